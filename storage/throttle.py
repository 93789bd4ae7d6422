"""Passes over what was done to the same key a moment ago."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Throttle:
    """Remembers when each key had its turn. Thread-safe, bounded.

    Args:
        every_s: a key has a turn no more often than this.
        clock: seconds; when it is set back everything is due.
        max_keys: remembered at most; the oldest are forgotten.
    """

    def __init__(self, every_s: float, clock: Callable[[], float], max_keys: int = 1 << 17) -> None:
        self._every_s = every_s
        self._clock = clock
        self._max_keys = max_keys
        self._lock = threading.Lock()
        self._turn_s: dict[bytes, float] = {}  # oldest first

    def due(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return those of ``keys`` whose turn it is, and note that they have had it."""
        now_s = self._clock()
        due = []
        with self._lock:
            for key in keys:
                turn_s = self._turn_s.get(key)
                if turn_s is None or not 0 <= now_s - turn_s < self._every_s:
                    self._turn_s.pop(key, None)
                    self._turn_s[key] = now_s
                    due.append(key)
            while len(self._turn_s) > self._max_keys:
                del self._turn_s[next(iter(self._turn_s))]
        return due

    def forget(self, keys: Iterable[bytes]) -> None:
        """Let ``keys`` be due again: what was to be done to them was not."""
        with self._lock:
            for key in keys:
                self._turn_s.pop(key, None)
