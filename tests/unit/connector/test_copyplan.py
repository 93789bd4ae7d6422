"""Shapes of copies: runs, rows, descriptors."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.connector.copyplan import Run, check_blocks, find_runs, group_shape
from kvtier.connector.cuda_driver import ROWS_DTYPE
from kvtier.connector.descriptors import GroupDescriptors, Scratch
from kvtier.connector.regions import region_table
from kvtier.storage.errors import AddressError

PAGE = 1 << 16


def u64(*values):
    return np.array(values, np.uint64)


def test_runs_are_neighbours_on_both_sides():
    """A run ends where either side jumps, also backwards."""
    blocks = np.array([4, 5, 6, 7, 9, 10, 2, 1], np.int64)
    pages = u64(0, 1, 2, 5, 6, 7, 3, 2) * np.uint64(PAGE)
    runs = [(run.first, run.count) for run in find_runs(blocks, pages, PAGE)]
    assert runs == [(0, 3), (3, 1), (4, 2), (6, 1), (7, 1)]
    backwards = np.array([5, 3, 3], np.int64)
    assert len(list(find_runs(backwards, pages[:3], PAGE))) == 3
    assert list(find_runs(blocks[:1], pages[:1], PAGE)) == [Run(0, 1)]
    assert list(find_runs(blocks[:0], pages[:0], PAGE)) == []


def test_layers_at_equal_distances_are_one_part():
    """A layer-outermost group is one strided part; a hole in the distances splits it."""
    ranges = [(1000 * r, 100, 100) for r in (1, 2, 3, 5, 6)]
    parts = group_shape(region_table(0, ranges, 9)).parts
    assert [(p.base, p.rows, p.pitch_bytes, p.page_offset_bytes) for p in parts] == [
        (1000, 3, 1000, 0),
        (5000, 2, 1000, 300),
    ]


def test_block_and_page_counts_must_agree():
    """Calls with other numbers of pages than blocks, or with no blocks' ids, are refused."""
    ids = np.array([1, 2], np.int64)
    assert check_blocks(ids, ids, 3) == 2
    for blocks, pages, pool in ((ids, ids[:1], 3), (ids, ids, 2), (ids - 1, ids, 9)):
        with pytest.raises(AddressError):
            check_blocks(blocks, pages, pool)


tables = st.lists(
    st.tuples(st.integers(1, 1 << 20), st.integers(300, 5000), st.integers(1, 300)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=200, deadline=None)
@given(
    ranges=tables | st.integers(1, 9).map(lambda n: [(4096 * (r + 1), 64, 64) for r in range(n)]),
    ids=st.lists(st.integers(1, 49), min_size=1, max_size=20, unique=True),
    copies=st.integers(1, 40),
    data=st.data(),
)
def test_descriptors_are_what_a_loop_would_say(ranges, ids, copies, data):
    """Flat and strided descriptors cover exactly the bytes of each block, in bounded batches."""
    table = region_table(0, ranges, 50)
    pages = data.draw(st.permutations(range(len(ids))))
    expected = {}
    for block, page in zip(ids, pages, strict=True):
        at = page * PAGE
        for base, stride, length in zip(
            table.base.tolist(), table.stride.tolist(), table.length.tolist(), strict=True
        ):
            for i in range(length):
                expected[at + i] = base + block * stride + i
            at += length
    shape = group_shape(table)
    builder = GroupDescriptors(table, shape, PAGE)
    addresses = np.array(pages, np.uint64) * np.uint64(PAGE)
    block_ids = np.array(ids, np.int64)
    found = {}
    for flat in builder.flat_batches(block_ids, addresses, Scratch(copies)):
        assert len(flat.size) == len(flat.host) == len(flat.device)
        assert len(flat.size) <= max(copies, len(table.base))
        for device, host, size in zip(
            flat.device.tolist(), flat.host.tolist(), flat.size.tolist(), strict=True
        ):
            for i in range(size):
                assert host + i not in found
                found[host + i] = device + i
    assert found == expected
    for to_device in (True, False):
        near, far = ("dst", "src") if to_device else ("src", "dst")
        found = {}
        for batch in builder.row_batches(
            block_ids, addresses, Scratch(copies), to_device=to_device, order=1
        ):
            assert len(batch) <= copies
            for op in batch:
                for row in range(int(op["height"])):
                    for i in range(int(op["width"])):
                        host = int(op[far]) + row * int(op[far + "_pitch"]) + i
                        assert host not in found
                        found[host] = int(op[near]) + row * int(op[near + "_pitch"]) + i
        assert found == expected


def test_a_strided_operation_is_laid_out_as_the_driver_reads_it():
    """The array's bytes are those of the C structure CUDA_MEMCPY3D_BATCH_OP."""

    class Location(ctypes.Structure):
        _fields_ = [("type", ctypes.c_uint), ("id", ctypes.c_int)]

    class Operand(ctypes.Structure):
        _fields_ = [
            ("type", ctypes.c_uint),
            ("ptr", ctypes.c_uint64),
            ("row_length", ctypes.c_size_t),
            ("layer_height", ctypes.c_size_t),
            ("hint", Location),
        ]

    class Operation(ctypes.Structure):
        _fields_ = [
            ("src", Operand),
            ("dst", Operand),
            ("width", ctypes.c_size_t),
            ("height", ctypes.c_size_t),
            ("depth", ctypes.c_size_t),
            ("order", ctypes.c_uint),
            ("flags", ctypes.c_uint),
        ]

    made = np.zeros(1, ROWS_DTYPE)
    for i, name in enumerate(ROWS_DTYPE.names):
        made[name] = i + 1
    read = Operation.from_buffer_copy(made.tobytes())
    src, dst = read.src, read.dst
    assert (src.type, src.ptr, src.row_length, src.layer_height) == (1, 2, 3, 4)
    assert (dst.type, dst.ptr, dst.row_length, dst.layer_height) == (5, 6, 7, 8)
    assert (read.width, read.height, read.depth, read.order, read.flags) == (9, 10, 11, 12, 13)
    assert ctypes.sizeof(Operation) == ROWS_DTYPE.itemsize
