"""Every family of models: what comes back from RAM, from disk and after a restart is exact.

Compared three ways: an engine without any prefix caching (the truth), vLLM's own prefix
caching, and kvtier. Every request runs alone, so that batches are composed alike. A Llama that
speculates or is split over ranks must answer as the plain one does.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache

import pytest

from kvtier.tools.redis_server import RedisServer

from .families import FAMILIES, LLAMA, LLAMA4, Family
from .harness import (
    CHUNK_TOKENS,
    FLOAT32_TOLERANCE,
    Answer,
    damage_files,
    damaged_ram,
    distance,
    prompt,
    record_files,
)
from .test_identity import count_drafts

ANSWER_TOKENS = 6
TURN_ANSWER_TOKENS = 9
TURNS = (300, 61, 205, 30)  # tokens that each turn adds to the conversation


@dataclass
class Truth:
    """What one family answers without kvtier."""

    family: Family
    answers: list[Answer]
    turns: list[tuple[list[int], Answer]]
    own_answers: list[Answer]  # on vLLM's own prefix hits
    own_turns: list[Answer]
    disk: str = ""
    redis: dict = field(default_factory=dict)  # settings


def converse(family, engine):
    """Turn after turn: prompt, answer, more. Returns (prompt, answer) of each."""
    turns, tokens = [], []
    for i, n in enumerate(TURNS):
        tokens = tokens + prompt(n, 100 + i)
        answer = engine.ask(tokens, TURN_ANSWER_TOKENS, lora=family.lora(0))
        turns.append((tokens, answer))
        tokens = tokens + list(answer.tokens)
    return turns


def ask_turns(engine, truth):
    """Ask the turns of the true conversation, with an empty device cache before each."""
    answers = []
    for tokens, _ in truth.turns:
        engine.forget()
        answers.append(engine.ask(tokens, TURN_ANSWER_TOKENS, lora=truth.family.lora(0)))
    return answers


@cache
def computed(family):
    """Answers by length and adapter, and turns, without any cache."""
    with family.engine(prefix_caching=False) as engine:
        answers = family.ask_each(engine, ANSWER_TOKENS)
        turns = converse(family, engine)
        again = family.ask_each(engine, ANSWER_TOKENS, 3)
    assert distance(again, answers[:3]) == 0.0, "the engine does not repeat itself"
    if family.adapters:
        apart = [a.distance(b) for a, b in zip(answers[::2], answers[1::2], strict=True)]
        assert min(apart) > 10 * FLOAT32_TOLERANCE, "the adapters answer alike"
    return dict(zip(family.requests, answers, strict=True)), turns


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.name)
def truth(request, tmp_path_factory):
    family = request.param
    computed_answers, turns = computed(family.plain or family)
    answers = [computed_answers[request] for request in family.requests]
    with family.workers(), family.engine() as engine:
        family.ask_each(engine, ANSWER_TOKENS)
        own = family.ask_each(engine, ANSWER_TOKENS)
        own_turns = [
            engine.ask(tokens, TURN_ANSWER_TOKENS, lora=family.lora(0)) for tokens, _ in turns
        ]
    right = [*answers, *(answer for _, answer in turns)]
    moved = [a.distance(b) for a, b in zip([*own, *own_turns], right, strict=True)]
    print(f"{family.name}: vLLM's own prefix caching moves logprobs by {max(moved):.2g}")
    # A bfloat16 state is another one when a prefill is cut at block boundaries, which
    # vLLM does as soon as prefix caching is on; that is the engine's, not ours.
    assert family.recurrent or max(moved) <= FLOAT32_TOLERANCE
    disk = str(tmp_path_factory.mktemp(family.name))
    with ExitStack() as stack:
        stack.enter_context(family.workers())
        # test_redis_engine.py has that family over Redis; here its RAM is really alone.
        alone = family is LLAMA
        redis = {}
        if not alone:
            url = stack.enter_context(RedisServer()).url
            redis = {"redis": url, "lookup_deadline_ms": 2000}  # the machine is others' too
        yield Truth(family, answers, turns, own, own_turns, disk, redis)


def assert_exact(truth, answers):
    """Equal to a run without any cache; where vLLM's own hit is not, equal to that."""
    lengths = truth.family.lengths[-len(answers) :]
    pairs = [*zip(truth.answers, truth.own_answers, strict=True)][-len(answers) :]
    for n, answer, (right, own) in zip(lengths, answers, pairs, strict=True):
        assert_as_exact_as_vllm(truth.family, answer, right, own, f"{n} tokens")


def assert_as_exact_as_vllm(family, answer, right, own, what):
    far, own_far = answer.distance(right), own.distance(right)
    if far > FLOAT32_TOLERANCE:
        assert family.recurrent, f"{what}: {far} from no cache at all (vLLM alone {own_far})"
        assert answer.distance(own) <= FLOAT32_TOLERANCE, f"{what}: neither right nor vLLM's own"


def assert_turns_exact(truth, answers):
    for (tokens, right), own, answer in zip(truth.turns, truth.own_turns, answers, strict=True):
        assert_as_exact_as_vllm(truth.family, answer, right, own, f"turn of {len(tokens)} tokens")


def assert_turns_restored(truth, answers):
    """Each turn brings back what the turn before left, to within one block."""
    block = truth.family.block
    for i in range(1, len(answers)):
        before, previous = truth.turns[i - 1]
        assert answers[i].restored_tokens >= truth.own_turns[i].local_tokens, f"turn {i}"
        if not truth.family.recurrent:
            end = len(before) + len(previous.tokens)
            assert answers[i].restored_tokens >= (end - 1) // block * block, f"turn {i}"


def assert_restored(truth, answers):
    """A prompt sent again comes back to its last block that leaves a token to compute.

    With recurrent layers to where vLLM itself keeps a state; older engines keep fewer.
    """
    for n, answer, own in zip(truth.family.lengths, answers, truth.own_answers, strict=True):
        block = truth.family.block
        assert answer.local_tokens == 0
        reach = own.local_tokens if truth.family.recurrent else (n - 1) // block * block
        assert answer.restored_tokens == reach, f"{n} tokens"


def test_restores_from_ram(truth):
    """RAM: cold, restored and turn after turn, answers are those of no cache at all."""
    family = truth.family
    disk = {"disk": truth.disk, "disk_capacity": "1GiB"} if family.label else {}
    with family.engine({"ram": "64MiB", **disk, **truth.redis}) as engine:
        drafts = count_drafts(engine)
        assert_exact(truth, family.ask_each(engine, ANSWER_TOKENS))
        engine.forget()
        warm = family.ask_each(engine, ANSWER_TOKENS)
        assert_exact(truth, warm)
        assert_restored(truth, warm)
        assert engine.read_bytes("ram") > 0
        turns = ask_turns(engine, truth)
        assert_turns_exact(truth, turns)
        assert_turns_restored(truth, turns)
        assert (drafts["drafted"] > 0) == family.speculates
        # The control: this comparison notices damage.
        engine.forget()
        with damaged_ram(engine):
            damaged = family.ask_each(engine, ANSWER_TOKENS)
            engine.forget()
        restored = [i for i, a in enumerate(damaged) if a.restored_tokens]
        assert restored
        for i in restored:
            assert damaged[i].distance(warm[i]) > 10 * FLOAT32_TOLERANCE
        engine.assert_clean()


def test_a_second_engine_restores_from_redis(truth):
    """What one engine wrote to Redis from below its RAM another one restores exactly."""
    family = truth.family
    if not truth.redis:
        pytest.skip("test_redis_engine.py has this family")
    with family.engine(truth.redis) as engine:
        answers = family.ask_each(engine, ANSWER_TOKENS)
        assert_exact(truth, answers)
        assert_restored(truth, answers)
        turns = ask_turns(engine, truth)
        assert_turns_exact(truth, turns)
        assert_turns_restored(truth, turns)
        assert engine.read_bytes("redis") > 0
        engine.assert_clean()


def test_restores_from_disk_alone(truth):
    """Disk alone: answers come from disk; damaged records are noticed, counted and replaced."""
    family = truth.family
    if family.label:
        pytest.skip("its folder is filled from below RAM")
    with family.engine({"disk": truth.disk, "disk_capacity": "1GiB"}) as engine:
        assert_exact(truth, family.ask_each(engine, ANSWER_TOKENS))
        engine.forget()
        warm = family.ask_each(engine, ANSWER_TOKENS)
        assert_exact(truth, warm)
        assert_restored(truth, warm)
        assert engine.read_bytes("disk") > 0
        assert engine.read_bytes("ram") == 0
        engine.forget()
        damage_files(record_files(truth.disk))
        hurt = family.ask_each(engine, ANSWER_TOKENS)
        assert_exact(truth, hurt)
        engine.flush_stats()
        assert engine.stats["loads_failed"] > 0
        assert engine.stats["load_failed_chunks.disk.payload_checksum"] > 0
        # What is found bad after these short answers have ended waits for the next turn, and so
        # does a state that is found bad after it was handed over.
        for _ in range(2):
            engine.forget()
            healed = family.ask_each(engine, ANSWER_TOKENS)
            assert_exact(truth, healed)
        assert_restored(truth, healed)
        engine.assert_clean()


def test_restores_from_both_tiers_after_a_restart(truth):
    """A new engine, RAM over the same disk: the first answer is from disk, the next from RAM."""
    family = truth.family
    assert record_files(truth.disk), "runs after a test that fills the folder"
    with family.engine({"ram": "64MiB", "disk": truth.disk, "disk_capacity": "1GiB"}) as engine:
        for tier in ("disk", "ram"):
            before = engine.read_bytes(tier)
            answers = family.ask_each(engine, ANSWER_TOKENS)
            assert_exact(truth, answers)
            assert_restored(truth, answers)
            assert engine.read_bytes(tier) > before
            engine.forget()
        turns = ask_turns(engine, truth)
        assert_turns_exact(truth, turns)
        assert_turns_restored(truth, turns)
        engine.assert_clean()
        records = len(record_files(truth.disk))
        assert engine.half.catalog.resident()["disk"] * family.ranks == records


def test_restores_with_every_layer_in_one_group(truth):
    """Windowed layers kept as full ones (the hybrid manager off) are restored as exactly."""
    family = truth.family
    if family is not LLAMA4:
        pytest.skip("one model with layers of two kinds is enough")
    with family.engine({"ram": "64MiB"}, disable_hybrid_kv_cache_manager=True) as engine:
        assert len(engine.half.geometry.groups) == 1
        prompts = family.prompts()[-4:]
        assert_exact(truth, engine.ask_each(prompts, ANSWER_TOKENS))
        engine.forget()
        warm = engine.ask_each(prompts, ANSWER_TOKENS)
        assert_exact(truth, warm)
        assert all(a.restored_tokens >= CHUNK_TOKENS for a in warm)
