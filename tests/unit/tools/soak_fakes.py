"""A model that is a hash, engines that may be wrong, and a whole soak without vLLM."""

from __future__ import annotations

import hashlib
import threading

from kvtier.tools.soak_types import Ask, ChunkUse, EngineGone, Reply, Script, Turn

CHUNK = 64


def answer_of(prompt, n, offset=0.0):
    """The right answer of a prompt: tokens and logprobs from its hash."""
    tokens, top = [], []
    for i in range(n):
        digest = hashlib.sha256(repr((tuple(prompt), i)).encode()).digest()
        best, other = digest[0], 256 + digest[1]
        tokens.append(best)
        top.append(((best, -0.5 - digest[2] / 1000 + offset), (other, -2.0 + offset)))
    return Reply(tuple(tokens), tuple(top), len(prompt), 0.01, 0.02)


class FakeEngine:
    """Restores a prompt seen before with the same salt; may break what it restores.

    Args:
        wrong: given an `Ask`, whether its answer is wrong.
        restores: whether it restores at all.
    """

    def __init__(self, wrong=lambda ask, restored: False, restores=True, noise=0.0):
        self.asked = []
        self.gone = False
        self._wrong, self._restores, self._noise = wrong, restores, noise
        self._seen = {}
        self._lock = threading.Lock()

    def ask(self, ask: Ask):
        with self._lock:
            self.asked.append(ask)
            if self.gone:
                raise EngineGone("gone")
            seen = self._seen.setdefault(ask.salt, [])
            whole = 0
            for other in seen:
                same = next((i for i, (a, b) in enumerate(zip(ask.prompt, other, strict=False))
                             if a != b), min(len(ask.prompt), len(other)))  # fmt: skip
                whole = max(whole, same // CHUNK * CHUNK)
            seen.append(ask.prompt)
        restored = whole if self._restores and ask.kvtier else 0
        loads = tuple(
            ChunkUse(f"{ask.salt}-{hash(ask.prompt[: at + CHUNK])}", at, at + CHUNK, "disk")
            for at in range(0, restored, CHUNK)
        )
        prompt = (*ask.prompt, -1) if self._wrong(ask, restored) else ask.prompt
        right = answer_of(prompt, ask.answer_tokens, self._noise)
        return Reply(
            right.tokens, right.top, len(ask.prompt), 0.01, 0.02, 0,
            {"disk": restored} if restored else {}, loads, ask.abort_after_s is not None,
        )  # fmt: skip

    def sample(self):
        return {"hits": 1.0}


def script(sessions=3, turns=3, first=130, growth=70):
    """Sessions that grow, with their right answers."""
    all_turns, truth = [], {}
    for s in range(sessions):
        mine = []
        for t in range(turns):
            n = first + growth * t
            prompt = (*range(64), *(1000 * (s + 1) + i for i in range(n - 64)))
            turn = Turn(f"session-{s + 1}", t + 1, prompt, 4, 0.0)
            mine.append(turn)
            truth[turn.session, turn.number] = answer_of(prompt, 4)
        all_turns.append(tuple(mine))
    return Script(tuple(all_turns), truth)
