"""Carries out save jobs: device blocks to RAM pages, and behind that pages to the tiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from .counts import Counts
from .device import COPY_TIMEOUT_S, BlockMover, CopyHealth, CopyTicket, Pages, wait_fenced
from .errors import KVTierError
from .jobs import ChunkStatus, SaveChunk
from .link import TierLink
from .saving import SaveState
from .tier import RecordSpec


class TransferClosed(KVTierError):
    """The transfer is shutting down; what had not begun is cancelled."""


class SaveRunner:
    """Runs saves on the copy lane, and their writes on the lanes of the tiers.

    Args:
        pages: the RAM arena.
        block_bytes: for each group id, the bytes of one block in a page (a multiple of 4096).
        mover: the device copies.
        links_of: the tiers that a job of a generation may be written to.
        closed: whether everything is coming to its end.
        counts: where to count.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        pages: Pages,
        block_bytes: dict[int, int],
        mover: BlockMover,
        links_of: Callable[[int], Mapping[str, TierLink]],
        closed: Callable[[], bool],
        counts: Counts,
        clock: Callable[[], float],
    ) -> None:
        self._pages = pages
        self._block_bytes = block_bytes
        self._mover = mover
        self._links_of = links_of
        self._closed = closed
        self._counts = counts
        self._clock = clock
        self._health = CopyHealth("from", "its chunks are not kept")

    def run(self, state: SaveState, after: Any) -> None:
        """Copy a job's blocks to their pages and queue the writes below; on a lane's thread."""
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
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends in a status
            wait_fenced(tickets)
            self._health.failed(error)
            status = ChunkStatus.COPY_FAILED
            self._counts.add("save_failed_chunks.device", len(job.chunks))
        state.copied(bytes([status] * len(job.chunks)))
        if status is not ChunkStatus.OK:
            state.planned(0)
            return
        if n_bytes:
            self._health.worked()
            self._counts.add("save_bytes.ram", n_bytes)
            self._counts.add("save_chunks.ram", len(job.chunks))
            self._counts.add("save_s.ram", self._clock() - begin_s)
        self._write_behind(state)

    def _refuse_when_closed(self) -> None:
        if self._closed():
            raise TransferClosed

    def _write_behind(self, state: SaveState) -> None:
        offered = 0
        links = self._links_of(state.job.generation)
        for i, chunk in enumerate(state.job.chunks):
            for name in chunk.tiers:
                link = links.get(name)
                if link is None or not link.writable:
                    self._counts.add(f"save_dropped_chunks.{name}.tier_off")
                    continue
                n_bytes = len(chunk.pages) * self._block_bytes[chunk.group]
                task = partial(self._write, state, i, chunk, link)
                if link.save_lane.offer(task, n_bytes):
                    offered += 1
                else:
                    self._counts.add(f"save_dropped_chunks.{name}.queue_full")
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
                self._counts.add(f"save_dropped_chunks.{link.name}.tier_off")
        finally:
            state.wrote(i, link.name, ok)
