"""Giving a record's file its place, and clearing what stands there."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

from .disk_file import file_bytes
from .disk_layout import CONTROL, FILE_MODE, make_folders
from .record import DISK_HEADER_BYTES, sealed_bytes
from .tier import ALIGN_BYTES

if TYPE_CHECKING:
    from .tier import RecordSpec

_CAPACITY = "capacity"
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


def looks_intact(path: str, spec: RecordSpec) -> bool:
    """Return whether a file of a length that the record can have lies there; reads nothing."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return (
        stat.S_ISREG(status.st_mode)
        and status.st_size % ALIGN_BYTES == 0
        and DISK_HEADER_BYTES < status.st_size <= file_bytes(sealed_bytes(spec.raw_bytes))
    )


def link_new(tmp: str, path: str) -> None:
    """Link a file to its final name, making the folders on the way.

    Raises:
        OSError: FileExistsError when something lies there.
    """
    for last in (False, False, False, True):
        try:
            os.link(tmp, path)
        except (FileNotFoundError, NotADirectoryError):
            if last or not os.path.lexists(tmp):
                raise
            clear_way(path)
            make_folders(os.path.dirname(path))  # until somebody tidies it up again
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            os.rename(tmp, path)  # what it replaces stays counted until the next walk
            return
        else:
            return


def clear_way(path: str) -> None:
    """Remove what stands where a folder on the way to a record should be."""
    for folder in (os.path.dirname(os.path.dirname(path)), os.path.dirname(path)):
        if os.path.lexists(folder) and not os.path.isdir(folder):
            os.unlink(folder)


def same_length(tmp: str, path: str) -> bool:
    """Return whether a regular file as long as ``tmp`` lies at ``path``."""
    try:
        there = os.lstat(path)
        return stat.S_ISREG(there.st_mode) and there.st_size == os.lstat(tmp).st_size
    except OSError:
        return False


def remove_all(path: str) -> None:
    """Remove a file, a device node, or a folder with all that is in it."""
    try:
        os.unlink(path)
    except (IsADirectoryError, PermissionError):  # Linux says EISDIR, POSIX EPERM
        for folder, folders, files in os.walk(path, topdown=False):
            for name in files:
                os.unlink(f"{folder}/{name}")
            for name in folders:
                sub = f"{folder}/{name}"
                (os.unlink if os.path.islink(sub) else os.rmdir)(sub)
        os.rmdir(path)


def write_small(path: str, tmp: str, data: bytes) -> None:
    """Write a small file whole or not at all, for its owner only.

    Raises:
        OSError.
    """
    fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)
    os.rename(tmp, path)


def write_capacity(root: str, capacity_bytes: int, tmp_name: str) -> None:
    """Keep the capacity that an engine was given beside the store's counter.

    Raises:
        OSError.
    """
    make_folders(f"{root}/{CONTROL}")
    folder = f"{root}/{CONTROL}"
    write_small(f"{folder}/{_CAPACITY}", f"{folder}/{tmp_name}", b"%d\n" % capacity_bytes)


def read_capacity(root: str) -> int | None:
    """Return the capacity that the last engine to start was given; None where none has."""
    try:
        with open(f"{root}/{CONTROL}/{_CAPACITY}", "rb") as file:
            text = file.read(32).strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
