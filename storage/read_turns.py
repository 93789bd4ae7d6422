"""Turns at a device's reads, so that some threads read while the others check and copy."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

PATIENCE_S = 0.025  # a healthy disk reads a piece in less; what takes longer may never end


class ReadTurns:
    """A context manager that ``at_once`` threads may be inside. Thread-safe.

    Threads that read at will share the disk, come to the end of their reads
    together and then all compute with the disk idle. With half of them waiting
    for a turn, the disk reads on while the other half computes.

    A turn is never waited for longer than ``patience_s``: whoever waited that
    long goes on without, and brings a new turn into circulation when done, so
    reads that never return take no turns from the others.
    """

    def __init__(self, at_once: int, patience_s: float = PATIENCE_S) -> None:
        """Let ``at_once`` (1 or more) threads read at a time."""
        assert at_once >= 1
        self._at_once = at_once
        self._patience_s = patience_s
        self._free = at_once
        self._cond = threading.Condition()

    def __enter__(self) -> None:
        """Wait for a turn, at most ``patience_s``."""
        with self._cond:
            if self._cond.wait_for(lambda: self._free > 0, self._patience_s):
                self._free -= 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the turn to the next."""
        with self._cond:
            self._free = min(self._at_once, self._free + 1)
            self._cond.notify()
