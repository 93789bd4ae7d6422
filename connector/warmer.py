"""Brings records up into RAM because somebody asked, before a request needs them.

The way is that of every promoted load: pages from the catalog, where only what is free or also
held below gives way; a verified read by every rank's lanes; READY once all ranks have said so.
There is no request and no device block, so nothing waits for these loads, and they wait for
others. Few chunks are under way at a time, and one wish fills half of RAM at most.

Scheduler thread only; nothing blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, Queue

import numpy as np

from ..storage.catalog import Catalog
from ..storage.counts import Counts
from ..storage.entry import Entry, RamState
from ..storage.jobs import LoadChunk, LoadJob
from .geometry import Geometry
from .ledger import Ledger
from .plan import NamespaceInfo
from .shared_lookup import SharedLookup
from .warm_request import WarmRequest

CHUNKS_UNDER_WAY = 8
KEYS_A_STEP = 256
RAM_SHARE = 2  # one wish takes at most one part in so many
DEADLINE_S = 60.0
_NO_BLOCKS = np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class _Running:
    request: WarmRequest
    age: int
    pages_left: int
    next_key: int = 0
    under_way: list[tuple[Entry, str, float]] = field(default_factory=list)  # since when


class Warmer:
    """Works on one wish after another.

    Args:
        wishes: where they wait; whoever puts one in sees to it that it stays short.
        next_job_id: gives numbers of load jobs.
    """

    def __init__(
        self,
        geometry: Geometry,
        catalog: Catalog,
        ledger: Ledger,
        shared: SharedLookup,
        counts: Counts,
        next_job_id: Callable[[], int],
        wishes: Queue[WarmRequest],
    ) -> None:
        self._geometry = geometry
        self._catalog = catalog
        self._ledger = ledger
        self._shared = shared
        self._counts = counts
        self._next_job_id = next_job_id
        self._wishes = wishes
        self._running: _Running | None = None

    @property
    def waiting(self) -> bool:
        """Whether the engine must go on stepping for this."""
        return self._running is not None or not self._wishes.empty()

    def step(self, info: NamespaceInfo) -> tuple[LoadJob, ...]:
        """Return the loads that this step shall carry."""
        running = self._running
        if running is None:
            running = self._running = self._take(info)
            if running is None:
                return ()
        self._look_back(running)
        chunks: list[LoadChunk] = []
        entries: list[Entry] = []
        keys = running.request.keys
        stop_at = min(len(keys), running.next_key + KEYS_A_STEP)
        while running.next_key < stop_at and len(running.under_way) < CHUNKS_UNDER_WAY:
            if running.request.cancelled:
                running.next_key = len(keys)
                break
            key, end_tokens = keys[running.next_key]
            running.next_key += 1
            part = self._begin(running, key, end_tokens)
            if part is not None:
                entries.append(part[0])
                chunks.append(part[1])
        if not running.under_way and running.next_key >= len(keys):
            running.request.end("cancelled" if running.request.cancelled else "done")
            self._running = None
        if not chunks:
            return ()
        job = LoadJob(self._next_job_id(), info.generation, "", DEADLINE_S, tuple(chunks))
        self._ledger.open_load(job, entries, [True] * len(entries))
        return (job,)

    def _take(self, info: NamespaceInfo) -> _Running | None:
        try:
            request = self._wishes.get_nowait()
        except Empty:
            return None
        own = info.digest if request.tier == "disk" else info.shared_digest
        if request.tier not in self._catalog.tiers or own != request.namespace:
            request.end("other_namespace")
            return None
        request.begin()
        pages = self._catalog.n_pages // RAM_SHARE if self._catalog.retain_in_ram else 0
        return _Running(request, self._catalog.age(), pages)

    def _look_back(self, running: _Running) -> None:
        """Count what has come since the last step; a read that hangs is given up."""
        under_way = []
        late_s = self._ledger.clock() - DEADLINE_S
        for entry, source, since_s in running.under_way:
            if entry.ram is RamState.FILLING and not entry.dead and since_s >= late_s:
                under_way.append((entry, source, since_s))
            elif entry.ram is RamState.READY and not entry.dead:
                running.request.count("loaded")
                self._counts.add(f"warmed_chunks.{source}")
            else:
                self._skip(running, "failed")
        running.under_way = under_way

    def _begin(
        self, running: _Running, key: bytes, end_tokens: int
    ) -> tuple[Entry, LoadChunk] | None:
        """Reserve pages for one record; None where nothing is to be loaded."""
        geometry, tier = self._geometry, running.request.tier
        groups = {group.group_id: group for group in geometry.groups}
        group = groups.get(key[-1])
        start = (end_tokens - 1) // geometry.chunk_tokens * geometry.chunk_tokens
        n_blocks = 0 if group is None else geometry.blocks_in_span(group, start, end_tokens)[1]
        if group is None or end_tokens < 1 or n_blocks < 1:
            self._skip(running, "unknown")
            return None
        if tier != "disk":
            self._believe(tier, key)
        entry = self._catalog.get(key)
        source = None if entry is None else self._catalog.source_of(entry)
        if entry is None or source is None:
            self._skip(running, "not_stored")
            return None
        if entry.ram is not RamState.ABSENT:
            entry.used = max(entry.used, running.age - end_tokens)
            running.request.count("in_ram")
            return None
        if n_blocks > running.pages_left or self._catalog.begin_promote(key, n_blocks) is None:
            self._skip(running, "no_room")
            return None
        running.pages_left -= n_blocks
        entry.span = (start, end_tokens)
        entry.used = max(entry.used, running.age - end_tokens)
        running.under_way.append((entry, source, self._ledger.clock()))
        chunk = LoadChunk(
            key, key[-1], start, end_tokens, source, n_blocks, 0, _NO_BLOCKS, entry.pages
        )
        return entry, chunk

    def _believe(self, tier: str, key: bytes) -> None:
        """Take it that a shared tier holds a record; a load that misses it corrects that."""
        for holder in range(self._catalog.n_holders):
            self._catalog.tier_added(tier, key, holder)
        self._shared.learned(tier, (key,))

    def _skip(self, running: _Running, why: str) -> None:
        running.request.count(why)
        self._counts.add(f"warm_skipped_chunks.{why}")

    def reset(self) -> None:
        """The cache was cleared: what was asked for is gone."""
        if self._running is not None:
            self._running.request.end("cancelled")
            self._running = None
        while not self._wishes.empty():
            self._wishes.get_nowait().end("cancelled")
