"""Recurrent and full groups together: hits inside a block, and prefixes that several share.

vLLM 0.32 by itself answers wrongly after some hits inside a block (its copy-on-write skips
views that start at the same address). So three are compared: vLLM computing everything, vLLM
on its own hit, and kvtier. Only a difference from the first counts against kvtier.
"""

from __future__ import annotations

import pytest

from kvtier.connector.geometry import GroupKind

from . import models
from .harness import FLOAT32_TOLERANCE, Engine, prompt

BLOCK_TOKENS = 128
UNIT_TOKENS = 32
N = 5
LENGTHS = (500, 523, 640)
SHARED = prompt(650, 90)
SESSIONS = [SHARED + prompt(n, 91 + n) for n in (150, 230, 77)]


def engine(kvtier=None, **more):
    return Engine(models.QWEN3_NEXT, kvtier, block_tokens=None, **more)


@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_hits_inside_a_block(tier, tmp_path):
    """With a matching unit below the block, a hit reaches the last unit and is exact."""
    prompts = [prompt(n, n) for n in LENGTHS]
    if tier == "ram":
        with engine(prefix_match_unit=UNIT_TOKENS) as plain:
            computed = plain.ask_each(prompts, N)
            hit = plain.ask_each(prompts, N)
        for n, a, b in zip(LENGTHS, computed, hit, strict=True):
            print(f"{n} tokens: vLLM's own hit at {b.local_tokens} is {a.distance(b):.2g} off")
    settings = {"ram": "64MiB"} if tier == "ram" else {"disk": str(tmp_path)}
    if tier == "disk":
        settings["disk_capacity"] = "1GiB"
    with engine(settings, prefix_match_unit=UNIT_TOKENS) as ours:
        unit = ours.half.geometry.hit_alignment_tokens
        # An engine that does not tell a connector its unit is served at whole blocks.
        told = hasattr(ours.scheduler.kv_cache_config, "cache_hit_alignment_tokens")
        assert unit == (UNIT_TOKENS if told else BLOCK_TOKENS)
        cold = ours.ask_each(prompts, N)
        ours.forget()
        if tier == "disk":
            ours.close()
            ours = engine(settings, prefix_match_unit=UNIT_TOKENS)  # noqa: PLW2901
        try:
            warm = ours.ask_each(prompts, N)
            assert ours.read_bytes(tier) > 0 or not told
            ours.assert_clean()
        finally:
            ours.close()
    for n, a, b in zip(LENGTHS, cold, warm, strict=True):
        if told:
            assert b.restored_tokens == (n - 1) // UNIT_TOKENS * UNIT_TOKENS
        assert b.restored_tokens % unit == 0
        assert b.distance(a) <= FLOAT32_TOLERANCE
    if tier == "ram":
        for a, b in zip(computed, cold, strict=True):
            assert b.distance(a) <= FLOAT32_TOLERANCE


def whole_copies(kv_caches, num_blocks, copies):
    """Copy blocks as vLLM means to: every view that differs from those before it."""
    views = {(v.data_ptr(), v.shape, v.stride()): v for v in kv_caches}
    for view in views.values():
        blocks = view.unflatten(0, (num_blocks, -1))
        for source, to in copies or ():
            blocks[to] = blocks[source].clone()


def test_what_the_engine_s_copies_damage_is_not_stored(monkeypatch):
    """After its own hits inside blocks vLLM is wrong; what is restored later is right all the same.

    The truth is an engine whose copies are whole.
    """
    from vllm.v1.worker import gpu_model_runner, utils

    first = prompt(700, 700)
    turns = [first, first + prompt(150, 701), first + prompt(150, 701) + prompt(90, 702)]
    more = {"block_tokens": None, "blocks": 200, "prefix_match_unit": UNIT_TOKENS}

    def play(ours):
        live = ours.ask_each(turns, N)
        for _ in range(2):  # what was left out the first time is there the second
            restored = []
            for tokens in turns:
                ours.forget()
                restored.append(ours.ask(tokens, N))
        ours.assert_clean()
        return live, restored

    with monkeypatch.context() as patch:
        for module in (utils, gpu_model_runner):
            patch.setattr(module, "copy_kv_cache_blocks_inplace", whole_copies)
        with Engine(models.QWEN3_NEXT_DEEP, {"ram": "128MiB"}, **more) as sound:
            assert not sound.half.short_copies.on
            right, right_later = play(sound)
    with Engine(models.QWEN3_NEXT_DEEP, {"ram": "128MiB"}, **more) as ours:
        told = ours.half.geometry.hit_alignment_tokens == UNIT_TOKENS
        live, later = play(ours)
    for a, b in zip(right, live, strict=True):
        print(
            f"{b.prompt_tokens} tokens: vLLM's hit at {b.local_tokens} is {b.distance(a):.2g} off"
        )
    for a, b in zip(right_later, later, strict=True):
        assert b.restored_tokens == a.restored_tokens > len(first) - BLOCK_TOKENS
        if told:  # else the prefill of what was left out is cut elsewhere
            assert b.distance(a) <= FLOAT32_TOLERANCE


def test_sessions_that_share_a_prefix_and_part():
    """What vLLM's own cache would hit of a shared prefix comes back, to 95 % and exactly."""
    again = [SESSIONS[0], SHARED + prompt(99, 99), SESSIONS[2]]
    with engine() as plain:
        plain.ask_each(SESSIONS, N)  # the second one makes vLLM keep a state where they part
        own = plain.ask_each(again, N)
    with engine({"ram": "64MiB"}) as ours:
        ours.ask_each(SESSIONS, N)
        mine = []
        for tokens in again:
            ours.forget()
            mine.append(ours.ask(tokens, N))
        ours.assert_clean()
    for a, b in zip(own, mine, strict=True):
        print(f"{a.prompt_tokens} tokens: vLLM hits {a.local_tokens}, restored {b.restored_tokens}")
        assert b.restored_tokens >= 0.95 * a.local_tokens
        if b.restored_tokens == a.local_tokens:  # else the prefill is cut elsewhere
            assert b.distance(a) <= FLOAT32_TOLERANCE
    assert own[1].local_tokens > 0, "vLLM keeps nothing of a shared prefix; this tells nothing"


TURNS = (300, 61, 205, 30, 170)  # tokens that each turn adds, the last answer included


@pytest.mark.parametrize("unit", [None, UNIT_TOKENS], ids=["blocks", "units"])
def test_returning_turns_are_restored_as_far_as_the_engine_itself_hits(unit):
    """Turn after turn, on three recurrent groups and one full: 95 % of vLLM's own hits, exactly."""
    more = {"block_tokens": None, "blocks": 200}
    more |= {} if unit is None else {"prefix_match_unit": unit}
    tokens, turns = [], []
    for i, n in enumerate(TURNS):
        tokens = tokens + prompt(n, 200 + i)
        turns.append(tokens)
    with Engine(models.QWEN3_NEXT_DEEP, **more) as plain:
        own = plain.ask_each(turns, N)
    with Engine(models.QWEN3_NEXT_DEEP, {"ram": "128MiB"}, **more) as ours:
        kinds = [group.kind for group in ours.half.geometry.groups]
        told = hasattr(ours.scheduler.kv_cache_config, "cache_hit_alignment_tokens")
        assert (len(kinds), kinds.count(GroupKind.RECURRENT)) == (4, 3)
        assert all(group.n_regions == 2 for group in ours.half.geometry.groups)
        mine = []
        for one in turns:
            ours.forget()
            mine.append(ours.ask(one, N))
        again = []
        for one in turns:  # once more: what was restored and gone on from is as good
            ours.forget()
            again.append(ours.ask(one, N))
        ours.assert_clean()
    for a, b in zip(own, mine, strict=True):
        print(f"{a.prompt_tokens} tokens: vLLM hits {a.local_tokens}, restored {b.restored_tokens}")
        if b.restored_tokens == a.local_tokens and not a.local_tokens % BLOCK_TOKENS:
            assert b.distance(a) <= FLOAT32_TOLERANCE
    hits = sum(a.local_tokens for a in own)
    assert hits > 0
    if told or unit is None:  # an engine that does not tell its unit is served at whole blocks
        assert sum(b.restored_tokens for b in mine) >= 0.95 * hits
    for a, b in zip(mine, again, strict=True):
        assert b.restored_tokens >= a.restored_tokens
