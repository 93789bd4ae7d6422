"""The scheduler half: looks up, plans loads and saves, settles what came back.

Runs on the engine's one scheduling thread. Nothing here does I/O or waits; the
work of a step grows with the step's requests, not with the store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from ..storage.catalog import Catalog
from ..storage.counts import Counts
from ..storage.jobs import LoadJob
from . import engine_api
from .admission import Admission
from .audit import Auditor
from .block_pins import BlockPins
from .extras import Extras
from .gate import Gate
from .geometry import Geometry
from .ledger import Ledger
from .load_planner import LoadPlanner
from .lookup import Piece, PrefixLookup
from .plan import NamespaceInfo, Plan, RankReport
from .request_options import options_of
from .save_planner import SavePlanner
from .save_tracker import SaveTracker
from .settlement import Settlement
from .shared_lookup import SharedLookup
from .short_copies import ShortCopies
from .spoiled_steps import SpoiledSteps
from .standing import Standing
from .tally import Tally
from .tier_states import TierStates
from .tracker import SchedulerOptions, Tracker
from .warmer import Warmer

logger = logging.getLogger("kvtier.scheduler")

PIN_PATIENCE_S = 1.0  # how long a save in flight may hold off a preemption


class SchedulerHalf:
    """One engine's brain.

    Args:
        geometry: groups and blocks.
        catalog: what is where; owned from here on.
        namespace: given the generation, returns the namespace, or None while it
            cannot be known yet.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        geometry: Geometry,
        catalog: Catalog,
        namespace: Callable[[int], NamespaceInfo | None],
        clock: Callable[[], float],
        *,
        n_ranks: int = 1,
        options: SchedulerOptions | None = None,
    ) -> None:
        self.geometry = geometry
        self.catalog = catalog
        self.counts = Counts()
        self.options = options or SchedulerOptions()
        self._tally = Tally(self.counts)
        self.last_hits = self._tally.last_hits
        self.short_copies = ShortCopies(geometry)
        self._lookup = PrefixLookup(geometry, catalog)
        self._namespace_of = namespace
        self._namespace: NamespaceInfo | None = None
        self._clock = clock
        self._n_ranks = n_ranks
        self._pins = BlockPins()
        self._ledger = Ledger(catalog, n_ranks, self._pins.pin, self._pins.unpin, clock)
        self._saves = SavePlanner(
            geometry,
            catalog,
            self._ledger,
            self.counts,
            self._next_job_id,
            lambda: self._generation,
            self.options.write,
        )
        self._load_plans = LoadPlanner(
            geometry, catalog, self._ledger, promote=self.options.promote
        )
        self._auditor = Auditor(
            geometry,
            catalog,
            self._ledger,
            self.counts,
            self._next_job_id,
            lambda: self._generation,
            self.options.audit,
        )
        self._shared = SharedLookup(geometry, catalog, clock, self.counts)
        self.gate = Gate(self.options.load_policy)
        self._spoiled = SpoiledSteps()
        self._tier_states = TierStates(
            catalog, self._shared, n_ranks, clock, self.options.shared.tiers
        )
        self._admission = Admission(
            geometry,
            catalog,
            self._lookup,
            self._shared,
            self.gate,
            self._auditor,
            self._tier_states,
            self.counts,
            clock,
            lookup_deadline_s=self.options.lookup_deadline_s,
        )
        self._extras = Extras(self.options, self.counts, self._make_warmer())
        self._trackers: dict[str, Tracker] = {}
        self._settlement = Settlement(
            catalog,
            self._ledger,
            self._load_plans,
            self._auditor,
            self._shared,
            self._tier_states,
            self.gate,
            self.counts,
            self._trackers,
            clock,
        )
        self._job_id = 0
        self._generation = 0
        self._cancels: list[int] = []
        self._touches: dict[str, list[bytes]] = {}
        self._ready_pages = [0] * n_ranks
        self._standing = Standing(
            catalog, self._ledger, self._auditor, geometry.page_bytes * n_ranks
        )

    def _make_warmer(self) -> Warmer | None:
        if self.options.control is None:
            return None
        return Warmer(
            self.geometry,
            self.catalog,
            self._ledger,
            self._shared,
            self.counts,
            self._next_job_id,
            self.options.control.wishes,
        )

    # -- device blocks -------------------------------------------------------

    def bind_block_pool(self, pool: Any) -> None:
        """Use vLLM's block pool for pins."""
        self._pins.bind(pool)

    def _next_job_id(self) -> int:
        self._job_id += 1
        return self._job_id

    # -- requests ------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Begin to follow a request."""
        self._tracker(request)

    def _tracker(self, request: Any) -> Tracker:
        tracker = self._trackers.get(request.request_id)
        if tracker is None or tracker.request is not request:
            options = options_of(request, self.options.adapter_of)
            tracker = Tracker(request, SaveTracker(blocked=not options.store), options)
            self._trackers[request.request_id] = tracker
        return tracker

    def lookup(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Answer `get_num_new_matched_tokens`: extra tokens, or None for "ask again"."""
        tracker = self._tracker(request)
        tracker.local_tokens = local_tokens
        tracker.hit_tokens = local_tokens
        tracker.counted = False
        if self._tier_states.starting() and self._admission.refusal(tracker) is None:
            return None, False
        hit = self._admission.find(tracker, local_tokens)
        if hit is None:
            return None, False
        tracker.reason = hit.reason
        tracker.hit_tokens = hit.tokens
        return hit.tokens - local_tokens, hit.tokens > local_tokens

    def admitted(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """Answer `update_state_after_alloc`: plan the load of exactly ``external_tokens``."""
        tracker = self._tracker(request)
        tracker.probed, tracker.admitted = False, True
        if not tracker.counted:
            self._tally.admission(tracker, external_tokens)
        self._auditor.admitted(tracker.audit, tracker.hashes)
        if external_tokens == 0:
            return
        end = tracker.local_tokens + external_tokens
        pieces = self._lookup.pieces(tracker.hashes, tracker.local_tokens, end)
        if pieces is None:
            logger.error(
                "kvtier: request %s was promised %d tokens that are gone; it computes them",
                request.request_id,
                external_tokens,
            )
        job_id = self._next_job_id()
        job = self._load_plans.plan(
            job_id,
            self._generation,
            request.request_id,
            self._deadline_s(pieces or (), external_tokens),
            pieces,
            blocks,
        )
        tracker.load_job = job_id
        tracker.load_began_s = self._clock()
        tracker.hits.update(self._load_plans.tokens_by_source(job, external_tokens))
        self._tally.hit(tracker)
        self._touch_chain(job)

    def _deadline_s(self, pieces: Sequence[Piece], n_tokens: int) -> float:
        if self.options.deadline_s is not None:
            return self.options.deadline_s
        return self.gate.deadline_s(self._load_plans.bytes_of(pieces), n_tokens)

    def _touch_chain(self, job: LoadJob) -> None:
        keys = [chunk.key for chunk in reversed(job.chunks)]
        self.catalog.touch(keys)
        self._touch_below(keys)

    def _touch_below(self, keys: Sequence[bytes]) -> None:
        for tier in self.catalog.tiers:
            self._touches.setdefault(tier, []).extend(keys)

    def finished(self, request: Any, block_ids: tuple[list[int], ...]) -> None:
        """Answer `request_finished_all_groups`: save the last chunks and the tail."""
        tracker = self._trackers.get(request.request_id)
        if tracker is None or tracker.request is not request:
            return
        del self._trackers[request.request_id]
        self._shared.forget(request.request_id)
        self._auditor.finished(tracker.audit)
        self._extras.finished(request, tracker, self._namespace)
        if tracker.load_job is not None:
            self._cancels.append(tracker.load_job)
            return
        if engine_api.finished_normally(request):
            self._saves.plan_finish(request, tracker.hashes, tracker.save, block_ids)
            self._touch_below(self._saves.chain(tracker.hashes, tracker.save))

    def partial_tail(
        self,
        request: Any,
        block_ids: tuple[list[int], ...],
        offers: Sequence[tuple[int, int, int]],
    ) -> None:
        """Answer `register_finished_partial_tail`: keep the states at a finished prompt's end."""
        tracker = self._trackers.get(request.request_id)
        if tracker is not None and tracker.request is request:
            self._saves.plan_states(tracker.hashes, tracker.save, block_ids, offers)

    # -- each step -----------------------------------------------------------

    def build_plan(self, scheduler_output: Any) -> Plan:
        """Answer `build_connector_meta`."""
        n_tokens = scheduler_output.total_num_scheduled_tokens
        self.gate.note_step(self._clock(), n_tokens)
        self._tier_states.step_begins()
        fresh = self._open_namespace()
        if self._namespace is not None:
            offers = engine_api.boundary_offloads(scheduler_output)
            for request_id, n in scheduler_output.num_scheduled_tokens.items():
                tracker = self._trackers.get(request_id)
                if tracker is not None:
                    self._plan_saves(scheduler_output, tracker, n)
            for request_id, states in offers.items():
                tracker = self._trackers.get(request_id)
                table = engine_api.block_table(scheduler_output, request_id)
                if tracker is not None and table is not None:
                    self._saves.plan_states(tracker.hashes, tracker.save, table, states)
            self._saves.plan_write_back()
        saves = self._saves.take()
        self._spoiled.planned(saves)
        plan = Plan(
            idle=n_tokens == 0,
            namespace=fresh,
            saves=saves,
            loads=self._load_plans.take() + self._extra_loads(),
            cancels=tuple(self._cancels),
            touches=tuple((tier, tuple(keys)) for tier, keys in self._touches.items()),
            removals=self._auditor.take_removals(),
            audits=self._auditor.take_jobs(),
        )
        self._cancels, self._touches = [], {}
        return plan

    def _extra_loads(self) -> tuple[LoadJob, ...]:
        # Before the indexes are read, what is stored looks as if it were not.
        return () if self._tier_states.starting() else self._extras.loads(self._namespace)

    def _open_namespace(self) -> NamespaceInfo | None:
        shared = self.options.shared
        changed = shared.namespace_changed
        if self._namespace is not None and (changed is None or not changed()):
            return None
        self._namespace = self._namespace_of(self._generation)
        if self._namespace is not None and shared.open_probers is not None:
            self._shared.set_probers(shared.open_probers(self._namespace))
            if self._namespace.shared_digest is None:  # those tiers will not be heard of
                self._tier_states.never_mind(shared.tiers)
        return self._namespace

    def _plan_saves(self, scheduler_output: Any, tracker: Tracker, n_scheduled: int) -> None:
        request = tracker.request
        valid_tokens = min(request.num_computed_tokens + n_scheduled, request.num_tokens)
        prompt_tokens = request.num_prompt_tokens
        if self.short_copies.on:
            self.short_copies.scheduled(tracker, valid_tokens)
        due = self._saves.due(tracker.save, valid_tokens, prompt_tokens)
        if not due and not tracker.audit.pieces:
            return
        table = engine_api.block_table(scheduler_output, request.request_id)
        if table is None:
            return
        if tracker.audit.pieces:
            self._auditor.plan(tracker.audit, tracker.hashes, table, valid_tokens)
        if due:
            self._saves.plan_chunks(tracker.hashes, tracker.save, table, valid_tokens)
            self._saves.plan_prompt(
                tracker.hashes, tracker.save, table, valid_tokens, prompt_tokens
            )

    def spoiled(self) -> None:
        """Another connector failed a load in a step that is over: its saves may be wrong."""
        keys = self._spoiled.take()
        self.counts.add("spoiled_chunks", len(keys))
        self._auditor.condemn(keys, "spoiled")

    def pages_begin(self, first_page: int) -> bool:
        """Leave the pages before ``first_page`` to the ranks' staging; False: it is too late."""
        return self.catalog.begin_at(first_page)

    def pages_ready(self, rank: int, ready_pages: int) -> None:
        """Use the RAM pages that every rank has by now; ``rank`` has its first ``ready_pages``."""
        if ready_pages != self._ready_pages[rank]:
            self._ready_pages[rank] = ready_pages
            self.catalog.add_pages(min(self._ready_pages))

    def settle(self, reports: Sequence[RankReport]) -> None:
        """Answer `update_connector_output`: take in what the workers say."""
        for report in reports:
            self.pages_ready(report.rank, report.ready_pages)
            for event in report.events:
                self._settlement.settle(event, report)

    def reset(self) -> None:
        """Forget everything: no byte computed or stored before is served or written after."""
        if self._namespace is not None and self.options.shared.clear is not None:
            self.options.shared.clear(self._namespace)
        self.catalog.clear()
        for tracker in self._trackers.values():
            tracker.save.blocked = True
        self._auditor.reset()
        self._extras.reset()
        self._generation += 1
        self._namespace = None
        self._shared.close()

    def pending(self) -> bool:
        """Answer `has_pending_push_work`: whether the engine must go on stepping."""
        if (
            self._ledger.urgent()
            or self._cancels
            or self._saves.waiting
            or self._auditor.waiting
            or self._extras.waiting(self._namespace)
        ):
            return True
        return self._tier_states.starting()

    @property
    def outstanding(self) -> bool:
        """Whether any job has not been answered in full, be it that nobody waits for it."""
        return self._ledger.outstanding

    def frees_soon(self) -> bool:
        """Answer `has_pending_block_frees`: whether saves in flight will free device blocks."""
        return self._ledger.pinning(PIN_PATIENCE_S)

    def hit_sources(self, request: Any) -> dict[str, int]:
        """Return the last admission's restored tokens by source."""
        tracker = self._trackers.get(request.request_id)
        return dict(tracker.hits) if tracker is not None else {}

    def take_counts(self) -> dict[str, float]:
        """Return counters since the last call; a step's last one."""
        self._tier_states.step_ends()
        self._spoiled.over()
        self._standing.add_evictions(self.counts)
        self._extras.hand_over_counts()
        return self.counts.take()

    def gauges(self) -> dict[str, float]:
        """Return what is where now."""
        return self._standing.gauges()

    def shutdown(self) -> None:
        """Stop the probers and what people have asked for. Idempotent."""
        self._shared.close()
        self._extras.close()
