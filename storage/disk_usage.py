"""How many bytes a store holds, shared by every process that uses it.

One small file below ``ROOT/.kvtier`` counts the bytes of all namespaces and
ranks; it is changed under `flock`, so the cap holds for all engines together.
A writer reserves before it writes. Whatever moment a process is killed at, the
counter errs only upwards, and a recount from the directory puts it right.

Each process has an owner file that it keeps locked while it lives; its
temporary files carry the owner's name, so leftovers are told from work in
progress without trusting process ids. The owner file also says how much the
process has reserved and not yet written.

`flock` works between processes of one machine on local file systems. On NFS
it depends on the server: the counter may drift there until the next recount.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import struct
import threading
import time
from typing import TYPE_CHECKING

import xxhash

from .disk_layout import CONTROL, FILE_MODE, make_folders
from .errors import TierUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

_MAGIC = b"KVTUSE1\n"
_COUNTER = struct.Struct("<8sQQ")  # magic, bytes used, bytes ever committed
_INFLIGHT = struct.Struct("<Q")
_LOCK_TIMEOUT_S = 5.0
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class LockedFile:
    """A small file that threads and processes lock in turn. Survives removal of the file."""

    def __init__(self, path: str) -> None:
        """Open nothing yet."""
        self.path = path
        self._fd = -1
        self._mutex = threading.Lock()

    @contextlib.contextmanager
    def locked(self, timeout_s: float = _LOCK_TIMEOUT_S) -> Iterator[int]:
        """Hold the lock; yields the descriptor.

        Raises:
            TierUnavailable: someone else held it all that time.
            OSError: the file cannot be opened or locked.
        """
        if not self._mutex.acquire(timeout=timeout_s):
            raise TierUnavailable(f"{self.path} stays locked by this process")
        try:
            self._lock(time.monotonic() + timeout_s)
            try:
                yield self._fd
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._mutex.release()

    def _lock(self, deadline_s: float) -> None:
        wait_s = 0.0001
        while True:
            if self._fd < 0:
                self._fd = _open_control(self.path)
            if try_lock(self._fd):
                # A file that was removed or moved away locks nobody out.
                if is_at(self._fd, self.path):
                    return
                self._drop()
                continue
            if time.monotonic() > deadline_s:
                raise TierUnavailable(f"{self.path} stays locked by another process")
            time.sleep(wait_s)
            wait_s = min(0.005, wait_s * 2)

    def _drop(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        with self._mutex:
            self._drop()


def is_at(fd: int, path: str) -> bool:
    """Return whether an open file is the one at ``path``."""
    try:
        there, ours = os.lstat(path), os.fstat(fd)
    except FileNotFoundError:
        return False
    return (there.st_ino, there.st_dev) == (ours.st_ino, ours.st_dev)


def try_lock(fd: int) -> bool:
    """Lock an open file without waiting; return whether that worked."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def _open_control(path: str) -> int:
    try:
        return os.open(path, _FLAGS, FILE_MODE)
    except FileNotFoundError:
        make_folders(os.path.dirname(path))
        return os.open(path, _FLAGS, FILE_MODE)


class Owner:
    """This process's mark in a store: a file kept locked while it lives."""

    def __init__(self, root: str) -> None:
        """Create nothing yet."""
        self._folder = f"{root}/{CONTROL}/owners"
        self._fd = -1
        self.name = ""
        self._number = 0
        self._lock = threading.Lock()

    def tmp_name(self) -> str:
        """Return a fresh name for a temporary file.

        Raises:
            OSError: the owner file cannot be created.
        """
        with self._lock:
            self._ensure()
            self._number += 1
            return f"{self.name}-{self._number}"

    def add_inflight(self, delta_bytes: int) -> None:
        """Change what this process says it has reserved. Called under the counter's lock."""
        with self._lock:
            self._ensure()
            data = os.pread(self._fd, _INFLIGHT.size, 0)
            now = _INFLIGHT.unpack(data)[0] if len(data) == _INFLIGHT.size else 0
            os.pwrite(self._fd, _INFLIGHT.pack(max(0, now + delta_bytes)), 0)

    def _ensure(self) -> None:
        """Have a locked file at a name of ours; a new one when somebody removed it."""
        while self._fd < 0 or not is_at(self._fd, f"{self._folder}/{self.name}"):
            self._drop()
            name = f"{os.getpid()}-{secrets.token_hex(4)}"
            fd = _open_control(f"{self._folder}/{name}")
            if not try_lock(fd):  # a sweeper looks at it this moment
                os.close(fd)
                continue
            self._fd, self.name = fd, name

    def _drop(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        """Remove the mark. Idempotent."""
        with self._lock:
            if self._fd >= 0:
                with contextlib.suppress(OSError):
                    os.unlink(f"{self._folder}/{self.name}")
            self._drop()

    def others(self) -> tuple[set[str], int]:
        """Remove marks of the dead; return the living's names and what they have reserved.

        This process's own is among them.
        """
        living: set[str] = set()
        inflight_bytes = 0
        try:
            names = os.listdir(self._folder)
        except OSError:
            return living, 0
        for name in names:
            path = f"{self._folder}/{name}"
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    if name != self.name and try_lock(fd):
                        os.unlink(path)
                        continue
                    living.add(name)
                    data = os.pread(fd, _INFLIGHT.size, 0)
                    if len(data) == _INFLIGHT.size:
                        inflight_bytes += _INFLIGHT.unpack(data)[0]
                finally:
                    os.close(fd)
        return living, inflight_bytes


class UsageUnknown(Exception):
    """The counter is missing or damaged; a recount is needed."""


class Usage:
    """The counter. Thread-safe; each call takes the lock for some microseconds."""

    def __init__(self, root: str, owner: Owner) -> None:
        """Open nothing yet."""
        self._file = LockedFile(f"{root}/{CONTROL}/usage")
        self._owner = owner
        self.last_used_bytes = 0  # as of the last call, for stat()

    def reserve(self, file_bytes: int, capacity_bytes: int) -> int:
        """Reserve room for a file; return 0, or how many bytes are too many.

        Raises:
            UsageUnknown, TierUnavailable, OSError.
        """
        with self._file.locked() as fd:
            used, committed = self._load(fd)
            over = used + file_bytes - capacity_bytes
            if over > 0:
                return over
            self._store(fd, used + file_bytes, committed)
            self._owner.add_inflight(file_bytes)
            return 0

    def commit(self, file_bytes: int) -> None:
        """Say that what was reserved is now a file."""
        with self._file.locked() as fd:
            self._owner.add_inflight(-file_bytes)
            with contextlib.suppress(UsageUnknown):
                used, committed = self._load(fd)
                self._store(fd, used, committed + file_bytes)

    def cancel(self, file_bytes: int) -> None:
        """Give a reservation back; the file is gone."""
        with self._file.locked() as fd:
            self._owner.add_inflight(-file_bytes)
            with contextlib.suppress(UsageUnknown):
                used, committed = self._load(fd)
                self._store(fd, max(0, used - file_bytes), committed)

    def unlink(self, path: str, counted_bytes: int | None = None) -> int:
        """Unlink a file and take it off the counter; return the bytes taken off.

        In one go under the lock: a recount that did not see the file any more must not end
        before it is taken off, or it would be taken off twice.

        Args:
            path: the file.
            counted_bytes: what was reserved for it; a file that grew since frees no more.

        Raises:
            FileNotFoundError: somebody else removed it.
            IsADirectoryError: it is a folder.
            TierUnavailable, OSError.
        """
        with self._file.locked() as fd:
            status = os.lstat(path)
            os.unlink(path)
            freed = status.st_size if stat.S_ISREG(status.st_mode) else 0
            if counted_bytes is not None:
                freed = min(freed, counted_bytes)
            with contextlib.suppress(UsageUnknown):
                used, committed = self._load(fd)
                self._store(fd, max(0, used - freed), committed)
            return freed

    def used_bytes(self) -> int:
        """Return the bytes used and reserved by all.

        Raises:
            UsageUnknown, TierUnavailable, OSError.
        """
        with self._file.locked() as fd:
            return self._load(fd)[0]

    def begin_recount(self) -> int:
        """Return a mark for `finish_recount`; take it before the directory is walked."""
        with self._file.locked() as fd:
            try:
                return self._load(fd)[1]
            except UsageUnknown:
                return -1

    def finish_recount(self, mark: int, found_bytes: int) -> bool:
        """Set the counter to what a walk found, plus what was written during the walk.

        What a walk may have seen or not is counted, so the counter errs upwards. Return whether
        it is exact: nothing was written meanwhile.
        """
        with self._file.locked() as fd:
            try:
                _, committed = self._load(fd)
            except UsageUnknown:
                committed = 0
            _, inflight_bytes = self._owner.others()
            during = max(0, committed - mark) if mark >= 0 else committed
            self._store(fd, found_bytes + during + inflight_bytes, committed)
            return during + inflight_bytes == 0

    def _load(self, fd: int) -> tuple[int, int]:
        data = os.pread(fd, _COUNTER.size + 8, 0)
        counter = data[: _COUNTER.size]
        if len(data) != _COUNTER.size + 8 or xxhash.xxh3_64_digest(counter) != data[-8:]:
            raise UsageUnknown
        magic, used, committed = _COUNTER.unpack(counter)
        if magic != _MAGIC:
            raise UsageUnknown
        self.last_used_bytes = used
        return used, committed

    def _store(self, fd: int, used: int, committed: int) -> None:
        counter = _COUNTER.pack(_MAGIC, used, committed)
        os.pwrite(fd, counter + xxhash.xxh3_64_digest(counter), 0)
        self.last_used_bytes = used

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        self._file.close()
