"""Blocks of chunks as arrays, and the small array tools around them.

Pure computation on NumPy arrays; nothing here knows addresses.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

from ..storage.errors import AddressError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_ONE = np.uint64(1)


class BlockPlan:
    """Blocks of one group, chunk after chunk, in payload order.

    The arrays belong to the plan and are not written to after it is made. Chunks of
    one block each at equal distances, the usual case, are kept as numbers and become
    arrays only when asked for.
    """

    __slots__ = ("_rows", "_spans", "_starts", "block_ids", "group_id")

    def __init__(
        self,
        group_id: int,
        block_ids: NDArray[np.uint64],
        starts_tokens: range | NDArray[np.int64],
        spans_tokens: int | NDArray[np.int64],
        rows: NDArray[np.int64] | None,
    ) -> None:
        """Take what describes the chunks.

        Args:
            group_id: the engine's id of the group.
            block_ids: ids of all blocks, uint64 (n,).
            starts_tokens: first token of each chunk, int64 (c,), or a range.
            spans_tokens: tokens of each chunk, int64 (c,), or one number for all.
            rows: see `first_rows`; None: one block a chunk.
        """
        self.group_id = group_id
        self.block_ids = block_ids
        self._starts = starts_tokens
        self._spans = spans_tokens
        self._rows = rows

    @property
    def n_chunks(self) -> int:
        """Chunks (c)."""
        return len(self._starts)

    @property
    def n_blocks(self) -> int:
        """Blocks of all chunks together (n)."""
        return len(self.block_ids)

    @property
    def starts_tokens(self) -> NDArray[np.int64]:
        """First token of each chunk, int64 (c,)."""
        if isinstance(self._starts, range):
            return np.array(self._starts, dtype=np.int64)
        return self._starts

    @property
    def spans_tokens(self) -> NDArray[np.int64]:
        """Tokens of each chunk, int64 (c,)."""
        if isinstance(self._spans, int):
            return np.full(self.n_chunks, self._spans, dtype=np.int64)
        return self._spans

    @property
    def first_rows(self) -> NDArray[np.int64]:
        """Index into `block_ids` of each chunk's first block, and n at the end, int64 (c + 1,)."""
        if self._rows is None:
            return np.arange(self.n_chunks + 1, dtype=np.int64)
        return self._rows

    def select(self, chunks: NDArray[np.bool_] | NDArray[np.integer] | Sequence[int]) -> BlockPlan:
        """Return a plan of these chunks (a mask, or indices in the order wanted); a copy."""
        picked = np.asarray(chunks)
        index = np.flatnonzero(picked) if picked.dtype == np.bool_ else picked.astype(np.int64)
        rows = self.first_rows
        counts = np.diff(rows)[index]
        return BlockPlan(
            self.group_id,
            self.block_ids[ragged_ranges(rows[:-1][index], counts)],
            self.starts_tokens[index],
            self.spans_tokens[index],
            first_rows(counts),
        )

    def slice(self, first_chunk: int, end_chunk: int) -> BlockPlan:
        """Return chunks [first_chunk, end_chunk) as views of this plan's arrays."""
        if self._rows is None:
            low, high, rows = first_chunk, end_chunk, None
        else:
            rows = self._rows[first_chunk : end_chunk + 1]
            low, high = int(rows[0]), int(rows[-1])
            rows = rows - low
        spans = self._spans
        return BlockPlan(
            self.group_id,
            self.block_ids[low:high],
            self._starts[first_chunk:end_chunk],
            spans if isinstance(spans, int) else spans[first_chunk:end_chunk],
            rows,
        )


def runs(block_ids: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return (index of the first, count) of every run of ascending adjacent ids, int64 (k, 2)."""
    n = len(block_ids)
    if not n:
        return np.empty((0, 2), dtype=np.int64)
    breaks = np.flatnonzero(block_ids[1:] != block_ids[:-1] + block_ids.dtype.type(1))
    out = np.empty((len(breaks) + 1, 2), dtype=np.int64)
    out[0, 0] = 0
    out[1:, 0] = breaks + 1
    out[:-1, 1] = np.diff(out[:, 0])
    out[-1, 1] = n - out[-1, 0]
    return out


def to_ids(block_ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.uint64]:
    """Turn block ids into a uint64 array.

    `struct.pack` converts a list three times faster than NumPy does, and refuses
    what is no integer or negative.

    Raises:
        AddressError: not integers, or negative.
    """
    if isinstance(block_ids, np.ndarray):
        if block_ids.dtype.kind not in "iu":
            raise AddressError(f"block ids must be integers, are {block_ids.dtype}")
        if block_ids.dtype.kind == "i" and len(block_ids) and int(block_ids.min()) < 0:
            raise AddressError(f"block id {int(block_ids.min())} is negative")
        return block_ids.astype(np.uint64)
    try:
        packed = struct.pack(f"{len(block_ids)}Q", *block_ids)
    except struct.error as error:
        raise AddressError(f"block ids must be integers of 0 or more: {error}") from None
    return np.frombuffer(packed, dtype=np.uint64)


def check_ids(ids: NDArray[np.uint64], num_blocks: int) -> None:
    """Refuse ids outside 1 .. num_blocks - 1: block 0 is never read from or written to.

    Raises:
        AddressError: names an id that is outside.
    """
    # One pass: 0 wraps round to the largest number.
    if len(ids) and np.maximum.reduce(ids - _ONE) >= num_blocks - 1:
        bad = ids[(ids < 1) | (ids >= num_blocks)][0]
        raise AddressError(f"block id {int(bad)} is outside 1 .. {num_blocks - 1}")


def first_rows(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each chunk begins when chunk i has ``counts[i]`` blocks, int64 (c + 1,)."""
    out = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=out[1:])
    return out


def ragged_ranges(firsts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the concatenation of ranges [first, first + count), int64."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(firsts - (ends - counts), counts) + np.arange(total, dtype=np.int64)


def merge_touching(pairs: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Merge (address, length) pairs that touch, in place; return the shorter view."""
    apart = pairs[1:, 0] != pairs[:-1, 0] + pairs[:-1, 1]
    if apart.all():
        return pairs
    heads = np.concatenate((np.zeros(1, dtype=np.int64), np.flatnonzero(apart) + 1))
    lengths = np.add.reduceat(pairs[:, 1], heads)
    count = len(heads)
    pairs[:count, 0] = pairs[heads, 0]
    pairs[:count, 1] = lengths
    return pairs[:count]
