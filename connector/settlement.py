"""Takes in what the workers report, and draws the conclusions for the requests that wait.

Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..storage.catalog import RAM, Catalog
from ..storage.counts import Counts
from ..storage.jobs import (
    AuditCopied,
    AuditDone,
    ChunkStatus,
    Event,
    LoadChunk,
    LoadDone,
    LoadRetired,
    SaveCopied,
    SaveRetired,
    TierNews,
)
from .admission import MAX_LOAD_FAILURES
from .audit import Auditor
from .gate import Gate
from .ledger import Ledger, LoadEnd, LoadOutcome
from .load_planner import LoadPlanner
from .plan import RankReport
from .shared_lookup import SharedLookup
from .tier_states import TierStates
from .tracker import Tracker

_LOST = frozenset({ChunkStatus.MISSING, ChunkStatus.DAMAGED})
_TIER_FAILED = frozenset({ChunkStatus.DEADLINE, ChunkStatus.TIER_DOWN})


@dataclass(frozen=True, slots=True)
class Settlement:
    """Settles events, one at a time.

    Attributes:
        trackers: the requests that are followed, by request id.
        clock: monotonic seconds.
    """

    catalog: Catalog
    ledger: Ledger
    load_plans: LoadPlanner
    auditor: Auditor
    shared: SharedLookup
    tier_states: TierStates
    gate: Gate
    counts: Counts
    trackers: Mapping[str, Tracker]
    clock: Callable[[], float]

    def settle(self, event: Event, report: RankReport) -> None:
        """Take in one event of one rank."""
        if isinstance(event, SaveCopied):
            self.ledger.save_copied(event)
        elif isinstance(event, SaveRetired):
            self.ledger.save_retired(event, report.holder)
        elif isinstance(event, LoadDone):
            outcome = self.ledger.load_done(event)
            if outcome is not None:
                self._settle_load(outcome)
        elif isinstance(event, LoadRetired):
            self._settle_end(self.ledger.load_retired(event))
        elif isinstance(event, AuditCopied):
            self.ledger.audit_copied(event)
        elif isinstance(event, AuditDone):
            self.auditor.settle(event)
        elif isinstance(event, TierNews):
            self.tier_states.settle(event, report)

    def _settle_end(self, end: LoadEnd) -> None:
        for chunk in end.lost:
            self.catalog.tier_removed(chunk.source, chunk.key)
            self.shared.missed(chunk.source, [chunk.key], ())
        tracker = self.trackers.get(end.request_id)
        if tracker is not None and (end.lost or end.hollow):
            tracker.save.rewind()  # it may have computed them already, and found them kept

    def _settle_load(self, outcome: LoadOutcome) -> None:
        tracker = self.trackers.get(outcome.job.request_id)
        if tracker is not None and tracker.load_job == outcome.job.job_id:
            tracker.load_job = None
            took_s = self.clock() - tracker.load_began_s
            if outcome.ok:
                self.gate.note_load(self.load_plans.bytes_by_source(outcome.job.chunks), took_s)
            else:
                note_failure(tracker, outcome)
                late = [c for c, status in _chunks(outcome) if status is ChunkStatus.DEADLINE]
                self.gate.note_late(self.load_plans.bytes_by_source(late), took_s)
        if not outcome.ok:
            self.counts.add("loads_failed")
            self._forget_lost(outcome)

    def _forget_lost(self, outcome: LoadOutcome) -> None:
        lost: dict[str, list[bytes]] = {}
        unread: dict[str, list[bytes]] = {}
        for chunk, status in _chunks(outcome):
            if status in _LOST:
                self.catalog.tier_removed(chunk.source, chunk.key)
                lost.setdefault(chunk.source, []).append(chunk.key)
            elif status is not ChunkStatus.OK:
                unread.setdefault(chunk.source, []).append(chunk.key)
        for tier, keys in lost.items():
            self.shared.missed(tier, keys, unread.get(tier, ()))


def _chunks(outcome: LoadOutcome) -> list[tuple[LoadChunk, ChunkStatus]]:
    # A doomed job's outcome has no chunks at all.
    return list(zip(outcome.job.chunks, outcome.statuses, strict=True))


def note_failure(tracker: Tracker, outcome: LoadOutcome) -> None:
    """Decide what a request may still try after a load that failed.

    A bad record: once more, the good part of the prefix. A tier that failed or was too
    slow: once more, what RAM alone holds. A copy that failed, or RAM that was not in time:
    nothing.
    """
    statuses = set(outcome.statuses)
    tracker.failures += 1
    if ChunkStatus.COPY_FAILED in statuses:
        tracker.failures = MAX_LOAD_FAILURES
    elif statuses & _TIER_FAILED:
        # What came after the tier's chunk (another group's) was not even tried.
        late_ram = any(
            chunk.source == RAM and status is ChunkStatus.DEADLINE
            for chunk, status in _chunks(outcome)
        )
        if late_ram or tracker.ram_only:
            tracker.failures = MAX_LOAD_FAILURES
        tracker.ram_only = True
