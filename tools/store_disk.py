"""A folder of a disk tier, as commands see it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import TYPE_CHECKING, Any

from ..storage.disk_layout import (
    CONTROL,
    NAMESPACE_FILE,
    QUARANTINE,
    TOKEN_AGE_S,
    WITHOUT_CAP_BYTES,
    RecordFile,
    iter_quarantine,
    iter_record_files,
    iter_tmp_files,
    list_namespaces,
    make_folders,
    rank_folder,
    record_path,
)
from ..storage.errors import KVTierError
from .exit_codes import ExitCode
from .reporting import CommandError
from .store_base import Broken, Capacity, Loose, Record, Space, Store, Writer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ..storage.disk import DiskTier
    from ..storage.disk_verify import VerifyResult
    from ..storage.pins import Pin
    from ..storage.record import Header


class DiskStore(Store):
    """A folder."""

    kind = "disk"

    def __init__(self, target: str, *, create: bool = False) -> None:
        """Open a folder; an empty one is an empty store.

        Raises:
            CommandError: nothing there (unreachable), or something else (wrong format).
        """
        root = os.path.abspath(os.path.expanduser(target))
        self.name = self.root = root
        if not os.path.lexists(root):
            if create:
                return
            raise CommandError(f"{target}: no such folder", ExitCode.UNREACHABLE)
        if not os.path.isdir(root):
            raise CommandError(f"{target} is no folder, so no kvtier store", ExitCode.WRONG_FORMAT)
        names = os.listdir(root)
        if names and not list_namespaces(root) and not {CONTROL, QUARANTINE} & set(names):
            raise CommandError(
                f"{target} is no kvtier store: none of its {len(names)} entries is a namespace",
                ExitCode.WRONG_FORMAT,
            )

    def is_same(self, other: Store) -> bool:
        """Compare the folders, however they are called; see `Store.is_same`."""
        if not isinstance(other, DiskStore):
            return False
        return os.path.realpath(self.root) == os.path.realpath(other.root)

    def spaces(self) -> list[Space]:
        """Return the namespaces; see `Store.spaces`."""
        return self.described()

    def described(self) -> list[Space]:
        """Return every namespace's folder; see `Store.described`."""
        if not os.path.isdir(self.root):
            return []
        return [
            Space(info.namespace, info.description, info.problem)
            for info in list_namespaces(self.root)
        ]

    def records(self, namespace: bytes | None = None, start: str = "") -> Iterator[Record]:
        """Yield records in order; see `Store.records`."""
        for file in iter_record_files(self.root, namespace, start=start):
            yield _record(file)

    def ordered(self, namespace: bytes | None = None) -> Iterator[Record]:
        """Yield records in order; see `Store.ordered`."""
        return self.records(namespace)

    def count(self, namespace: bytes | None = None) -> Iterator[tuple[bytes, int, bytes]]:
        """Yield every record; see `Store.count`."""
        for file in iter_record_files(self.root, namespace):
            yield file.namespace, file.rank, file.key

    def headers(self, wanted: list[Record]) -> Iterator[tuple[Record, Header]]:
        """Read one block of each file; see `Store.headers`."""
        from ..storage.disk_verify import read_header

        for record in wanted:
            with contextlib.suppress(KVTierError):
                yield record, read_header(record.place)

    def sample(self, wanted: list[tuple[bytes, int, bytes]]) -> list[Record]:
        """Look at the files; see `Store.sample`."""
        found = []
        for namespace, rank, key in wanted:
            path = record_path(rank_folder(self.root, namespace, rank), key)
            with contextlib.suppress(OSError):
                status = os.lstat(path)
                found.append(
                    _record(RecordFile(path, namespace, rank, key, status.st_size, status.st_mtime))
                )
        return found

    def check(self, record: Record) -> VerifyResult:
        """Read a whole file; see `Store.check`."""
        from ..storage.disk_verify import verify_file

        return verify_file(record.place, record.source)

    def stored(self, record: Record) -> tuple[Header, memoryview]:
        """Read a whole file; see `Store.stored`."""
        from ..storage.disk_verify import read_stored

        return read_stored(record.place, record.source)

    def capacity(self) -> Capacity:
        """Ask the file system, and what the last engine to start was given."""
        from ..storage.disk_place import read_capacity

        root = self.root
        while not os.path.isdir(root):
            root = os.path.dirname(root)
        disk = os.statvfs(root)
        limit_bytes, free_bytes = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
        used_bytes = limit_bytes - disk.f_bfree * disk.f_frsize
        return Capacity(
            used_bytes, limit_bytes, free_bytes, "the whole file system", read_capacity(self.root)
        )

    def quarantined(self) -> tuple[int, int]:
        """Look into the quarantine folder."""
        sizes = [n_bytes for _, n_bytes, _ in iter_quarantine(self.root)]
        return len(sizes), sum(sizes)

    def quarantined_names(self) -> list[str]:
        """Return the file names in quarantine."""
        return [os.path.basename(path) for path, _, _ in iter_quarantine(self.root)]

    def went(self, namespace: bytes, rank: int, key: bytes) -> bool:
        """Look into the journal, which tells of the last few thousand records."""
        from ..storage.disk_journal import mentions

        return mentions(rank_folder(self.root, namespace, rank), key)

    def unfinished(self) -> tuple[int, int]:
        """Return how many files are being written, or were left half-written, and their bytes."""
        sizes = [n_bytes for _, _, n_bytes in iter_tmp_files(self.root)]
        return len(sizes), sum(sizes)

    def loose(self) -> list[Loose]:
        """Return temporary files whose writers are dead; see `Store.loose`."""
        files = list(iter_tmp_files(self.root))  # before the owners: the living come first
        living = _living(f"{self.root}/{CONTROL}/owners") if files else set()
        return [
            Loose(path, n_bytes, "left half-written by a process that ended")
            for path, name, n_bytes in files
            if name.rpartition("-")[0] not in living
        ]

    def current_epoch(self, description: Mapping[str, Any]) -> int | None:
        """Read the epoch that a clear raised; see `Store.current_epoch`."""
        from ..connector.epoch import read_epoch
        from .store_words import base_digest

        digest = base_digest(description)
        return None if digest is None else read_epoch(self.root, digest)

    def tier(self, namespace: bytes, rank: int) -> DiskTier:
        """Open a tier; see `Store.tier`."""
        return self._tier(namespace, rank)

    def _tier(self, namespace: bytes, rank: int, **options: Any) -> DiskTier:
        from ..storage.disk import DiskTier

        return DiskTier(self.root, namespace, rank, WITHOUT_CAP_BYTES, **options)

    @contextlib.contextmanager
    def writer(self, space: Space, rank: int) -> Iterator[Writer]:
        """Open a namespace and rank to write; see `Store.writer`."""
        from ..storage.payload import Verbatim

        clock = _Clock()
        form = Verbatim()
        tier = self._tier(
            space.namespace, rank, description=space.description, form=form, clock=clock
        )
        try:
            yield _DiskWriter(tier, form, clock)
        finally:
            tier.close()

    def broken_descriptions(self) -> list[Broken]:
        """Look at each namespace's file; see `Store.broken_descriptions`."""
        return [
            Broken(info.namespace, path, info.problem)
            for info in (list_namespaces(self.root) if os.path.isdir(self.root) else [])
            if info.problem
            and os.path.lexists(path := f"{info.path}/{NAMESPACE_FILE}")
            and self.has_records(info.namespace)
        ]

    def drop_description(self, broken: Broken) -> bool:
        """Move the file among what is kept to be looked at; see `Store.drop_description`."""
        name = f"{broken.namespace.hex()}-{NAMESPACE_FILE}.{os.getpid()}"
        make_folders(f"{self.root}/{QUARANTINE}")
        with contextlib.suppress(FileNotFoundError):
            os.rename(broken.place, f"{self.root}/{QUARANTINE}/{name}")
            return True
        return False

    def sweep(self, loose: list[Loose]) -> int:
        """Unlink; see `Store.sweep`."""
        done = 0
        for item in loose:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(item.place)
                done += 1
        return done

    def pins(self) -> list[Pin]:
        """Read the pins' files; see `Store.pins`."""
        from ..storage.pins import PinFolder

        return PinFolder(self.root).all()

    def pin(self, pin: Pin, records: list[Record]) -> None:  # noqa: ARG002 - keys are enough here
        """Write a pin's file, which engines look for before they evict; see `Store.pin`."""
        from ..storage.pins import PinFolder

        PinFolder(self.root).add(pin)

    def unpin(self, pin: Pin) -> None:
        """Remove a pin's file; see `Store.unpin`."""
        from ..storage.pins import PinFolder

        PinFolder(self.root).remove(pin.name)

    def pin_limit_bytes(self) -> int | None:
        """Return a share of the capacity that the last engine to start was given."""
        from ..storage.disk_place import read_capacity
        from ..storage.pins import PIN_SHARE

        capacity_bytes = read_capacity(self.root)
        return None if capacity_bytes is None else capacity_bytes // PIN_SHARE

    def pin_warning(self) -> str | None:
        """Return nothing: whoever evicts here looks at the pins."""
        return None

    def forget(self, namespace: bytes) -> None:
        """Remove a namespace's empty folders and description; see `Store.forget`."""
        from ..storage.disk_tidy import remove_namespace

        remove_namespace(self.root, namespace)

    def close(self) -> None:
        """Nothing is held open."""


class _Clock:
    """What a tier that is written to takes for the time: the last use of the record at hand."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class _DiskWriter(Writer):
    def __init__(self, tier: Any, form: Any, clock: _Clock) -> None:
        self._tier = tier
        self._form = form
        self._clock = clock

    def put(
        self, header: Header, stored: memoryview, used_at_s: float, *, replace: bool = False
    ) -> bool:
        from ..storage.tier import PutResult, RecordSpec

        spec = RecordSpec(header.key, header.start_tokens, header.end_tokens, header.raw_bytes)
        self._clock.now_s = used_at_s + header.start_tokens * TOKEN_AGE_S
        self._form.expect(header)
        return bool(self._tier.put(spec, [stored], replace=replace) is PutResult.STORED)


def _record(file: RecordFile) -> Record:
    return Record(
        file.namespace, file.rank, file.key, file.file_bytes, file.used_at_s, file.path, file
    )


def _living(folder: str) -> set[str]:
    """Return the marks in a store that a process holds; changes nothing."""
    living = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                fd = os.open(f"{folder}/{name}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except OSError:
                    living.add(name)
                finally:
                    os.close(fd)
    return living
