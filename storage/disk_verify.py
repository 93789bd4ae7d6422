"""Looking at record files without a tier: for tools. Read-only."""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from .direct_io import padded, read_all
from .disk_file import checked_header, open_record, regular_length, unavailable
from .errors import DamageReason, RecordDamaged, RecordError
from .key import key_name
from .record import DISK_HEADER_BYTES
from .reseal import check_size

if TYPE_CHECKING:
    from .disk_layout import RecordFile
    from .record import Header

_PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What a full check of one file found.

    Attributes:
        path: the file.
        header: what its header says; None when that cannot be trusted.
        reason: what disagreed; None for an intact record.
        detail: the same in words.
        bytes_read: from the disk.
    """

    path: str
    header: Header | None
    reason: DamageReason | None
    detail: str
    bytes_read: int

    @property
    def ok(self) -> bool:
        """Whether the record is intact."""
        return self.reason is None


def read_header(path: str) -> Header:
    """Return a record file's header; reads one block, not the payload.

    Raises:
        RecordMissing: no such file.
        RecordDamaged: it is no intact header, or the file's length disagrees with it.
        TierUnavailable: the disk does not answer.
    """
    fd = open_record(path)
    try:
        return _header_of(fd)
    except OSError as error:
        raise unavailable(error, f"cannot read {path}") from None
    finally:
        os.close(fd)


def probe_record(path: str) -> None:
    """Read a record's header from the disk itself; what it says does not matter.

    Raises:
        TierUnavailable: the disk does not answer.
    """
    with contextlib.suppress(RecordError):
        fd = open_record(path)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # memory would always answer
            _header_of(fd)
        except OSError as error:
            raise unavailable(error, f"cannot read {path}") from None
        finally:
            os.close(fd)


def read_stored(path: str, belongs: RecordFile) -> tuple[Header, memoryview]:
    """Return a record's header and its payload as stored, once all of it has been checked.

    The view begins at a page boundary, as writers with O_DIRECT need it.

    Args:
        path: the file.
        belongs: where it was found; its header must name the same record.

    Raises:
        RecordMissing, RecordDamaged, TierUnavailable: as `read_header`.
    """
    fd = open_record(path)
    try:
        header = _header_of(fd)
        _check_place(header, belongs)
        check_size(header)
        room = memoryview(mmap.mmap(-1, padded(header.stored_bytes)))
        if read_all(fd, [room], DISK_HEADER_BYTES) < len(room):
            raise RecordDamaged(DamageReason.TRUNCATED, "ends inside its payload")
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        raise unavailable(error, f"cannot read {path}") from None
    finally:
        os.close(fd)
    stored = room[: header.stored_bytes]
    if xxhash.xxh3_128_digest(stored) != header.payload_checksum:
        raise RecordDamaged(DamageReason.PAYLOAD, "payload checksum differs")
    if any(room[header.stored_bytes :]):
        raise RecordDamaged(DamageReason.PAYLOAD, "padding is not zero")
    return header, stored


def verify_file(path: str, belongs: RecordFile | None = None) -> VerifyResult:
    """Read a whole record file and check everything in it.

    Needs a few MiB, whatever the file says. Leaves the page cache as it was, nearly.

    Args:
        path: the file.
        belongs: where it was found; when given, its header must name the same record.

    Raises:
        RecordMissing: no such file (any more).
        TierUnavailable: the disk does not answer.
    """
    header = None
    bytes_read = 0
    try:
        fd = open_record(path)
        try:
            bytes_read = min(DISK_HEADER_BYTES, regular_length(fd))
            header = _header_of(fd)
            if belongs is not None:
                _check_place(header, belongs)
            bytes_read += _check_payload(fd, header)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    except RecordDamaged as damage:
        return VerifyResult(path, header, damage.reason, str(damage), bytes_read)
    except OSError as error:
        raise unavailable(error, f"cannot read {path}") from None
    return VerifyResult(path, header, None, "intact", bytes_read)


def _header_of(fd: int) -> Header:
    length = regular_length(fd)
    head = memoryview(bytearray(DISK_HEADER_BYTES))
    return checked_header(head, read_all(fd, [head], 0), length)


def _check_place(header: Header, belongs: RecordFile) -> None:
    if header.namespace != belongs.namespace:
        raise RecordDamaged(
            DamageReason.NAMESPACE,
            f"of {header.namespace.hex()}, found in {belongs.namespace.hex()}",
        )
    if (header.key, header.rank) != (belongs.key, belongs.rank):
        raise RecordDamaged(
            DamageReason.IDENTITY,
            f"holds {key_name(header.key)} of rank {header.rank},"
            f" found as {key_name(belongs.key)} of rank {belongs.rank}",
        )


def _check_payload(fd: int, header: Header) -> int:
    """Hash the payload piece by piece; return the bytes read."""
    digest = xxhash.xxh3_128()
    length = os.fstat(fd).st_size - DISK_HEADER_BYTES
    piece = memoryview(bytearray(min(_PIECE_BYTES, length)))
    done = 0
    while done < length:
        got = read_all(fd, [piece[: length - done]], DISK_HEADER_BYTES + done)
        if got == 0:
            raise RecordDamaged(DamageReason.TRUNCATED, "ends inside its payload")
        hashed = max(0, min(got, header.stored_bytes - done))
        digest.update(piece[:hashed])
        if any(piece[hashed:got]):
            raise RecordDamaged(DamageReason.PAYLOAD, "padding is not zero")
        done += got
    if digest.digest() != header.payload_checksum:
        raise RecordDamaged(DamageReason.PAYLOAD, "payload checksum differs")
    return done
