"""A disk that is full or slow, made below the disk tier in the engine's own process."""

from __future__ import annotations

import errno
import os
import time
from typing import Any

from ..storage.disk_file import RecordIO

SLOW_S = 0.5  # added to every read and write of a record
_ON: set[str] = set()
_REAL_WRITE, _REAL_READ = RecordIO.write, RecordIO.read


def set_fault(kind: str, on: bool) -> None:
    """Begin or end a fault: ``disk-full`` or ``disk-slow``."""
    (_ON.add if on else _ON.discard)(kind)
    RecordIO.write = _write if _ON else _REAL_WRITE  # type: ignore[method-assign]
    RecordIO.read = _read if _ON else _REAL_READ  # type: ignore[method-assign]


def _write(self: RecordIO, *args: Any, **kwargs: Any) -> int:
    if "disk-slow" in _ON:
        time.sleep(SLOW_S)
    if "disk-full" in _ON:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return _REAL_WRITE(self, *args, **kwargs)


def _read(self: RecordIO, *args: Any, **kwargs: Any) -> int:
    if "disk-slow" in _ON:
        time.sleep(SLOW_S)
    return _REAL_READ(self, *args, **kwargs)
