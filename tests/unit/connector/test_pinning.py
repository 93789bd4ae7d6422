"""Pinning of the RAM arena, segment by segment."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from kvtier.connector import pinning as pinning_module
from kvtier.connector.pinning import Pinning, prefer_numa_node
from kvtier.storage.ram import Arena

from .fake_driver import FakeDriver

PAGE = 4096


@pytest.fixture
def driver():
    return FakeDriver(np.random.default_rng(1))


def grow(driver, pages=10, segment_pages=4):
    pinning = Pinning(driver, pages * PAGE)
    arena = Arena(PAGE, pages, segment_bytes=segment_pages * PAGE, on_segment=pinning.on_segment)
    arena.start(background=False)
    return pinning, arena


def test_every_segment_is_pinned_before_its_pages_are_ready(driver):
    """No page is handed out that a copy would find unpinned."""
    ready_when_pinned = []
    pinning = Pinning(driver, 10 * PAGE)

    def hook(address, length):
        ready_when_pinned.append(arena.ready_pages)
        pinning.on_segment(address, length)

    arena = Arena(PAGE, 10, segment_bytes=4 * PAGE, on_segment=hook)
    arena.start(background=False)
    assert ready_when_pinned == [0, 4, 8]
    assert pinning.reach(arena.addresses(np.arange(10))) is not None
    assert pinning.pinned_bytes == 10 * PAGE == sum(driver.pinned.values())
    arena.close()


def test_knows_what_is_pinned(driver):
    """Addresses before, between and after pinned segments are told apart."""
    pinning = Pinning(driver, 100 * PAGE)
    assert pinning.reach(np.array([PAGE], np.uint64)) is None
    assert pinning.reach(np.empty(0, np.uint64)) is not None
    pinning.on_segment(20 * PAGE, 2 * PAGE)
    pinning.on_segment(10 * PAGE, 3 * PAGE)
    inside = [10, 11, 12, 20, 21]
    assert pinning.reach(np.array(inside, np.uint64) * np.uint64(PAGE)) is not None
    for page in (9, 13, 19, 22):
        assert pinning.reach(np.array([*inside, page], np.uint64) * np.uint64(PAGE)) is None


def test_pages_are_reached_where_the_device_has_them(driver):
    """Each segment has its own distance between the host's address and the device's."""
    pinning = Pinning(driver, 100 * PAGE)
    for first, alias in ((20, 0), (10, 1 << 40), (30, 1 << 41)):
        driver.alias = alias
        pinning.on_segment(first * PAGE, 3 * PAGE)
    pages = np.array([11, 21, 32, 12], np.uint64) * np.uint64(PAGE)
    aliases = np.array([1 << 40, 0, 1 << 41, 1 << 40], np.uint64)
    assert np.array_equal(pinning.reach(pages), pages + aliases)
    driver.alias = -5 * PAGE
    pinning.on_segment(50 * PAGE, PAGE)
    assert pinning.reach(np.array([50 * PAGE], np.uint64)).tolist() == [45 * PAGE]


def test_a_refusal_is_one_warning_and_the_arena_goes_on(driver, caplog):
    """The warning names the amount, the cause and the knob; later segments are not tried."""
    driver.pin_limit = 5 * PAGE
    with caplog.at_level(logging.WARNING):
        pinning, arena = grow(driver)
    assert arena.ready_pages == 10
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert "CUDA_ERROR_OUT_OF_MEMORY" in message
    assert "`ram`" in message
    assert "ulimit -l" in message
    assert len(driver.pinned) == 1  # the last, smaller one would have fitted
    assert pinning.reach(arena.addresses(np.arange(4))) is not None
    assert pinning.reach(arena.addresses(np.arange(5))) is None
    arena.close()


def test_close_unpins_everything_once(driver):
    """After closing nothing is pinned, and closing again is harmless."""
    pinning, arena = grow(driver)
    pages = arena.addresses(np.arange(10))
    assert driver.pinned
    pinning.close()
    pinning.close()
    assert driver.pinned == {}
    assert pinning.reach(pages) is None
    arena.close()


def test_nothing_is_pinned_after_close(driver):
    """A segment that comes late stays unpinned, and one that was being pinned is undone."""
    pinning = Pinning(driver, 10 * PAGE)
    pinning.close()
    pinning.on_segment(4 * PAGE, PAGE)
    assert driver.pinned == {}

    pinning, pin = Pinning(driver, 10 * PAGE), driver.pin

    def pin_while_closing(address, length):
        pin(address, length)
        assert driver.pinned
        pinning.close()

    driver.pin = pin_while_closing
    pinning.on_segment(4 * PAGE, PAGE)
    assert driver.pinned == {}
    assert pinning.reach(np.array([4 * PAGE], np.uint64)) is None


@pytest.mark.parametrize(("node", "expected"), [(None, []), (1, [(1, 0)])])
def test_the_growing_thread_prefers_the_devices_node(driver, monkeypatch, node, expected):
    """The device's NUMA node is preferred once, from the first segment on, where it is known."""
    asked = []
    monkeypatch.setattr(
        pinning_module,
        "prefer_numa_node",
        lambda node, address, length: asked.append((node, len(driver.pinned))),
    )
    driver.node = node
    _, arena = grow(driver)
    assert asked == expected
    arena.close()


def test_numa_placement_is_best_effort():
    """A node that is not there, or a machine with one node, changes nothing and raises nothing."""
    room = np.zeros(3 * PAGE, np.uint8)
    start = -(-room.ctypes.data // PAGE) * PAGE
    assert prefer_numa_node(1000, start, PAGE) is False
    room[:] = 1
