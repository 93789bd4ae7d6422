"""What people ask of an engine beside serving: a recording, and records warmed up. Both optional.

Scheduler thread only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..storage.counts import Counts
from ..storage.jobs import LoadJob
from .plan import NamespaceInfo
from .tracker import SchedulerOptions, Tracker

if TYPE_CHECKING:
    from .warmer import Warmer


class Extras:
    """The recorder and the warmer of one scheduler half, or neither."""

    def __init__(self, options: SchedulerOptions, counts: Counts, warmer: Warmer | None) -> None:
        self._recorder = options.recorder
        self._control = options.control
        self._counts = counts
        self._warmer = warmer

    def finished(self, request: Any, tracker: Tracker, namespace: NamespaceInfo | None) -> None:
        """Record a request that is over."""
        if self._recorder is not None:
            self._recorder.finished(request, tracker, namespace)

    def loads(self, namespace: NamespaceInfo | None) -> tuple[LoadJob, ...]:
        """Return loads for this step that no request waits for."""
        if self._warmer is None or namespace is None:
            return ()
        return self._warmer.step(namespace)

    def waiting(self, namespace: NamespaceInfo | None) -> bool:
        """Whether the engine must go on stepping for them."""
        return self._warmer is not None and namespace is not None and self._warmer.waiting

    def hand_over_counts(self) -> None:
        """Add what other threads have counted."""
        if self._recorder is not None:
            for name, n in self._recorder.counts.take().items():
                self._counts.add(name, n)

    def reset(self) -> None:
        """The cache was cleared."""
        if self._warmer is not None:
            self._warmer.reset()

    def close(self) -> None:
        """Stop. Idempotent."""
        if self._warmer is not None:
            self._warmer.reset()
        if self._control is not None:
            self._control.close()
        if self._recorder is not None:
            self._recorder.close()
