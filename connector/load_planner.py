"""Turns a granted hit into a load job: what comes from where, into which blocks and pages.

Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..storage.catalog import RAM, Catalog
from ..storage.entry import Entry
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

        What RAM holds is pinned before pages are reserved for the rest, which must not
        push it out.

        Args:
            job_id: of the new job.
            generation: the namespace's.
            request_id: who waits.
            deadline_s: how long.
            pieces: None when what was promised is gone: the job fails at once.
            blocks: vLLM's `KVCacheBlocks` of the request.
        """
        found = self._find(pieces, blocks)
        doomed = found is None
        parts = found or []
        for part in parts:
            if part.source == RAM:
                self._catalog.pin(part.entry)
        filling = [part.source != RAM and self._promoted(part) for part in parts]
        chunks = [part.chunk(own) for part, own in zip(parts, filling, strict=True)]
        entries = [part.entry for part in parts]
        job = LoadJob(job_id, generation, request_id, deadline_s, tuple(chunks), doomed=doomed)
        self._ledger.open_load(job, entries, filling)
        self._jobs.append(job)
        return job

    def _find(self, pieces: Sequence[Piece] | None, blocks: Any) -> list[_Part] | None:
        """Return what each piece is to fill, and from where; None when that cannot be done."""
        parts: list[_Part] = []
        for piece in pieces or ():
            table = blocks.blocks[piece.group_id]
            # Null blocks are outside the window; hashed ones are valid on the device already.
            wanted = [
                (i, table[i].block_id)
                for i in range(piece.first_block, piece.first_block + piece.n_blocks)
                if not table[i].is_null and table[i].block_hash is None
            ]
            if not wanted:
                continue
            entry = self._catalog.get(piece.key)
            source = None if entry is None else self._catalog.source_of(entry)
            first = wanted[0][0]
            if entry is None or source is None or wanted[-1][0] - first + 1 != len(wanted):
                return None  # gone, or blocks to fill that are not one run
            ids = np.array([block for _, block in wanted], dtype=np.int64)
            parts.append(_Part(piece, entry, source, first - piece.stored_block, ids))
        return None if pieces is None else parts

    def _promoted(self, part: _Part) -> bool:
        """Reserve RAM pages for a chunk of a lower tier, if that is wanted and there are any."""
        if not self._promote:
            return False
        piece = part.piece
        entry = self._catalog.begin_promote(piece.key, piece.stored_blocks)
        if entry is not None:
            entry.span = (piece.start_tokens, piece.end_tokens)
        return entry is not None

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

    def bytes_of(self, pieces: Iterable[Piece]) -> dict[str, int]:
        """Return the bytes of the records of ``pieces``, by the place that serves them now."""
        out: dict[str, int] = {}
        for piece in pieces:
            source = self._catalog.source(piece.key)
            if source is not None:
                size = self._geometry.group(piece.group_id).padded_block_bytes
                out[source] = out.get(source, 0) + piece.stored_blocks * size
        return out

    def bytes_by_source(self, chunks: Iterable[LoadChunk]) -> dict[str, int]:
        """Return the bytes that a load of ``chunks`` moves, by source (rank 0's sizes)."""
        out: dict[str, int] = {}
        for chunk in chunks:
            size = self._geometry.group(chunk.group).padded_block_bytes
            out[chunk.source] = out.get(chunk.source, 0) + chunk.n_blocks * size
        return out


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece with what is to be filled: ``blocks``, from the record's block ``offset_blocks``."""

    piece: Piece
    entry: Entry
    source: str
    offset_blocks: int
    blocks: npt.NDArray[np.int64]

    def chunk(self, own_pages: bool) -> LoadChunk:
        """Return the chunk to load, into pages of its own or through staging."""
        piece = self.piece
        return LoadChunk(
            piece.key,
            piece.group_id,
            piece.start_tokens,
            piece.end_tokens,
            self.source,
            piece.stored_blocks,
            self.offset_blocks,
            self.blocks,
            self.entry.pages if own_pages or self.source == RAM else None,
        )
