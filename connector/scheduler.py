"""The scheduler half: looks up, plans loads and saves, settles what came back.

Runs on the engine's one scheduling thread. Nothing here does I/O or waits; the
work of a step grows with the step's requests, not with the store.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..storage.catalog import RAM, Catalog, Entry, RamState
from ..storage.counts import Counts
from ..storage.jobs import (
    ChunkStatus,
    Event,
    LoadChunk,
    LoadDone,
    LoadJob,
    LoadRetired,
    SaveCopied,
    SaveRetired,
    TierNews,
)
from . import engine_api
from .geometry import Geometry
from .ledger import Ledger, LoadOutcome
from .lookup import MissReason, Piece, PrefixLookup
from .plan import NamespaceInfo, Plan, RankReport
from .save_planner import SavePlanner, SaveTracker

logger = logging.getLogger("kvtier.scheduler")

INDEX_WAIT_S = 10.0  # longest wait of a first lookup for the tiers' indexes
SHARED_LOAD_WAIT_S = 10.0  # longest wait for another request's load of the same chunks
PIN_PATIENCE_S = 1.0  # how long a save in flight may hold off a preemption
MAX_LOAD_FAILURES = 2  # a request that failed so often computes


@dataclass(slots=True)
class SchedulerOptions:
    """What of the configuration concerns this half.

    Attributes:
        deadline_s: function of a load's tokens to its deadline.
        promote: keep chunks loaded from lower tiers in RAM.
        may_load: the gate; False when computing is cheaper than loading so many tokens.
    """

    promote: bool = True
    deadline_s: Callable[[int], float] = lambda tokens: 30.0
    may_load: Callable[[int, str], bool] = lambda tokens, tier: True


@dataclass(slots=True)
class Tracker:
    """What is known of one request."""

    request: Any
    save: SaveTracker
    local_tokens: int = 0
    hit_tokens: int = 0  # promised in the last lookup
    reason: MissReason = MissReason.NONE
    failures: int = 0
    asked_since_s: float | None = None  # since when lookups answer "ask again"
    load_job: int | None = None
    hits: dict[str, int] = field(default_factory=dict)  # tokens by source, last admission
    counted: bool = False


class SchedulerHalf:
    """One engine's brain.

    Args:
        geometry: groups and blocks.
        catalog: what is where; owned from here on.
        lower_tiers: names, fastest first.
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
        self.last_hits: dict[str, dict[str, int]] = {}
        self._lookup = PrefixLookup(geometry, catalog)
        self._namespace_of = namespace
        self._namespace: NamespaceInfo | None = None
        self._clock = clock
        self._n_ranks = n_ranks
        self._pool: Any = None
        self._ledger = Ledger(catalog, n_ranks, self._pin_blocks, self._unpin_blocks, clock)
        self._saves = SavePlanner(
            geometry,
            catalog,
            self._ledger,
            self.counts,
            self._next_job_id,
            lambda: self._generation,
        )
        self._trackers: dict[str, Tracker] = {}
        self._job_id = 0
        self._generation = 0
        self._loads: list[LoadJob] = []
        self._cancels: list[int] = []
        self._touches: dict[str, list[bytes]] = {}
        self._incomplete: set[tuple[str, int]] = {
            (tier, rank) for tier in catalog.tiers for rank in range(n_ranks)
        }
        self._offline: set[tuple[str, int]] = set()
        self._ready_pages = [0] * n_ranks
        self._index_wait_until_s: float | None = None
        self._told: dict[str, int] = {}

    # -- device blocks -------------------------------------------------------

    def bind_block_pool(self, pool: Any) -> None:
        """Use vLLM's block pool for pins."""
        self._pool = pool

    def _pin_blocks(self, blocks: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[b] for b in blocks])

    def _unpin_blocks(self, blocks: Sequence[int]) -> None:
        # End of the prefix first, as the engine frees: its head is reused last.
        self._pool.free_blocks([self._pool.blocks[b] for b in reversed(blocks)])

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
            tracker = Tracker(request, SaveTracker())
            self._trackers[request.request_id] = tracker
        return tracker

    def lookup(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Answer `get_num_new_matched_tokens`: extra tokens, or None for "ask again"."""
        tracker = self._tracker(request)
        tracker.local_tokens = local_tokens
        tracker.hit_tokens = local_tokens
        tracker.counted = False
        if getattr(request, "skip_reading_prefix_cache", False):
            tracker.reason = MissReason.NOT_READ
            return 0, False
        if tracker.failures >= MAX_LOAD_FAILURES:
            tracker.reason = MissReason.LOAD_FAILED
            return 0, False
        if self._indexing() and self._may_ask_again(tracker, INDEX_WAIT_S):
            return None, False
        limit = self._lookup.limit_tokens(request.num_tokens)
        hit = self._lookup.find(request.block_hashes, local_tokens, limit)
        tracker.reason = hit.reason
        if hit.tokens <= local_tokens:
            return 0, False
        if self._others_load(request.block_hashes, local_tokens, hit.tokens):
            if self._may_ask_again(tracker, SHARED_LOAD_WAIT_S):
                return None, False
        tracker.asked_since_s = None
        tracker.hit_tokens = hit.tokens
        return hit.tokens - local_tokens, True

    def _indexing(self) -> bool:
        return bool(self._incomplete - self._offline)

    def _may_ask_again(self, tracker: Tracker, wait_s: float) -> bool:
        now_s = self._clock()
        if tracker.asked_since_s is None:
            tracker.asked_since_s = now_s
        return now_s - tracker.asked_since_s < wait_s

    def _others_load(self, hashes: Sequence[bytes], local_tokens: int, tokens: int) -> bool:
        """Whether another request brings the next chunk to RAM and the device right now."""
        chunk, unit = self.geometry.chunk_tokens, self.geometry.hash_block_tokens
        end = min((local_tokens // chunk + 1) * chunk, tokens // unit * unit)
        for group in self.geometry.groups:
            entry = self.catalog.get(hashes[end // unit - 1] + bytes((group.group_id,)))
            if entry is not None and entry.ram is RamState.FILLING and entry.writes == 0:
                return True
        return False

    def admitted(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """Answer `update_state_after_alloc`: plan the load of exactly ``external_tokens``."""
        tracker = self._tracker(request)
        if not tracker.counted:
            self._count_admission(tracker, external_tokens)
        if external_tokens == 0:
            return
        tokens = tracker.local_tokens + external_tokens
        pieces = self._lookup.pieces(request.block_hashes, tracker.local_tokens, tokens)
        job_id = self._next_job_id()
        tracker.load_job = job_id
        chunks: list[LoadChunk] = []
        entries: list[Entry] = []
        filling: list[bool] = []
        for piece in pieces or ():
            self._plan_piece(piece, blocks, chunks, entries, filling)
        if pieces is None:
            logger.error(
                "kvtier: request %s was promised %d tokens that are gone; it computes them",
                request.request_id,
                external_tokens,
            )
        deadline_s = self.options.deadline_s(external_tokens)
        job = LoadJob(
            job_id,
            self._generation,
            request.request_id,
            deadline_s,
            tuple(chunks),
            doomed=pieces is None,
        )
        self._ledger.open_load(job, entries, filling)
        self._loads.append(job)
        self._count_hits(tracker, job, tokens)

    def _plan_piece(
        self,
        piece: Piece,
        blocks: Any,
        chunks: list[LoadChunk],
        entries: list[Entry],
        filling: list[bool],
    ) -> None:
        """Add the load of one record's needed blocks; pins what it uses."""
        table = blocks.blocks[piece.group_id]
        last = piece.first_block + piece.n_blocks
        wanted = [
            i
            for i in range(piece.first_block, last)
            if not table[i].is_null and table[i].block_hash is None
        ]
        if not wanted:
            return
        first, n = wanted[0], wanted[-1] - wanted[0] + 1
        assert n == len(wanted), f"group {piece.group_id}: blocks to fill are not a run"
        entry = self.catalog.get(piece.key)
        assert entry is not None
        source = self.catalog.source_of(entry)
        assert source is not None
        pages, fills = None, False
        if source == RAM:
            self.catalog.pin(entry)
            pages = entry.pages
        elif self.options.promote:
            fills = self.catalog.begin_promote(piece.key, piece.stored_blocks) is not None
            pages = entry.pages if fills else None
        chunks.append(
            LoadChunk(
                piece.key,
                piece.group_id,
                piece.start_tokens,
                piece.end_tokens,
                source,
                piece.stored_blocks,
                first - piece.stored_block,
                np.array([table[i].block_id for i in wanted], dtype=np.int64),
                pages,
            )
        )
        entries.append(entry)
        filling.append(fills)

    def _count_admission(self, tracker: Tracker, external_tokens: int) -> None:
        tracker.counted = True
        tracker.hits = {}
        request = tracker.request
        self.last_hits[request.request_id] = tracker.hits
        if len(self.last_hits) > 1000:
            self.last_hits.pop(next(iter(self.last_hits)))
        self.counts.add("lookups")
        self.counts.add("lookup_tokens", request.num_tokens)
        self.counts.add("local_hit_tokens", tracker.local_tokens)
        if external_tokens == 0 and tracker.hit_tokens > tracker.local_tokens:
            return  # promised but not taken: the engine had a longer hit of its own
        if tracker.reason is not MissReason.NONE:
            self.counts.add(f"misses.{tracker.reason.value}")

    def _count_hits(self, tracker: Tracker, job: LoadJob, tokens: int) -> None:
        """Charge the hit's tokens to the tiers that serve its first group's chunks."""
        n_by_source: Counter[str] = Counter()
        lead = self.geometry.groups[0].group_id
        for group in self.geometry.groups:
            if any(c.group == group.group_id for c in job.chunks) and group.window_tokens is None:
                lead = group.group_id
                break
        size = self.geometry.group(lead).block_tokens
        for chunk in job.chunks:
            if chunk.group == lead:
                n_by_source[chunk.source] += len(chunk.blocks) * size
        left = tokens - tracker.local_tokens
        for source, n in n_by_source.most_common():
            charged = min(n, left)
            left -= charged
            tracker.hits[source] = charged
        if left and tracker.hits:
            source = next(iter(tracker.hits))
            tracker.hits[source] += left
        for source, n in tracker.hits.items():
            self.counts.add(f"hit_tokens.{source}", n)
        self.counts.add("hits")
        self._touch_chain(job)

    def _touch_chain(self, job: LoadJob) -> None:
        keys = [chunk.key for chunk in reversed(job.chunks)]
        self.catalog.touch(keys)
        for tier in self.catalog.tiers:
            self._touches.setdefault(tier, []).extend(keys)

    def finished(self, request: Any, block_ids: tuple[list[int], ...]) -> None:
        """Answer `request_finished_all_groups`: save the last chunks and the tail."""
        tracker = self._trackers.get(request.request_id)
        if tracker is None or tracker.request is not request:
            return
        del self._trackers[request.request_id]
        if tracker.load_job is not None:
            self._cancels.append(tracker.load_job)
            return
        if engine_api.finished_normally(request):
            self._saves.plan_finish(request, tracker.save, block_ids)

    def partial_tail(
        self,
        request: Any,
        block_ids: tuple[list[int], ...],
        offers: Sequence[tuple[int, int, int]],
    ) -> None:
        """Answer `register_finished_partial_tail`: keep the states at a finished prompt's end."""
        self._saves.plan_states(request, block_ids, offers)

    # -- each step -----------------------------------------------------------

    def build_plan(self, scheduler_output: Any) -> Plan:
        """Answer `build_connector_meta`."""
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
                    self._saves.plan_states(tracker.request, table, states)
        plan = Plan(
            idle=scheduler_output.total_num_scheduled_tokens == 0,
            namespace=fresh,
            saves=self._saves.take(),
            loads=tuple(self._loads),
            cancels=tuple(self._cancels),
            touches=tuple((tier, tuple(keys)) for tier, keys in self._touches.items()),
        )
        self._loads, self._cancels, self._touches = [], [], {}
        return plan

    def _open_namespace(self) -> NamespaceInfo | None:
        if self._namespace is not None:
            return None
        self._namespace = self._namespace_of(self._generation)
        return self._namespace

    def _plan_saves(self, scheduler_output: Any, tracker: Tracker, n_scheduled: int) -> None:
        request = tracker.request
        valid_tokens = min(request.num_computed_tokens + n_scheduled, request.num_tokens)
        if not self._saves.due(tracker.save, valid_tokens):
            return
        table = engine_api.block_table(scheduler_output, request.request_id)
        if table is not None:
            self._saves.plan_chunks(request, tracker.save, table, valid_tokens)

    def settle(self, reports: Sequence[RankReport]) -> None:
        """Answer `update_connector_output`: take in what the workers say."""
        for report in reports:
            if report.ready_pages != self._ready_pages[report.rank]:
                self._ready_pages[report.rank] = report.ready_pages
                self.catalog.add_pages(min(self._ready_pages))
            for event in report.events:
                self._settle(event, report.rank)

    def _settle(self, event: Event, rank: int) -> None:
        if isinstance(event, SaveCopied):
            self._ledger.save_copied(event)
        elif isinstance(event, SaveRetired):
            self._ledger.save_retired(event, rank)
        elif isinstance(event, LoadDone):
            outcome = self._ledger.load_done(event)
            if outcome is not None:
                self._settle_load(outcome)
        elif isinstance(event, LoadRetired):
            self._ledger.load_retired(event)
        elif isinstance(event, TierNews):
            self._settle_news(event, rank)

    def _settle_load(self, outcome: LoadOutcome) -> None:
        tracker = self._trackers.get(outcome.job.request_id)
        if tracker is not None and tracker.load_job == outcome.job.job_id:
            tracker.load_job = None
            if not outcome.ok:
                final = {ChunkStatus.DEADLINE, ChunkStatus.COPY_FAILED, ChunkStatus.TIER_DOWN}
                bad = final.intersection(outcome.statuses)
                tracker.failures += MAX_LOAD_FAILURES if bad else 1
        if outcome.ok:
            return
        self.counts.add("loads_failed")
        for chunk, status in zip(outcome.job.chunks, outcome.statuses, strict=True):
            if status in {ChunkStatus.MISSING, ChunkStatus.DAMAGED}:
                self.catalog.tier_removed(chunk.source, chunk.key)

    def _settle_news(self, news: TierNews, rank: int) -> None:
        place = (news.tier, rank)
        for key in news.removed:
            self.catalog.tier_removed(news.tier, key, rank)
        for key in news.added:
            self.catalog.tier_added(news.tier, key, rank)
        if news.complete:
            self._incomplete.discard(place)
        elif news.reset:
            self._incomplete.add(place)
        if news.online == (place in self._offline):
            (self._offline.discard if news.online else self._offline.add)(place)
            offline = any(tier == news.tier for tier, _ in self._offline)
            self.catalog.set_offline(news.tier, offline)

    def reset(self) -> None:
        """Forget everything: no byte computed or stored before is served or written after."""
        self.catalog.clear()
        for tracker in self._trackers.values():
            tracker.save.blocked = True
        self._generation += 1
        self._namespace = None

    def pending(self) -> bool:
        """Answer `has_pending_push_work`: whether the engine must go on stepping."""
        if self._ledger.outstanding or self._loads or self._cancels or self._saves.waiting:
            return True
        return self._starting()

    def _starting(self) -> bool:
        """Whether the tiers' indexes are still being read, so that the first lookup hits."""
        if not self._indexing():
            return False
        now_s = self._clock()
        if self._index_wait_until_s is None:
            self._index_wait_until_s = now_s + INDEX_WAIT_S
        return now_s < self._index_wait_until_s

    def frees_soon(self) -> bool:
        """Answer `has_pending_block_frees`: whether saves in flight will free device blocks."""
        return self._ledger.pinning(PIN_PATIENCE_S)

    def hit_sources(self, request: Any) -> dict[str, int]:
        """Return the last admission's restored tokens by source."""
        tracker = self._trackers.get(request.request_id)
        return dict(tracker.hits) if tracker is not None else {}

    def take_counts(self) -> dict[str, float]:
        """Return counters since the last call."""
        counts = self.catalog.counts
        for name in ("ram_evicted_chunks", "ram_evicted_lost_chunks"):
            grown = getattr(counts, name) - self._told.get(name, 0)
            if grown:
                self._told[name] = getattr(counts, name)
                self.counts.add(name, grown)
        return self.counts.take()

    def gauges(self) -> dict[str, float]:
        """Return what is where now."""
        catalog = self.catalog
        values = {f"resident_chunks.{tier}": float(n) for tier, n in catalog.resident().items()}
        values["ram_pages.free"] = catalog.free_pages
        values["ram_pages.pinned"] = catalog.pinned_pages
        values["ram_pages.all"] = catalog.n_pages
        values["pinned_device_blocks"] = self._ledger.pinned_blocks
        return values
