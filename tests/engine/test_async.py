"""Scheduling ahead: the next step is planned while the last one's tokens are not known yet.

vLLM turns this off on the CPU, whose runner gains nothing from it, but runs it when told to:
its own asynchronous scheduler, two steps in flight, with drafts that may still be rejected.
"""

from __future__ import annotations

import pytest

from . import families, models
from .harness import CHUNK_TOKENS, FLOAT32_TOLERANCE, Engine, distance, prompt
from .test_identity import count_drafts
from .test_pressure import PROMPTS, N, Squeeze, alone, count_preemptions, differing

SPECULATED = [prompt(300, 71), prompt(500, 72)]
SPECULATED_TOKENS = 60


@pytest.fixture(autouse=True)
def ahead(monkeypatch):
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config.__func__

    def update_and_insist(cls, vllm_config):
        update(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(update_and_insist))


def assert_ahead(engine):
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    assert isinstance(engine.scheduler, AsyncScheduler)
    assert engine.core.batch_queue is not None


def test_preempted_and_restored_while_scheduling_ahead(tmp_path):
    """Uneven requests in a pool for fewer, aborts among them: all end, all are right."""
    squeeze = Squeeze(families.GEMMA3, 60)
    (right,) = alone(squeeze.family, squeeze.budget)
    settings = {"ram": "6MiB", "disk": str(tmp_path), "disk_capacity": "1GiB"}
    with squeeze.engine(settings) as engine:
        assert_ahead(engine)
        preempted = count_preemptions(engine)
        for aborted in (2, 9, 30):
            ids = [engine.submit(tokens, N) for tokens in PROMPTS]
            given_up = engine.submit(PROMPTS[0], N)
            for _ in range(aborted):
                engine.step()
            engine.abort(given_up)
            assert differing(engine.finish(*ids), right) == 0
            engine.forget()
        assert preempted, "the pool is too large to tell anything"
        single = []
        for tokens in PROMPTS:
            single.append(engine.ask(tokens, N))
            engine.forget()
        assert differing(single, right) == 0
        assert sum(a.restored_tokens for a in single) > CHUNK_TOKENS
        assert engine.read_bytes("ram") + engine.read_bytes("disk") > 0
        engine.assert_clean()


def test_drafts_in_flight_are_never_stored():
    """A draft head while scheduling ahead: what the answer left is restored, and is right."""
    model = models.GLM4_MTP
    follow_up = prompt(40, 79)
    with Engine(model, prefix_caching=False) as engine:
        right = engine.ask_each(SPECULATED, SPECULATED_TOKENS)
        turns = [
            [*tokens, *answer.tokens, *follow_up]
            for tokens, answer in zip(SPECULATED, right, strict=True)
        ]
        right_turns = engine.ask_each(turns, SPECULATED_TOKENS)
    with Engine(model, {"ram": "64MiB"}, speculative_config=model.speculation) as engine:
        assert_ahead(engine)
        drafts = count_drafts(engine)
        answers = engine.ask_together(SPECULATED, SPECULATED_TOKENS)
        assert distance(answers, right) <= FLOAT32_TOLERANCE
        engine.forget()
        answers = engine.ask_together(turns, SPECULATED_TOKENS)
        assert distance(answers, right_turns) <= FLOAT32_TOLERANCE
        assert all(b.restored_tokens >= len(a) for a, b in zip(SPECULATED, answers, strict=True))
        assert 0 < drafts["accepted"] < drafts["drafted"]
        engine.assert_clean()
