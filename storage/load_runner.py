"""Carries out load jobs: RAM pages to the device, records to pages and on to the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from .counts import Counts
from .device import COPY_TIMEOUT_S, BlockMover, CopyHealth, CopyTicket, Ids, Pages, wait_fenced
from .jobs import ChunkStatus, LoadChunk
from .lanes import Lane
from .link import TierLink
from .loading import LoadState, Need
from .staging import Staging
from .tier import RecordSpec

RAM_BATCH_BYTES = 64 << 20


class LoadRunner:
    """Runs loads on the lanes of RAM and of the tiers.

    Args:
        pages: the RAM arena.
        block_bytes: for each group id, the bytes of one block in a page (a multiple of 4096).
        staging: slots for loads without pages.
        mover: the device copies.
        lane: of copies from RAM pages.
        counts: where to count.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        pages: Pages,
        block_bytes: dict[int, int],
        staging: Staging,
        mover: BlockMover,
        lane: Lane,
        counts: Counts,
        clock: Callable[[], float],
    ) -> None:
        self._pages = pages
        self._block_bytes = block_bytes
        self._staging = staging
        self._mover = mover
        self._lane = lane
        self._counts = counts
        self._clock = clock
        self._health = CopyHealth("to", "the request computes instead")

    def submit(self, state: LoadState, links: Mapping[str, TierLink]) -> None:
        """Queue every chunk of a job that has some. Never blocks."""
        ram: list[tuple[int, LoadChunk]] = []
        for i, chunk in enumerate(state.job.chunks):
            if chunk.source == "ram":
                ram.append((i, chunk))
            else:
                self._submit_tier_load(state, i, chunk, links.get(chunk.source))
        for batch in _batches(ram, self._block_bytes):
            if not self._lane.offer(partial(self._load_from_ram, state, batch)):
                for i, _ in batch:
                    state.finish(i, ChunkStatus.CANCELLED)

    def _submit_tier_load(
        self, state: LoadState, i: int, chunk: LoadChunk, link: TierLink | None
    ) -> None:
        if link is None or not link.online:
            state.finish(i, ChunkStatus.TIER_DOWN)
        elif not link.load_lane.offer(
            partial(self._load_from_tier, state, i, chunk, link),
            spare=not len(chunk.blocks),  # nobody waits for what goes into RAM only
        ):
            state.finish(i, ChunkStatus.CANCELLED)

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
            self._counts.add("load_bytes.ram", n_bytes)
            self._counts.add("load_chunks.ram", len(batch))
            self._counts.add("load_s.ram", self._clock() - begin_s)

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
                slot, status = self._take_slot(state, i, need, link)
                if slot is None:
                    return
                pages = slot[: chunk.n_blocks]
            used_bytes = self._block_bytes[chunk.group]
            spec = RecordSpec(
                chunk.key, chunk.start_tokens, chunk.end_tokens, chunk.n_blocks * used_bytes
            )
            state.reading[i] = link
            status = link.load(spec, self._pages.buffers(pages, used_bytes), state.job.deadline_s)
            state.reading.pop(i, None)
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
            state.reading.pop(i, None)
            if slot is not None:
                self._staging.give(slot, link.name)
            state.finish(i, status)

    def _take_slot(
        self, state: LoadState, i: int, need: Need, link: TierLink
    ) -> tuple[Ids | None, ChunkStatus]:
        """Return pages to read into; or none, and how the chunk has ended."""
        if not link.online:
            return None, ChunkStatus.TIER_DOWN  # before it waits for a slot in vain
        wait_s = state.deadline_at_s - self._clock() if need is Need.LOAD else 0.0
        slot = self._staging.take(wait_s, link.name)
        if slot is None:
            return None, ChunkStatus.DEADLINE if need is Need.LOAD else ChunkStatus.CANCELLED
        if state.need(i) is Need.NOTHING:  # closed meanwhile; at shutdown the pages are gone
            self._staging.give(slot, link.name)
            return None, ChunkStatus.CANCELLED
        return slot, ChunkStatus.CANCELLED

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
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends in a status
            wait_fenced(tickets)
            self._health.failed(error)
            self._counts.add("load_failed_chunks.device.copy", len(chunks))
            return ChunkStatus.COPY_FAILED
        self._health.worked()
        return ChunkStatus.OK


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
