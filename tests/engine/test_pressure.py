"""Too few device blocks, too small a token budget, and several uneven requests at once.

Requests are cut into many steps, preempted and resumed, and restored meanwhile. Every answer
must be the one that the request gets alone in an engine without kvtier.
"""

from __future__ import annotations

from functools import cache

import pytest

from . import families
from .harness import FLOAT32_TOLERANCE, damaged_ram, prompt

SHARED = prompt(290, 1)
PROMPTS = [SHARED + prompt(410, 2), SHARED + prompt(37, 3), prompt(513, 4), SHARED[:257]]
N = 40


class Squeeze:
    """One family and how few blocks make it preempt."""

    def __init__(self, family, blocks, budget=96):
        self.family, self.blocks, self.budget = family, blocks, budget

    def engine(self, kvtier):
        return engine(self.family, kvtier, blocks=self.blocks, budget=self.budget)


def engine(family, kvtier=None, **more):
    return family.engine(kvtier, max_model_len=768, **more)


@cache
def alone(family, budget):
    """The right answers for each adapter, or for the bare model."""
    # vLLM cuts prefills of recurrent models at block boundaries as soon as prefix caching is
    # on, which moves bfloat16 states: for them the right answer is vLLM's own, with caching.
    with engine(family, blocks=200, budget=budget, prefix_caching=family.recurrent) as plain:
        numbers = range(len(family.adapters) or 1)
        return [plain.ask_each(PROMPTS, N, lora=family.lora(i)) for i in numbers]


SQUEEZES = [
    Squeeze(families.LLAMA, 28),
    Squeeze(families.DRAFTED, 28),
    Squeeze(families.NGRAMS, 28),
    Squeeze(families.ADAPTED, 28),
    Squeeze(families.SPLIT, 28),
    Squeeze(families.GEMMA3, 60),
    Squeeze(families.GPT_OSS, 60),
    Squeeze(families.LLAMA4, 100),
    Squeeze(families.QWEN3_NEXT, 11, 160),
]


@pytest.fixture(scope="module", params=SQUEEZES, ids=lambda s: s.family.name)
def squeeze(request):
    return request.param


@pytest.fixture(scope="module")
def right(squeeze):
    return alone(squeeze.family.plain or squeeze.family, squeeze.budget)


def count_preemptions(engine):
    scheduler = engine.scheduler
    preempt = scheduler._preempt_request
    seen = []

    def counted(request, *args, **kwargs):
        seen.append(request.request_id)
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = counted
    return seen


def differing(answers, right):
    """How many answers are not the right ones."""
    return sum(a.distance(b) > FLOAT32_TOLERANCE for a, b in zip(answers, right, strict=True))


@pytest.mark.parametrize("ram_over_disk", [False, True], ids=["ram", "ram-over-disk"])
def test_preempted_chunked_and_restored_at_once(squeeze, right, ram_over_disk, tmp_path):
    """Four uneven requests in a pool for fewer, three times over: all end, all are right."""
    family = squeeze.family
    if family is families.LLAMA4 and not ram_over_disk:
        pytest.skip("the other windowed models tell as much")
    if family.label and ram_over_disk:
        pytest.skip("the plain model tells as much of disks")
    settings = {"ram": "64MiB"}
    if ram_over_disk:
        settings = {"ram": "6MiB", "disk": str(tmp_path), "disk_capacity": "1GiB"}
    with family.workers(), squeeze.engine(settings) as engine:
        preempted = count_preemptions(engine)
        for i in range(3):  # the adapter changes between batches
            answers = engine.ask_together(PROMPTS, N, lora=family.lora(i))
            assert differing(answers, right[i % len(right)]) == 0
            engine.forget()
        assert preempted, "the pool is too large to tell anything"
        assert engine.read_bytes("ram") + engine.read_bytes("disk") > 0
        # Alone, from what was stored under pressure.
        answers = []
        for tokens in PROMPTS:
            answers.append(engine.ask(tokens, N, lora=family.lora(0)))
            engine.forget()
        assert differing(answers, right[0]) == 0
        assert sum(a.restored_tokens for a in answers) > 0
        if not ram_over_disk:  # the control
            with damaged_ram(engine):
                hurt = engine.ask_together(PROMPTS, N, lora=family.lora(0))
                assert differing(hurt, right[0]) > 0
                engine.forget()
        engine.assert_clean()
