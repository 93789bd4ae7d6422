"""What a soak asks: agent sessions, synthetic or from a trace, scaled to a context.

Synthetic sessions share system prompts, grow turn by turn and carry the right answer of the turn
before, as an agent's do. A trace's sessions have the shape of the recorded ones (growth, shared
beginnings, histories cut short, pauses) on tokens made up for each of its blocks.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from .sessions import pieces
from .soak_types import Turn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .traces import Request, Trace

MIN_CONTEXT_TOKENS = 256
SYSTEM_PROMPTS = 2
SYSTEM_SHARE = 0.2  # of the context
MIN_BLOCKS = 8  # a recorded prompt with less is left out
LIKE_SHARE = 0.4  # shortest of the chosen sessions, in parts of the longest
MAX_UNITS = 256  # runs of tokens that a recorded prompt becomes at most


@dataclass(frozen=True, slots=True)
class TrafficOptions:
    """The shape of the traffic.

    Attributes:
        context_tokens: longest prompt and answer together.
        sessions: how many different ones.
        turns: most of each.
        answer_tokens: of each turn.
        think_s: mean pause before a turn, of synthetic sessions; a trace's are divided by
            ``compress``.
        compress: recorded pauses are so many times as long.
        max_think_s: no pause is longer.
        seed: everything comes from it.
    """

    context_tokens: int
    sessions: int = 6
    turns: int = 4
    answer_tokens: int = 8
    think_s: float = 0.3
    compress: float = 60.0
    max_think_s: float = 3.0
    seed: int = 1


class Stream(Protocol):
    """Tokens without end."""

    def take(self, n_tokens: int) -> list[int]:
        """Return the next ``n_tokens``."""


class TextStream:
    """An agent's context as text, through the model's tokenizer."""

    def __init__(self, name: str, seed: int, encode: Callable[[str], list[int]]) -> None:
        self._pieces: Iterator[str] = pieces(name, random.Random(f"{seed}/{name}"))  # noqa: S311
        self._encode = encode
        self._left: list[int] = []

    def take(self, n_tokens: int) -> list[int]:
        """Return the next ``n_tokens``."""
        while len(self._left) < n_tokens:
            self._left += self._encode(next(self._pieces))
        taken, self._left = self._left[:n_tokens], self._left[n_tokens:]
        return taken


class RandomStream:
    """Token ids drawn evenly, for models without a tokenizer."""

    def __init__(self, name: str, seed: int, vocab_tokens: int) -> None:
        self._rng = random.Random(f"{seed}/{name}")  # noqa: S311
        self._vocab_tokens = vocab_tokens

    def take(self, n_tokens: int) -> list[int]:
        """Return the next ``n_tokens``."""
        low = min(5, self._vocab_tokens - 1)  # the first are often special
        return [self._rng.randrange(low, self._vocab_tokens) for _ in range(n_tokens)]


class Session(Protocol):
    """Makes one session's turns, given the right answer of each."""

    name: str

    def next_turn(self, answer: Sequence[int]) -> Turn | None:
        """Return the next turn, after one that was answered so; None at the end."""


class SyntheticSession:
    """One made-up session; every second one shares its system prompt with this one.

    Args:
        number: which.
        options: shape.
        open_stream: gives the tokens of a name.
    """

    def __init__(
        self, number: int, options: TrafficOptions, open_stream: Callable[[str], Stream]
    ) -> None:
        self.name = f"session-{number + 1}"
        self._options = options
        self._rng = random.Random(f"{options.seed}/shape/{number}")  # noqa: S311
        self._stream = open_stream(self.name)
        system = open_stream(f"system-{number % SYSTEM_PROMPTS + 1}")
        self._tokens = system.take(int(SYSTEM_SHARE * options.context_tokens))
        self._lengths = self._plan_lengths()
        self._turn = 0

    def _plan_lengths(self) -> list[int]:
        options, rng = self._options, self._rng
        most = options.context_tokens - options.answer_tokens
        first = int(most * rng.uniform(0.35, 0.55))
        last = int(most * rng.uniform(0.85, 1.0))
        least_growth = options.answer_tokens + 4
        turns = max(1, min(options.turns, 1 + (last - first) // least_growth))
        step = (last - first) / max(1, turns - 1)
        return [round(first + step * i) for i in range(turns)]

    def next_turn(self, answer: Sequence[int]) -> Turn | None:
        """Return the next turn; the answer of the one before is part of it."""
        if self._turn >= len(self._lengths):
            return None
        self._tokens += answer
        self._tokens += self._stream.take(max(1, self._lengths[self._turn] - len(self._tokens)))
        self._turn += 1
        think_s = min(self._options.max_think_s, self._rng.expovariate(1 / self._options.think_s))
        return Turn(
            self.name, self._turn, tuple(self._tokens), self._options.answer_tokens, think_s
        )


class TraceSession:
    """One recorded session, scaled: a block becomes a run of tokens of its own.

    Args:
        name: for people.
        requests: its calls in order.
        stride: blocks that become one run.
        unit_tokens: tokens of a run.
        options: shape.
        open_stream: gives the tokens of a name.
    """

    def __init__(
        self,
        name: str,
        requests: Sequence[Request],
        stride: int,
        unit_tokens: int,
        options: TrafficOptions,
        open_stream: Callable[[str], Stream],
    ) -> None:
        self.name = name
        self._requests = requests
        self._stride = stride
        self._unit_tokens = unit_tokens
        self._options = options
        self._open_stream = open_stream
        self._turn = 0

    def next_turn(self, answer: Sequence[int]) -> Turn | None:  # noqa: ARG002 - it is recorded
        """Return the next turn, as recorded."""
        if self._turn >= len(self._requests):
            return None
        request = self._requests[self._turn]
        before_s = self._requests[self._turn - 1].at_s if self._turn else request.at_s
        think_s = min(self._options.max_think_s, (request.at_s - before_s) / self._options.compress)
        self._turn += 1
        room_tokens = self._options.context_tokens - self._options.answer_tokens
        tokens: list[int] = []
        # A node stands for everything before it, so that each last one of a run will do.
        for node in request.nodes[self._stride - 1 :: self._stride].tolist():
            if len(tokens) >= room_tokens:
                break
            tokens += self._open_stream(f"block-{node}").take(self._unit_tokens)
        return Turn(
            self.name,
            self._turn,
            tuple(tokens[:room_tokens]),
            self._options.answer_tokens,
            max(0.0, think_s),
        )


def synthetic_sessions(
    options: TrafficOptions, open_stream: Callable[[str], Stream]
) -> list[Session]:
    """Return made-up sessions."""
    return [SyntheticSession(i, options, open_stream) for i in range(options.sessions)]


def trace_sessions(
    trace: Trace, options: TrafficOptions, open_stream: Callable[[str], Stream]
) -> list[Session]:
    """Return sessions of a trace, chosen and thinned from the seed.

    Of a long session ``turns`` calls are kept, spread over it, so that prompts grow by what
    several calls brought. Sessions are chosen among those of a like length, for all are scaled
    alike (what they share must stay shared) and the longest fills the context.
    """
    by_session: dict[int, list[Request]] = {}
    for request in trace.requests:
        if len(request.nodes) >= MIN_BLOCKS:
            by_session.setdefault(request.session, []).append(request)
    usable = sorted(number for number, calls in by_session.items() if len(calls) >= 2)
    rng = random.Random(f"{options.seed}/trace")  # noqa: S311
    usable = _of_like_length(
        {n: max(len(r.nodes) for r in by_session[n]) for n in usable}, options.sessions
    )
    chosen = sorted(rng.sample(usable, min(options.sessions, len(usable))))
    thinned = {number: _spread(by_session[number], options.turns) for number in chosen}
    longest = max((len(r.nodes) for calls in thinned.values() for r in calls), default=1)
    room_tokens = options.context_tokens - options.answer_tokens
    unit_tokens = -(-room_tokens // min(MAX_UNITS, room_tokens, longest))
    stride = -(-longest // (room_tokens // unit_tokens))
    return [
        TraceSession(f"{trace.name}-{number}", calls, stride, unit_tokens, options, open_stream)
        for number, calls in thinned.items()
    ]


def _of_like_length(blocks: dict[int, int], at_least: int) -> list[int]:
    """Return the sessions as long as most, the longest tenth left out, if there are enough."""
    if not blocks:
        return []
    most = sorted(blocks.values())[(len(blocks) - 1) * 9 // 10]
    like = sorted(n for n, length in blocks.items() if LIKE_SHARE * most <= length <= most)
    return like if len(like) >= at_least else sorted(blocks)


def _spread(calls: Sequence[Request], turns: int) -> list[Request]:
    if len(calls) <= turns:
        return list(calls)
    return [calls[round(i * (len(calls) - 1) / max(1, turns - 1))] for i in range(turns)]


def fitting_context(
    max_tokens: int, prefill_tokens_per_s: float, budget_s: float, sessions: int, turns: int
) -> int:
    """Return the context, max/2^k, at which computing all turns once takes ``budget_s``.

    Powers of two, so that a slightly faster or slower run asks for the same prompts and finds
    their right answers on disk.
    """
    context = max_tokens
    mean_share = 0.7
    while (
        context // 2 >= MIN_CONTEXT_TOKENS
        and sessions * turns * mean_share * context / prefill_tokens_per_s > budget_s
    ):
        context //= 2
    return context
