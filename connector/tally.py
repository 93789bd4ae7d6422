"""What became of requests when the engine admitted them, in counters. Scheduler thread only."""

from __future__ import annotations

from ..storage.counts import Counts
from .lookup import MissReason
from .tracker import Tracker

MAX_REMEMBERED = 1000


class Tally:
    """Counts admissions.

    Attributes:
        last_hits: tokens by source of the last admissions, by request id, newest last.
    """

    def __init__(self, counts: Counts) -> None:
        self.last_hits: dict[str, dict[str, int]] = {}
        self._counts = counts

    def admission(self, tracker: Tracker, external_tokens: int) -> None:
        """Count a request that is to get ``external_tokens``, once for its lookup."""
        tracker.counted = True
        tracker.hits = {}
        request = tracker.request
        self.last_hits[request.request_id] = tracker.hits
        if len(self.last_hits) > MAX_REMEMBERED:
            self.last_hits.pop(next(iter(self.last_hits)))
        self._counts.add("lookups")
        self._counts.add("lookup_tokens", request.num_tokens)
        self._counts.add("local_hit_tokens", tracker.local_tokens)
        if external_tokens == 0 and tracker.hit_tokens > tracker.local_tokens:
            return  # promised but not taken: the engine had a longer hit of its own
        if tracker.reason is not MissReason.NONE:
            self._counts.add(f"misses.{tracker.reason.value}")

    def hit(self, tracker: Tracker) -> None:
        """Count what a request's load is to bring."""
        for source, n in tracker.hits.items():
            self._counts.add(f"hit_tokens.{source}", n)
        self._counts.add("hits")
