"""The mover for a device whose memory is the host's."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

import kvtier.connector.mover as mover_module
from kvtier.connector.mover import HostMover
from kvtier.storage.errors import AddressError

from .mover_contract import MoverContract, Pages, make_device


class TestHostMover(MoverContract):
    @pytest.fixture
    def make_mover(self):
        return HostMover


class TestHostMoverWithoutTorch(MoverContract):
    @pytest.fixture
    def make_mover(self, monkeypatch):
        monkeypatch.setattr(mover_module, "_copy_many", lambda: None)
        return HostMover


def test_refuses_pages_too_small_for_a_block():
    """A RAM page that cannot hold a padded block is refused at construction."""
    device = make_device("layer outermost", np.random.default_rng(1))
    with pytest.raises(AddressError, match="takes 24576 bytes, a RAM page has 20480"):
        HostMover(device.tables, Pages(4, 20480))


def test_starts_no_threads_of_the_engine_pool():
    """Copies never start or use torch's thread pool, which belongs to the engine."""
    device = make_device("wide rows", np.random.default_rng(1))
    pages = Pages(24, 1_204_224)
    mover = HostMover(device.tables, pages)
    ids = np.array([3, 1, 9, 5], np.int64)
    grown = []

    def work():
        before = set(os.listdir("/proc/self/task"))
        mover.save(3, ids, ids).wait(1.0)
        grown.append(set(os.listdir("/proc/self/task")) - before)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert grown == [set()]
