"""Draft heads that read the target's hidden states: EAGLE, and MTP inside the checkpoint.

Their layers' KV comes back with the target's. What a draft head keeps at a position depends on
the token after it, so that vLLM ends its own prefix hits a block early; kvtier does, too.
"""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest

from . import models
from .harness import BLOCK_TOKENS, CHUNK_TOKENS, FLOAT32_TOLERANCE, Engine, distance, prompt
from .test_identity import count_drafts

N = 40
SHARED = prompt(CHUNK_TOKENS, 70)
PROMPTS = [prompt(300, 71), prompt(700, 72), SHARED + prompt(260, 73)]
PARTED = SHARED + prompt(90, 74)  # leaves the one before at a chunk's end
TURNS = (150, 70, 33)


@pytest.fixture(scope="module", params=[models.LLAMA_EAGLE, models.GLM4_MTP], ids=lambda m: m.name)
def model(request):
    return request.param


def ask_turns(engine, more=lambda: None):
    tokens, answers = [], []
    for i, n in enumerate(TURNS):
        more()
        tokens = tokens + prompt(n, 80 + i)
        answers.append(engine.ask(tokens, N))
        tokens = tokens + list(answers[-1].tokens)
    return answers


class Drafts:
    """The acceptance rate of what is asked while inside."""

    def __init__(self, engine):
        self._counted = count_drafts(engine)

    def rate(self, answers):
        assert answers
        drafted, accepted = self._counted["drafted"], self._counted["accepted"]
        self._counted.update(drafted=0, accepted=0)
        assert drafted > 10
        return accepted / drafted


@contextmanager
def damaged_draft(engine):
    """While inside, the last layer's part of every RAM page is nonsense; it is the draft's."""
    geometry, arena = engine.half.geometry, engine.worker._arena
    (group,) = geometry.groups
    length = group.regions[-1].length_bytes
    engine.drain()

    def flip():
        for view in arena.buffers(list(range(arena.ready_pages)), arena.page_bytes):
            data = np.frombuffer(view, np.uint8).reshape(-1, arena.page_bytes)
            data[:, group.block_bytes - length : group.block_bytes : 3] ^= 0x41

    flip()
    try:
        yield
    finally:
        engine.drain()
        flip()


def test_drafts_are_accepted_after_a_restore_as_on_the_engines_own_hits(model):
    """Tokens, hit lengths and acceptance are those of vLLM's own hits; wrong draft KV is seen."""
    with Engine(model, prefix_caching=False) as engine:
        right = engine.ask_each([*PROMPTS, PARTED], N)
        right_turns = ask_turns(engine)
    with Engine(model, speculative_config=model.speculation) as engine:
        drafts = Drafts(engine)
        cold = drafts.rate(engine.ask_each(PROMPTS, N))
        own = [*engine.ask_each(PROMPTS, N), engine.ask(PARTED, N)]
        own_rate = drafts.rate(own)
        own_turns = ask_turns(engine)
        own_turn_rate = drafts.rate(own_turns)
    print(f"accepted: cold {cold:.3f}, own hits {own_rate:.3f}, turns {own_turn_rate:.3f}")
    with Engine(model, {"ram": "64MiB"}, speculative_config=model.speculation) as engine:
        assert engine.half.geometry.draft_drop_tokens == BLOCK_TOKENS
        drafts = Drafts(engine)

        def restored():
            answers = []
            for tokens in [*PROMPTS, PARTED]:
                engine.forget()
                answers.append(engine.ask(tokens, N))
            return answers

        engine.ask_each(PROMPTS, N)
        drafts.rate("cold")
        mine = restored()
        assert distance(mine, right) <= FLOAT32_TOLERANCE
        assert drafts.rate(mine) >= own_rate - 0.02
        for a, b in zip(own, mine, strict=True):
            assert b.restored_tokens >= a.local_tokens
        assert mine[-1].restored_tokens == CHUNK_TOKENS - BLOCK_TOKENS
        turns = ask_turns(engine, engine.forget)
        assert distance(turns, right_turns) <= FLOAT32_TOLERANCE
        assert drafts.rate(turns) >= own_turn_rate - 0.02
        for a, b in zip(own_turns, turns, strict=True):
            assert b.restored_tokens >= a.local_tokens
        # The control: nothing but the draft's own KV is wrong.
        with damaged_draft(engine):
            hurt = restored()
            assert distance(hurt, right) <= FLOAT32_TOLERANCE
            assert drafts.rate(hurt) < own_rate - 0.1
            engine.forget()
        engine.assert_clean()
