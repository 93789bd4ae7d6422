"""The oracle: answers computed without any cache, kept on disk, and what differs from them.

Greedy decoding gives the same tokens only as far as the arithmetic does, and a prefill that is
cut elsewhere, or shares its batch, moves logprobs a little. So the noise is measured first, and
two tokens whose logprobs lie closer together than it are a tie, not a difference.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .soak_types import Reply
from .trial import tolerance

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

NOISE_FACTOR = 5.0
"""How many times the largest noise seen a logprob may differ."""


@dataclass(frozen=True, slots=True)
class Noise:
    """How far equal requests lie apart in an engine without any cache.

    Attributes:
        alone: largest difference of a logprob, asked again alone.
        together: the same, asked beside others.
        token_flips: positions where another token came out, ties included.
        repeats: comparisons made.
    """

    alone: float = 0.0
    together: float = 0.0
    token_flips: int = 0
    repeats: int = 0

    def tolerance(self, dtype: str) -> float:
        """Return how far logprobs of right answers may lie apart."""
        return max(tolerance(dtype), NOISE_FACTOR * max(self.alone, self.together))

    def as_dict(self) -> dict[str, Any]:
        """Return the fields of the report."""
        return {
            "alone": self.alone,
            "together": self.together,
            "token_flips": self.token_flips,
            "repeats": self.repeats,
        }


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an answer leaves the right one.

    Attributes:
        position: index in the answer of the first token or logprob that differs.
        expected, got: tokens there; equal when only the logprob differs.
        logprob_distance: the largest up to there; infinite for NaN.
    """

    position: int
    expected: int | None
    got: int | None
    logprob_distance: float


def compare(right: Reply, reply: Reply, limit: float) -> Difference | None:
    """Return where ``reply`` differs from the right answer by more than noise, or None.

    Positions are compared up to the first that has another token: what follows answers another
    prompt. Another token is a tie when the right answer's two logprobs, and the other answer's,
    lie within ``limit``.

    Args:
        right: the oracle's.
        reply: what is tried.
        limit: how far logprobs may lie apart.
    """
    worst = 0.0
    for i, (want, got) in enumerate(zip(right.tokens, reply.tokens, strict=False)):
        there, here = dict(right.top[i]), dict(reply.top[i])
        shared = [there[token] - here[token] for token in there.keys() & here.keys()]
        distance = max((_size(d) for d in shared), default=math.inf)
        worst = max(worst, distance)
        if distance > limit:
            return Difference(i, want, got, distance)
        if want != got:
            if got in there and _size(there[want] - there[got]) <= limit:
                return None
            return Difference(i, want, got, distance)
    if len(right.tokens) != len(reply.tokens):
        at = min(len(right.tokens), len(reply.tokens))
        return Difference(at, None, None, worst)
    return None


def distance(a: Reply, b: Reply) -> tuple[float, int]:
    """Return the largest difference of a logprob, and whether a token differs (0 or 1)."""
    worst = 0.0
    for i, (want, got) in enumerate(zip(a.tokens, b.tokens, strict=False)):
        there, here = dict(a.top[i]), dict(b.top[i])
        shared = [there[token] - here[token] for token in there.keys() & here.keys()]
        worst = max(worst, max((_size(d) for d in shared), default=math.inf))
        if want != got:
            return worst, 1
    return worst, 0


def _size(difference: float) -> float:
    return math.inf if math.isnan(difference) else abs(difference)


class TruthStore:
    """Right answers on disk: one file for each engine set-up, a line for each answer.

    Lines are only ever appended; one that does not read is passed over.

    Args:
        folder: where; created when missing.
        identity: what the answers depend on (model, engine, versions, sizes).
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        text = json.dumps(identity, sort_keys=True)
        self.path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.jsonl"
        self._replies: dict[str, Reply] = {}
        self._facts: dict[str, Any] = {}
        folder.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            self._append({"identity": dict(identity)})
        with open(self.path, encoding="utf-8", errors="replace") as file:
            for line in file:
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    self._take(json.loads(line))

    def _take(self, row: dict[str, Any]) -> None:
        if "fact" in row:
            self._facts[row["fact"]] = row["value"]
        elif "prompt" in row:
            top = tuple(tuple((int(t), float(x)) for t, x in place) for place in row["top"])
            tokens = tuple(int(token) for token in row["tokens"])
            if len(top) == len(tokens):
                reply = Reply(tokens, top, int(row["n"]), float(row["ttft_s"]), float(row["s"]))
                self._replies[row["prompt"]] = reply

    def __len__(self) -> int:
        return len(self._replies)

    def get(self, prompt: Sequence[int], answer_tokens: int) -> Reply | None:
        """Return the answer, if it is known."""
        return self._replies.get(_name(prompt, answer_tokens))

    def put(self, prompt: Sequence[int], answer_tokens: int, reply: Reply) -> None:
        """Keep an answer."""
        name = _name(prompt, answer_tokens)
        self._replies[name] = reply
        self._append(
            {
                "prompt": name,
                "n": len(prompt),
                "tokens": list(reply.tokens),
                "top": [[list(pair) for pair in place] for place in reply.top],
                "ttft_s": round(reply.ttft_s, 5),
                "s": round(reply.total_s, 5),
            }
        )

    def fact(self, name: str) -> Any:
        """Return something measured earlier, or None."""
        return self._facts.get(name)

    def note(self, name: str, value: Any) -> None:
        """Keep something measured."""
        self._facts[name] = value
        self._append({"fact": name, "value": value})

    def _append(self, row: dict[str, Any]) -> None:
        line = json.dumps(row) + "\n"
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(fd, line.encode())
        finally:
            os.close(fd)


def _name(prompt: Sequence[int], answer_tokens: int) -> str:
    digest = hashlib.sha256(np.asarray(prompt, dtype=np.int64).tobytes())
    digest.update(str(answer_tokens).encode())
    return digest.hexdigest()[:32]


def measure_noise(
    ask_alone: Callable[[tuple[int, ...]], Reply],
    ask_together: Callable[[Sequence[tuple[int, ...]]], list[Reply]],
    prompts: Sequence[tuple[int, ...]],
) -> Noise:
    """Ask the same prompts three times: alone, alone again, all at once. Blocking."""
    first = [ask_alone(prompt) for prompt in prompts]
    again = [distance(a, ask_alone(p)) for a, p in zip(first, prompts, strict=True)]
    beside = [distance(a, b) for a, b in zip(first, ask_together(prompts), strict=True)]
    return Noise(
        alone=max(d for d, _ in again),
        together=max(d for d, _ in beside),
        token_flips=sum(flip for _, flip in again + beside),
        repeats=len(again) + len(beside),
    )
