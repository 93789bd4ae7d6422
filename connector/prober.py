"""Finds out what other engines have put on a shared tier.

The scheduler asks for a request's chain of chunks and goes on; a thread of the
prober asks the tier in batches, each one round trip for every rank: twice as
many chunks each time, until one is missing, then the records that can end
inside the next chunk. Answers wait for the scheduler to take them.

Guarantees: `ask` and `take` never block on I/O; at most `MAX_QUEUED` questions
wait (more are refused); a tier that fails answers "nothing new".
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..storage.errors import KVTierError
from ..storage.tier import Tier

logger = logging.getLogger("kvtier.prober")

FIRST_CHUNKS = 64
MAX_QUEUED = 256
RETRY_S = 2.0


@dataclass(frozen=True, slots=True)
class Question:
    """One request's chain.

    Attributes:
        ticket: names the asker's request.
        mark: names the chain; both come back with the answer.
        chunks: for each whole chunk in order, the keys (all groups) at its end.
        inside: for a number n of whole chunks found, the keys of records that end
            inside the chunk after them.
    """

    ticket: str
    mark: bytes
    chunks: Sequence[Sequence[bytes]]
    inside: Callable[[int], Sequence[bytes]]


@dataclass(frozen=True, slots=True)
class Answer:
    """Which keys every rank holds."""

    ticket: str
    mark: bytes
    present: tuple[bytes, ...]
    round_trips: int


class Prober:
    """Asks one shared tier on a thread of its own.

    Args:
        tiers: one opened tier a rank; closed with the prober.
        clock: monotonic seconds.
    """

    def __init__(self, name: str, tiers: Sequence[Tier], clock: Callable[[], float]) -> None:
        self.name = name
        self._tiers = list(tiers)
        self._clock = clock
        self._cond = threading.Condition()
        self._questions: deque[Question] = deque()
        self._answers: deque[Answer] = deque()
        self._silent_until_s = 0.0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"kvtier-probe-{name}", daemon=True)
        self._thread.start()

    @property
    def silent(self) -> bool:
        """Whether the tier failed a moment ago and is not asked."""
        return self._clock() < self._silent_until_s

    def ask(self, question: Question) -> bool:
        """Queue a question; False when it will not be answered."""
        if self.silent:
            return False
        with self._cond:
            if self._closed or len(self._questions) >= MAX_QUEUED:
                return False
            self._questions.append(question)
            self._cond.notify()
            return True

    def take(self) -> list[Answer]:
        """Return the answers that have come."""
        answers: list[Answer] = []
        while self._answers:
            answers.append(self._answers.popleft())
        return answers

    def _run(self) -> None:
        while True:
            with self._cond:
                while not self._questions and not self._closed:
                    self._cond.wait()
                if self._closed:
                    return
                question = self._questions.popleft()
            try:
                answer = self._find(question)
            except KVTierError as err:
                logger.debug("kvtier: probing %s failed: %s", self.name, err)
                answer = self._nothing(question)
            except Exception:
                logger.exception("kvtier: probing %s failed unexpectedly", self.name)
                answer = self._nothing(question)
            self._answers.append(answer)

    def _nothing(self, question: Question) -> Answer:
        self._silent_until_s = self._clock() + RETRY_S
        return Answer(question.ticket, question.mark, (), 0)

    def _find(self, question: Question) -> Answer:
        present: list[bytes] = []
        trips = 0
        n_whole = 0
        size = FIRST_CHUNKS
        at = 0
        while at < len(question.chunks):
            batch = question.chunks[at : at + size]
            held = self._held([key for keys in batch for key in keys])
            trips += 1
            present += held
            known = set(held)
            # The first group's chunk (full attention where there is one) leads the walk.
            lead = next((i for i, keys in enumerate(batch) if keys[0] not in known), len(batch))
            n_whole = at + lead
            if lead < len(batch):
                break
            at += size
            size *= 2
        inside = list(question.inside(n_whole))
        if inside:
            present += self._held(inside)
            trips += 1
        return Answer(question.ticket, question.mark, tuple(present), trips)

    def _held(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the keys that every rank holds."""
        left = list(keys)
        for tier in self._tiers:
            if not left:
                break
            held = tier.contains_many(left)
            left = [key for key, there in zip(left, held, strict=True) if there]
        return left

    def close(self) -> None:
        """Stop. Does not wait for a call that hangs."""
        with self._cond:
            self._closed = True
            self._questions.clear()
            self._cond.notify_all()
        self._thread.join(0.5)
        for tier in self._tiers:
            tier.close()
