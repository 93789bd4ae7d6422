"""The arena: pages where they should be, growth in the background, memory given back."""

import ctypes
import threading
from pathlib import Path

import numpy as np
import pytest

from kvtier.storage.errors import AddressError, ConfigError
from kvtier.storage.ram import Arena


@pytest.fixture
def arena():
    arena = Arena(8192, 10, segment_bytes=4 * 8192)
    arena.start(background=False)
    yield arena
    arena.close()


def test_pages_are_apart(arena):
    """What is written to a page is read from it, at its address, and from no other."""
    for page in range(10):
        (view,) = arena.buffers([page], 8192)
        view[:] = bytes([page]) * 8192
    addresses = arena.addresses(np.arange(10))
    assert addresses.dtype == np.uint64
    for page in range(10):
        assert int(addresses[page]) % 4096 == 0
        assert ctypes.string_at(int(addresses[page]), 8192) == bytes([page]) * 8192
        assert bytes(arena.buffers([page], 100)[0]) == bytes([page]) * 100


def test_neighbours_merge(arena):
    """Neighbouring full pages of one segment are one view; partly used ones never."""
    lengths = [len(view) // 8192 for view in arena.buffers([0, 1, 2, 3, 4, 5, 7, 9, 8], 8192)]
    assert lengths == [4, 2, 1, 1, 1]
    assert [len(view) for view in arena.buffers([0, 1], 4096)] == [4096, 4096]
    assert arena.buffers([], 8192) == []


def test_order_is_kept(arena):
    """The views are in the order that was asked for."""
    for page in range(10):
        arena.buffers([page], 8192)[0][:] = bytes([page]) * 8192
    order = [5, 4, 3, 8, 9, 0]
    got = b"".join(bytes(view) for view in arena.buffers(order, 8192))
    assert got == b"".join(bytes([page]) * 8192 for page in order)
    assert b"".join(arena.buffers(np.array(order), 8192)) == got


@pytest.mark.parametrize("pages", [[10], [-1], [0, 99]])
def test_pages_that_are_not(arena, pages):
    """Pages out of range are our own error, never somebody else's memory."""
    with pytest.raises(AddressError):
        arena.buffers(pages, 8192)
    with pytest.raises(AddressError):
        arena.addresses(pages)
    for used_bytes in (0, 8193):
        with pytest.raises(AddressError):
            arena.buffers([0], used_bytes)


@pytest.mark.parametrize(("page_bytes", "n_pages"), [(0, 1), (100, 1), (4096, 0), (-4096, 1)])
def test_no_arena(page_bytes, n_pages):
    """Numbers that make no arena are refused."""
    with pytest.raises(ConfigError):
        Arena(page_bytes, n_pages)


def test_grows_while_in_use():
    """The first pages serve while the hook still registers a later segment."""
    second, go_on, seen = threading.Event(), threading.Event(), []

    def hook(address, length):
        seen.append((address, length))
        if len(seen) == 2:
            second.set()
            assert go_on.wait(20)

    arena = Arena(4096, 5, segment_bytes=2 * 4096, on_segment=hook)
    assert arena.ready_pages == 0
    assert not arena.wait_ready(1, 0.01)
    arena.start()
    assert second.wait(20)
    assert arena.ready_pages == 2
    arena.buffers([0, 1], 4096)[0][:] = b"x" * 8192
    with pytest.raises(AddressError):
        arena.buffers([2], 4096)
    go_on.set()
    assert arena.wait_ready(5, 20)
    assert [length for _, length in seen] == [8192, 8192, 4096]
    assert [address for address, _ in seen] == [int(a) for a in arena.addresses([0, 2, 4])]
    arena.close()


def test_a_failing_hook_stops_growth():
    """When registering fails the pages before it stay, and the reason is kept."""

    def hook(address, length):
        if length < 8192:
            raise RuntimeError("no more pinned memory")

    arena = Arena(4096, 3, segment_bytes=8192, on_segment=hook)
    arena.start()
    assert not arena.wait_ready(3, 20)
    assert arena.ready_pages == 2
    assert "no more pinned memory" in arena.failure
    arena.close()


def test_close_gives_memory_back():
    """After close no page is ready and the memory is unmapped; a view held keeps only its own."""

    def mapped_kib():
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * 4

    before = mapped_kib()
    arena = Arena(1 << 20, 64, segment_bytes=16 << 20)
    arena.start(background=False)
    assert mapped_kib() - before > 60 << 10
    (view,) = arena.buffers([0], 1 << 20)
    arena.close()
    arena.close()
    assert arena.ready_pages == 0
    assert mapped_kib() - before < 24 << 10
    view[:] = bytes(len(view))
    with pytest.raises(AddressError):
        arena.buffers([0], 4096)


def test_segments_do_not_touch():
    """The last page of a segment never ends where another begins: they are pinned apart."""
    arena = Arena(4096, 200, segment_bytes=4096)
    arena.start(background=False)
    starts = arena.addresses(np.arange(200))
    assert not set((starts + np.uint64(4096)).tolist()) & set(starts.tolist())
    arena.close()


def test_a_fork_does_not_take_the_pages_along(arena):
    """A child process gets no copy: its page tables stay small, a device's pages stay ours."""
    address = int(arena.addresses([0])[0])
    flags, here = "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(maxsplit=1)[0]
        if not head.endswith(":"):
            start, end = (int(part, 16) for part in head.split("-"))
            here = start <= address < end
        elif here and head == "VmFlags:":
            flags = line
    if not flags:
        pytest.skip("this kernel does not tell")
    assert "dc" in flags.split()
