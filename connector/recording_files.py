"""The files of recordings: parts of bounded size in a folder of bounded size.

A part is locked (`flock`) while its engine writes it, so that engines that share a folder remove
only parts that nobody writes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import time

from ..storage.disk_layout import FILE_MODE, make_folders

PARTS = 4  # of the limit: a part takes one in so many
NAME = re.compile(r"(?P<run>\d{8}T\d{6}Z-\d+-[0-9a-f]{4})-(?P<part>\d{4,9})\.jsonl")


class Part:
    """One file being written.

    Args:
        path: of the new file.
        limit_bytes: from when on it is full.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: str, limit_bytes: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self.path = path
        self._limit_bytes = limit_bytes
        self._n_bytes = 0
        self._fd = os.open(path, flags, FILE_MODE)
        with contextlib.suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @property
    def full(self) -> bool:
        """Whether the next line belongs into another part."""
        return self._n_bytes >= self._limit_bytes

    def write(self, line: bytes) -> None:
        """Append a line, whole or not at all.

        Raises:
            OSError: it is not there; a part that could not be kept whole is cut back.
        """
        done = 0
        try:
            while done < len(line):
                done += os.write(self._fd, line[done:])
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._n_bytes)
            raise
        self._n_bytes += len(line)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class PartWriter:
    """Opens the parts of one engine's recording and keeps the folder below its limit."""

    def __init__(self, folder: str, limit_bytes: int, started_s: float) -> None:
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(started_s))
        self._run = f"{stamp}-{os.getpid()}-{secrets.token_hex(2)}"
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._number = 0

    def open(self, header: bytes) -> Part:
        """Make room for a part and begin it with ``header``.

        Raises:
            OSError.
        """
        make_folders(self._folder)
        part_bytes = self._limit_bytes // PARTS
        make_room(self._folder, self._limit_bytes - part_bytes)
        self._number += 1
        part = Part(f"{self._folder}/{self._run}-{self._number:04}.jsonl", part_bytes)
        try:
            part.write(header)
        except OSError:
            part.close()
            raise
        return part


def make_room(folder: str, limit_bytes: int) -> None:
    """Remove the oldest parts that nobody writes until all take at most ``limit_bytes``.

    Raises:
        OSError: the folder cannot be listed.
    """
    parts = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                parts.append((status.st_mtime, entry.path, status.st_size))
    held = sum(n_bytes for _, _, n_bytes in parts)
    for _, path, n_bytes in sorted(parts):
        if held <= limit_bytes:
            return
        if _remove_unless_written(path):
            held -= n_bytes


def _remove_unless_written(path: str) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
