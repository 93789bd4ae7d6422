"""One save job on its way: copied out once, retired when its last write has ended.

Guarantee: `SaveCopied` and `SaveRetired` are each reported exactly once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from .jobs import Event, SaveCopied, SaveJob, SaveRetired


class SaveState:
    """A save job on its way: copied once, retired when the last write has ended."""

    def __init__(self, job: SaveJob, emit: Callable[[Event], None]) -> None:
        self.job = job
        self.retired = False
        self._emit = emit
        self._lock = threading.Lock()
        self._left: int | None = None  # unknown until all writes are planned
        self._ended = 0
        self._written: list[tuple[int, str]] = []

    def copied(self, statuses: bytes) -> None:
        """The device blocks are free to be reused."""
        self._emit(SaveCopied(self.job.job_id, statuses))

    def planned(self, n_writes: int) -> None:
        """So many writes were accepted."""
        with self._lock:
            self._left = n_writes
        self._retire_if_over()

    def wrote(self, index: int, tier: str, ok: bool) -> None:
        """One accepted write has ended."""
        with self._lock:
            self._ended += 1
            if ok:
                self._written.append((index, tier))
        self._retire_if_over()

    def _retire_if_over(self) -> None:
        with self._lock:
            if self.retired or self._left is None or self._ended < self._left:
                return
            self.retired = True
        self._emit(SaveRetired(self.job.job_id, tuple(self._written)))
