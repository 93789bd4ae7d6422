"""Reads and writes with O_DIRECT, which wants whole pages, and without it where it is refused."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from typing import TYPE_CHECKING

from .tier import ALIGN_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

IOV_MAX = 1024  # of Linux: what one preadv or pwritev takes


def padded(length: int) -> int:
    """Return ``length`` rounded up to what O_DIRECT takes."""
    return -(-length // ALIGN_BYTES) * ALIGN_BYTES


class AlignedPool:
    """Reusable anonymous mappings, a bounded number of bytes of them kept. Thread-safe."""

    def __init__(self, keep_bytes: int = 64 << 20) -> None:
        """Keep at most ``keep_bytes`` that nobody uses."""
        self._keep_bytes = keep_bytes
        self._kept: list[mmap.mmap] = []
        self._lock = threading.Lock()

    def take(self, length: int) -> mmap.mmap:
        """Return a mapping of at least ``length`` bytes; its content is whatever it was."""
        with self._lock:
            for index, mapping in enumerate(self._kept):
                if length <= len(mapping) <= 4 * length + (1 << 20):
                    return self._kept.pop(index)
        return mmap.mmap(-1, padded(max(length, 1)))

    def give(self, mapping: mmap.mmap) -> None:
        """Take a mapping back."""
        with self._lock:
            if sum(map(len, self._kept)) + len(mapping) <= self._keep_bytes:
                self._kept.append(mapping)


def read_all(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill the buffers from ``offset``; return the bytes read, fewer only at the end of the file.

    Raises:
        OSError: the read fails.
    """
    done = 0
    left: list[bytes | memoryview] = list(buffers)
    while left:
        try:
            count = os.preadv(fd, left[:IOV_MAX], offset + done)
        except OSError as error:
            if error.errno != errno.EINVAL or not drop_direct(fd):
                raise
            continue
        if count == 0:
            break
        done += count
        if done % ALIGN_BYTES:
            drop_direct(fd)
        left = rest_of(left, count)
    return done


def rest_of(buffers: list[bytes | memoryview], count: int) -> list[bytes | memoryview]:
    """Return the buffers without their first ``count`` bytes."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            tail = buffers[index:]
            if count:
                tail[0] = memoryview(buffer)[count:]
            return tail
        count -= len(buffer)
    return []


def drop_direct(fd: int) -> bool:
    """Go on without O_DIRECT on this descriptor; False when it had none."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if not flags & os.O_DIRECT:
        return False
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return True
