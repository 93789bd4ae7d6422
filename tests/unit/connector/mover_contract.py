"""What every mover must do, whatever moves the bytes; subclassed by the movers' tests.

The oracle copies byte by byte from (base, stride, length) and shares no code with a mover.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import pytest

from kvtier.connector.mover import CopyFailed, Mover
from kvtier.connector.regions import RegionTable, region_table
from kvtier.storage.errors import AddressError

SEED = 20_407
NUM_BLOCKS = 14
ROUNDS = 4


@dataclass
class Device:
    """A KV cache of one allocation and its groups' regions."""

    memory: np.ndarray
    tables: dict[int, RegionTable]


class Pages:
    """RAM pages at scattered, aligned addresses."""

    def __init__(self, n_pages: int, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self._room = np.zeros((n_pages + 1) * page_bytes + 4096, np.uint8)
        self.start = -(-self._room.ctypes.data // 4096) * 4096
        self.n_pages = n_pages

    def addresses(self, page_ids):
        return (self.start + page_ids * self.page_bytes).astype(np.uint64)

    def bytes_of(self, page):
        return ctypes.string_at(self.start + page * self.page_bytes, self.page_bytes)

    def fill(self, rng):
        data = rng.integers(0, 256, self.n_pages * self.page_bytes, dtype=np.uint8)
        ctypes.memmove(self.start, data.ctypes.data, data.nbytes)


LAYOUTS = {
    # name: (offsets, strides, lengths) of each region, given the number of blocks
    "layer outermost": lambda n: ([r * n * 4096 for r in range(6)], [4096] * 6, [4096] * 6),
    "block outermost": lambda n: ([r * 2048 for r in range(5)], [5 * 2048] * 5, [2048] * 5),
    "two sizes": lambda n: (
        [0, n * 3000, 2 * n * 3000, 3 * n * 3000],
        [3000, 3000, 3000, 1000],
        [3000, 3000, 3000, 1000],
    ),
    "odd lengths in padded slots": lambda n: (
        [r * n * 512 for r in range(7)],
        [512] * 7,
        [333] * 7,
    ),
    "unequal distances": lambda n: ([0, n * 4096, 5 * n * 4096], [4096] * 3, [4096] * 3),
    "backwards": lambda n: ([3 * n * 512, 2 * n * 512, 0], [512] * 3, [512] * 3),
    "one region": lambda n: ([64], [8192], [8192]),
    "wide rows": lambda n: ([0, n * 600_016], [600_016] * 2, [600_016] * 2),
}


def make_device(layout, rng, num_blocks=NUM_BLOCKS):
    offsets, strides, lengths = LAYOUTS[layout](num_blocks)
    size = max(o + s * num_blocks for o, s in zip(offsets, strides, strict=True)) + 64
    memory = rng.integers(0, 256, size + 64, dtype=np.uint8)
    start = -(-memory.ctypes.data // 64) * 64
    ranges = [(start + o, s, n) for o, s, n in zip(offsets, strides, lengths, strict=True)]
    return Device(memory, {3: region_table(3, ranges, num_blocks)})


def device_block(table, block):
    """Oracle: the bytes of a block, region after region."""
    return b"".join(
        ctypes.string_at(int(b) + block * int(s), int(n))
        for b, s, n in zip(table.base, table.stride, table.length, strict=True)
    )


class MoverContract:
    """Subclass with a `make_mover` fixture: (tables, pages) -> Mover."""

    @pytest.fixture(params=sorted(LAYOUTS))
    def layout(self, request):
        return request.param

    @pytest.fixture
    def rng(self):
        print("seed", SEED)
        return np.random.default_rng(SEED)

    @pytest.fixture
    def world(self, layout, rng, make_mover):
        device = make_device(layout, rng)
        block_bytes = int(device.tables[3].length.sum())
        page_bytes = -(-block_bytes // 4096) * 4096 + 4096 * int(rng.integers(0, 2))
        pages = Pages(NUM_BLOCKS, page_bytes)
        pages.fill(rng)
        mover: Mover = make_mover(device.tables, pages)
        yield device, pages, mover
        mover.close()

    @staticmethod
    def _ids(rng):
        n = int(rng.integers(1, NUM_BLOCKS - 1))
        blocks = rng.permutation(np.arange(1, NUM_BLOCKS))[:n]
        pages = rng.permutation(NUM_BLOCKS)[:n]
        if n > 6:  # some neighbours on both sides, some on one
            blocks[:6] = [3, 4, 5, 9, 10, 11]
            blocks[6:] = rng.permutation(np.setdiff1d(np.arange(1, NUM_BLOCKS), blocks[:6]))[
                : n - 6
            ]
            pages[:6] = [7, 8, 9, 10, 2, 3]
            others = np.setdiff1d(np.arange(NUM_BLOCKS), pages[:6])
            pages[6:] = rng.permutation(others)[: n - 6]
        return blocks.astype(np.int64), pages.astype(np.int64)

    def test_save_moves_exactly_the_blocks(self, world, rng):
        """A save fills its pages with the blocks' regions and zeros, and touches nothing else."""
        for _ in range(ROUNDS):
            self._check_save(*world, rng)

    def _check_save(self, device, pages, mover, rng):
        table = device.tables[3]
        blocks, page_ids = self._ids(rng)
        before = [pages.bytes_of(p) for p in range(NUM_BLOCKS)]
        memory = device.memory.copy()
        ticket = mover.save(3, blocks, page_ids, mover.fence())
        ticket.wait(10.0)
        assert ticket.done()
        assert ticket.fenced()
        target = dict(zip(page_ids.tolist(), blocks.tolist(), strict=True))
        for page in range(NUM_BLOCKS):
            expected = before[page]
            if page in target:
                data = device_block(table, target[page])
                data += bytes(-len(data) % 4096)
                expected = data + expected[len(data) :]
            assert pages.bytes_of(page) == expected, page
        assert np.array_equal(device.memory, memory)

    def test_load_moves_exactly_the_blocks(self, world, rng):
        """A load fills its blocks from their pages and touches nothing else."""
        for _ in range(ROUNDS):
            self._check_load(*world, rng)

    def _check_load(self, device, pages, mover, rng):
        table = device.tables[3]
        blocks, page_ids = self._ids(rng)
        expected = device.memory.copy()
        shift = expected.ctypes.data - device.memory.ctypes.data
        for block, page in zip(blocks.tolist(), page_ids.tolist(), strict=True):
            data, at = pages.bytes_of(page), 0
            for b, s, n in zip(
                table.base.tolist(), table.stride.tolist(), table.length.tolist(), strict=True
            ):
                ctypes.memmove(b + block * s + shift, data[at : at + n], n)
                at += n
        before = [pages.bytes_of(p) for p in range(NUM_BLOCKS)]
        mover.load(3, blocks, page_ids, mover.fence()).wait(10.0)
        assert np.array_equal(device.memory, expected)
        assert [pages.bytes_of(p) for p in range(NUM_BLOCKS)] == before

    def test_nothing_to_copy(self, world):
        """A call without blocks is done at once."""
        _, _, mover = world
        none = np.empty(0, np.int64)
        assert mover.save(3, none, none).done()
        mover.load(3, none, none).wait(1.0)

    @pytest.mark.parametrize("bad", [[0], [-1], [NUM_BLOCKS], [3, 0]])
    def test_refuses_ids_that_are_no_blocks(self, world, bad):
        """The null block and ids beyond the pool are refused before a byte moves."""
        device, _, mover = world
        memory = device.memory.copy()
        ids = np.array(bad, np.int64)
        for copy in (mover.save, mover.load):
            with pytest.raises(AddressError):
                copy(3, ids, np.arange(len(bad), dtype=np.int64))
        assert np.array_equal(device.memory, memory)

    def test_refuses_a_group_and_counts_that_do_not_fit(self, world):
        """A group that is not kept, or not one page a block, is refused."""
        _, _, mover = world
        two, three = np.array([1, 2], np.int64), np.array([1, 2, 3], np.int64)
        with pytest.raises(AddressError, match="group 9"):
            mover.save(9, two, two)
        with pytest.raises(AddressError, match="2 blocks but 3 pages"):
            mover.load(3, two, three)

    def test_after_close_every_copy_fails(self, world):
        """A closed mover copies nothing and says so in the ticket."""
        device, _, mover = world
        mover.close()
        mover.close()
        memory = device.memory.copy()
        ids = np.array([1], np.int64)
        ticket = mover.load(3, ids, ids)
        with pytest.raises(CopyFailed, match="closed"):
            ticket.wait(1.0)
        assert ticket.fenced()
        assert np.array_equal(device.memory, memory)
