"""A circuit breaker: stop asking what does not answer, ask again later.

The usual three states (Nygard, "Release It!"): closed, open, and half-open
once the back-off has passed, when a single probe decides. Thread-safe; takes
its time from the clock that it is given.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum


class BreakerState(str, Enum):
    """What a breaker lets through."""

    CLOSED = "closed"  # everything
    OPEN = "open"  # nothing
    HALF_OPEN = "half_open"  # one probe


class Breaker:
    """Opens after ``threshold`` failures in a row; backs off from min to max, doubling.

    Args:
        on_change: called with (open, reason) at each change, outside the lock,
            on the thread that caused it.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        on_change: Callable[[bool, str], None],
        *,
        threshold: int = 3,
        min_backoff_s: float = 1.0,
        max_backoff_s: float = 60.0,
    ) -> None:
        self._clock = clock
        self._on_change = on_change
        self._threshold = threshold
        self._min_backoff_s = min_backoff_s
        self._max_backoff_s = max_backoff_s
        self._lock = threading.Lock()
        self._failures = 0
        self._backoff_s = min_backoff_s
        self._open_until_s: float | None = None
        self._probing = False

    @property
    def state(self) -> BreakerState:
        """The state now."""
        with self._lock:
            if self._open_until_s is None:
                return BreakerState.CLOSED
            waiting = self._probing or self._clock() < self._open_until_s
            return BreakerState.OPEN if waiting else BreakerState.HALF_OPEN

    @property
    def closed(self) -> bool:
        """Whether everything passes (lock-free, for hot paths)."""
        return self._open_until_s is None

    def take_probe(self) -> bool:
        """Return True for exactly one caller once the back-off has passed."""
        if self._open_until_s is None:
            return False
        with self._lock:
            due = self._open_until_s is not None and self._clock() >= self._open_until_s
            if not due or self._probing:
                return False
            self._probing = True
            return True

    def success(self) -> None:
        """Record an answer; closes the breaker."""
        if self._failures == 0 and self._open_until_s is None:
            return
        with self._lock:
            was_open = self._open_until_s is not None
            self._failures = 0
            self._probing = False
            self._open_until_s = None
            self._backoff_s = self._min_backoff_s
        if was_open:
            self._on_change(False, "answers again")

    def failure(self, reason: str) -> None:
        """Record a failure; opens the breaker at the threshold, or again after a failed probe."""
        with self._lock:
            self._failures += 1
            if self._open_until_s is not None:
                if self._probing:
                    self._probing = False
                    self._backoff_s = min(self._backoff_s * 2, self._max_backoff_s)
                    self._open_until_s = self._clock() + self._backoff_s
                return
            if self._failures < self._threshold:
                return
            self._open_until_s = self._clock() + self._backoff_s
        self._on_change(True, reason)

    def trip(self, reason: str) -> None:
        """Open at once."""
        with self._lock:
            self._failures = max(self._failures, self._threshold)
            was_open = self._open_until_s is not None
            self._probing = False
            self._open_until_s = self._clock() + self._backoff_s
        if not was_open:
            self._on_change(True, reason)
