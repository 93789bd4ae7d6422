"""One load job on its way: who is in it, what has landed, who must be told.

Guarantees, for every job:

- `LoadDone` is reported exactly once, and after it no byte of this job can
  reach a device block: a copy begins only while the job is open, and the
  report waits for copies that have begun.
- `LoadRetired` is reported exactly once, after `LoadDone`, when no thread holds
  the job's RAM pages any more; a read that never returns delays only this.

A missing or damaged chunk ends the load as soon as what comes before it has
landed. The chunks behind it are still read and verified, when no thread has
anything better to do: whatever else is bad is then found at once, and replaced
while the same request computes, and not one bad record a turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

from .jobs import ChunkStatus, Event, LoadDone, LoadJob, LoadRetired

if TYPE_CHECKING:
    from .link import TierLink

_LOST = frozenset({ChunkStatus.MISSING, ChunkStatus.DAMAGED})


class Need(Enum):
    """What a chunk of a load is still good for."""

    LOAD = "load"  # the request waits for it
    CHECK = "check"  # a chunk before it is bad: only to find out whether this one is too
    NOTHING = "nothing"


class LoadState:
    """Progress of one `LoadJob`. Thread-safe.

    Args:
        emit: takes the events, from whichever thread finishes; called under the lock, so
            that they come in order and none is on its way once `close` returns.
        after: the mover's fence that device copies wait for.
    """

    def __init__(
        self,
        job: LoadJob,
        deadline_at_s: float,
        emit: Callable[[Event], None],
        after: object = None,
    ) -> None:
        self.job = job
        self.after = after
        self.deadline_at_s = deadline_at_s
        self._emit = emit
        self._lock = threading.Lock()
        n = len(job.chunks)
        self._statuses = bytearray(n)
        self._filled = bytearray(n)
        self._ended = bytearray(n)
        self._lost_late: list[int] = []
        self._left = n  # chunks whose task has not ended
        self._copies = 0  # copies to the device under way
        self.reading: dict[int, TierLink] = {}  # chunks that a tier is being read for
        self._first_bad = n  # the request needs nothing after a failed chunk
        self._checking = True  # but what is there is checked, unless the tier itself fails
        self._closed_as: ChunkStatus | None = None
        self._done = False
        self._retired = False
        self._doomed = False

    @property
    def done(self) -> bool:
        """Whether `LoadDone` has been reported."""
        return self._done

    @property
    def retired(self) -> bool:
        """Whether `LoadRetired` has been reported: every chunk's task has ended."""
        return self._retired

    def start(self, *, doomed: bool) -> None:
        """Report at once a job that has nothing to do, or one that cannot be done."""
        with self._lock:
            self._doomed = doomed
            self._left = 0
            self._tell_done_if_over()
            self._tell_retired_if_over()

    def need(self, index: int) -> Need:
        """Say whether reading chunk ``index`` still makes sense, and what for."""
        if self._closed_as is not None:
            return Need.NOTHING
        if index <= self._first_bad:
            return Need.LOAD
        return Need.CHECK if self._checking else Need.NOTHING

    def begin_copy(self, index: int) -> bool:
        """Ask to write the device blocks of chunk ``index``; False where nobody waits for them."""
        with self._lock:
            if self._closed_as is not None or self._done or index > self._first_bad:
                return False
            self._copies += 1
            return True

    def end_copy(self) -> None:
        """The copy is over: no byte of it is under way any more."""
        with self._lock:
            self._copies -= 1
            self._tell_done_if_over()

    def filled(self, index: int) -> None:
        """Chunk ``index``'s own RAM pages hold its verified bytes."""
        self._filled[index] = 1

    def finish(self, index: int, status: ChunkStatus) -> None:
        """The task of chunk ``index`` has ended and let go of its pages."""
        with self._lock:
            if not self._done:
                self._statuses[index] = status
            elif status in _LOST:
                self._lost_late.append(index)
            self._ended[index] = 1
            self._left -= 1
            if status is not ChunkStatus.OK:
                self._first_bad = min(self._first_bad, index)
                # A chunk that was passed over says nothing about the tier.
                self._checking &= status in _LOST or status is ChunkStatus.CANCELLED
            self._tell_done_if_over()
            self._tell_retired_if_over()

    def close(self, why: ChunkStatus) -> bool:
        """Let no further copy and no read begin, and report as soon as no copy is under way.

        Returns False when the job was over or closed already.
        """
        with self._lock:
            if self._closed_as is not None:
                return False
            self._closed_as = why
            if self._done:
                return False
            self._tell_done_if_over()
        return True

    def _tell_done_if_over(self) -> None:
        over = (
            self._left == 0
            or self._closed_as is not None
            or (self._first_bad < len(self._ended) and 0 not in self._ended[: self._first_bad])
        )
        if self._done or not over or self._copies:
            return
        self._done = True
        if self._closed_as is not None:
            for i, status in enumerate(self._statuses):
                if status == ChunkStatus.NOT_ATTEMPTED:
                    self._statuses[i] = self._closed_as
        ok = not self._doomed and all(s == ChunkStatus.OK for s in self._statuses)
        self._emit(LoadDone(self.job.job_id, self.job.request_id, bytes(self._statuses), ok))

    def _tell_retired_if_over(self) -> None:
        if self._left == 0:
            lost = tuple(sorted(self._lost_late))
            self._emit(LoadRetired(self.job.job_id, bytes(self._filled), lost))
            self._retired = True
