"""Moves chunks between device blocks, RAM pages and the tiers below.

The worker half's engine, without anything of vLLM or torch: the device copies
come through a `BlockMover`. Nothing here decides what to move; jobs say so.

Guarantees:

- Every job reports exactly once for each of its two ends (see
  `kvtier.storage.jobs`), at shutdown too.
- `submit_*`, `poll` and `take_events` never block on I/O.
- Loads have lanes of their own and are never dropped; saves are dropped, and
  counted, when their lane is full.
- A tier's fault ends in a status, never in an exception.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from .counts import Counts
from .device import BlockMover, CopyTicket, Ids, Pages, wait_fenced
from .errors import KVTierError
from .jobs import (
    ChunkStatus,
    Event,
    LoadChunk,
    LoadDone,
    LoadJob,
    SaveChunk,
    SaveJob,
    TierNews,
)
from .lanes import Lane
from .link import LinkLimits, TierLink
from .loading import LoadState, Need
from .saving import SaveState
from .staging import Staging
from .tier import RecordSpec, Tier

logger = logging.getLogger("kvtier.transfer")

RAM_BATCH_BYTES = 64 << 20
NEWS_EVERY_S = 0.1
COPY_TIMEOUT_S = 120.0
STOP_S = 2.0


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """Threads and bounds.

    Attributes:
        copy_threads: threads that copy between RAM pages and the device, each way.
        hang_s: a copy that takes longer costs its thread, which is replaced.
        links: bounds of each tier, by name.
    """

    copy_threads: int = 1
    hang_s: float = 60.0
    links: dict[str, LinkLimits] = field(default_factory=dict)


class TransferClosed(KVTierError):
    """The transfer is shutting down; what had not begun is cancelled."""


class Transfer:
    """Runs load and save jobs of one rank.

    Args:
        pages: the RAM arena.
        block_bytes: for each group id, the bytes of one block in a page (a multiple of 4096).
        staging: slots for loads without pages.
        mover: the device copies.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        pages: Pages,
        block_bytes: dict[int, int],
        staging: Staging,
        mover: BlockMover,
        clock: Callable[[], float],
        limits: TransferLimits | None = None,
    ) -> None:
        self.limits = limits or TransferLimits()
        self.counts = Counts()
        self._pages = pages
        self._block_bytes = block_bytes
        self._staging = staging
        self._mover = mover
        self._clock = clock
        self._links: dict[str, TierLink] = {}
        self._generation = 0
        self._online: dict[str, bool] = {}
        self._told_complete: set[str] = set()
        self._events: deque[Event] = deque()
        self._wake = threading.Condition()
        self._loads: dict[int, LoadState] = {}
        self._saves: dict[int, SaveState] = {}
        self._news_at_s = 0.0
        self._closed = False
        self._ram_lane = Lane(
            "ram-load", self.limits.copy_threads, clock, hang_s=self.limits.hang_s
        )
        self._copy_lane = Lane("copy", self.limits.copy_threads, clock, hang_s=self.limits.hang_s)

    # -- tiers -----------------------------------------------------------

    def set_tiers(self, tiers: Sequence[Tier], generation: int = 0) -> None:
        """Use these tiers from now on; those in use before are closed in the background.

        A tier that has limits but is not among them counts as off.

        Jobs of another ``generation`` load nothing and write nothing from here on, and
        a load of one that is over but not told yet is told as failed.
        """
        old = self._links
        links = {}
        for tier in tiers:
            limits = self.limits.links.get(tier.name, LinkLimits())
            links[tier.name] = TierLink(tier, self.counts, self._clock, limits)
            self._online[tier.name] = True
            self._emit(TierNews(tier.name, complete=False, reset=True))
        for name in self.limits.links.keys() - links.keys():
            self._emit(TierNews(name, online=False, reset=True))
        self._told_complete.clear()
        self._generation, self._links = generation, links
        self._give_up_loads_of_old()
        for link in old.values():
            closing = partial(link.close, self._clock() + STOP_S)
            threading.Thread(target=closing, name="kvtier-close", daemon=True).start()

    def _give_up_loads_of_old(self) -> None:
        old = {
            job_id: state
            for job_id, state in self._loads.items()
            if state.job.generation != self._generation
        }
        for state in old.values():
            state.close(ChunkStatus.CANCELLED)
        with self._wake:
            self._events = deque(
                replace(event, ok=False)
                if isinstance(event, LoadDone) and event.job_id in old
                else event
                for event in self._events
            )

    @property
    def links(self) -> dict[str, TierLink]:
        """The links in use, by tier name."""
        return self._links

    # -- jobs ------------------------------------------------------------

    def submit_load(self, job: LoadJob, after: Any = None) -> None:
        """Start a load into blocks that are free once ``after`` (a fence) has passed."""
        state = LoadState(job, self._clock() + job.deadline_s, self._emit, after)
        self._loads[job.job_id] = state
        if job.doomed or job.generation != self._generation or not job.chunks:
            state.start(doomed=job.doomed or job.generation != self._generation)
            return
        if self._closed:
            self._fail_all(state)
            return
        ram: list[tuple[int, LoadChunk]] = []
        for i, chunk in enumerate(job.chunks):
            if chunk.source == "ram":
                ram.append((i, chunk))
            else:
                self._submit_tier_load(state, i, chunk)
        for batch in _batches(ram, self._block_bytes):
            if not self._ram_lane.offer(partial(self._load_from_ram, state, batch)):
                for i, _ in batch:
                    state.finish(i, ChunkStatus.CANCELLED)

    def _fail_all(self, state: LoadState) -> None:
        state.close(ChunkStatus.CANCELLED)
        for i in range(len(state.job.chunks)):
            state.finish(i, ChunkStatus.CANCELLED)

    def _submit_tier_load(self, state: LoadState, i: int, chunk: LoadChunk) -> None:
        link = self._links.get(chunk.source)
        if link is None or not link.online:
            state.finish(i, ChunkStatus.TIER_DOWN)
        elif not link.load_lane.offer(
            partial(self._load_from_tier, state, i, chunk, link),
            spare=not len(chunk.blocks),  # nobody waits for what goes into RAM only
        ):
            state.finish(i, ChunkStatus.CANCELLED)

    def cancel_load(self, job_id: int) -> None:
        """Nobody waits for this load any more; it still reports."""
        state = self._loads.get(job_id)
        if state is not None:
            state.close(ChunkStatus.CANCELLED)

    def submit_save(self, job: SaveJob, after: Any = None) -> None:
        """Start a save of blocks that are valid once ``after`` (the mover's fence) has passed."""
        state = SaveState(job, self._emit)
        self._saves[job.job_id] = state
        if not self._copy_lane.offer(partial(self._save, state, after)):
            state.copied(bytes([ChunkStatus.CANCELLED] * len(job.chunks)))
            state.planned(0)

    # -- running loads (lane threads) --------------------------------------

    def _load_from_ram(self, state: LoadState, batch: list[tuple[int, LoadChunk]]) -> None:
        status = ChunkStatus.CANCELLED
        begin_s = self._clock()
        try:
            if state.begin_copy(batch[0][0]):
                status = ChunkStatus.COPY_FAILED
                try:
                    status = self._copy_in(
                        [chunk for _, chunk in batch], [c.pages for _, c in batch], state.after
                    )
                finally:
                    state.end_copy()
        finally:
            for i, _ in batch:
                state.finish(i, status)
        if status is ChunkStatus.OK:
            n_bytes = sum(len(c.blocks) * self._block_bytes[c.group] for _, c in batch)
            self.counts.add("load_bytes.ram", n_bytes)
            self.counts.add("load_chunks.ram", len(batch))
            self.counts.add("load_s.ram", self._clock() - begin_s)

    def _load_from_tier(self, state: LoadState, i: int, chunk: LoadChunk, link: TierLink) -> None:
        fetch = partial(self._fetch, state, i, chunk, link)
        if state.need(i) is not Need.CHECK or not link.load_lane.offer(fetch, spare=True):
            fetch()

    def _fetch(self, state: LoadState, i: int, chunk: LoadChunk, link: TierLink) -> None:
        slot: Ids | None = None
        status = ChunkStatus.CANCELLED
        try:
            need = state.need(i)
            if need is Need.NOTHING:
                return
            pages = chunk.pages
            if pages is None:
                wait_s = state.deadline_at_s - self._clock() if need is Need.LOAD else 0.0
                slot = self._staging.take(wait_s)
                if slot is None:
                    if need is Need.LOAD:
                        status = ChunkStatus.DEADLINE
                    return
                if state.need(i) is Need.NOTHING:
                    return  # closed while it waited; at shutdown the pages are gone
                pages = slot[: chunk.n_blocks]
            used_bytes = self._block_bytes[chunk.group]
            spec = RecordSpec(
                chunk.key, chunk.start_tokens, chunk.end_tokens, chunk.n_blocks * used_bytes
            )
            status = link.load(spec, self._pages.buffers(pages, used_bytes))
            if status is not ChunkStatus.OK:
                return
            if chunk.pages is not None:
                state.filled(i)
            status = ChunkStatus.CANCELLED
            if not state.begin_copy(i):
                return
            status = ChunkStatus.COPY_FAILED
            try:
                status = self._copy_in([chunk], [pages], state.after)
            finally:
                state.end_copy()
        finally:
            if slot is not None:
                self._staging.give(slot)
            state.finish(i, status)

    def _copy_in(
        self, chunks: list[LoadChunk], pages: Sequence[Ids | None], after: Any
    ) -> ChunkStatus:
        by_group: dict[int, tuple[list[Ids], list[Ids]]] = {}
        for chunk, page_ids in zip(chunks, pages, strict=True):
            assert page_ids is not None
            n = len(chunk.blocks)
            first = chunk.offset_blocks
            blocks, wanted = by_group.setdefault(chunk.group, ([], []))
            blocks.append(chunk.blocks)
            wanted.append(page_ids[first : first + n])
        tickets: list[CopyTicket] = []
        try:
            for group, (blocks, wanted) in by_group.items():
                ids, page_ids = np.concatenate(blocks), np.concatenate(wanted)
                tickets.append(self._mover.load(group, ids, page_ids, after))
            for ticket in tickets:
                ticket.wait(COPY_TIMEOUT_S)
        except Exception:
            wait_fenced(tickets)
            logger.exception("kvtier: a copy to the device failed; the request computes instead")
            self.counts.add("load_failed_chunks.device.copy", len(chunks))
            return ChunkStatus.COPY_FAILED
        return ChunkStatus.OK

    # -- running saves (lane threads) --------------------------------------

    def _save(self, state: SaveState, after: Any) -> None:
        job = state.job
        begin_s = self._clock()
        n_bytes = 0
        tickets: list[CopyTicket] = []
        try:
            self._refuse_when_closed()
            for group in sorted({chunk.group for chunk in job.chunks}):
                chunks = [c for c in job.chunks if c.group == group and len(c.blocks)]
                if not chunks:
                    continue  # written back: the pages hold the bytes already
                blocks = np.concatenate([chunk.blocks for chunk in chunks])
                pages = np.concatenate([chunk.pages for chunk in chunks])
                tickets.append(self._mover.save(group, blocks, pages, after))
                tickets[-1].wait(COPY_TIMEOUT_S)
                n_bytes += len(blocks) * self._block_bytes[group]
            status = ChunkStatus.OK
        except TransferClosed:
            status = ChunkStatus.CANCELLED
        except Exception:
            wait_fenced(tickets)
            logger.exception("kvtier: a copy from the device failed; its chunks are not kept")
            status = ChunkStatus.COPY_FAILED
            self.counts.add("save_failed_chunks.device", len(job.chunks))
        state.copied(bytes([status] * len(job.chunks)))
        if status is not ChunkStatus.OK:
            state.planned(0)
            return
        if n_bytes:
            self.counts.add("save_bytes.ram", n_bytes)
            self.counts.add("save_chunks.ram", len(job.chunks))
            self.counts.add("save_s.ram", self._clock() - begin_s)
        self._write_behind(state)

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise TransferClosed

    def _write_behind(self, state: SaveState) -> None:
        offered = 0
        links = self._links
        if state.job.generation != self._generation:  # checked after `links` was read
            links = {}
        for i, chunk in enumerate(state.job.chunks):
            for name in chunk.tiers:
                link = links.get(name)
                if link is None or not link.writable:
                    self.counts.add(f"save_dropped_chunks.{name}.tier_off")
                    continue
                n_bytes = len(chunk.pages) * self._block_bytes[chunk.group]
                task = partial(self._write, state, i, chunk, link)
                if link.save_lane.offer(task, n_bytes):
                    offered += 1
                else:
                    self.counts.add(f"save_dropped_chunks.{name}.queue_full")
        state.planned(offered)

    def _write(self, state: SaveState, i: int, chunk: SaveChunk, link: TierLink) -> None:
        used_bytes = self._block_bytes[chunk.group]
        spec = RecordSpec(
            chunk.key, chunk.start_tokens, chunk.end_tokens, len(chunk.pages) * used_bytes
        )
        ok = False
        try:
            if link.online:
                ok = link.save(spec, self._pages.buffers(chunk.pages, used_bytes))
            else:  # also what a closing link hands back: at shutdown the pages are gone
                self.counts.add(f"save_dropped_chunks.{link.name}.tier_off")
        finally:
            state.wrote(i, link.name, ok)

    # -- results -----------------------------------------------------------

    def _emit(self, event: Event) -> None:
        with self._wake:
            self._events.append(event)
            self._wake.notify_all()

    def poll(self) -> None:
        """Enforce deadlines, look after threads and tiers. Engine's thread, every step, no I/O."""
        now_s = self._clock()
        for job_id in [j for j, s in self._loads.items() if s.retired]:
            del self._loads[job_id]
        for state in self._loads.values():
            if now_s > state.deadline_at_s and state.close(ChunkStatus.DEADLINE):
                self.counts.add("load_deadline_missed")
        for job_id in [j for j, s in self._saves.items() if s.retired]:
            del self._saves[job_id]
        if now_s >= self._news_at_s:
            self._news_at_s = now_s + NEWS_EVERY_S
            self._ram_lane.poll()
            self._copy_lane.poll()
            for link in self._links.values():
                link.poll()
                self._tell_news(link)

    def _tell_news(self, link: TierLink) -> None:
        news = link.changes()
        online = link.online
        if news.added or news.removed or online != self._online[link.name] or not news.complete:
            self._emit(TierNews(link.name, news.added, news.removed, news.complete, online))
        elif link.name not in self._told_complete:
            self._emit(TierNews(link.name, complete=True, online=online))
        if news.complete:
            self._told_complete.add(link.name)
        self._online[link.name] = online

    def take_events(self) -> list[Event]:
        """Return what happened since the last call. Never blocks."""
        events: list[Event] = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def wait(self, timeout_s: float) -> None:
        """Wait until there is an event, at most ``timeout_s``."""
        with self._wake:
            if not self._events:
                self._wake.wait(timeout_s)

    @property
    def loading(self) -> bool:
        """Whether a load has not reported yet."""
        return any(not state.done for state in self._loads.values())

    @property
    def busy(self) -> bool:
        """Whether any job has not reported all of its events."""
        return self.loading or any(not state.retired for state in self._saves.values())

    @property
    def queued_save_bytes(self) -> int:
        """Bytes waiting to be written to lower tiers."""
        return sum(link.save_lane.queued_bytes for link in self._links.values())

    # -- the end -----------------------------------------------------------

    def close(self, flush_s: float) -> None:
        """Write what is queued for up to ``flush_s``, then stop; every job reports."""
        with self._wake:
            self._wake.wait_for(lambda: not self.busy, max(0.0, flush_s))
        self._closed = True
        for state in list(self._loads.values()):
            state.close(ChunkStatus.CANCELLED)
        stop_s = self._clock() + STOP_S
        for lane in (self._ram_lane, self._copy_lane):
            for task in lane.close():
                task()  # of a closed transfer: only reports
        for lane in (self._ram_lane, self._copy_lane):
            lane.join(stop_s)
        for link in self._links.values():
            link.close(stop_s)


def _batches(
    chunks: list[tuple[int, LoadChunk]], block_bytes: dict[int, int]
) -> Iterator[list[tuple[int, LoadChunk]]]:
    """Cut RAM chunks into batches, so that one copy is long and a cancel is quick."""
    batch: list[tuple[int, LoadChunk]] = []
    n_bytes = 0
    for item in chunks:
        batch.append(item)
        n_bytes += len(item[1].blocks) * block_bytes[item[1].group]
        if n_bytes >= RAM_BATCH_BYTES:
            yield batch
            batch, n_bytes = [], 0
    if batch:
        yield batch
