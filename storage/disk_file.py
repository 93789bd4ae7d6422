"""Reading and writing one record's file, with O_DIRECT where the file system has it.

A record's file is the header padded to `DISK_HEADER_BYTES`, then the stored
payload, padded with zeros to a multiple of `ALIGN_BYTES`: every offset and
length is one that O_DIRECT takes, and a raw record is one preadv or pwritev.
Nothing is synced: a power failure may lose or tear the newest records, and a
torn one fails its checks and is written again.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

from .direct_io import IOV_MAX, AlignedPool, drop_direct, padded, read_all, rest_of
from .errors import (
    DamageReason,
    RecordDamaged,
    RecordError,
    RecordMissing,
    TierError,
    TierRefused,
    TierUnavailable,
)
from .read_turns import ReadTurns
from .record import DISK_HEADER_BYTES, HEADER_BYTES, Header, check, parse_header
from .record import payload_checksum as checksum_of
from .tier import ALIGN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .payload import PayloadFormat
    from .tier import Buffers, RecordSpec

PIECE_BYTES = 4 << 20  # read, then checked, while other threads do the same
_OPEN_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OPEN_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NOT_A_FILE = frozenset({errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.ENOTDIR, errno.EISDIR})
_REFUSED = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}
)


def file_bytes(stored_bytes: int) -> int:
    """Return the length of the file of a record with that stored payload."""
    return DISK_HEADER_BYTES + padded(stored_bytes)


def write_error(error: OSError, what: str) -> TierError:
    """Return our exception for an error while writing."""
    if error.errno in _REFUSED:
        return TierRefused(f"{what}: {os.strerror(error.errno)}")
    return unavailable(error, what)


def unavailable(error: OSError, what: str) -> TierUnavailable:
    """Return our exception for an error that says the store does not answer."""
    return TierUnavailable(f"{what}: {error.strerror or error}")


def _read_error(error: OSError, path: str) -> RecordError | TierError:
    if error.errno == errno.ENOENT:
        return RecordMissing(os.path.basename(path))
    if error.errno in _NOT_A_FILE:
        return RecordDamaged(DamageReason.NOT_A_FILE, f"{path}: {error.strerror}")
    return unavailable(error, f"cannot read {path}")


class RecordIO:
    """Reads and writes record files. Thread-safe; every call blocks on the disk.

    Attributes:
        direct: whether O_DIRECT is used; cleared for good when the file system refuses it.
    """

    def __init__(self, form: PayloadFormat, *, direct: bool, reads_at_once: int = 2) -> None:
        """Use O_DIRECT until refused when ``direct``; ``form`` is what payloads go through.

        Of the threads that read records, ``reads_at_once`` wait for the disk at a time.
        """
        self._form = form
        self.direct = direct
        self._turns = ReadTurns(reads_at_once)
        self._pool = AlignedPool()

    def write(
        self, path: str, header: bytes, parts: Sequence[bytes | memoryview], mtime_s: float
    ) -> int:
        """Write a new file; return its length.

        Args:
            path: must not exist.
            header: packed, `HEADER_BYTES` long.
            parts: the stored payload; RAW parts are aligned and written as they are.
            mtime_s: modification time to set.

        Raises:
            OSError: the file may then exist, incomplete.
        """
        stored = sum(len(part) for part in parts)
        total = file_bytes(stored)
        gather = any(len(part) % ALIGN_BYTES for part in parts)
        staging = self._pool.take(DISK_HEADER_BYTES + (padded(stored) if gather else 0))
        try:
            with memoryview(staging) as room:
                room[:HEADER_BYTES] = header
                room[HEADER_BYTES:DISK_HEADER_BYTES] = bytes(DISK_HEADER_BYTES - HEADER_BYTES)
                buffers: list[bytes | memoryview]
                if gather:
                    at = DISK_HEADER_BYTES
                    for part in parts:
                        room[at : at + len(part)] = part
                        at += len(part)
                    room[at:total] = bytes(total - at)
                    buffers = [room[:total]]
                else:
                    buffers = [room[:DISK_HEADER_BYTES], *parts]
                try:
                    self._write_file(path, buffers, mtime_s)
                finally:
                    for view in buffers[:1]:
                        view.release()  # type: ignore[union-attr]
        finally:
            self._pool.give(staging)
        return total

    def _write_file(self, path: str, buffers: list[bytes | memoryview], mtime_s: float) -> None:
        fd = self._open(path, _OPEN_WRITE)
        try:
            done = 0
            while buffers:
                try:
                    count = os.pwritev(fd, buffers[:IOV_MAX], done)
                except OSError as error:
                    if error.errno != errno.EINVAL or not drop_direct(fd):
                        raise
                    continue
                if count <= 0:
                    raise OSError(errno.EIO, "nothing written")
                done += count
                if done % ALIGN_BYTES:
                    drop_direct(fd)
                buffers = rest_of(buffers, count)
            os.utime(fd, (mtime_s, mtime_s))
        finally:
            os.close(fd)

    def _open(self, path: str, flags: int) -> int:
        if self.direct:
            try:
                return os.open(path, flags | os.O_DIRECT, 0o600)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                self.direct = False
                if flags & os.O_CREAT:  # some file systems create the file, then refuse
                    _unlink_quietly(path)
        return os.open(path, flags, 0o600)

    def read(self, path: str, spec: RecordSpec, namespace: bytes, rank: int, into: Buffers) -> int:
        """Read, verify and decode a record; return the bytes read from the disk.

        Raises:
            RecordMissing: no such file.
            RecordDamaged: anything disagrees.
            TierUnavailable: the disk does not answer.
        """
        try:
            fd = self._open(path, _OPEN_READ)
        except OSError as error:
            raise _read_error(error, path) from None
        room = self._pool.take(DISK_HEADER_BYTES)
        try:
            with memoryview(room) as view, view[:DISK_HEADER_BYTES] as head:
                return self._read_open(fd, head, spec, namespace, rank, into)
        except OSError as error:
            raise _read_error(error, path) from None
        finally:
            os.close(fd)
            self._pool.give(room)

    def _read_open(
        self,
        fd: int,
        head: memoryview,
        spec: RecordSpec,
        namespace: bytes,
        rank: int,
        into: Buffers,
    ) -> int:
        length = regular_length(fd)
        raw = length == DISK_HEADER_BYTES + spec.raw_bytes and spec.raw_bytes % ALIGN_BYTES == 0
        pieces = list(_cut(into, PIECE_BYTES)) if raw else [[]]
        with self._turns:
            got = read_all(fd, [head, *pieces[0]], 0)
        header = checked_header(head, got, length)
        check(header, spec, namespace, rank)
        self._form.admit(header)
        if self._form.as_is(header):
            if not raw:  # an odd raw length: the padding does not fit the caller's buffers
                self._read_stored(fd, header, into)
            elif checksum_of(self._filled(fd, pieces, got)) != header.payload_checksum:
                raise RecordDamaged(DamageReason.PAYLOAD, "payload checksum differs")
        else:
            self._read_stored(fd, header, into)
        return length

    def _filled(self, fd: int, pieces: list[list[memoryview]], got: int) -> Iterator[memoryview]:
        """Read a payload piece by piece, the first one of which was read with the header.

        So the checksum of one record is computed while others are read: threads that read whole
        records at the same speed would all compute at the same time, with the disk idle.

        Args:
            fd: a record's file.
            pieces: where its payload goes.
            got: bytes of header and first piece that were read.

        Raises:
            RecordDamaged: TRUNCATED.
            OSError: a read fails.
        """
        end = DISK_HEADER_BYTES
        for number, piece in enumerate(pieces):
            if number:
                with self._turns:
                    got = end + read_all(fd, piece, end)
            end += sum(map(len, piece))
            if got < end:
                raise RecordDamaged(DamageReason.TRUNCATED, f"ends at {got}, inside its payload")
            yield from piece

    def _read_stored(self, fd: int, header: Header, into: Buffers) -> None:
        """Read the stored payload into staging, verify it, decode it."""
        total = padded(header.stored_bytes)
        staging = self._pool.take(total)
        try:
            with memoryview(staging) as room, room[:total] as whole:
                with self._turns:
                    got = read_all(fd, [whole], DISK_HEADER_BYTES)
                if got < total:
                    raise RecordDamaged(DamageReason.TRUNCATED, "ends inside its payload")
                with whole[: header.stored_bytes] as stored, whole[header.stored_bytes :] as rest:
                    if checksum_of([stored]) != header.payload_checksum or any(rest):
                        raise RecordDamaged(DamageReason.PAYLOAD, "payload checksum differs")
                    self._form.unpack(header, stored, into)
        finally:
            self._pool.give(staging)


def open_record(path: str) -> int:
    """Open a record's file for reading; never blocks on what is not a file.

    Raises:
        RecordMissing, RecordDamaged, TierUnavailable: as in `RecordIO.read`.
    """
    try:
        return os.open(path, _OPEN_READ)
    except OSError as error:
        raise _read_error(error, path) from None


def regular_length(fd: int) -> int:
    """Return the length of an open regular file.

    Raises:
        RecordDamaged: NOT_A_FILE.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise RecordDamaged(DamageReason.NOT_A_FILE, "not a regular file")
    return status.st_size


def checked_header(head: memoryview, got: int, length: int) -> Header:
    """Parse a header block of a file and check the file's length against it.

    Args:
        head: `DISK_HEADER_BYTES` that were read from the file's start.
        got: how many bytes were really read.
        length: of the file.

    Raises:
        RecordDamaged: anything disagrees.
    """
    header = parse_header(head[: min(got, DISK_HEADER_BYTES)])
    if got < DISK_HEADER_BYTES:
        raise RecordDamaged(DamageReason.TRUNCATED, f"{got} bytes")
    if bytes(head[HEADER_BYTES:]).strip(b"\0"):
        raise RecordDamaged(DamageReason.HEADER, "bytes after the header are not zero")
    expected = file_bytes(header.stored_bytes)
    if length != expected:
        reason = DamageReason.TRUNCATED if length < expected else DamageReason.LENGTHENED
        raise RecordDamaged(reason, f"{length} bytes, its header says {expected}")
    return header


def _cut(buffers: Sequence[memoryview], piece_bytes: int) -> Iterator[list[memoryview]]:
    """Cut buffers into runs of at most ``piece_bytes``."""
    piece: list[memoryview] = []
    left = piece_bytes
    for buffer in buffers:
        at = 0
        while at < len(buffer):
            part = buffer[at : at + left]
            piece.append(part)
            at += len(part)
            left -= len(part)
            if not left:
                yield piece
                piece, left = [], piece_bytes
    if piece:
        yield piece


def _unlink_quietly(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return
