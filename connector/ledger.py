"""Jobs that are out with the workers: what they hold, and which ranks have answered.

Every job holds device blocks (saves), catalog entries (both) and, for a load,
a request that waits. Each is let go exactly once, when the last rank has said
so. Scheduler thread only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..storage.catalog import Catalog
from ..storage.entry import Entry
from ..storage.jobs import (
    AuditCopied,
    AuditDone,
    AuditJob,
    ChunkStatus,
    LoadChunk,
    LoadDone,
    LoadJob,
    LoadRetired,
    SaveCopied,
    SaveJob,
    SaveRetired,
)

STEP_PATIENCE_S = 5.0  # how long a job that nobody waits for keeps the engine stepping


@dataclass(slots=True)
class _Save:
    job: SaveJob
    entries: tuple[Entry, ...]
    device_blocks: list[int]
    copies_left: int
    retires_left: int
    ok: list[bool]
    opened_at_s: float


@dataclass(slots=True)
class _Load:
    job: LoadJob
    entries: tuple[Entry, ...]  # one a chunk
    filling: tuple[bool, ...]  # whether the chunk's own pages are being filled
    dones_left: int
    retires_left: int
    worst: list[int]
    filled: list[bool]
    opened_at_s: float
    ok: bool = True


@dataclass(slots=True)
class _Audit:
    job: AuditJob
    entry: Entry
    device_blocks: list[int]
    copies_left: int
    dones_left: int
    opened_at_s: float
    results: list[AuditDone] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """A load that every rank has reported: the worst status of each chunk."""

    job: LoadJob
    statuses: tuple[ChunkStatus, ...]
    ok: bool  # every byte is in place on every rank


@dataclass(frozen=True, slots=True)
class LoadEnd:
    """What is left of a load when a rank has finished with its pages.

    Attributes:
        lost: chunks found missing or damaged after the load was told.
        hollow: pages that were to be filled were not.
    """

    request_id: str
    lost: tuple[LoadChunk, ...]
    hollow: bool


@dataclass(slots=True)
class Ledger:
    """All jobs that are out.

    Attributes:
        pin_blocks, unpin_blocks: take and give back references of device blocks.
        unwritten_at_s: when a write-back last ended with nothing held below RAM.
    """

    catalog: Catalog
    n_ranks: int
    pin_blocks: Callable[[Sequence[int]], None]
    unpin_blocks: Callable[[Sequence[int]], None]
    clock: Callable[[], float]
    pinned_blocks: int = 0
    unwritten_at_s: float = -math.inf
    _saves: dict[int, _Save] = field(default_factory=dict)
    _loads: dict[int, _Load] = field(default_factory=dict)
    _audits: dict[int, _Audit] = field(default_factory=dict)

    @property
    def outstanding(self) -> bool:
        """Whether any job has not been answered in full."""
        return bool(self._saves or self._loads or self._audits)

    def urgent(self, patience_s: float = STEP_PATIENCE_S) -> bool:
        """Whether the engine must step for a job: its blocks or a request wait, or it is young.

        The end of any other is told whenever the engine steps next; it may never come, where
        a tier hangs, and a pause or a stop waits for an engine that has nothing to step for.
        """
        since_s = self.clock() - patience_s
        return (
            any(save.copies_left or save.opened_at_s > since_s for save in self._saves.values())
            or any(load.dones_left or load.opened_at_s > since_s for load in self._loads.values())
            or any(a.copies_left or a.opened_at_s > since_s for a in self._audits.values())
        )

    def pinning(self, patience_s: float) -> bool:
        """Whether device blocks are held that will soon come back by themselves."""
        if self.pinned_blocks == 0:
            return False
        since_s = self.clock() - patience_s
        return any(save.copies_left and save.opened_at_s > since_s for save in self._saves.values())

    def open_save(self, job: SaveJob, entries: Sequence[Entry]) -> None:
        """Take the device blocks of a save whose entries are pinned already."""
        blocks = list(dict.fromkeys(b for chunk in job.chunks for b in chunk.blocks.tolist()))
        self.pin_blocks(blocks)
        self.pinned_blocks += len(blocks)
        n = self.n_ranks
        for entry in entries:
            entry.writes += 1
        ok = [True] * len(entries)
        self._saves[job.job_id] = _Save(job, tuple(entries), blocks, n, n, ok, self.clock())

    def open_load(self, job: LoadJob, entries: Sequence[Entry], filling: Sequence[bool]) -> None:
        """Note a load; entries with pages in use are pinned already."""
        n = len(job.chunks)
        if job.request_id:
            for entry, fills in zip(entries, filling, strict=True):
                entry.loads += fills
        self._loads[job.job_id] = _Load(
            job,
            tuple(entries),
            tuple(filling),
            self.n_ranks,
            self.n_ranks,
            [ChunkStatus.OK] * n,
            [True] * n,
            self.clock(),
        )

    def save_copied(self, event: SaveCopied) -> None:
        """One rank has read the device blocks of a save."""
        save = self._saves[event.job_id]
        save.ok = [a and b == ChunkStatus.OK for a, b in zip(save.ok, event.statuses, strict=True)]
        save.copies_left -= 1
        if save.copies_left == 0:
            self.unpin_blocks(save.device_blocks)
            self.pinned_blocks -= len(save.device_blocks)
            for entry, chunk, ok in zip(save.entries, save.job.chunks, save.ok, strict=True):
                if len(chunk.blocks):
                    self.catalog.filled(entry, ok)

    def save_retired(self, event: SaveRetired, holder: int) -> None:
        """One rank has finished with the pages of a save; ``holder`` keeps what it wrote."""
        save = self._saves[event.job_id]
        for index, tier in event.written:
            if save.ok[index] and not save.entries[index].dead:
                chunk = save.job.chunks[index]
                self.catalog.tier_added(tier, chunk.key, holder, len(chunk.pages))
        save.retires_left -= 1
        if save.retires_left == 0:
            held = any(self.catalog.held_below(entry) for entry in save.entries)
            if not held and not save.device_blocks:
                self.unwritten_at_s = self.clock()
            del self._saves[event.job_id]
            for entry, chunk in zip(save.entries, save.job.chunks, strict=True):
                entry.dropped = bool(chunk.tiers) and not self.catalog.held_below(entry)
                entry.writes -= 1
                self.catalog.unpin(entry)

    def load_done(self, event: LoadDone) -> LoadOutcome | None:
        """One rank's device blocks are final; the outcome once all ranks' are."""
        load = self._loads[event.job_id]
        load.worst = [
            b if a == ChunkStatus.OK else a for a, b in zip(load.worst, event.statuses, strict=True)
        ]
        load.ok = load.ok and event.ok
        load.dones_left -= 1
        if load.dones_left:
            return None
        if load.job.request_id:
            for entry, fills in zip(load.entries, load.filling, strict=True):
                entry.loads -= fills
        return LoadOutcome(load.job, tuple(ChunkStatus(s) for s in load.worst), load.ok)

    def load_retired(self, event: LoadRetired) -> LoadEnd:
        """One rank has finished with the pages of a load."""
        load = self._loads[event.job_id]
        load.filled = [a and bool(b) for a, b in zip(load.filled, event.filled, strict=True)]
        load.retires_left -= 1
        hollow = False
        if load.retires_left == 0:
            del self._loads[event.job_id]
            for i, entry in enumerate(load.entries):
                if load.filling[i]:
                    hollow |= not load.filled[i]
                    self.catalog.filled(entry, load.filled[i])
                    self.catalog.unpin(entry)
                elif load.job.chunks[i].source == "ram":
                    self.catalog.unpin(entry)
        lost = tuple(load.job.chunks[i] for i in event.lost)
        return LoadEnd(load.job.request_id, lost, hollow)

    def open_audit(self, job: AuditJob, entry: Entry) -> None:
        """Take the device blocks of an audit, and the RAM pages that it reads."""
        blocks = job.blocks.tolist()
        self.pin_blocks(blocks)
        self.pinned_blocks += len(blocks)
        if job.pages is not None:
            self.catalog.pin(entry)
        n, now_s = self.n_ranks, self.clock()
        self._audits[job.job_id] = _Audit(job, entry, blocks, n, n, now_s)

    def audit_copied(self, event: AuditCopied) -> None:
        """One rank has read the device blocks of an audit."""
        audit = self._audits[event.job_id]
        audit.copies_left -= 1
        if audit.copies_left == 0:
            self.unpin_blocks(audit.device_blocks)
            self.pinned_blocks -= len(audit.device_blocks)

    def audit_done(self, event: AuditDone) -> tuple[AuditDone, ...] | None:
        """One rank has compared; all ranks' results once the last one has."""
        audit = self._audits[event.job_id]
        audit.results.append(event)
        audit.dones_left -= 1
        if audit.dones_left:
            return None
        del self._audits[event.job_id]
        if audit.job.pages is not None:
            self.catalog.unpin(audit.entry)
        return tuple(audit.results)
