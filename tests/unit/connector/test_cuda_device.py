"""The CUDA parts put together: which way a group goes, whose device, what a failure leaves."""

from __future__ import annotations

import contextlib
import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvtier.connector import assembly, cuda_device, cuda_driver, device_side
from kvtier.connector.cuda_device import choose_way, open_cuda_mover
from kvtier.connector.cuda_driver import DriverError
from kvtier.connector.device_side import CudaSide
from kvtier.connector.mover_cuda import CopyWay
from kvtier.connector.regions import region_table
from kvtier.connector.worker import ArenaPlan
from kvtier.storage.errors import GeometryError
from kvtier.storage.ram import Arena

from .fake_driver import AllPinned, FakeDriver
from .mover_contract import NUM_BLOCKS, Pages, make_device

PLAN = ArenaPlan(page_bytes=4096, staging_pages=4, catalog_pages=60, slot_pages=2)


def table(row_bytes):
    return region_table(0, [(1 << 40, row_bytes, row_bytes), (1 << 41, row_bytes, row_bytes)], 9)


@pytest.mark.parametrize(
    ("row_kib", "can_batch", "way"),
    [
        (64, True, CopyWay.FLAT),
        (28, True, CopyWay.FLAT),
        (16, True, CopyWay.KERNEL),
        (64, False, CopyWay.KERNELS),
        (16, False, CopyWay.KERNELS),
    ],
)
def test_small_rows_and_old_drivers_use_the_kernel(row_kib, can_batch, way):
    """Batches for large rows, the kernel for loads of small ones; no driver copies row by row."""
    assert choose_way(table(row_kib << 10), can_batch) is way


@pytest.mark.parametrize("can_batch", [True, False])
def test_without_a_kernel_batches_do_it(caplog, can_batch):
    """Where the kernel is not to be had (here: torch without CUDA) one line says so."""
    rng = np.random.default_rng(8)
    driver = FakeDriver(rng)
    driver.can_batch = can_batch
    device = make_device("layer outermost", rng)
    pages = Pages(NUM_BLOCKS, 6 * 4096)
    with caplog.at_level(logging.WARNING):
        mover = open_cuda_mover(device.tables, pages, driver, AllPinned(), ordinal=0)
    assert not mover.uses_kernel(3)
    assert caplog.text.count("not to be had") == 1
    ids = np.array([1, 2], np.int64)
    ticket = mover.load(3, ids, ids, None)
    driver.run()
    ticket.wait(1.0)
    assert {name for name, _ in driver.submitted} == {"load"}


class Rows:
    def copy(self, *_, **__):
        raise TypeError("whatever triton raises")


def test_a_kernel_that_fails_is_a_failed_driver(monkeypatch):
    """Nothing but the driver's error leaves a launch: the mover fences what it had queued."""
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    ids = np.array([1], np.int64)
    with pytest.raises(DriverError, match="whatever triton raises"):
        cuda_device._launch(Rows(), 0, FakeDriver(None), 1, ids, ids.astype(np.uint64), True)


def test_each_rank_drives_its_own_device(monkeypatch):
    """The driver is opened for the device that holds the rank's KV cache."""
    opened = []
    monkeypatch.setattr(
        cuda_driver, "CudaDriver", lambda ordinal: opened.append(ordinal) or FakeDriver(None)
    )
    for index in (0, 3, None):
        CudaSide(SimpleNamespace(type="cuda", index=index), PLAN)
    assert opened == [0, 3, 0]


def test_a_device_without_a_driver_turns_kvtier_off():
    """No libcuda, as with other makers' devices, is a reason to be off, told in one line."""
    with pytest.raises(GeometryError, match="libcuda"):
        CudaSide(SimpleNamespace(type="cuda", index=0), PLAN)


class BrokenSide:
    on_segment = None
    copy_threads = 1

    def __init__(self, device, plan):
        pass

    def open_mover(self, tables, arena):
        raise GeometryError("no mover")

    def close(self):
        closed.append(self)


closed = []


def test_a_device_that_cannot_copy_leaves_no_memory_behind(monkeypatch):
    """When the mover cannot be made, the arena is unpinned and given back."""
    arenas = []

    class Watched(Arena):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            arenas.append(self)

    closed.clear()
    monkeypatch.setattr(assembly, "Arena", Watched)
    monkeypatch.setattr(assembly, "CudaSide", BrokenSide)
    monkeypatch.setattr(assembly, "arena_plan", lambda *_: PLAN)
    monkeypatch.setattr(assembly, "build_region_tables", lambda *_: {})
    config = SimpleNamespace(key_ring=lambda: None)
    caches = {"layer": SimpleNamespace(device=SimpleNamespace(type="cuda", index=0))}
    with pytest.raises(GeometryError, match="no mover"):
        assembly.build_worker(config, None, None, caches, 0, 1, 2)
    assert [arena.ready_pages for arena in arenas] == [0]
    assert arenas[0]._closed
    assert len(closed) == 1


def test_copies_to_a_device_are_queued_while_others_run():
    """Two threads each way keep a CUDA device busy; a host's copies take their own thread."""
    assert device_side.CudaSide.copy_threads == 2
    assert device_side.HostSide.copy_threads == 1
