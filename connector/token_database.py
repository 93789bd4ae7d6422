"""Prefix hashes to chunk keys, and block ids to addresses, as arrays.

`ChunkedTokenDatabase` holds no state of requests. The key half needs only the
geometry (scheduler); the address half needs the region tables too (worker).
Pure computation: nothing blocks, any thread may call, results belong to the
caller.

Cost: one conversion of the id list, one broadcast multiply-add, no Python loop
over chunks, blocks or regions. Lengths are one row for all blocks of a group.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..storage.errors import AddressError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from .geometry import Geometry
    from .regions import RegionTable

MAX_IOVECS = 1024  # Linux IOV_MAX: what one preadv or pwritev takes


@dataclass(frozen=True, slots=True)
class Plan:
    """Blocks of one group, chunk after chunk, in payload order.

    Attributes:
        group_id: the engine's id of the group.
        block_ids: ids of all blocks, uint64 (n,).
        starts_tokens: first token of each chunk, int64 (c,).
        spans_tokens: tokens of each chunk, int64 (c,).
        first_rows: index into `block_ids` of each chunk's first block, and n at
            the end, int64 (c + 1,).
    """

    group_id: int
    block_ids: NDArray[np.uint64]
    starts_tokens: NDArray[np.int64]
    spans_tokens: NDArray[np.int64]
    first_rows: NDArray[np.int64]

    @property
    def n_chunks(self) -> int:
        """Chunks (c)."""
        return len(self.starts_tokens)

    @property
    def n_blocks(self) -> int:
        """Blocks of all chunks together (n)."""
        return len(self.block_ids)

    def select(self, chunks: NDArray[np.bool_] | NDArray[np.integer] | Sequence[int]) -> Plan:
        """Return a plan of these chunks (a mask, or indices in the order wanted); a copy."""
        picked = np.asarray(chunks)
        index = np.flatnonzero(picked) if picked.dtype == np.bool_ else picked.astype(np.int64)
        counts = np.diff(self.first_rows)[index]
        rows = _ragged_ranges(self.first_rows[:-1][index], counts)
        return Plan(
            self.group_id,
            self.block_ids[rows],
            self.starts_tokens[index],
            self.spans_tokens[index],
            _first_rows(counts),
        )

    def slice(self, first_chunk: int, end_chunk: int) -> Plan:
        """Return chunks [first_chunk, end_chunk) as views of this plan's arrays."""
        rows = self.first_rows[first_chunk : end_chunk + 1]
        low, high = (int(rows[0]), int(rows[-1])) if len(rows) else (0, 0)
        return Plan(
            self.group_id,
            self.block_ids[low:high],
            self.starts_tokens[first_chunk:end_chunk],
            self.spans_tokens[first_chunk:end_chunk],
            rows - low if low else rows,
        )


class ChunkedTokenDatabase:
    """Keys of chunks and addresses of blocks for one rank's KV cache."""

    def __init__(self, geometry: Geometry, tables: Mapping[int, RegionTable] | None = None) -> None:
        """Take the geometry and, on a worker, the region tables by group id."""
        self.geometry = geometry
        self._tables = dict(tables or {})
        self._groups = {group.group_id: group for group in geometry.groups}
        self._hashes_per_chunk = geometry.chunk_tokens // geometry.hash_block_tokens

    # -- keys ---------------------------------------------------------------

    def n_whole_chunks(self, n_tokens: int) -> int:
        """Return how many whole chunks the first ``n_tokens`` tokens hold."""
        return n_tokens // self.geometry.chunk_tokens

    def chunk_hashes(
        self, block_hashes: Sequence[bytes], n_chunks: int | None = None, first_chunk: int = 0
    ) -> list[bytes]:
        """Return the prefix hashes at the ends of whole chunks [first_chunk, n_chunks).

        One slice of the list: about 1 microsecond per 100 chunks.

        Args:
            block_hashes: the request's hashes, one a hash block. Read anew each time;
                the engine shortens the list in streaming sessions.
            n_chunks: end chunk; None: as many as the hashes cover.
            first_chunk: first chunk wanted.

        Raises:
            AddressError: the hashes do not reach that far.
        """
        per_chunk = self._hashes_per_chunk
        covered = len(block_hashes) // per_chunk
        if n_chunks is None:
            n_chunks = covered
        elif n_chunks > covered:
            raise AddressError(f"{n_chunks} chunks wanted, hashes cover {covered}")
        picked = block_hashes[(first_chunk + 1) * per_chunk - 1 : n_chunks * per_chunk : per_chunk]
        return picked if isinstance(picked, list) else list(picked)

    def chunk_keys(
        self,
        block_hashes: Sequence[bytes],
        group_id: int,
        n_chunks: int | None = None,
        first_chunk: int = 0,
    ) -> list[bytes]:
        """Return the keys of whole chunks [first_chunk, n_chunks) of a group."""
        suffix = bytes((group_id,))
        return [h + suffix for h in self.chunk_hashes(block_hashes, n_chunks, first_chunk)]

    def hash_at(self, block_hashes: Sequence[bytes], end_tokens: int) -> bytes:
        """Return the prefix hash that covers exactly the first ``end_tokens`` tokens.

        Raises:
            AddressError: not a hash boundary, or past the hashes.
        """
        index, rest = divmod(end_tokens, self.geometry.hash_block_tokens)
        if rest or not 0 < index <= len(block_hashes):
            raise AddressError(
                f"no prefix hash at token {end_tokens}: {len(block_hashes)} hashes of "
                f"{self.geometry.hash_block_tokens} tokens"
            )
        return bytes(block_hashes[index - 1])

    def key_at(self, block_hashes: Sequence[bytes], end_tokens: int, group_id: int) -> bytes:
        """Return the key of the chunk, tail or state of a group that ends at ``end_tokens``."""
        return self.hash_at(block_hashes, end_tokens) + bytes((group_id,))

    # -- plans --------------------------------------------------------------

    def plan(
        self,
        group_id: int,
        block_ids: Sequence[int] | NDArray[np.integer],
        starts_tokens: Sequence[int] | NDArray[np.integer],
        spans_tokens: Sequence[int] | NDArray[np.integer] | int,
    ) -> Plan:
        """Cut a request's block table of one group into chunks.

        Args:
            group_id: the engine's id of the group.
            block_ids: the request's table: entry i holds tokens from i * block_tokens.
            starts_tokens: first token of each chunk; a multiple of the block.
            spans_tokens: tokens of each chunk, or one number for all; a multiple of the
                hash block. A span that ends inside a block takes that block whole.

        Raises:
            AddressError: starts or spans that are no whole blocks, chunks past the
                table, the null block or ids outside the pool.
        """
        group = self._groups[group_id]
        table = _to_ids(block_ids)
        starts = np.asarray(starts_tokens, dtype=np.int64)
        block = group.block_tokens
        spans = np.asarray(spans_tokens, dtype=np.int64)
        _check_spans(starts, spans, block, self.geometry.hash_block_tokens)
        if spans.ndim == 0:
            counts = np.full(len(starts), -(-int(spans) // block), dtype=np.int64)
            spans = np.full(len(starts), int(spans), dtype=np.int64)
        else:
            counts = -(-spans // block)
        firsts = starts // block
        if len(firsts) and int((firsts + counts).max()) > len(table):
            raise AddressError(
                f"chunks reach block {int((firsts + counts).max())}, the table has {len(table)}"
            )
        single = len(counts) == 0 or int(counts.max()) == 1
        ids = table[firsts] if single else table[_ragged_ranges(firsts, counts)]
        _check_ids(ids, self.geometry.num_blocks)
        return Plan(group_id, ids, starts, spans, _first_rows(counts))

    def plan_blocks(self, group_id: int, block_ids: Sequence[int] | NDArray[np.integer]) -> Plan:
        """Return a plan whose chunks are these single blocks, in this order.

        The worker's way: a plan from the scheduler names every block itself.

        Raises:
            AddressError: the null block or ids outside the pool.
        """
        block = self._groups[group_id].block_tokens
        ids = _to_ids(block_ids)
        _check_ids(ids, self.geometry.num_blocks)
        rows = np.arange(len(ids) + 1, dtype=np.int64)
        # All chunks share one span; a stride of 0 keeps it one number.
        spans = np.broadcast_to(np.int64(block), len(ids))
        return Plan(group_id, ids, rows[:-1] * block, spans, rows)

    # -- addresses ----------------------------------------------------------

    def addresses(self, plan: Plan, out: NDArray[np.uint64] | None = None) -> NDArray[np.uint64]:
        """Return the address of every block in every range, uint64 (n, R).

        Args:
            plan: n blocks.
            out: C-contiguous uint64 array of at least n rows and R columns to fill; its
                first n rows are returned.

        Raises:
            AddressError: no memory is registered for the group, or ``out`` does not fit.
        """
        table = self.table(plan.group_id)
        n, width = plan.n_blocks, table.n_ranges
        if out is None:
            target = np.empty((n, width), dtype=np.uint64)
        elif out.dtype == np.uint64 and out.ndim == 2 and len(out) >= n and out.shape[1] == width:
            target = out[:n]
        else:
            raise AddressError(f"out must be uint64 of shape ({n}, {width}), is {out.shape}")
        stride = table.stride
        if width and (stride == stride[0]).all():
            # One stride for all: a product a block instead of one an address.
            np.add((plan.block_ids * stride[0])[:, None], table.base, out=target)
        else:
            np.multiply(plan.block_ids[:, None], stride, out=target)
            np.add(target, table.base, out=target)
        return target

    def lengths(self, plan: Plan) -> NDArray[np.uint64]:
        """Return the bytes of a block in each range, uint64 (R,): the same for every block."""
        return self.table(plan.group_id).length

    def table(self, group_id: int) -> RegionTable:
        """Return the region table of a group.

        Raises:
            AddressError: no memory is registered for the group.
        """
        try:
            return self._tables[group_id]
        except KeyError:
            raise AddressError(f"no memory is registered for KV cache group {group_id}") from None

    def iovecs(self, plan: Plan, out: NDArray[np.uint64] | None = None) -> NDArray[np.uint64]:
        """Return (address, length) pairs in payload order, uint64 (m, 2), touching ones merged.

        Such an array *is* a C array of `struct iovec` on 64-bit machines; `batches`
        cuts it for one system call each.

        Args:
            plan: n blocks.
            out: C-contiguous uint64 array of at least n * R rows and 2 columns to fill;
                its first m rows are returned.
        """
        table = self.table(plan.group_id)
        count = plan.n_blocks * table.n_ranges
        if out is None:
            target = np.empty((count, 2), dtype=np.uint64)
        elif out.dtype == np.uint64 and out.ndim == 2 and len(out) >= count and out.shape[1] == 2:
            target = out[:count]
        else:
            raise AddressError(f"out must be uint64 of shape ({count}, 2), is {out.shape}")
        if not count:
            return target
        pairs = target.reshape(plan.n_blocks, table.n_ranges, 2)
        np.multiply(plan.block_ids[:, None], table.stride, out=pairs[:, :, 0])
        np.add(pairs[:, :, 0], table.base, out=pairs[:, :, 0])
        pairs[:, :, 1] = table.length
        return _merge_touching(target)

    def chunk_bytes(self, plan: Plan) -> NDArray[np.int64]:
        """Return the useful bytes of each chunk, int64 (c,)."""
        return np.diff(plan.first_rows) * self.table(plan.group_id).block_bytes

    def split(self, plan: Plan, max_bytes: int) -> Iterator[Plan]:
        """Yield views of ``plan`` of at most ``max_bytes`` each, whole chunks, one at least."""
        if max_bytes <= 0:
            raise AddressError(f"max_bytes must be positive, is {max_bytes}")
        block_bytes = self.table(plan.group_id).block_bytes
        first = 0
        while first < plan.n_chunks:
            limit = int(plan.first_rows[first]) + max_bytes // block_bytes
            end = int(np.searchsorted(plan.first_rows, limit, side="right")) - 1
            end = min(max(end, first + 1), plan.n_chunks)
            yield plan.slice(first, end)
            first = end


def batches(iovecs: NDArray[np.uint64], limit: int = MAX_IOVECS) -> Iterator[NDArray[np.uint64]]:
    """Yield views of at most ``limit`` pairs."""
    for first in range(0, len(iovecs), limit):
        yield iovecs[first : first + limit]


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


def _to_ids(block_ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.uint64]:
    """Turn block ids into a uint64 array.

    `struct.pack` converts a list three times faster than NumPy does, and refuses
    what is no integer or negative.
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


def _check_ids(ids: NDArray[np.uint64], num_blocks: int) -> None:
    if not len(ids):
        return
    # One pass: 0 (the null block, never read or written) wraps round to the largest.
    worst = int((ids - np.uint64(1)).max())
    if worst >= num_blocks - 1:
        bad = int(ids.min()) if int(ids.min()) == 0 else int(ids.max())
        raise AddressError(f"block id {bad} is outside 1 .. {num_blocks - 1}")


def _check_spans(
    starts: NDArray[np.int64], spans: NDArray[np.int64], block: int, unit: int
) -> None:
    if starts.ndim != 1 or spans.ndim > 1 or (spans.ndim == 1 and len(spans) != len(starts)):
        raise AddressError("starts and spans must be rows of equal length")
    if not len(starts):
        return
    if int(starts.min()) < 0 or (starts % block).any():
        raise AddressError(f"chunk starts must be multiples of the block of {block} tokens")
    if int(spans.min()) <= 0 or (spans % unit).any():
        raise AddressError(f"chunk spans must be positive multiples of {unit} tokens")


def _first_rows(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    out = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=out[1:])
    return out


def _ragged_ranges(firsts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the concatenation of ranges [first, first + count), int64."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(firsts - (ends - counts), counts) + np.arange(total, dtype=np.int64)


def _merge_touching(pairs: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Merge pairs that touch, in place; return the shorter view."""
    touch = pairs[1:, 0] == pairs[:-1, 0] + pairs[:-1, 1]
    if not touch.any():
        return pairs
    heads = np.concatenate(([0], np.flatnonzero(~touch) + 1))
    lengths = np.add.reduceat(pairs[:, 1], heads)
    count = len(heads)
    pairs[:count, 0] = pairs[heads, 0]
    pairs[:count, 1] = lengths
    return pairs[:count]
