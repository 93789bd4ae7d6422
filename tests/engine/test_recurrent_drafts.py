"""Speculation on a recurrent model with prefix caching, for which vLLM has no CPU kernels.

The two kernels that move states between blocks are done here with vLLM's own scalar copies.
That they do what is right is shown by an engine without prefix caching, which needs neither.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from . import models
from .harness import FLOAT32_TOLERANCE, Engine, distance, prompt
from .test_identity import count_drafts

BLOCK_TOKENS = 128
N = 30
ACROSS = [prompt(110, 60), (prompt(23, 61) * 20)[:120]]  # the answer crosses a block's end
TURNS = (300, 170, 61, 205)
MODEL = models.QWEN3_NEXT_MTP


@pytest.fixture
def state_copies(monkeypatch):
    """Move states as the kernels would: before a step, and to a block's end after drafts."""
    from vllm.v1.worker import mamba_utils

    before = mamba_utils.preprocess_mamba

    def preprocess(*args, align_ctx=None, **kwargs):
        return before(*args, align_ctx=None, **kwargs)

    def copy(copies, *where):
        copies.offset = 0
        mamba_utils.collect_mamba_copy_meta(copies, *where)
        mamba_utils.do_mamba_copy_block(copies)

    def postprocess(
        *,
        bufs,
        num_reqs,
        num_accepted_tokens_gpu,
        num_accepted_tokens_cpu_tensor,
        input_batch,
        kv_cache_config,
        forward_context,
        mamba_state_copy_funcs,
    ):
        step, copies = bufs.postprocess_align, bufs.preprocess
        size, groups = copies.mamba_spec.block_size, copies.mamba_group_ids
        for i in range(num_reqs):
            accepted, source = int(num_accepted_tokens_gpu[i]), int(step.mamba_state_idx_buf.np[i])
            running = int(step.num_computed_tokens_buf.np[i])
            running += int(step.num_scheduled_tokens_buf.np[i] - step.num_draft_tokens_buf.np[i])
            end = (running + accepted - 1) // size * size
            if end >= running:  # the accepted tokens reach a block's end
                to = end // size - 1
                tables = {
                    g: input_batch.block_table[g].get_cpu_tensor()[i].tolist() for g in groups
                }
                request = SimpleNamespace(block_ids=tables)
                where = (kv_cache_config, mamba_state_copy_funcs, groups, source, to)
                copy(copies, *where, end - running, request, forward_context)
                accepted = 1 if source == to else accepted
            num_accepted_tokens_cpu_tensor[i] = accepted

    monkeypatch.setattr(mamba_utils, "preprocess_mamba", preprocess)
    monkeypatch.setattr(mamba_utils, "postprocess_mamba_align_gpu", postprocess)


def engine(kvtier=None, **more):
    return Engine(
        MODEL, kvtier, block_tokens=None, blocks=200, speculative_config=MODEL.speculation, **more
    )


def converse(engine, history=None):
    """Turn after turn; with ``history`` the turns of that conversation, on an empty device."""
    answers, tokens = [], []
    for i, n in enumerate(TURNS):
        tokens = tokens + prompt(n, 300 + i)
        if history is not None:
            engine.forget()
        answers.append(engine.ask(tokens, N))
        tokens = tokens + list((history or answers)[i].tokens)
    return answers


def test_states_under_a_draft_head_are_restored_as_the_engine_hits(state_copies):
    """Hits, answers and acceptance are those of vLLM's own hits on the same conversation."""
    with engine(prefix_caching=False) as plain:
        right = plain.ask_each(ACROSS, N)
    with engine() as plain:
        drafts = count_drafts(plain)
        assert distance(plain.ask_each(ACROSS, N), right) == 0.0, "the stand-in is wrong"
        first = converse(plain)
        drafts.update(drafted=0, accepted=0)
        own = converse(plain)  # every turn once more, on the device's own states
        own_drafts = dict(drafts)
    with engine({"ram": "128MiB"}) as ours:
        assert ours.half.geometry.draft_drop_tokens == BLOCK_TOKENS
        converse(ours, first)
        drafts = count_drafts(ours)
        mine = converse(ours, first)
        ours.assert_clean()
    for a, b in zip(own, mine, strict=True):
        print(f"{a.prompt_tokens} tokens: vLLM hits {a.local_tokens}, restored {b.restored_tokens}")
        assert b.restored_tokens == a.local_tokens
        assert b.distance(a) <= FLOAT32_TOLERANCE
    assert sum(a.local_tokens for a in own) > 0
    print(f"drafts on vLLM's own hits {own_drafts}, restored {drafts}")
    assert drafts == own_drafts
    assert 0 < drafts["accepted"] < drafts["drafted"]
