"""The arrays of `ChunkedTokenDatabase` against plain loops that share no code with it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvtier.connector.block_plan import runs
from kvtier.connector.geometry import Geometry, GroupGeometry, GroupKind, Region
from kvtier.connector.regions import RegionTable
from kvtier.connector.token_database import ChunkedTokenDatabase

SEEDS = range(60)


class Case:
    """One random pool, table and set of chunks."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.unit = rng.choice([1, 8, 16])
        self.block = self.unit * rng.choice([1, 2, 4])
        self.num_blocks = rng.choice([2, 17, 4000])
        n_regions = rng.choice([1, 2, 3, rng.randint(4, 160), 160])
        even = rng.random() < 0.3
        self.bases, self.strides, self.lengths = [], [], []
        base = rng.randrange(1 << 40, 1 << 47, 64)
        for _ in range(n_regions):
            length = 4096 if even else rng.randrange(1, 70_000)
            stride = length + (0 if even or rng.random() < 0.5 else rng.randrange(1, 5000))
            self.bases.append(base)
            self.strides.append(stride)
            self.lengths.append(length)
            base += stride * self.num_blocks + rng.choice([0, 0, 512])
        table_len = rng.choice([0, 1, rng.randint(2, 300)])
        self.table = [rng.randrange(1, self.num_blocks) for _ in range(table_len)]
        if rng.random() < 0.4 and table_len < self.num_blocks:
            first = rng.randint(1, self.num_blocks - max(1, table_len))
            self.table = list(range(first, first + table_len))  # one run
        self.starts, self.spans = [], []
        for _ in range(rng.randint(0, 40) if table_len else 0):
            first = rng.randrange(table_len)
            most = (table_len - first) * self.block
            self.starts.append(first * self.block)
            self.spans.append(rng.randint(1, most // self.unit) * self.unit)
        region = [
            Region(f"layers.{i}", b - self.bases[0], s, n)
            for i, (b, s, n) in enumerate(zip(self.bases, self.strides, self.lengths, strict=True))
        ]
        group = GroupGeometry(3, GroupKind.FULL, self.block, None, tuple(region))
        geometry = Geometry(
            (group,), self.unit, self.unit, self.block, self.block * 4, self.num_blocks, "LBHNC", 4
        )
        columns = [np.array(c, dtype=np.uint64) for c in (self.bases, self.strides, self.lengths)]
        self.database = ChunkedTokenDatabase(
            geometry, {3: RegionTable(3, *columns, self.num_blocks)}
        )

    def scalar_blocks(self) -> list[list[int]]:
        """Block ids of each chunk, by walking token by token."""
        out = []
        for start, span in zip(self.starts, self.spans, strict=True):
            ids = []
            for token in range(start, start + span):
                index = token // self.block
                if not ids or ids[-1][0] != index:
                    ids.append((index, self.table[index]))
            out.append([block_id for _, block_id in ids])
        return out

    def scalar_ranges(self) -> list[tuple[int, int]]:
        """Every (address, length) in payload order, one at a time."""
        return [
            (base + block_id * stride, length)
            for chunk in self.scalar_blocks()
            for block_id in chunk
            for base, stride, length in zip(self.bases, self.strides, self.lengths, strict=True)
        ]


def merge(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge ranges that follow each other without a gap."""
    out: list[tuple[int, int]] = []
    for address, length in ranges:
        if out and out[-1][0] + out[-1][1] == address:
            out[-1] = (out[-1][0], out[-1][1] + length)
        else:
            out.append((address, length))
    return out


@pytest.mark.parametrize("seed", SEEDS)
def test_addresses_equal_the_scalar_reference(seed: int) -> None:
    """Addresses, lengths, iovecs and sizes are those of plain loops, in the same order."""
    print(f"seed {seed}")
    case = Case(seed)
    plan = case.database.plan(3, case.table, case.starts, case.spans)
    blocks = case.scalar_blocks()
    assert plan.block_ids.tolist() == [b for chunk in blocks for b in chunk]
    assert np.diff(plan.first_rows).tolist() == [len(chunk) for chunk in blocks]
    assert plan.starts_tokens.tolist() == case.starts
    assert plan.spans_tokens.tolist() == case.spans
    addresses = case.database.addresses(plan)
    lengths = case.database.lengths(plan)
    assert addresses.dtype == lengths.dtype == np.uint64
    assert addresses.shape == (plan.n_blocks, len(case.bases))
    row = lengths.tolist()
    pairs = [(a, n) for some in addresses.tolist() for a, n in zip(some, row, strict=True)]
    assert pairs == case.scalar_ranges()
    iovecs = case.database.iovecs(plan)
    assert [tuple(pair) for pair in iovecs.tolist()] == merge(case.scalar_ranges())
    assert case.database.chunk_bytes(plan).tolist() == [
        len(chunk) * sum(case.lengths) for chunk in blocks
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_even_chunks_as_numbers_equal_the_same_as_arrays(seed: int) -> None:
    """A range of starts and one span give what the written-out lists give."""
    print(f"seed {seed}")
    case = Case(seed)
    rng = random.Random(-seed)
    each = rng.randint(1, 3)
    step = rng.randint(1, 4) * case.block
    stop = max(0, len(case.table) - each + 1) * case.block
    starts, span = range(0, stop, step), each * case.block - rng.choice([0, case.unit])
    span = span or case.unit
    even = case.database.plan(3, case.table, starts, span)
    listed = case.database.plan(3, case.table, list(starts), [span] * len(starts))
    one_span = case.database.plan(3, np.array(case.table, dtype=np.int64), list(starts), span)
    for other in (listed, one_span):
        for name in ("block_ids", "starts_tokens", "spans_tokens", "first_rows"):
            assert getattr(even, name).tolist() == getattr(other, name).tolist(), name


@pytest.mark.parametrize("seed", SEEDS)
def test_outputs_given_are_filled_and_nothing_past_them(seed: int) -> None:
    """With out= the same numbers land in the caller's array and rows past the plan stay."""
    print(f"seed {seed}")
    case = Case(seed)
    plan = case.database.plan(3, case.table, case.starts, case.spans)
    n, width = plan.n_blocks, len(case.bases)
    out = np.full((n + 2, width), 7, dtype=np.uint64)
    got = case.database.addresses(plan, out=out)
    assert got.base is out
    assert got.tolist() == case.database.addresses(plan).tolist()
    assert (out[n:] == 7).all()
    vectors = np.full((n * width + 2, 2), 7, dtype=np.uint64)
    merged = case.database.iovecs(plan, out=vectors)
    assert merged.tolist() == case.database.iovecs(plan).tolist()
    assert (vectors[n * width :] == 7).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_select_and_split_keep_every_chunk_whole(seed: int) -> None:
    """A selection gives the chunks asked for; split covers all in order within its bytes."""
    print(f"seed {seed}")
    case = Case(seed)
    rng = random.Random(seed + 1)
    plan = case.database.plan(3, case.table, case.starts, case.spans)
    blocks = case.scalar_blocks()
    mask = [rng.random() < 0.5 for _ in blocks]
    order = [i for i, wanted in enumerate(mask) if wanted]
    for chosen in (np.array(mask, dtype=np.bool_), order):
        part = plan.select(chosen)
        assert part.block_ids.tolist() == [b for i in order for b in blocks[i]]
        assert part.starts_tokens.tolist() == [case.starts[i] for i in order]
        assert np.diff(part.first_rows).tolist() == [len(blocks[i]) for i in order]
    limit = rng.choice([1, sum(case.lengths) * 3, 10**9])
    parts = list(case.database.split(plan, limit))
    assert [b for p in parts for b in p.block_ids.tolist()] == plan.block_ids.tolist()
    assert [s for p in parts for s in p.spans_tokens.tolist()] == case.spans
    for part in parts:
        assert part.first_rows[0] == 0
        assert part.first_rows[-1] == part.n_blocks
        assert part.n_chunks == 1 or part.n_blocks * sum(case.lengths) <= limit
        assert np.shares_memory(part.block_ids, plan.block_ids)


@pytest.mark.parametrize("seed", SEEDS)
def test_runs_cover_the_ids_in_ascending_steps_of_one(seed: int) -> None:
    """Runs rebuild the ids, and no two neighbouring runs could be one."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    ids: list[int] = []
    for _ in range(rng.randint(0, 12)):
        first = rng.randint(1, 50)
        ids += range(first, first + rng.randint(1, 6))
    found = runs(np.array(ids, dtype=rng.choice([np.uint64, np.int64, np.int32])))
    assert [ids[i] + k for i, count in found.tolist() for k in range(count)] == ids
    starts = [i for i, _ in found.tolist()]
    assert all(ids[i] != ids[i - 1] + 1 for i in starts if i)
