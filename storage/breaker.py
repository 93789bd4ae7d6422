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

    One that opens again soon after a probe had closed it goes on backing off: what answers
    probes and nothing else is asked, and told of, less and less often. A probe that has not
    ended after the longest back-off counts as lost, and another one follows.

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
        self._probed_at_s = 0.0
        self._closed_at_s: float | None = None  # by a probe, the last time

    @property
    def state(self) -> BreakerState:
        """The state now."""
        with self._lock:
            if self._open_until_s is None:
                return BreakerState.CLOSED
            waiting = self._is_probing() or self._clock() < self._open_until_s
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
            if not due or self._is_probing():
                return False
            self._probing, self._probed_at_s = True, self._clock()
            return True

    def _is_probing(self) -> bool:
        return self._probing and self._clock() - self._probed_at_s < self._max_backoff_s

    def success(self) -> None:
        """Record an answer; closes the breaker."""
        if self._failures == 0 and self._open_until_s is None:
            return
        with self._lock:
            was_open = self._open_until_s is not None
            self._failures = 0
            self._probing = False
            self._open_until_s = None
            if was_open:
                self._closed_at_s = self._clock()
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
            self._open()
        self._on_change(True, reason)

    def trip(self, reason: str) -> None:
        """Open at once."""
        with self._lock:
            self._failures = max(self._failures, self._threshold)
            was_open = self._open_until_s is not None
            self._probing = False
            if was_open:
                self._open_until_s = self._clock() + self._backoff_s
            else:
                self._open()
        if not was_open:
            self._on_change(True, reason)

    def _open(self) -> None:
        """Open, for longer than the last time where that was a moment ago."""
        now_s = self._clock()
        again = self._closed_at_s is not None and now_s - self._closed_at_s < self._max_backoff_s
        longer_s = min(self._backoff_s * 2, self._max_backoff_s)
        self._backoff_s = longer_s if again else self._min_backoff_s
        self._open_until_s = now_s + self._backoff_s
