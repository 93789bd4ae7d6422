"""Finds out what other engines have put on a shared tier.

The scheduler asks for a request's chain of chunks and goes on; a thread of the
prober asks the tier in batches, each one round trip for all ranks and for all
requests that wait: twice as many chunks each time, until one is missing, then
the records that can end inside the next chunk. Answers wait for the scheduler
to take them.

Guarantees: `ask` and `take` never block on I/O; at most `MAX_QUEUED` questions
wait (more are refused); every question taken in is answered once, unless the
prober is closed. A tier that fails, or that has owed an answer for longer than
anybody waits, is not asked for anybody: `ask` refuses at once, and the thread
itself finds out, with back-off, when the tier is well again.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from ..storage.errors import KVTierError

logger = logging.getLogger("kvtier.prober")

_T = TypeVar("_T")

FIRST_CHUNKS = 64
MAX_QUEUED = 256
MIN_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0
MIN_PATIENCE_S = 0.05
_PROBE_KEY = b"\0" * 32 + b"\0"


class SharedIndex(Protocol):
    """What can be asked of a shared tier; see `kvtier.storage.redis_lookup`."""

    def held(self, keys: Sequence[bytes]) -> list[bool]:
        """Which chunks every rank has a record of; blocks, raises `KVTierError`."""

    def close(self) -> None:
        """Wake whoever is in a call. Does not wait."""


@dataclass(frozen=True, slots=True)
class Question:
    """One request's chain.

    Attributes:
        number: no other question's.
        ticket: names the request that waits.
        mark: names the chain.
        chunks: for each whole chunk in order, the keys (all groups) at its end.
        inside: for a number n of whole chunks found, the keys of records that end
            inside the chunk after them.
        led: the first key of each chunk is needed for all that follows it (full
            attention), so that the walk ends where one is missing.
    """

    number: int
    ticket: str
    mark: bytes
    chunks: Sequence[Sequence[bytes]]
    inside: Callable[[int], Sequence[bytes]]
    led: bool = True


@dataclass(frozen=True, slots=True)
class Answer:
    """Which keys every rank holds.

    Attributes:
        question: what was asked.
        present: keys that are there.
        asked: whether the tier was asked and said all this; else nothing is known.
        round_trips: calls of the tier that it took.
    """

    question: Question
    present: tuple[bytes, ...] = ()
    asked: bool = True
    round_trips: int = 0


class Prober:
    """Asks one shared tier on a thread of its own.

    Args:
        name: the tier's.
        index: what is asked; closed with the prober.
        clock: monotonic seconds.
        patience_s: longest that anybody waits for an answer.
        start: False leaves the thread out; the caller runs `work` (tests).
    """

    def __init__(
        self,
        name: str,
        index: SharedIndex,
        clock: Callable[[], float],
        *,
        patience_s: float = MIN_PATIENCE_S,
        start: bool = True,
    ) -> None:
        self.name = name
        self._index = index
        self._clock = clock
        self._patience_s = max(patience_s, MIN_PATIENCE_S)
        self._cond = threading.Condition()
        self._questions: deque[tuple[Question, float]] = deque()
        self._answers: deque[Answer] = deque()
        self._calling_since_s: float | None = None
        self._retry_at_s: float | None = None  # set while the tier is off
        self._backoff_s = MIN_BACKOFF_S
        self._closed = False
        self._thread: threading.Thread | None = None
        if start:
            self._thread = threading.Thread(
                target=self._run, name=f"kvtier-probe-{name}", daemon=True
            )
            self._thread.start()

    @property
    def silent(self) -> bool:
        """Whether the tier would not answer in time, as far as is known."""
        since_s = self._calling_since_s
        late = since_s is not None and self._clock() - since_s > self._patience_s
        return late or self._retry_at_s is not None

    def ask(self, question: Question) -> bool:
        """Queue a question; False when it will not be answered in time."""
        if self.silent:
            return False
        with self._cond:
            if self._closed or len(self._questions) >= MAX_QUEUED:
                return False
            self._questions.append((question, self._clock()))
            self._cond.notify()
            return True

    def take(self) -> list[Answer]:
        """Return the answers that have come."""
        answers: list[Answer] = []
        while self._answers:
            answers.append(self._answers.popleft())
        return answers

    # -- the thread ------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            with self._cond:
                if not self._due():
                    self._cond.wait(self._sleep_s())
                    continue
            self.work()

    def _due(self) -> bool:
        if self._closed or self._questions:
            return True
        return self._retry_at_s is not None and self._clock() >= self._retry_at_s

    def _sleep_s(self) -> float | None:
        if self._retry_at_s is None:
            return None
        return max(0.001, self._retry_at_s - self._clock())

    def work(self) -> None:
        """Do what is due: answer the questions, or see whether the tier is well again."""
        with self._cond:
            if self._closed:
                return
            batch = [self._questions.popleft() for _ in range(len(self._questions))]
        if batch:
            oldest_s = self._clock() - self._patience_s  # nobody waits for one before
            fresh = [q for q, at_s in batch if at_s >= oldest_s and self._retry_at_s is None]
            answers = self._guarded(lambda: self._find(fresh)) or {}
            for question, _ in batch:
                answer = answers.get(question.number) or Answer(question, asked=False)
                self._answers.append(answer)
        elif self._retry_at_s is not None and self._clock() >= self._retry_at_s:
            if self._guarded(lambda: self._held([_PROBE_KEY])) is not None:
                self._retry_at_s, self._backoff_s = None, MIN_BACKOFF_S
                logger.warning("kvtier: %s is asked for other engines' chunks again", self.name)

    def _guarded(self, call: Callable[[], _T]) -> _T | None:
        """Return what ``call`` returns; None, and the tier is off for a while, when it raises."""
        try:
            return call()
        except KVTierError as err:
            reason = str(err)
        except Exception as err:
            logger.exception("kvtier: probing %s failed unexpectedly", self.name)
            reason = repr(err)
        if self._closed:
            return None
        if self._retry_at_s is None:
            logger.warning(
                "kvtier: %s is not asked for other engines' chunks: %s; tried again by itself",
                self.name,
                reason,
            )
        else:
            self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)
        self._retry_at_s = self._clock() + self._backoff_s
        return None

    def _find(self, questions: Sequence[Question]) -> dict[int, Answer]:
        """Answer all ``questions``, side by side: what each wants next goes into one call."""
        answers: dict[int, Answer] = {}
        walks: dict[int, tuple[Walk, list[bytes]]] = {}
        for question in questions:
            _advance(question.number, walk(question), None, walks, answers)
        while walks:
            keys = list(dict.fromkeys(key for _, wanted in walks.values() for key in wanted))
            held = self._held(keys)
            for number, (steps, _) in list(walks.items()):
                _advance(number, steps, held, walks, answers)
        return answers

    def _held(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return the keys that every rank holds."""
        self._calling_since_s = self._clock()
        try:
            held = self._index.held(keys)
        finally:
            self._calling_since_s = None
        return {key for key, there in zip(keys, held, strict=True) if there}

    def close(self, wait_s: float = 0.0) -> None:
        """Stop; wait at most ``wait_s`` for the thread."""
        with self._cond:
            self._closed = True
            self._questions.clear()
            self._cond.notify_all()
        self._index.close()
        if self._thread is not None and wait_s:
            self._thread.join(wait_s)


Walk: TypeAlias = "Generator[list[bytes], set[bytes] | None, Answer]"


def walk(question: Question) -> Walk:
    """Find out which keys of a chain are there: yields keys to ask for, is sent those held."""
    present: list[bytes] = []
    trips = n_whole = at = 0
    size = FIRST_CHUNKS
    while at < len(question.chunks):
        batch = question.chunks[at : at + size]
        wanted = [key for keys in batch for key in keys]
        held = (yield wanted) or set()
        trips += 1
        present += [key for key in wanted if key in held]
        n_whole = at + len(batch)
        if question.led:
            lead = next((i for i, keys in enumerate(batch) if keys[0] not in held), None)
            if lead is not None:
                n_whole = at + lead
                break
        at += size
        size *= 2
    inside = list(question.inside(n_whole))
    if inside:
        held = (yield inside) or set()
        trips += 1
        present += [key for key in inside if key in held]
    return Answer(question, tuple(present), round_trips=trips)


def _advance(
    number: int,
    steps: Walk,
    held: set[bytes] | None,
    walks: dict[int, tuple[Walk, list[bytes]]],
    answers: dict[int, Answer],
) -> None:
    try:
        walks[number] = steps, steps.send(held)
    except StopIteration as end:
        walks.pop(number, None)
        answers[number] = end.value
