"""The engine under test: started, killed, started again, its counters added up."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

from .soak_types import EngineGone, SoakError

if TYPE_CHECKING:
    from collections.abc import Callable

    from .soak_client import ChildEngine

GAUGE = "gauge."
MAX_CRASHES = 3


class Host:
    """Keeps one engine running. Thread-safe.

    Args:
        start: starts one, blocking.
    """

    def __init__(self, start: Callable[[], ChildEngine]) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._engine = start()
        self._before: Counter[str] = Counter()
        self._last: dict[str, float] = {}
        self._expected_end = False
        self.incarnation = 1
        self.crashes: list[str] = []

    @property
    def engine(self) -> ChildEngine:
        """The engine of now, perhaps one that has just gone."""
        return self._engine

    def client(self) -> ChildEngine:
        """Return a running engine; blocks while one is started.

        Raises:
            SoakError: it ends again and again by itself.
        """
        with self._lock:
            if not self._engine.alive:
                self._replace()
            return self._engine

    def _replace(self) -> None:
        if not self._expected_end:
            self.crashes.append(self._engine.log_tail())
            if len(self.crashes) > MAX_CRASHES:
                raise SoakError(f"the engine ends again and again: {self.crashes[-1]}")
        self._expected_end = False
        self._engine.close()
        self._before.update(self._last)
        self._last = {}
        self._engine = self._start()
        self.incarnation += 1

    def kill(self) -> None:
        """End the engine as a crash does; the next `client` starts another."""
        with self._lock:
            self._expected_end = True
            self._engine.kill()

    def sample(self) -> dict[str, float] | None:
        """Return counters over all engines so far, and gauges of this one; None without one."""
        engine = self._engine
        if not engine.alive:
            return None
        try:
            told = engine.sample()
        except EngineGone:
            return None
        with self._lock:
            if engine is not self._engine:
                return None
            self._last = {n: v for n, v in told.items() if not n.startswith(GAUGE)}
            gauges = {n: v for n, v in told.items() if n.startswith(GAUGE)}
            total = Counter(self._before)
            total.update(self._last)
            return {**total, **gauges}

    def counters(self) -> dict[str, float]:
        """Return the counters as last sampled."""
        with self._lock:
            total = Counter(self._before)
            total.update(self._last)
            return dict(total)

    def close(self) -> None:
        """End the engine."""
        self._engine.close()
