"""The worker half: owns one rank's bytes, runs plans, reports.

It decides nothing. The engine's thread calls in once or twice a step and never
waits here for a tier; an idle step, in which the engine computes nothing, may
wait a millisecond for loads, which is what lets them run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..storage.jobs import AuditJob, Event, LoadDone, SaveJob
from ..storage.ram import Arena
from ..storage.staging import Staging
from ..storage.tier import Tier
from ..storage.transfer import Transfer, TransferLimits
from .audit_worker import AuditRunner, AuditSetup
from .mover import Mover
from .plan import NamespaceInfo, Plan, RankReport

logger = logging.getLogger("kvtier.worker")

IDLE_WAIT_S = 0.001
AUDIT_STOP_S = 2.0
FIRST_PAGES_WAIT_S = 2.0  # a segment is pinned and touched in a fraction of this

TierFactory = Callable[[NamespaceInfo], Sequence[Tier]]


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """How the RAM arena is cut.

    Attributes:
        page_bytes: size of a page.
        staging_pages: pages of the worker's own, the first ones.
        audit_pages: of those, the last ones: two slots where hits are audited.
        catalog_pages: pages that the scheduler gives out, after those.
        slot_pages: pages of the largest chunk.
    """

    page_bytes: int
    staging_pages: int
    catalog_pages: int
    slot_pages: int
    audit_pages: int = 0

    @property
    def n_pages(self) -> int:
        """All pages."""
        return self.catalog_pages + self.staging_pages


class WorkerHalf:
    """One rank's hands.

    Args:
        rank: this rank's number among those that share a plan.
        replicas: so many ranks in a row hold identical bytes; the first of them writes
            records, all of them read those.
        arena: RAM pages, growing already; closed here.
        plan: how the arena is cut.
        block_bytes: for each group id, bytes of a block in a page (padded).
        mover: device copies; closed here.
        open_tiers: makes the tiers below RAM of a namespace.
        audits: what audits need; None where there are none.
    """

    def __init__(
        self,
        rank: int,
        arena: Arena,
        plan: ArenaPlan,
        block_bytes: dict[int, int],
        mover: Mover,
        open_tiers: TierFactory,
        clock: Callable[[], float],
        limits: TransferLimits | None = None,
        flush_s: float = 3.0,
        replicas: int = 1,
        audits: AuditSetup | None = None,
    ) -> None:
        self.rank = rank
        self.holder = rank // replicas
        self._writes = rank % replicas == 0
        self._arena = arena
        self._plan = plan
        self._mover = mover
        self._open_tiers = open_tiers
        self._flush_s = flush_s
        self._clock = clock
        staging = Staging(range(plan.staging_pages - plan.audit_pages), plan.slot_pages)
        self.transfer = Transfer(arena, block_bytes, staging, mover, clock, limits)
        self._generation = 0
        self._audits: AuditRunner | None = None
        if audits is not None:
            self._audits = AuditRunner(
                audits,
                arena,
                block_bytes,
                mover,
                lambda: self.transfer.links,
                lambda: self._generation,
                clock,
            )
        self._audit_jobs: list[AuditJob] = []
        self._saves: list[SaveJob] = []
        self._idle = False
        self._events: list[Event] = []
        self._closed = False
        self._last_ready = -1

    # -- plans -----------------------------------------------------------

    def begin(self, plan: Plan) -> None:
        """Take in a step's plan, before its forward; loads start at once."""
        self.forward_launched()  # of a step that never said so (a pipeline's earlier stages)
        self._idle = plan.idle
        if plan.namespace is not None:
            self._enter(plan.namespace)
        for job_id in plan.cancels:
            self.transfer.cancel_load(job_id)
        for tier, key, reason in plan.removals:  # before the loads, which must not read those
            link = self.transfer.links.get(tier)
            if link is not None:
                link.condemn(key, reason)
        if plan.loads:
            # Zeroing and copy-on-write of this step are in the stream already; the
            # loads must come after them.
            after = self._mover.fence()
            for load in plan.loads:
                self.transfer.submit_load(load, after)
        self._saves.extend(plan.saves if self._writes else map(_copy_only, plan.saves))
        self._audit_jobs.extend(plan.audits)
        for tier, keys in plan.touches:
            link = self.transfer.links.get(tier)
            if link is not None:
                link.touch(keys)

    def _enter(self, namespace: NamespaceInfo) -> None:
        self._generation = namespace.generation
        try:
            self.transfer.set_tiers(self._open_tiers(namespace), namespace.generation)
        except Exception:
            logger.exception("kvtier: the tiers below RAM could not be opened; RAM alone is used")
            self.transfer.set_tiers((), namespace.generation)

    def forward_launched(self) -> None:
        """The step's forward has been launched: its saves may be read once it is done."""
        if not self._saves and not self._audit_jobs:
            return
        fence = self._mover.fence()
        saves, self._saves = self._saves, []
        for save in saves:
            self.transfer.submit_save(save, fence)
        audits, self._audit_jobs = self._audit_jobs, []
        for job in audits:
            assert self._audits is not None
            self._audits.submit(job, fence)

    # -- results -----------------------------------------------------------

    @property
    def staging_pages(self) -> int:
        """How many pages, the first ones, are this rank's own."""
        return self._plan.staging_pages

    def first_pages(self) -> int:
        """Return how many pages are ready, after a short wait for the first segment of them.

        At start only: what the first request saves needs pages before any report.
        """
        self._arena.wait_ready(self._arena.segment_pages, FIRST_PAGES_WAIT_S)
        return self._arena.ready_pages

    def collect(self) -> tuple[set[str], set[str]]:
        """Return (requests whose load is over, those of them whose load failed)."""
        # No save begins here: with speculation the engine asks before the draft has run,
        # and the draft's layers are part of the blocks.
        self.transfer.poll()
        if self._idle and self.transfer.loading:
            self.transfer.wait(IDLE_WAIT_S)
        self._events += self.transfer.take_events()
        if self._audits is not None:
            self._events += self._audits.take_events()
        finished: set[str] = set()
        failed: set[str] = set()
        for event in self._events:
            if isinstance(event, LoadDone) and event.request_id:  # else nobody waits
                finished.add(event.request_id)
                if not event.ok:
                    failed.add(event.request_id)
        return finished, failed

    def report(self) -> RankReport | None:
        """Return what happened since the last report; after `collect` in a step."""
        events, self._events = self._events, []
        ready = self._arena.ready_pages
        if not events and ready == self._last_ready:
            return None
        self._last_ready = ready
        return RankReport(self.rank, ready, tuple(events), self.holder)

    def take_counts(self) -> dict[str, float]:
        """Return counters since the last call."""
        return self.transfer.counts.take()

    def gauges(self) -> dict[str, float]:
        """Return what this rank can tell of its tiers now, without I/O."""
        values: dict[str, float] = {"save_queue_bytes": self.transfer.queued_save_bytes}
        for name, link in self.transfer.links.items():
            values[f"resident_bytes.{name}"] = link.stored_bytes()
            values[f"tier_online.{name}"] = float(link.online)
        return values

    def shutdown(self) -> None:
        """Write out what is queued for a short while, then stop. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._audits is not None:
            self._audits.close(self._clock() + AUDIT_STOP_S)
        self.transfer.close(self._flush_s)
        self._mover.close()
        self._arena.close()


def _copy_only(job: SaveJob) -> SaveJob:
    """Return the job without its writes below RAM: another rank does them."""
    return replace(job, chunks=tuple(replace(chunk, tiers=()) for chunk in job.chunks))
