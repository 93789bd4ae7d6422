"""What a tier below RAM is.

A tier keeps records: one for each chunk and rank. The interface is small and
blocking; every call is made from a worker thread, never from the engine's.
Queues, deadlines, breakers and retries are wrapped around a tier
(`kvtier.storage.transfer`), never built into one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

Buffers = Sequence[memoryview]
"""Writable (get) or readable (put) byte views, in payload order.

Each view's length is a multiple of `ALIGN_BYTES` and starts at an address
that is one too (RAM pages are), so that O_DIRECT can use them as they are.
The caller owns them and keeps them alive and unchanged until the call returns.
"""

ALIGN_BYTES = 4096
PROBE_KEY = b"\0" * 32 + b"\0"  # nobody's


@dataclass(frozen=True, slots=True)
class RecordSpec:
    """Which record is meant, and what its header must say.

    Attributes:
        key: chunk key (`kvtier.storage.key`).
        start_tokens: first token position that the chunk covers.
        end_tokens: one past the last.
        raw_bytes: length of the decoded payload; the buffers' total length.
    """

    key: bytes
    start_tokens: int
    end_tokens: int
    raw_bytes: int


@dataclass(frozen=True, slots=True)
class RecordInfo:
    """What a scan tells of one record, without reading its payload."""

    key: bytes
    stored_bytes: int  # what it takes on the tier, header included
    used_at_s: float  # last use, Unix time


class PutResult(str, Enum):
    """How a put ended when nothing was raised."""

    STORED = "stored"
    EXISTS = "exists"  # an intact-looking record is there already


@dataclass(frozen=True, slots=True)
class TierCapabilities:
    """What a tier can do, as data."""

    persistent: bool  # outlives the process
    shared: bool  # other engines may add and remove records
    evicts: bool  # removes records by itself to hold its capacity


@dataclass(frozen=True, slots=True)
class TierStat:
    """Residency of this rank's namespace and of the whole tier."""

    records: int
    stored_bytes: int
    capacity_bytes: int | None  # None: not limited by us


@dataclass(frozen=True, slots=True)
class TierChanges:
    """Keys that appeared and vanished since the last call (own and others' doing)."""

    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    complete: bool = True  # False while the first index is still being built


class Tier(ABC):
    """Records of one namespace and one rank.

    All methods are thread-safe and blocking. They raise only
    `RecordError` and `TierError` subclasses.
    """

    name: str
    capabilities: TierCapabilities

    @abstractmethod
    def put(self, spec: RecordSpec, payload: Buffers, *, replace: bool = False) -> PutResult:
        """Store a record, whole or not at all.

        With ``replace`` an existing record is overwritten (a healed chunk);
        without it an existing record of this key is left alone.

        Raises:
            RecordRefused: not this one now, where others can be.
            TierRefused: full (after eviction, where the tier evicts) or read-only.
            TierUnavailable: the tier does not answer.
        """

    @abstractmethod
    def get(self, spec: RecordSpec, into: Buffers) -> int:
        """Read, verify and decode a record into ``into``; return the bytes read from the tier.

        On any exception the content of ``into`` is undefined and must not be used.

        Raises:
            RecordMissing: no such record.
            RecordDamaged: header, identity, length or checksum disagree.
            TierUnavailable: the tier does not answer.
        """

    @abstractmethod
    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which keys have a record, in as few round trips as can be. A hint, not a proof."""

    @abstractmethod
    def delete(self, keys: Iterable[bytes]) -> int:
        """Delete records; return how many were there."""

    def quarantine(self, key: bytes, reason: str) -> None:  # noqa: ARG002
        """Take a damaged record out of sight (default: delete it)."""
        self.delete([key])

    def probe(self) -> None:
        """Find out whether the tier answers, as a read would (default: ask for a key).

        Raises:
            TierUnavailable: it does not.
        """
        self.contains_many([PROBE_KEY])

    @abstractmethod
    def scan(self) -> Iterator[RecordInfo]:
        """Yield all records of this namespace and rank, in no order."""

    @abstractmethod
    def touch(self, keys: Iterable[bytes]) -> None:
        """Mark records as just used, given most recent last; cheap, best effort."""

    @abstractmethod
    def changes(self) -> TierChanges:
        """Return and forget what appeared and vanished since the last call. Never blocks on I/O."""

    @abstractmethod
    def stat(self) -> TierStat:
        """Return what is known without I/O."""

    @abstractmethod
    def clear(self) -> None:
        """Delete every record of this namespace and rank.

        Raises:
            TierUnavailable: not everything could be deleted; says what is left.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back threads, descriptors and locks. Idempotent."""
