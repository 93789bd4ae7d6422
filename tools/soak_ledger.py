"""What a storage soak must find: versions begun and acknowledged, in memory that outlives a kill.

A plain file, mapped by the process that works and by the one that kills it. Every key is written
by one thread alone; numbers are 64 bits and aligned, so that a kill tears none of them.
"""

from __future__ import annotations

import random
import struct
from pathlib import Path

import numpy as np

KINDS = ("put", "replace", "get", "contains", "delete", "quarantine", "touch", "scan",
         "save", "load")  # fmt: skip
MAX_THREADS = 8
BEGUN, ACKED, STATE, HURT = range(4)
UNKNOWN, STORED, DELETED = range(3)
BASE_BYTES = 1 << 20
_HEAD = struct.Struct("<QQ")


class Ledger:
    """Counters of operations and the state of every key.

    Args:
        path: the file; made when missing.
        n_keys: how many keys there are.
    """

    def __init__(self, path: Path, n_keys: int) -> None:
        cells = len(KINDS) * MAX_THREADS + 4 * n_keys
        if not path.exists():
            path.write_bytes(bytes(8 * cells))
        self._cells = np.memmap(path, dtype=np.int64, mode="r+", shape=(cells,))
        split = len(KINDS) * MAX_THREADS
        self.counts = self._cells[:split].reshape(len(KINDS), MAX_THREADS)
        self.keys = self._cells[split:].reshape(n_keys, 4)

    def operations(self) -> dict[str, int]:
        """Return how many operations of each kind were done."""
        return {kind: int(self.counts[i].sum()) for i, kind in enumerate(KINDS)}

    def new_life(self) -> None:
        """Forget what must be there: the store may be smaller than before."""
        self.keys[:, STATE] = UNKNOWN


class Payloads:
    """The bytes of every version of every key, made again whenever they are needed.

    Args:
        seed: what they come from.
        n_bytes: length of each.
    """

    def __init__(self, seed: int, n_bytes: int) -> None:
        base = random.Random(f"{seed}/payload").randbytes(BASE_BYTES)  # noqa: S311
        self._base = base + base[:n_bytes]
        self.n_bytes = n_bytes

    def fill(self, view: memoryview, number: int, version: int) -> None:
        """Write one version's bytes."""
        view[: _HEAD.size] = _HEAD.pack(number, version)
        at = (number * 7919 + version * 104729) % BASE_BYTES
        view[_HEAD.size :] = self._base[at + _HEAD.size : at + self.n_bytes]

    def version_of(self, view: memoryview, number: int) -> int | None:
        """Return which version these bytes are, all of them compared; None for none."""
        found, version = _HEAD.unpack(view[: _HEAD.size])
        at = (number * 7919 + version * 104729) % BASE_BYTES
        right = found == number and view[_HEAD.size :] == memoryview(self._base)[
            at + _HEAD.size : at + self.n_bytes
        ]  # fmt: skip
        return int(version) if right else None


def key_of(number: int, seed: int) -> bytes:
    """Return the chunk key of a number: a hash that spreads over the folders."""
    return random.Random(f"{seed}/key/{number}").randbytes(32) + b"\0"  # noqa: S311
