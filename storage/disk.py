"""The disk tier: one file per chunk and rank in a directory that engines share.

What a record's file is, `disk_file` says; where it lies, `disk_layout`; how
the capacity holds for all engines together, `disk_usage` and `disk_evict`; how
they hear of each other, `disk_journal` and `disk_keeper`.

Nothing is synced to the disk: a power failure may lose the newest records, and
one that it tears fails its checks. A killed process loses nothing that `put`
returned for.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from .codec import codec_of
from .disk_evict import Evictor
from .disk_file import RecordIO, file_bytes, unavailable, write_error
from .disk_index import Index
from .disk_journal import JournalWriter
from .disk_keeper import Keeper
from .disk_layout import (
    NAMESPACE_FILE,
    RECORD_SUFFIX,
    TMP_FOLDER,
    TMP_SUFFIX,
    TOKEN_AGE_S,
    iter_record_files,
    make_folders,
    pack_namespace,
    rank_folder,
    record_path,
)
from .disk_place import (
    clear_way,
    link_new,
    looks_intact,
    remove_all,
    same_length,
    write_small,
)
from .disk_room import Room
from .disk_usage import Owner, Usage
from .disk_verify import probe_record
from .errors import RecordMissing, TierUnavailable
from .key import NAMESPACE_BYTES, key_name
from .payload import PayloadFormat
from .tier import (
    PutResult,
    RecordInfo,
    Tier,
    TierCapabilities,
    TierChanges,
    TierStat,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from .disk_layout import RecordFile
    from .keyring import KeyRing
    from .tier import Buffers, RecordSpec

_CLOSE_TIMEOUT_S = 5.0
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class DiskTier(Tier):
    """Records of one namespace and rank in a directory.

    The constructor returns at once and does not fail when the directory does not work: calls
    raise until it does. A background thread builds the index; until it is complete, `get` finds
    everything that is there and `contains_many` looks at the files.
    """

    name = "disk"
    capabilities = TierCapabilities(persistent=True, shared=True, evicts=True)

    def __init__(
        self,
        root: str,
        namespace: bytes,
        rank: int,
        capacity_bytes: int,
        *,
        codec: str = "raw",
        item_bytes: int = 2,
        description: Mapping[str, Any] | None = None,
        keys: KeyRing | None = None,
        form: PayloadFormat | None = None,
        clock: Callable[[], float] = time.time,
        direct: str = "auto",
        poll_s: float = 1.0,
        reads_at_once: int = 2,
    ) -> None:
        """Open a store.

        Args:
            root: its directory; created when missing.
            namespace: 16 bytes.
            rank: whose records.
            capacity_bytes: of the whole root, all namespaces, ranks and engines together.
            codec: raw, lz4 or zstd.
            item_bytes: bytes of one KV value: 1, 2 or 4.
            description: plain-text fields of the namespace, kept next to the records.
            keys: seals records with their first, reads those of all; None: not sealed.
            form: instead of codec, item_bytes and keys.
            clock: Unix time in seconds.
            direct: "auto" uses O_DIRECT where the file system has it, "never" the page cache.
            poll_s: how often others' changes are looked for.
            reads_at_once: reads under way at a time, while other threads check and copy.

        Raises:
            ConfigError: no such codec.
        """
        assert len(namespace) == NAMESPACE_BYTES
        self._format = form or PayloadFormat(codec_of(codec), item_bytes, keys)
        self._root = os.path.abspath(root)
        self._namespace = namespace
        self._rank = rank
        self._capacity_bytes = capacity_bytes
        self._description = dict(description or {})
        self._clock = clock
        self._folder = rank_folder(self._root, namespace, rank)
        self._io = RecordIO(self._format, direct=direct != "never", reads_at_once=reads_at_once)
        self._index = Index()
        self._owner = Owner(self._root)
        self._usage = Usage(self._root, self._owner)
        self._journal = JournalWriter(self._folder)
        self._keeper = Keeper(self._root, self._folder, self._index, self._usage, self._owner)
        self._evictor = Evictor(
            self._root,
            self._folder,
            self._usage,
            self._index,
            self._journal,
            self._keeper.walk,
            clock,
        )
        self._keeper.evictor = self._evictor
        self._room = Room(self._root, capacity_bytes, self._usage, self._evictor, self._keeper)
        self._closed = False
        self._quarantined = 0
        self._described = False
        self._lock = threading.Lock()
        self._keeper.start(capacity_bytes, poll_s, self._describe)

    def put(self, spec: RecordSpec, payload: Buffers, *, replace: bool = False) -> PutResult:
        """Store a record; see `Tier.put`."""
        path = record_path(self._folder, spec.key)
        if not replace and looks_intact(path, spec):
            self._keeper.look(spec.key)
            return PutResult.EXISTS
        now_s = self._clock()
        packed = self._format.pack(spec, self._namespace, self._rank, now_s, payload)
        header = packed.checked_header().pack()
        total = file_bytes(packed.header.stored_bytes)
        used_at_s = _used_at(now_s, spec)
        try:
            try:
                stored = self._store(spec.key, header, packed.parts, total, used_at_s, replace)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                # The disk is full although the cap is not reached: other things lie there too.
                self._room.make(total, at_least=total)
                stored = self._store(spec.key, header, packed.parts, total, used_at_s, replace)
        except OSError as error:
            raise write_error(error, f"cannot write below {self._root}") from None
        if not stored:
            self._keeper.look(spec.key)
            return PutResult.EXISTS
        self._index.add(spec.key, total, used_at_s, fresh=True)
        self._journal.append(spec.key)
        return PutResult.STORED

    def _store(
        self,
        key: bytes,
        header: bytes,
        parts: Sequence[bytes | memoryview],
        total: int,
        used_at_s: float,
        replace: bool,
    ) -> bool:
        """Reserve, write and publish a file; False when another one was there first.

        Raises:
            OSError, TierRefused, TierUnavailable: nothing is left behind.
        """
        self._room.reserve(total)
        if not self._described:
            with contextlib.suppress(OSError):
                self._describe()
        done = False
        tmp = ""
        try:
            tmp = self._tmp_path()
            try:
                self._io.write(tmp, header, parts, used_at_s)
            except FileNotFoundError:
                make_folders(os.path.dirname(tmp))
                self._describe()
                self._io.write(tmp, header, parts, used_at_s)
            done = self._publish(tmp, key, replace)
        finally:
            if tmp:
                with contextlib.suppress(OSError):
                    os.unlink(tmp)
            (self._usage.commit if done else self._usage.cancel)(total)
        return done

    def _publish(self, tmp: str, key: bytes, replace: bool) -> bool:
        """Give a complete file its name; False when an intact one has it and may keep it.

        Linked, not renamed: so nobody replaces a file unseen, and who removes one takes it off
        the counter.
        """
        path = record_path(self._folder, key)
        for _ in range(8):
            with contextlib.suppress(FileExistsError):
                link_new(tmp, path)
                return True
            if not replace and same_length(tmp, path):
                return False
            self._remove(path, key)
        raise OSError(errno.EAGAIN, "others keep writing the same record")

    def get(self, spec: RecordSpec, into: Buffers) -> int:
        """Read, verify and decode a record; see `Tier.get`."""
        path = record_path(self._folder, spec.key)
        seen = self._index.get(spec.key)
        try:
            count = self._io.read(path, spec, self._namespace, self._rank, into)
        except RecordMissing:
            if seen is not None:
                self._index.discard(spec.key, seen)
            raise
        if seen is None:
            self._keeper.look(spec.key)
        self._index.touch([spec.key], self._clock())
        return count

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which keys have a record: the index knows, or the directory is asked."""
        known = self._index.contains_many(keys)
        return [there or self._keeper.look(key) for there, key in zip(known, keys, strict=True)]

    def probe(self) -> None:
        """Open the root and read some record's header; see `Tier.probe`."""
        try:
            os.close(os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        except FileNotFoundError:
            return  # the next put makes it
        except OSError as error:
            raise unavailable(error, f"cannot open {self._root}") from None
        known = self._index.oldest()
        if known is not None:
            probe_record(record_path(self._folder, known[0]))

    def delete(self, keys: Iterable[bytes]) -> int:
        """Delete records; return how many were there.

        Raises:
            TierUnavailable: one could not be deleted.
        """
        count = 0
        for key in keys:
            try:
                there = self._remove(record_path(self._folder, key), key)
            except OSError as error:
                raise unavailable(error, f"cannot delete {key_name(key)}") from None
            self._index.discard(key)
            if there:
                count += 1
                self._journal.append(key)
        return count

    def _remove(self, path: str, key: bytes) -> bool:
        """Remove whatever lies at a record's place and take it off the counter.

        Raises:
            TierUnavailable, OSError: it is still there.
        """
        known = self._index.get(key)
        try:
            self._usage.unlink(path, known.file_bytes if known else None)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except IsADirectoryError:
            remove_all(path)
        return True

    def quarantine(self, key: bytes, reason: str) -> None:
        """Move a damaged record out of sight, among the few that are kept to be looked at.

        Raises:
            TierUnavailable: it is still there.
        """
        path = record_path(self._folder, key)
        seen = self._index.get(key)
        word = "".join(letter for letter in reason if letter.isalnum() or letter == "_")[:32]
        with self._lock:
            self._quarantined += 1
            number = self._quarantined
        name = (
            f"{self._namespace.hex()}-r{self._rank}-{key_name(key)}"
            f".{word or 'damaged'}.{os.getpid()}-{number}{RECORD_SUFFIX}"
        )
        try:
            clear_way(path)
            if not self._evictor.quarantine(path, name, seen.file_bytes if seen else None):
                self._keeper.want_walk()  # not what was counted: count again
            self._evictor.trim_quarantine(self._capacity_bytes)
        except OSError as error:
            raise unavailable(error, f"cannot remove {key_name(key)}") from None
        finally:
            self._keeper.look(key)
        self._journal.append(key)

    def scan(self) -> Iterator[RecordInfo]:
        """Yield this rank's records as the directory has them now."""
        for file in iter_record_files(self._root, self._namespace, self._rank):
            yield RecordInfo(file.key, file.file_bytes, file.used_at_s)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Mark records as used, the last given the most recent; files follow within seconds."""
        self._index.touch(keys, self._clock())

    def changes(self) -> TierChanges:
        """Return what came and went; see `Tier.changes`."""
        return self._index.changes()

    def stat(self) -> TierStat:
        """Return this rank's residency and the capacity of the whole root."""
        return TierStat(len(self._index), self._index.stored_bytes, self._capacity_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes used in the whole root by all engines, as last seen."""
        return self._usage.last_used_bytes

    def wait_complete(self, timeout_s: float) -> bool:
        """Block until the first index is built; return whether it is."""
        return self._keeper.walked.wait(timeout_s)

    def clear(self) -> None:
        """Delete every record of this namespace and rank; see `Tier.clear`."""
        problems = [
            problem
            for file in iter_record_files(self._root, self._namespace, self._rank)
            if (problem := self._cleared(file)) is not None
        ]
        self._journal.append_all()
        self._keeper.want_walk()
        if problems:
            raise TierUnavailable(f"{len(problems)} records could not be deleted: {problems[0]}")

    def _cleared(self, file: RecordFile) -> str | None:
        try:
            self._remove(file.path, file.key)
        except OSError as error:
            return str(error)
        self._index.discard(file.key)
        return None

    def close(self) -> None:
        """Stop the thread and give everything back. Idempotent; waits a few seconds at most."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._keeper.close(_CLOSE_TIMEOUT_S)
        self._owner.close()
        self._journal.close()
        self._evictor.close()
        self._usage.close()

    def _describe(self) -> None:
        """Write the namespace's description where there is none.

        Raises:
            OSError.
        """
        path = f"{self._root}/{self._namespace.hex()}/{NAMESPACE_FILE}"
        if not os.path.lexists(path):
            make_folders(f"{self._folder}/{TMP_FOLDER}")
            write_small(path, self._tmp_path(), pack_namespace(self._namespace, self._description))
        self._described = True

    def _tmp_path(self) -> str:
        return f"{self._folder}/{TMP_FOLDER}/{self._owner.tmp_name()}{TMP_SUFFIX}"


def _used_at(now_s: float, spec: RecordSpec) -> float:
    """Return the last use that a new record starts with.

    The later a chunk lies in its prefix, the older it looks, so that a prefix loses its tail
    before its head although the head was written first. A chunk of 256 tokens takes some
    10 to 25 ms to write and looks 51 ms older. `touch` gives the exact order.
    """
    return now_s - spec.start_tokens * TOKEN_AGE_S
