"""Prefix hashes to chunk keys, and block ids to addresses, as arrays.

`ChunkedTokenDatabase` holds no state of requests. The key half needs only the
geometry (scheduler); the address half needs the region tables too (worker).
Pure computation: nothing blocks, any thread may call, results belong to the
caller.

Cost: one conversion of the id list, one broadcast multiply-add, no Python loop
over chunks, blocks or regions. Lengths are one row for all blocks of a group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..storage.errors import AddressError
from .block_plan import BlockPlan, check_ids, first_rows, merge_touching, ragged_ranges, to_ids

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from .geometry import Geometry, GroupGeometry
    from .regions import RegionTable


class ChunkedTokenDatabase:
    """Keys of chunks and addresses of blocks for one rank's KV cache."""

    def __init__(self, geometry: Geometry, tables: Mapping[int, RegionTable] | None = None) -> None:
        """Take the geometry and, on a worker, the region tables by group id."""
        self.geometry = geometry
        self._tables = dict(tables or {})
        self._one_stride = {
            group_id: table.stride[0] if len(set(table.stride.tolist())) == 1 else None
            for group_id, table in self._tables.items()
        }
        self._groups = {group.group_id: group for group in geometry.groups}
        self._hashes_per_chunk = geometry.chunk_tokens // geometry.hash_block_tokens

    # -- keys ---------------------------------------------------------------

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
        starts_tokens: range | Sequence[int] | NDArray[np.integer],
        spans_tokens: Sequence[int] | NDArray[np.integer] | int,
    ) -> BlockPlan:
        """Cut a request's block table of one group into chunks.

        Args:
            group_id: the engine's id of the group.
            block_ids: the request's table: entry i holds tokens from i * block_tokens.
            starts_tokens: first token of each chunk, a multiple of the block; a range for
                chunks at equal distances, which saves a pass.
            spans_tokens: tokens of each chunk, or one number for all; a multiple of the
                hash block. A span that ends inside a block takes that block whole.

        Raises:
            AddressError: starts or spans that are no whole blocks, chunks past the
                table, the null block or ids outside the pool.
        """
        group = self._groups[group_id]
        unit = self.geometry.hash_block_tokens
        table = to_ids(block_ids)
        if isinstance(starts_tokens, range) and isinstance(spans_tokens, int):
            return self._plan_even(group, table, starts_tokens, spans_tokens)
        starts = np.array(starts_tokens, dtype=np.int64)
        spans = np.array(spans_tokens, dtype=np.int64)
        if spans.ndim == 0:
            spans = np.full(len(starts), spans, dtype=np.int64)
        firsts, counts = _first_blocks_and_counts(starts, spans, group.block_tokens, unit)
        if len(counts) and int((firsts + counts).max()) > len(table):
            raise AddressError(
                f"chunks reach block {int((firsts + counts).max())}, the table has {len(table)}"
            )
        ids = table[ragged_ranges(firsts, counts)]
        check_ids(ids, self.geometry.num_blocks)
        return BlockPlan(group_id, ids, starts, spans, first_rows(counts))

    def _plan_even(
        self, group: GroupGeometry, table: NDArray[np.uint64], starts: range, span_tokens: int
    ) -> BlockPlan:
        """Plan chunks of one length at equal distances, checked as numbers instead of arrays."""
        block, unit = group.block_tokens, self.geometry.hash_block_tokens
        n_chunks, n_each = len(starts), -(-span_tokens // block)
        start, distance = (
            (starts.start if n_chunks else 0),
            (starts.step if n_chunks > 1 else block),
        )
        if start < 0 or distance < 0 or start % block or distance % block:
            raise AddressError(f"chunk starts {starts} are no multiples of {block} tokens")
        if span_tokens <= 0 or span_tokens % unit:
            raise AddressError(f"chunk span of {span_tokens} is no multiple of {unit} tokens")
        first, step = start // block, distance // block
        end = first + (n_chunks - 1) * step + n_each if n_chunks else 0
        if end > len(table):
            raise AddressError(f"chunks reach block {end}, the table has {len(table)}")
        if n_each == 1 or not n_chunks:
            ids, rows = table[first:end:step], None
        else:
            steps = np.arange(first, first + n_chunks * step, step, dtype=np.int64)
            ids = table[(steps[:, None] + np.arange(n_each, dtype=np.int64)).ravel()]
            rows = np.arange(0, n_chunks * n_each + 1, n_each, dtype=np.int64)
        check_ids(ids, self.geometry.num_blocks)
        return BlockPlan(group.group_id, ids, starts, span_tokens, rows)

    def plan_blocks(
        self, group_id: int, block_ids: Sequence[int] | NDArray[np.integer]
    ) -> BlockPlan:
        """Return a plan whose chunks are these single blocks, in this order.

        The worker's way: a plan from the scheduler names every block itself.

        Raises:
            AddressError: the null block or ids outside the pool.
        """
        block = self._groups[group_id].block_tokens
        ids = to_ids(block_ids)
        check_ids(ids, self.geometry.num_blocks)
        starts = range(0, len(ids) * block, block)
        return BlockPlan(group_id, ids, starts, block, None)

    # -- addresses ----------------------------------------------------------

    def addresses(
        self, plan: BlockPlan, out: NDArray[np.uint64] | None = None
    ) -> NDArray[np.uint64]:
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
        stride = self._one_stride[plan.group_id]
        if stride is not None:
            # One stride for all: a product a block instead of one an address.
            np.add((plan.block_ids * stride)[:, None], table.base, out=target)
        else:
            np.multiply(plan.block_ids[:, None], table.stride, out=target)
            np.add(target, table.base, out=target)
        return target

    def lengths(self, plan: BlockPlan) -> NDArray[np.uint64]:
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

    def iovecs(self, plan: BlockPlan, out: NDArray[np.uint64] | None = None) -> NDArray[np.uint64]:
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
        return merge_touching(target)

    def chunk_bytes(self, plan: BlockPlan) -> NDArray[np.int64]:
        """Return the useful bytes of each chunk, int64 (c,)."""
        return np.diff(plan.first_rows) * self.table(plan.group_id).block_bytes

    def split(self, plan: BlockPlan, max_bytes: int) -> Iterator[BlockPlan]:
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


def _first_blocks_and_counts(
    starts: NDArray[np.int64], spans: NDArray[np.int64], block: int, unit: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the index of the first block and the number of blocks of each chunk.

    Raises:
        AddressError: a start inside a block, or a span that is no whole number of units.
    """
    if starts.ndim != 1 or spans.shape != starts.shape:
        raise AddressError(f"starts {starts.shape} and spans {spans.shape} must be equal rows")
    firsts = starts // block
    if len(starts):
        if int(starts.min()) < 0 or (firsts * block != starts).any():
            raise AddressError(f"chunk starts must be multiples of the block of {block} tokens")
        if int(spans.min()) <= 0 or (spans % unit).any():
            raise AddressError(f"chunk spans must be positive multiples of {unit} tokens")
    return firsts, -(-spans // block)
