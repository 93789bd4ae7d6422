"""Turns a granted hit into a load job: what comes from where, into which blocks and pages.

Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..storage.catalog import RAM, Catalog, Entry
from ..storage.jobs import LoadChunk, LoadJob
from .geometry import Geometry
from .ledger import Ledger
from .lookup import Piece


class LoadPlanner:
    """Plans loads over one catalog.

    Args:
        promote: keep in RAM what lower tiers serve.
    """

    def __init__(
        self, geometry: Geometry, catalog: Catalog, ledger: Ledger, *, promote: bool
    ) -> None:
        self._geometry = geometry
        self._catalog = catalog
        self._ledger = ledger
        self._promote = promote
        self._jobs: list[LoadJob] = []
        kinds = {group.group_id: group.window_tokens is None for group in geometry.groups}
        lead = next((g for g, whole in kinds.items() if whole), geometry.groups[0].group_id)
        self._lead = geometry.group(lead)

    @property
    def waiting(self) -> bool:
        """Whether loads are planned that no step has carried yet."""
        return bool(self._jobs)

    def take(self) -> tuple[LoadJob, ...]:
        """Return the loads for this step's plan."""
        jobs, self._jobs = tuple(self._jobs), []
        return jobs

    def plan(
        self,
        job_id: int,
        generation: int,
        request_id: str,
        deadline_s: float,
        pieces: Sequence[Piece] | None,
        blocks: Any,
    ) -> LoadJob:
        """Plan and queue the load of ``pieces``; pins what it uses.

        Args:
            job_id: of the new job.
            generation: the namespace's.
            request_id: who waits.
            deadline_s: how long.
            pieces: None when what was promised is gone: the job fails at once.
            blocks: vLLM's `KVCacheBlocks` of the request.
        """
        chunks: list[LoadChunk] = []
        entries: list[Entry] = []
        filling: list[bool] = []
        for piece in pieces or ():
            self._plan_piece(piece, blocks.blocks[piece.group_id], chunks, entries, filling)
        doomed = pieces is None
        job = LoadJob(job_id, generation, request_id, deadline_s, tuple(chunks), doomed=doomed)
        self._ledger.open_load(job, entries, filling)
        self._jobs.append(job)
        return job

    def _plan_piece(
        self,
        piece: Piece,
        table: Sequence[Any],
        chunks: list[LoadChunk],
        entries: list[Entry],
        filling: list[bool],
    ) -> None:
        wanted = range(piece.first_block, piece.first_block + piece.n_blocks)
        # Null blocks are outside the window; hashed ones are valid on the device already.
        ids = [
            (i, table[i].block_id)
            for i in wanted
            if not table[i].is_null and table[i].block_hash is None
        ]
        if not ids:
            return
        first = ids[0][0]
        assert ids[-1][0] - first + 1 == len(ids), "blocks to fill are not one run"
        entry = self._catalog.get(piece.key)
        assert entry is not None
        source = self._catalog.source_of(entry)
        assert source is not None
        pages, fills = None, False
        if source == RAM:
            self._catalog.pin(entry)
            pages = entry.pages
        elif self._promote:
            fills = self._catalog.begin_promote(piece.key, piece.stored_blocks) is not None
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
                np.array([block for _, block in ids], dtype=np.int64),
                pages,
            )
        )
        entries.append(entry)
        filling.append(fills)

    def tokens_by_source(self, job: LoadJob, n_tokens: int) -> dict[str, int]:
        """Charge ``n_tokens`` to the places that the leading group's chunks come from."""
        size = self._lead.block_tokens
        shares: dict[str, int] = {}
        for chunk in job.chunks:
            if chunk.group == self._lead.group_id:
                shares[chunk.source] = shares.get(chunk.source, 0) + len(chunk.blocks) * size
        left = n_tokens
        out: dict[str, int] = {}
        for source, share in sorted(shares.items(), key=lambda item: -item[1]):
            out[source] = min(share, left)
            left -= out[source]
        if left:  # the last block is used in part, or this group had its blocks already
            source = next(iter(out), job.chunks[0].source if job.chunks else RAM)
            out[source] = out.get(source, 0) + left
        return {source: n for source, n in out.items() if n}

    def bytes_by_source(self, job: LoadJob) -> dict[str, int]:
        """Return the bytes that a load moves, by source (rank 0's sizes)."""
        out: dict[str, int] = {}
        for chunk in job.chunks:
            size = self._geometry.group(chunk.group).padded_block_bytes
            out[chunk.source] = out.get(chunk.source, 0) + chunk.n_blocks * size
        return out
