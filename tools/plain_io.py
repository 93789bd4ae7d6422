"""Plain copies, reads and writes: what the benchmarks measure themselves against."""

from __future__ import annotations

import mmap
import os
import time

import numpy as np

CALL_BYTES = 16 << 20
SECTOR_BYTES = 4096


def time_memcpy(n_bytes: int) -> float:
    """Return the seconds of one copy between two touched buffers, on one thread."""
    source = np.ones(n_bytes, dtype=np.uint8)
    target = np.full(n_bytes, 2, dtype=np.uint8)
    begin_s = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - begin_s


def write_plain(path: str, n_bytes: int) -> float:
    """Write a new file in 16 MiB calls, O_DIRECT where that works; return the seconds."""
    left_bytes = -(-n_bytes // SECTOR_BYTES) * SECTOR_BYTES
    with mmap.mmap(-1, CALL_BYTES) as buffer:
        buffer.write(os.urandom(CALL_BYTES))
        if os.path.exists(path):
            os.unlink(path)
        begin_s = time.perf_counter()
        fd = _open(path, os.O_WRONLY | os.O_CREAT)
        try:
            with memoryview(buffer) as view:
                while left_bytes:
                    left_bytes -= os.write(fd, view[: min(left_bytes, CALL_BYTES)])
        finally:
            os.close(fd)
        return time.perf_counter() - begin_s


def time_plain_read(path: str, n_bytes: int) -> float:
    """Read a file from its start in 16 MiB calls, O_DIRECT where that works; return the seconds."""
    with mmap.mmap(-1, CALL_BYTES) as buffer:
        buffer.write(bytes(CALL_BYTES))
        begin_s = time.perf_counter()
        fd = _open(path, os.O_RDONLY)
        try:
            done_bytes = 0
            while done_bytes < n_bytes:
                count = os.readv(fd, [buffer])
                if not count:
                    raise OSError(f"{path} ends after {done_bytes} of {n_bytes} bytes")
                done_bytes += count
        finally:
            os.close(fd)
        return time.perf_counter() - begin_s


def _open(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:
        return os.open(path, flags, 0o600)
