"""What a command needs of a store, a folder or a Redis server: one small interface.

Every verb is written against `Store`. Reading changes nothing in a store;
`delete`, `quarantine`, `sweep` and `writer` do, and are only called where a
person has asked for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..storage.key import key_name
from .exit_codes import ExitCode
from .reporting import CommandError

if TYPE_CHECKING:
    from types import TracebackType

    from ..storage.disk_verify import VerifyResult
    from ..storage.pins import Pin
    from ..storage.record import Header
    from ..storage.tier import Tier

CHANGE_RECORDS = 64  # changed at once: one round trip to a server for many


@dataclass(frozen=True, slots=True)
class Space:
    """A namespace of a store.

    Attributes:
        namespace: 16 bytes.
        description: its fields in plain words, or None.
        problem: why there is no description, or None.
    """

    namespace: bytes
    description: dict[str, Any] | None
    problem: str | None = None

    @property
    def name(self) -> str:
        """As people see it."""
        return self.namespace.hex()


class Record(NamedTuple):
    """One record as a walk finds it; its payload is not read.

    Attributes:
        namespace: 16 bytes.
        rank: whose bytes these are.
        key: chunk key.
        stored_bytes: what it takes, header included.
        used_at_s: last use, Unix time.
        place: path, or name in Redis.
        source: what the store needs to find it again.
    """

    namespace: bytes
    rank: int
    key: bytes
    stored_bytes: int
    used_at_s: float
    place: str
    source: Any = None

    @property
    def name(self) -> str:
        """Its key as people see it."""
        return key_name(self.key)

    @property
    def order(self) -> tuple[str, str, str]:
        """Where it comes in a walk in order."""
        return (self.namespace.hex(), f"r{self.rank}", self.name)


@dataclass(frozen=True, slots=True)
class Loose:
    """Bytes in a store that belong to no record.

    Attributes:
        place: path, or name in Redis.
        n_bytes: how many; 0 where that is not known.
        what: in words.
    """

    place: str
    n_bytes: int
    what: str


@dataclass(frozen=True, slots=True)
class Broken:
    """A namespace's description that cannot be read; its records are as good as ever.

    Attributes:
        namespace: 16 bytes.
        place: path, or name in Redis.
        problem: why it cannot be read.
    """

    namespace: bytes
    place: str
    problem: str

    def as_dict(self) -> dict[str, str]:
        """Return the fields for ``--json``."""
        return {"namespace": self.namespace.hex(), "path": self.place, "problem": self.problem}


@dataclass(frozen=True, slots=True)
class Capacity:
    """Room in a store; None where it does not say.

    Attributes:
        used_bytes: of the disk or the server, other people's included.
        limit_bytes: most that it can hold.
        free_bytes: left.
        note: in words.
        store_limit_bytes: of a folder, the `disk_capacity` of the engine that started there last;
            None where nobody has said one.
    """

    used_bytes: int | None
    limit_bytes: int | None
    free_bytes: int | None
    note: str | None
    store_limit_bytes: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for ``--json``."""
        return {
            "used_bytes": self.used_bytes,
            "limit_bytes": self.limit_bytes,
            "free_bytes": self.free_bytes,
            "note": self.note,
            "store_limit_bytes": self.store_limit_bytes,
        }


class Writer(ABC):
    """Puts records into one namespace and rank of a store, as they are stored elsewhere."""

    @abstractmethod
    def put(
        self, header: Header, stored: memoryview, used_at_s: float, *, replace: bool = False
    ) -> bool:
        """Store a record; False when one of this key is there already, and is to stay.

        Raises:
            TierRefused, TierUnavailable.
        """


class Store(ABC):
    """A store, opened for a command. A context manager; blocking.

    Attributes:
        name: how messages and ``--json`` call it: without secrets.
        kind: ``disk`` or ``redis``.
        to_fix: in words, what `quarantine` of damaged records comes to here.
        fixed: the same where it is done.
    """

    name: str
    kind: str
    to_fix = "move them out of the way"
    fixed = "quarantined"

    def is_same(self, other: Store) -> bool:
        """Whether both are one and the same store."""
        return self.name == other.name

    @abstractmethod
    def spaces(self) -> list[Space]:
        """Return the namespaces that have a description or records, by name."""

    @abstractmethod
    def described(self) -> list[Space]:
        """Return the namespaces that have a description (a folder: all), without a walk."""

    @abstractmethod
    def records(self, namespace: bytes | None = None, start: str = "") -> Iterator[Record]:
        """Yield records as they are found; one may come twice.

        Args:
            namespace: only this one, or None for all.
            start: only keys whose name begins so.
        """

    @abstractmethod
    def ordered(self, namespace: bytes | None = None) -> Iterator[Record]:
        """Yield records ordered by `Record.order`, each once; size and last use may be 0."""

    @abstractmethod
    def count(self, namespace: bytes | None = None) -> Iterator[tuple[bytes, int, bytes]]:
        """Yield (namespace, rank, key) of every record, the quickest way there is."""

    @abstractmethod
    def headers(self, wanted: list[Record]) -> Iterator[tuple[Record, Header]]:
        """Yield the headers of those records that have an intact one."""

    @abstractmethod
    def sample(self, wanted: list[tuple[bytes, int, bytes]]) -> list[Record]:
        """Return the records of these namespaces, ranks and keys that are there."""

    @abstractmethod
    def check(self, record: Record) -> VerifyResult:
        """Read a whole record and check all of it.

        Raises:
            RecordMissing: gone meanwhile.
            TierUnavailable: the store does not answer.
        """

    @abstractmethod
    def stored(self, record: Record) -> tuple[Header, memoryview]:
        """Return a record's header and its payload as stored, checked.

        Raises:
            RecordMissing, RecordDamaged, TierUnavailable.
        """

    @abstractmethod
    def capacity(self) -> Capacity:
        """Return how full the disk or server is."""

    @abstractmethod
    def quarantined(self) -> tuple[int, int]:
        """Return how many damaged records are kept to be looked at, and their bytes."""

    @abstractmethod
    def loose(self) -> list[Loose]:
        """Return what belongs to no record and to nobody who is still writing."""

    @abstractmethod
    def current_epoch(self, description: Mapping[str, Any]) -> int | None:
        """Return the cache epoch that engines of this description use; None: no engine's."""

    @abstractmethod
    def tier(self, namespace: bytes, rank: int) -> Tier:
        """Open the tier of one namespace and rank, to change something; evicts nothing."""

    @abstractmethod
    def writer(self, space: Space, rank: int) -> AbstractContextManager[Writer]:
        """Open one namespace and rank for records of another store."""

    @abstractmethod
    def broken_descriptions(self) -> list[Broken]:
        """Return the descriptions that cannot be read, of namespaces that have records."""

    @abstractmethod
    def drop_description(self, broken: Broken) -> bool:
        """Take a broken description away, so that an engine writes it anew; False: it is gone.

        Raises:
            OSError, TierUnavailable: it is still there.
        """

    @abstractmethod
    def sweep(self, loose: list[Loose]) -> int:
        """Remove what `loose` returned; return how much of it was there."""

    def went(self, namespace: bytes, rank: int, key: bytes) -> bool:  # noqa: ARG002
        """Return whether the store remembers a record that is not there; False proves nothing."""
        return False

    @abstractmethod
    def pins(self) -> list[Pin]:
        """Return what people have pinned, the oldest first."""

    @abstractmethod
    def pin(self, pin: Pin, records: list[Record]) -> None:
        """Pin records: keep them from eviction, as far as this store can."""

    @abstractmethod
    def unpin(self, pin: Pin) -> None:
        """Drop a pin; what no other pin holds is evicted like anything else again."""

    @abstractmethod
    def pin_limit_bytes(self) -> int | None:
        """Return how many bytes may be pinned; None where the store does not say."""

    @abstractmethod
    def pin_warning(self) -> str | None:
        """Return why pins may not hold here, in one line; None where they do."""

    def no_ages(self) -> str | None:
        """Return why this store does not tell when records were used; None where it does."""
        return None

    @abstractmethod
    def forget(self, namespace: bytes) -> None:
        """Remove what is kept of a namespace without records; does nothing while it has any."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Idempotent."""

    def __enter__(self) -> Store:  # noqa: PYI034 - typing.Self is 3.11
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def pick(self, start: str | None) -> bytes | None:
        """Return the one namespace whose hex form begins with ``start``; None for all.

        Raises:
            CommandError: none, or several.
        """
        if start is None:
            return None
        if not start:  # an empty variable in a script
            raise CommandError("--namespace is empty", ExitCode.USAGE)
        found = [space for space in self.spaces() if space.name.startswith(start)]
        if len(found) != 1:
            raise ambiguous("namespace", start, len(found))
        return found[0].namespace

    def pinned(self) -> dict[bytes, frozenset[bytes]]:
        """Return the keys that are pinned, by namespace."""
        from ..storage.pins import keys_by_namespace

        return keys_by_namespace(self.pins())

    def find(self, start: str, namespace: bytes | None = None) -> list[Record]:
        """Return the records of the one key that is, or begins with, ``start``.

        One for each namespace and rank that has it.

        Raises:
            CommandError: no such key, or several.
        """
        if not start:
            raise CommandError("the key is empty", ExitCode.USAGE)
        found = {record.order: record for record in self.records(namespace, start)}
        names = {record.name for record in found.values()}
        if not names:
            raise CommandError(f"no record's key begins with {start!r}; `kvtier ls` prints them")
        if len(names) > 1 and start not in names:
            raise CommandError(
                f"{len(names)} keys begin with {start!r}; give more of it", ExitCode.USAGE
            )
        name = start if start in names else names.pop()
        return [found[order] for order in sorted(found) if found[order].name == name]

    def has_records(self, namespace: bytes) -> bool:
        """Whether a namespace has any record."""
        return next(self.count(namespace), None) is not None

    def change(
        self,
        records: Iterable[Record],
        work: Callable[[Tier, Sequence[Record]], None],
    ) -> Iterator[Record]:
        """Run ``work`` on batches of records with their tier open; yield those that are done.

        Raises:
            TierError: of the first batch that fails; those before it are done.
        """
        by_place: dict[tuple[bytes, int], list[Record]] = {}
        for record in records:
            by_place.setdefault((record.namespace, record.rank), []).append(record)
        for place in sorted(by_place):
            tier = self.tier(*place)
            try:
                for at in range(0, len(by_place[place]), CHANGE_RECORDS):
                    batch = by_place[place][at : at + CHANGE_RECORDS]
                    work(tier, batch)
                    yield from batch
            finally:
                tier.close()


def ambiguous(what: str, start: str, n_found: int) -> CommandError:
    """Return the error for a name that nothing has (failure), or that says too little (usage)."""
    which = f"no {what} begins" if not n_found else f"{n_found} {what}s begin"
    code = ExitCode.USAGE if n_found else ExitCode.FAILURE
    return CommandError(f"{which} with {start!r}; see `kvtier stat`", code)


def delete(tier: Tier, records: Sequence[Record]) -> None:
    """Delete records; for `Store.change`."""
    tier.delete([record.key for record in records])
