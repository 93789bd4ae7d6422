"""Counters that many threads add to and one reader takes."""

from __future__ import annotations

import threading


class Counts:
    """Named sums; `take` returns what was added since the last take."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, float] = {}

    def add(self, name: str, amount: float = 1.0) -> None:
        """Add to a sum. Any thread."""
        with self._lock:
            self._sums[name] = self._sums.get(name, 0.0) + amount

    def take(self) -> dict[str, float]:
        """Return all sums and start anew. Any thread."""
        if not self._sums:
            return {}
        with self._lock:
            sums, self._sums = self._sums, {}
            return sums
