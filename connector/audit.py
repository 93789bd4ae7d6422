"""Audits: hits that are computed although they could be loaded, and then compared.

A checksum finds what changed after saving. Damage that was made before, in
device memory or by a fault of the engine, is only found by computing again. So
a share of hits is not served: the engine computes the prompt, and the workers
compare what it computed with what is stored. A record that differs beyond the
noise of computing again is dropped everywhere, with all of this chain after it.

Scheduler thread only. Recurrent states are not compared (their blocks are
handed over, not kept); what was computed from a bad one is.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..storage.catalog import RAM, Catalog
from ..storage.counts import Counts
from ..storage.entry import Entry
from ..storage.jobs import AuditDone, AuditJob, ChunkStatus, LayerDifference
from ..storage.key import key_name
from .geometry import Geometry, GroupKind
from .ledger import Ledger
from .lookup import Piece, PrefixLookup
from .token_database import ChunkedTokenDatabase

logger = logging.getLogger("kvtier.audit")

MAX_OPEN = 8  # audits out with the workers; the rest waits or is given up
PINNED_SHARE = 8  # at most one device block in so many is pinned
WRITE_PATIENCE_S = 60.0  # how long a condemned record that is being written is waited for
NULL_BLOCK = 0
REASON = "audit"

Removal = tuple[str, bytes, str]


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """How much is audited.

    Attributes:
        rate: share of hits, 0 to 1.
        draw: returns a number in [0, 1).
    """

    rate: float = 0.0
    draw: Callable[[], float] = random.random


@dataclass(slots=True)
class AuditTracker:
    """What of one request is audited.

    Attributes:
        drawn: whether its hit is to be audited; None before that was drawn.
        span: tokens [local, hit) of the last lookup that was answered with a miss.
        pieces: what waits to be compared.
    """

    drawn: bool | None = None
    span: tuple[int, int] | None = None
    pieces: list[Piece] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Open:
    """An audit that is out; ``hashes`` are the request's, which may still grow."""

    piece: Piece
    entry: Entry
    hashes: Sequence[bytes]


class Auditor:
    """Chooses hits to audit, plans comparisons, acts on what they find.

    Args:
        next_job_id: source of job ids, shared with loads and saves.
        generation: the namespace's.
    """

    def __init__(
        self,
        geometry: Geometry,
        catalog: Catalog,
        ledger: Ledger,
        counts: Counts,
        next_job_id: Callable[[], int],
        generation: Callable[[], int],
        options: AuditOptions,
    ) -> None:
        self._geometry = geometry
        self._catalog = catalog
        self._ledger = ledger
        self._counts = counts
        self._next_job_id = next_job_id
        self._generation = generation
        self._options = options
        self._lookup = PrefixLookup(geometry, catalog)
        self._database = ChunkedTokenDatabase(geometry)
        self._jobs: list[AuditJob] = []
        self._open: dict[int, _Open] = {}
        self._removals: list[Removal] = []
        # Dropped while a save was still writing them below, and when.
        self._writing: list[tuple[Entry, float]] = []
        self._max_pinned = max(1, geometry.num_blocks // PINNED_SHARE)
        self.worst_mean = 0.0  # of all audits that found no more than noise

    @property
    def waiting(self) -> bool:
        """Whether something is planned, or due, that no step has carried yet."""
        late_s = self._ledger.clock() - WRITE_PATIENCE_S
        due = any(entry.writes == 0 or at_s >= late_s for entry, at_s in self._writing)
        return bool(self._jobs or self._removals or due)

    # -- which hits -----------------------------------------------------------

    def wants(self, audit: AuditTracker, local_tokens: int, hit_tokens: int) -> bool:
        """Whether this hit is to be computed instead; the same answer until it is admitted."""
        if audit.drawn is None and self._options.rate > 0.0:
            audit.drawn = self._options.draw() < self._options.rate
        if not audit.drawn:
            return False
        audit.span = (local_tokens, hit_tokens)
        return True

    def admitted(self, audit: AuditTracker, hashes: Sequence[bytes]) -> None:
        """The request is about to compute: note what there is to compare. Once a request."""
        span, audit.span = audit.span, None
        audit.pieces = []
        if span is None:
            return
        audit.drawn = False
        pieces = self._lookup.pieces(hashes, *span) or ()
        whole = (self._whole_blocks(piece, span[1]) for piece in pieces)
        audit.pieces = sorted((p for p in whole if p is not None), key=self._needs_tokens)
        self._counts.add("audits")

    def _whole_blocks(self, piece: Piece, hit_tokens: int) -> Piece | None:
        """Return the piece without a last block that the hit covers only in part."""
        group = self._geometry.group(piece.group_id)
        if group.kind is GroupKind.RECURRENT:
            return None
        n = min(piece.first_block + piece.n_blocks, hit_tokens // group.block_tokens)
        n -= piece.first_block
        if n <= 0:
            return None
        return Piece(
            piece.key,
            piece.group_id,
            piece.start_tokens,
            piece.end_tokens,
            piece.stored_block,
            piece.stored_blocks,
            piece.first_block,
            n,
        )

    def _needs_tokens(self, piece: Piece) -> int:
        size = self._geometry.group(piece.group_id).block_tokens
        return (piece.first_block + piece.n_blocks) * size

    # -- each step ------------------------------------------------------------

    def plan(
        self,
        audit: AuditTracker,
        hashes: Sequence[bytes],
        table: Sequence[Sequence[int]],
        valid_tokens: int,
    ) -> None:
        """Plan what this step's forward completes, as far as there is room.

        Args:
            audit: what waits; what was planned or cannot be is taken off.
            hashes: the request's block hashes.
            table: block ids per engine group.
            valid_tokens: KV of so many tokens is valid once the forward has run.
        """
        while audit.pieces and self._needs_tokens(audit.pieces[0]) <= valid_tokens:
            piece = audit.pieces[0]
            if len(self._open) >= MAX_OPEN:
                return
            if self._ledger.pinned_blocks + piece.n_blocks > self._max_pinned:
                if self._open or self._ledger.pinned_blocks:
                    return  # later, or never: see `finished`
                self._counts.add("audit_skipped_chunks.pins")
            else:
                self._begin(piece, hashes, table)
            del audit.pieces[0]

    def _begin(self, piece: Piece, hashes: Sequence[bytes], table: Sequence[Sequence[int]]) -> None:
        entry = self._catalog.get(piece.key)
        source = None if entry is None else self._catalog.source_of(entry)
        blocks = table[piece.group_id][piece.first_block : piece.first_block + piece.n_blocks]
        if entry is None or source is None:
            self._counts.add("audit_skipped_chunks.gone")
            return
        if len(blocks) < piece.n_blocks or NULL_BLOCK in blocks:
            self._counts.add("audit_skipped_chunks.block_gone")
            return
        job = AuditJob(
            self._next_job_id(),
            self._generation(),
            piece.key,
            piece.group_id,
            piece.start_tokens,
            piece.end_tokens,
            source,
            piece.stored_blocks,
            piece.first_block - piece.stored_block,
            np.array(blocks, dtype=np.int64),
            entry.pages if source == RAM else None,
        )
        self._ledger.open_audit(job, entry)
        self._open[job.job_id] = _Open(piece, entry, hashes)
        self._jobs.append(job)

    def finished(self, audit: AuditTracker) -> None:
        """The request is over: what was not compared by now is not."""
        if audit.pieces:
            self._counts.add("audit_skipped_chunks.busy", len(audit.pieces))
            audit.pieces = []

    def take_jobs(self) -> tuple[AuditJob, ...]:
        """Return the audits for this step's plan."""
        jobs, self._jobs = tuple(self._jobs), []
        return jobs

    def take_removals(self) -> tuple[Removal, ...]:
        """Return (tier, key, reason) of records to take out of sight, for this step's plan."""
        written = [entry for entry, _ in self._writing if entry.writes == 0]
        if written:
            self._writing = [(entry, at_s) for entry, at_s in self._writing if entry.writes]
            left = {entry.key for entry, _ in self._writing}
            for entry in written:
                self._catalog.ban(entry.key, banned=entry.key in left)
                self._drop(entry.key)
        removals, self._removals = tuple(self._removals), []
        return removals

    # -- results --------------------------------------------------------------

    def settle(self, event: AuditDone) -> None:
        """Take in one rank's result; act once all ranks have told theirs."""
        results = self._ledger.audit_done(event)
        if results is None:
            return
        opened = self._open.pop(event.job_id)
        bad = next((r.status for r in results if r.status is not ChunkStatus.OK), None)
        layers = [layer for result in results for layer in result.layers]
        found = [layer for layer in layers if layer.differs]
        if bad is not None and not found:
            self._counts.add(f"audit_skipped_chunks.{bad.name.lower()}")
            return
        self._counts.add("audited_chunks")
        self._counts.add("audited_values", sum(layer.values for layer in layers))
        self._counts.add("audited_exact_values", sum(layer.exact for layer in layers))
        if found:
            self._found(opened, found)
        else:
            self.worst_mean = max([self.worst_mean, *(layer.mean for layer in layers)])

    def _found(self, opened: _Open, found: Sequence[LayerDifference]) -> None:
        self._counts.add("audit_differing_chunks")
        if opened.entry.dead:
            return  # an earlier chunk of the chain was found before
        piece = opened.piece
        first = min(found, key=lambda layer: layer.block)  # the first layer of the first block
        size = self._geometry.group(piece.group_id).block_tokens
        n_dropped = self._drop_from(opened.hashes, piece)
        logger.error(
            "kvtier: audit: stored KV of %s (group %d) differs from computed at tokens %d to %d: "
            "mean relative difference %.3g, largest %.3g, %d of %d values exact, %d layers differ; "
            "record %s and %d after it are dropped",
            first.layer,
            piece.group_id,
            (piece.first_block + first.block) * size,
            (piece.first_block + first.block + 1) * size,
            first.mean,
            first.largest,
            first.exact,
            first.values,
            len(found),
            key_name(piece.key),
            n_dropped - 1,
        )

    def _drop_from(self, hashes: Sequence[bytes], piece: Piece) -> int:
        """Drop the record and whatever else of this chain ends after the record's start."""
        unit = self._geometry.hash_block_tokens
        keys = [piece.key]
        for end in range(piece.start_tokens // unit * unit + unit, len(hashes) * unit + 1, unit):
            keys += [self._database.key_at(hashes, end, g.group_id) for g in self._geometry.groups]
        known = [key for key in dict.fromkeys(keys) if self._catalog.get(key) is not None]
        for key in known:
            self._drop(key)
        self._counts.add("audit_dropped_chunks", len(known))
        return len(known)

    def condemn(self, keys: Sequence[bytes], reason: str) -> None:
        """Forget chunks known to be wrong, and have every rank take their records out of sight."""
        for key in keys:
            self._drop(key, reason)

    def _drop(self, key: bytes, reason: str = REASON) -> None:
        entry = self._catalog.get(key)
        if entry is not None:
            self._catalog.drop(key)
            if entry.writes:  # once more when it has been written, and not served till then
                self._writing.append((entry, self._ledger.clock()))
                self._catalog.ban(key, banned=True)
        self._removals += [(tier, key, reason) for tier in self._catalog.tiers]

    def reset(self) -> None:
        """The namespace is void: there is nothing left to take out of sight."""
        self._removals, self._writing = [], []
