"""Adapters and speculation: what must not be shared, and what must not be stored."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from . import models
from .families import NGRAM, draft_model
from .harness import CHUNK_TOKENS, FLOAT32_TOLERANCE, Engine, damaged_ram, prompt

N = 6
TOKENS = prompt(420, 70)


def test_adapters_never_share(tmp_path):
    """Two adapters and the bare model, one prompt: each restores its own KV and nobody else's."""
    from vllm.lora.request import LoRARequest

    adapters = [
        None,
        *(
            LoRARequest(name, i, models.make_adapter(tmp_path / name, i))
            for i, name in enumerate(("one", "two"), 1)
        ),
    ]
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    with Engine(models.LLAMA, prefix_caching=False, **lora) as engine:
        right = [engine.ask(TOKENS, N, lora=adapter) for adapter in adapters]
    assert min(right[0].distance(right[1]), right[1].distance(right[2])) > 0.01
    with Engine(models.LLAMA, {"ram": "64MiB"}, **lora) as engine:
        for restored in (False, True):
            for adapter, expected in zip(adapters, right, strict=True):
                answer = engine.ask(TOKENS, N, lora=adapter)
                assert answer.distance(expected) <= FLOAT32_TOLERANCE
                assert (answer.restored_tokens >= CHUNK_TOKENS) == restored
                engine.forget()
        engine.assert_clean()


def test_an_adapter_that_changes_under_a_running_engine_shares_nothing(tmp_path):
    """The engine goes on with the old one: its KV is not served to the new one after a restart."""
    from vllm.lora.request import LoRARequest

    old, new = (models.make_adapter(tmp_path / name, i) for i, name in enumerate(("old", "new"), 1))
    adapter = LoRARequest("one", 1, old)
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    settings = {"disk": str(tmp_path / "store"), "disk_capacity": "1GiB"}
    with Engine(models.LLAMA, settings, **lora) as engine:
        before = engine.ask(TOKENS, N, lora=adapter)
        right = engine.ask(TOKENS, N, lora=LoRARequest("two", 2, new))
        shutil.copy(f"{new}/adapter_model.safetensors", old)
        engine.forget()
        after = engine.ask(TOKENS, N, lora=adapter)
        assert after.distance(before) <= FLOAT32_TOLERANCE, "this vLLM reads adapters anew"
        assert after.restored_tokens == 0
        engine.assert_clean()
    with Engine(models.LLAMA, settings, **lora) as engine:
        again = engine.ask(TOKENS, N, lora=adapter)
        assert again.distance(right) <= FLOAT32_TOLERANCE
        assert again.restored_tokens == 0


def stored(engine):
    """Key to the values of its blocks, of everything in RAM."""
    engine.drain()
    group = engine.half.geometry.groups[0]
    arena = engine.worker._arena
    out = {}
    for key, entry in engine.half.catalog._entries.items():
        views = arena.buffers(entry.pages.tolist(), group.block_bytes)
        out[key] = np.concatenate([np.frombuffer(view, np.float32) for view in views])
    return out


SPECULATED = [(prompt(23, 71) * 20)[:300], prompt(280, 72), (prompt(11, 73) * 30)[:256]]
SPECULATED_TOKENS = 40


@pytest.fixture(scope="module")
def unspeculated():
    """Answers and records of an engine that does not speculate."""
    with Engine(models.LLAMA, {"ram": "64MiB"}) as engine:
        answers = engine.ask_each(SPECULATED, SPECULATED_TOKENS)
        return answers, stored(engine)


def count_drafts(engine):
    """Drafted and accepted tokens, as the scheduler counts them from now on."""
    counted = {"drafted": 0, "accepted": 0}
    make = engine.scheduler.make_spec_decoding_stats

    def watched(stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs):
        counted["drafted"] += num_draft_tokens
        counted["accepted"] += num_accepted_tokens
        return make(stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs)

    engine.scheduler.make_spec_decoding_stats = watched
    return counted


def test_a_draft_model_is_restored_with_its_target(unspeculated):
    """The draft's KV comes back too: after a restore as many drafts are accepted as before."""
    right, plain = unspeculated
    with Engine(models.LLAMA, {"ram": "64MiB"}, speculative_config=draft_model()) as engine:
        drafts = count_drafts(engine)
        rates = []
        for restored in (False, True):
            for tokens, expected in zip(SPECULATED, right, strict=True):
                answer = engine.ask(tokens, SPECULATED_TOKENS)
                assert answer.distance(expected) <= FLOAT32_TOLERANCE
                assert (answer.restored_tokens > 0) == restored
            rates.append(drafts["accepted"] / drafts["drafted"])
            drafts.update(drafted=0, accepted=0)
            assert stored(engine).keys() == plain.keys()
            engine.forget()
        assert rates[0] > 0.8
        assert rates[1] >= rates[0] - 0.02
        with damaged_ram(engine):  # the control
            hurt = engine.ask(SPECULATED[0], SPECULATED_TOKENS)
            assert hurt.distance(right[0]) > FLOAT32_TOLERANCE
            engine.forget()
        engine.assert_clean()


def test_ngram_speculation_stores_what_no_speculation_stores(unspeculated):
    """Drafts from the prompt, accepted and rejected: the same records, the same bytes."""
    right, plain = unspeculated
    with Engine(models.LLAMA, {"ram": "64MiB"}, speculative_config=NGRAM) as engine:
        drafts = count_drafts(engine)
        for restored in (False, True):
            for tokens, expected in zip(SPECULATED, right, strict=True):
                answer = engine.ask(tokens, SPECULATED_TOKENS)
                assert answer.distance(expected) <= FLOAT32_TOLERANCE
                assert (answer.restored_tokens > 0) == restored
            kept = stored(engine)
            assert kept.keys() == plain.keys()
            for key, values in kept.items():
                assert np.allclose(values, plain[key], atol=1e-3)
            engine.forget()
        assert 0 < drafts["accepted"] < drafts["drafted"]
        engine.assert_clean()
