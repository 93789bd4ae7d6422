"""Jobs that a `kvtier.storage.transfer.Transfer` runs, and the events it reports.

Plain data: built by whoever decides (the scheduler half, or a tool), pickled
between processes or shared inside one, and never changed once handed over.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


class ChunkStatus(IntEnum):
    """How one chunk of a job ended. Not attempted counts as failed."""

    NOT_ATTEMPTED = 0
    OK = 1
    MISSING = 2
    DAMAGED = 3
    TIER_DOWN = 4
    COPY_FAILED = 5
    DEADLINE = 6
    CANCELLED = 7


@dataclass(frozen=True, slots=True)
class SaveChunk:
    """One chunk to copy out of the device.

    Attributes:
        blocks: device block ids (n,) int64, in token order; none where the pages hold
            the bytes already and are only to be written below.
        pages: RAM page ids (n,) int64, one for each block.
        tiers: names of the lower tiers to write behind.
    """

    key: bytes
    group: int
    start_tokens: int
    end_tokens: int
    blocks: Ids
    pages: Ids
    tiers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Chunks whose device blocks are valid once this step's forward has run.

    ``generation`` is the namespace that the bytes belong to: after a reset, what
    was computed before may not be written any more.
    """

    job_id: int
    generation: int
    chunks: tuple[SaveChunk, ...]


@dataclass(frozen=True, slots=True)
class LoadChunk:
    """One chunk to bring to the device.

    Attributes:
        source: "ram" or the name of a lower tier.
        n_blocks: blocks that the record stores.
        offset_blocks: first stored block to use.
        blocks: device block ids (m,) int64 to fill, m <= n_blocks - offset_blocks.
        pages: RAM page ids (n_blocks,) int64: where the bytes are (source "ram")
            or shall stay; None streams through the worker's staging pages.
    """

    key: bytes
    group: int
    start_tokens: int
    end_tokens: int
    source: str
    n_blocks: int
    offset_blocks: int
    blocks: Ids
    pages: Ids | None


@dataclass(frozen=True, slots=True)
class LoadJob:
    """What one request waits for (or nobody: a wish to warm); group by group, in token order.

    A ``doomed`` job, or one of another ``generation`` of the namespace, is reported
    as failed at once: what it was promised is gone.
    """

    job_id: int
    generation: int
    request_id: str
    deadline_s: float  # from the worker's receipt
    chunks: tuple[LoadChunk, ...]
    doomed: bool = False


@dataclass(frozen=True, slots=True)
class AuditJob:
    """Part of one record to compare with device blocks that were computed anew.

    Attributes:
        source: "ram" or the name of a lower tier.
        n_blocks: blocks that the record stores.
        offset_blocks: first stored block to compare.
        blocks: device block ids (m,) int64, m <= n_blocks - offset_blocks; valid once
            this step's forward has run.
        pages: RAM page ids (n_blocks,) int64 where the record is in RAM, else None.
    """

    job_id: int
    generation: int
    key: bytes
    group: int
    start_tokens: int
    end_tokens: int
    source: str
    n_blocks: int
    offset_blocks: int
    blocks: Ids
    pages: Ids | None


@dataclass(frozen=True, slots=True)
class LayerDifference:
    """How one layer's computed and stored KV compare.

    Attributes:
        values: how many were compared.
        exact: how many were the same, bit for bit.
        largest: largest relative difference of a value.
        mean: mean relative difference, of the worst slice of a block.
        block: index of the first block that differs beyond the noise; where none
            does, of the worst one.
        differs: beyond the noise.
    """

    layer: str
    values: int
    exact: int
    largest: float
    mean: float
    block: int
    differs: bool


@dataclass(frozen=True, slots=True)
class SaveCopied:
    """Device blocks have been read (or given up); they may be reused. One `ChunkStatus` a chunk."""

    job_id: int
    statuses: bytes


@dataclass(frozen=True, slots=True)
class SaveRetired:
    """Nothing of the job is left in the worker: its RAM pages are free to go.

    ``written`` names (chunk index, tier) pairs that are on a lower tier now.
    """

    job_id: int
    written: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class LoadDone:
    """All of a load's device blocks are final. One `ChunkStatus` a chunk."""

    job_id: int
    request_id: str
    statuses: bytes
    ok: bool


@dataclass(frozen=True, slots=True)
class LoadRetired:
    """No thread touches the job's RAM pages any more.

    ``filled`` has a 1 for each chunk whose RAM pages now hold its verified bytes;
    ``lost`` numbers the chunks found missing or damaged after `LoadDone` was told.
    """

    job_id: int
    filled: bytes
    lost: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TierNews:
    """Records that appeared on or vanished from a tier of this rank."""

    tier: str
    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    complete: bool = True
    online: bool = True
    reset: bool = False  # everything known before is void


@dataclass(frozen=True, slots=True)
class AuditCopied:
    """An audit's device blocks have been read (or given up); they may be reused."""

    job_id: int


@dataclass(frozen=True, slots=True)
class AuditDone:
    """An audit is over; ``layers`` are the rank's, and empty unless ``status`` is OK."""

    job_id: int
    status: ChunkStatus
    layers: tuple[LayerDifference, ...] = ()


Event = SaveCopied | SaveRetired | LoadDone | LoadRetired | TierNews | AuditCopied | AuditDone
