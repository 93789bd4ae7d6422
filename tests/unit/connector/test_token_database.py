"""Keys and refusals of `ChunkedTokenDatabase`; its numbers are in the property tests."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.connector.geometry import Geometry, GroupGeometry, GroupKind, Region
from kvtier.connector.regions import region_table
from kvtier.connector.token_database import ChunkedTokenDatabase
from kvtier.storage.errors import AddressError

BLOCK, UNIT, CHUNK = 32, 16, 128


@pytest.fixture
def database() -> ChunkedTokenDatabase:
    group = GroupGeometry(2, GroupKind.FULL, BLOCK, None, (Region("l.0", 0, 4096, 4096),))
    geometry = Geometry((group,), UNIT, UNIT, BLOCK, CHUNK, 100, "LBHNC", 3)
    return ChunkedTokenDatabase(geometry, {2: region_table(2, [(1 << 20, 4096, 4096)], 100)})


def hashes(n: int) -> list[bytes]:
    """Prefix hashes that say which token they end at."""
    return [((i + 1) * UNIT).to_bytes(32, "little") for i in range(n)]


def test_a_chunk_is_named_by_the_hash_at_its_end(database: ChunkedTokenDatabase) -> None:
    """Chunk i's hash covers exactly its last token, trailing zero bytes kept."""
    got = database.chunk_hashes(hashes(30))
    assert [int.from_bytes(h, "little") for h in got] == [128, 256, 384]
    assert all(len(h) == 32 for h in got)
    assert database.chunk_hashes(hashes(30), 3, first_chunk=1) == got[1:]
    assert database.chunk_hashes(hashes(30), 1) == got[:1]
    assert database.chunk_hashes(hashes(7)) == []
    assert database.chunk_hashes([]) == []


def test_keys_carry_the_group(database: ChunkedTokenDatabase) -> None:
    """A key is the hash and the group; whole chunks and single boundaries agree."""
    keys = database.chunk_keys(hashes(16), 2)
    assert [(key[:-1], key[-1]) for key in keys] == [
        (h, 2) for h in database.chunk_hashes(hashes(16))
    ]
    assert database.key_at(hashes(16), 256, 2) == keys[1]
    assert int.from_bytes(database.hash_at(hashes(16), 48), "little") == 48


@pytest.mark.parametrize("end", [0, -16, 8, 15, 17, 17 * 16])
def test_no_hash_where_there_is_none(database: ChunkedTokenDatabase, end: int) -> None:
    """A token count that is no boundary, or past the hashes, is refused."""
    with pytest.raises(AddressError, match="no prefix hash"):
        database.hash_at(hashes(16), end)


def test_more_chunks_than_hashes_are_refused(database: ChunkedTokenDatabase) -> None:
    """Asking for a chunk whose hash is not known raises instead of giving fewer."""
    with pytest.raises(AddressError, match="hashes cover 2"):
        database.chunk_hashes(hashes(16), 3)


@pytest.mark.parametrize("bad", [0, 100, 101, 1 << 40, -1, 1.5, None, "7"])
def test_ids_outside_the_pool_are_refused(database: ChunkedTokenDatabase, bad: object) -> None:
    """The null block, ids past the pool and what is no id raise our error, alone or among good."""
    for ids in ([bad], [5, bad, 6], [bad, 99]):
        with pytest.raises(AddressError):
            database.plan_blocks(2, ids)
        with pytest.raises(AddressError):
            database.plan(2, ids, range(0, len(ids) * BLOCK, BLOCK), BLOCK)


@pytest.mark.parametrize("ids", [np.array([0]), np.array([-3]), np.array([100]), np.array([1.0])])
def test_arrays_of_ids_are_checked_too(database: ChunkedTokenDatabase, ids: object) -> None:
    """NumPy input gets the same refusals as lists."""
    with pytest.raises(AddressError):
        database.plan_blocks(2, ids)


def test_the_edges_of_the_pool_are_good(database: ChunkedTokenDatabase) -> None:
    """Blocks 1 and num_blocks - 1 have addresses."""
    plan = database.plan_blocks(2, [1, 99])
    assert database.addresses(plan).tolist() == [[(1 << 20) + 4096], [(1 << 20) + 99 * 4096]]


@pytest.mark.parametrize(
    ("starts", "spans"),
    [
        ([16], [32]),  # inside a block
        ([-32], [32]),
        ([0], [8]),  # no whole hash block
        ([0], [0]),
        ([0], [-16]),
        ([0, 32], [32]),
        ([96], [64]),  # past the table
        ([128], [16]),
        ([0], 24),
        (range(0, 64, 16), 32),
        (range(-32, 64, 32), 32),
        (range(96, -32, -32), 32),
        (range(0, 32, 32), 24),
        (range(0, 32, 32), 0),
        (range(0, 160, 32), 32),
        (range(96, 128, 32), 64),
    ],
)
def test_starts_and_spans_that_cannot_be_are_refused(
    database: ChunkedTokenDatabase, starts: object, spans: object
) -> None:
    """What is no whole number of blocks, or reaches past the table, raises our error."""
    with pytest.raises(AddressError):
        database.plan(2, [4, 5, 6, 7], starts, spans)


def test_nothing_in_nothing_out(database: ChunkedTokenDatabase) -> None:
    """Empty input gives empty arrays of the right shapes."""
    for plan in (
        database.plan_blocks(2, []),
        database.plan(2, [], [], []),
        database.plan(2, [4], range(0), 32),
    ):
        assert database.addresses(plan).shape == (0, 1)
        assert database.iovecs(plan).shape == (0, 2)
        assert database.chunk_bytes(plan).tolist() == []
        assert list(database.split(plan, 1)) == []
        assert plan.select([]).n_blocks == 0


def test_adjacent_blocks_become_one_range(database: ChunkedTokenDatabase) -> None:
    """One region without gaps: a run of ids is one iovec."""
    iovecs = database.iovecs(database.plan_blocks(2, [4, 5, 6, 9, 8]))
    assert iovecs.tolist() == [
        [(1 << 20) + 4 * 4096, 3 * 4096],
        [(1 << 20) + 9 * 4096, 4096],
        [(1 << 20) + 8 * 4096, 4096],
    ]


def test_outputs_that_do_not_fit_are_refused(database: ChunkedTokenDatabase) -> None:
    """An output array that is too small or of another type raises instead of being cut."""
    plan = database.plan_blocks(2, [1, 2])
    for out in (np.empty((1, 1), np.uint64), np.empty((2, 2), np.uint64), np.empty((2, 1), int)):
        with pytest.raises(AddressError):
            database.addresses(plan, out=out)
    with pytest.raises(AddressError):
        database.iovecs(plan, out=np.empty((1, 2), np.uint64))


def test_a_scheduler_has_keys_but_no_addresses() -> None:
    """Without region tables keys work and addresses say what is missing."""
    group = GroupGeometry(0, GroupKind.FULL, 16, None, (Region("l.0", 0, 1, 1),))
    database = ChunkedTokenDatabase(Geometry((group,), 16, 16, 16, 256, 9, "LBHNC", 1))
    assert database.chunk_hashes(hashes(31)) == database.chunk_hashes(hashes(16))
    with pytest.raises(AddressError, match="no memory is registered"):
        database.addresses(database.plan_blocks(0, [1]))
