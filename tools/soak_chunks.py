"""Chunks that a storage soak's jobs save: what they are called and hold, and whether they do."""

from __future__ import annotations

import random
from typing import Any

from ..storage.errors import RecordDamaged, RecordMissing
from ..storage.key import NAMESPACE_BYTES
from ..storage.ram import Arena
from ..storage.tier import RecordSpec, Tier
from .soak_ledger import Payloads
from .soak_types import SoakError

NAMESPACE = bytes(reversed(range(NAMESPACE_BYTES)))
PAGE_BYTES = 4096
BLOCK_TOKENS = 16
N_CHUNKS, MOST_BLOCKS = 240, 4
STORE_BYTES = N_CHUNKS * (MOST_BLOCKS + 1) * PAGE_BYTES  # at most, all chunks, with headers
_FIRST_NUMBER = 1 << 32  # numbers in payloads: other ones than those of the plain operations


class Wrong(SoakError):
    """Something that must never be; the message says what."""


def key_of(number: int, seed: int) -> bytes:
    """Return the key of a chunk; groups take turns."""
    name = random.Random(f"{seed}/chunk/{number}").randbytes(32)  # noqa: S311
    return name + bytes((number % 2,))


def blocks_of(number: int) -> int:
    """Return how many blocks a chunk has."""
    return 1 + number % MOST_BLOCKS


class Content:
    """What every block of every chunk holds."""

    def __init__(self, seed: int) -> None:
        self._payloads = Payloads(seed, PAGE_BYTES)

    def fill(self, view: memoryview, number: int, block: int) -> None:
        """Write one block."""
        self._payloads.fill(view, _FIRST_NUMBER + number, block)

    def holds(self, view: memoryview, number: int, block: int) -> bool:
        """Whether it is this block, every byte of it."""
        return self._payloads.version_of(view, _FIRST_NUMBER + number) == block


def check_chunks(tier: Tier, seed: int) -> dict[str, Any]:
    """Read every chunk that a tier tells of, after a kill; return counts and wrongs. Blocking."""
    numbers = {key_of(i, seed): i for i in range(N_CHUNKS)}
    content = Content(seed)
    wrong: list[str] = []
    there = 0
    arena = Arena(PAGE_BYTES, MOST_BLOCKS)
    arena.start(background=False)
    try:
        for info in tier.scan():
            number = numbers.get(info.key)
            if number is None:
                wrong.append(f"a scan tells of a chunk that was never written: {info.key.hex()}")
                continue
            n = blocks_of(number)
            views = arena.buffers(range(n), PAGE_BYTES)
            try:
                tier.get(RecordSpec(info.key, 0, n * BLOCK_TOKENS, n * PAGE_BYTES), views)
            except RecordMissing:
                continue
            except RecordDamaged as error:
                wrong.append(f"chunk {number} is damaged, by no fault: {error}")
                continue
            there += 1
            data = b"".join(views)
            pages = [memoryview(data)[i * PAGE_BYTES : (i + 1) * PAGE_BYTES] for i in range(n)]
            bad = [i for i, page in enumerate(pages) if not content.holds(page, number, i)]
            wrong += [f"block {i} of chunk {number} verifies, but holds other bytes" for i in bad]
        return {"there": there, "wrong": wrong}
    finally:
        arena.close()
