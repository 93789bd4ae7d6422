"""Engines that need every prompt whole: kvtier serves nothing, they live, and answer right.

vLLM turns its own prefix caching off for them and would take a connector's hits all the same: it
then dies (pooling over all tokens) or computes nonsense (attention that lacks the prefix).
"""

from __future__ import annotations

import json
import logging
import shutil

import numpy as np
import pytest

from . import models
from .harness import Engine, prompt, register_kernels_once

SETTINGS = {"ram": "64MiB", "load_policy": "always"}


def the_line(caplog, words):
    lines = {r.getMessage() for r in caplog.records if "off in this engine" in r.getMessage()}
    return len(lines) == 1 and words in next(iter(lines))


@pytest.fixture
def log(caplog):
    logging.getLogger("kvtier").addHandler(caplog.handler)
    yield caplog
    logging.getLogger("kvtier").removeHandler(caplog.handler)


def test_mla_on_a_cpu_without_amx(log):
    """The reference attention has no prefix: a restored prompt would be answered with nonsense."""
    with Engine(models.MLA, SETTINGS, block_tokens=None, budget=2048, blocks=300) as engine:
        config = engine.llm.llm_engine.vllm_config
        if config.cache_config.enable_prefix_caching:
            pytest.skip("this processor's attention can begin in the middle")
        first, again = engine.ask_each([prompt(700, 1)] * 2)
        assert again.tokens == first.tokens
        assert again.restored_tokens == 0
    assert the_line(log, "no prompt can begin in its middle")


@pytest.mark.parametrize("kind", ["MEAN", "LAST"])
def test_pooling(log, tmp_path, kind):
    """Over all tokens: off. At the last token: restored, and the same embedding."""
    import vllm
    from vllm.config import KVTransferConfig, PoolerConfig

    register_kernels_once()
    folder = with_tokenizer(models.LLAMA.folder(), tmp_path / "model")
    llm = vllm.LLM(
        str(folder),
        runner="pooling",
        pooler_config=PoolerConfig(seq_pooling_type=kind),
        enforce_eager=True,
        dtype="float32",
        num_gpu_blocks_override=120,
        block_size=32,
        max_model_len=2048,
        max_num_seqs=4,
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVTierConnector",
            kv_connector_module_path="kvtier.connector",
            kv_role="kv_both",
            kv_connector_extra_config=SETTINGS,
        ),
    )
    core = llm.llm_engine.engine_core.engine_core
    try:
        found = []
        for _ in range(2):
            (output,) = llm.embed([{"prompt_token_ids": prompt(700, 1)}], use_tqdm=False)
            found.append(np.array(output.outputs.embedding))
            while core.scheduler.connector.has_pending_push_work():
                core.step_fn()
            assert core.reset_prefix_cache()
        assert np.abs(found[0] - found[1]).max() < 1e-5
        half = core.scheduler.connector.scheduler_half
        if kind == "MEAN":
            assert half is None
            assert the_line(log, "needs the whole prompt")
        else:
            assert [sum(hits.values()) for hits in half.last_hits.values()] == [0, 672]
    finally:
        llm.llm_engine.engine_core.shutdown()


def with_tokenizer(source, folder):
    """A copy of a model's folder with a tokenizer, which pooling asks for."""
    shutil.copytree(source, folder)
    words = {f"t{i}": i for i in range(models.VOCAB_TOKENS)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"},
    }
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0", "eos_token": "t1"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    return folder
