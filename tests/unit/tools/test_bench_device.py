"""`kvtier bench device`: what its figures are held to."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from kvtier.tools import bench_copies, bench_device

HOST_ONLY = {
    "device": None,
    "plan_time": {"flat": {"lock_held_ms": 1.5}},
    "host_copies": [
        {"regions": 30, "row_kib": 192, "chunk_blocks": 2, "save_ratio": 0.9, "load_ratio": 0.6},
        {"regions": 64, "row_kib": 4, "chunk_blocks": 16, "save_ratio": 0.1, "load_ratio": 0.1},
    ],
}


def test_without_a_device_only_what_was_measured_is_judged():
    """A report without a device has no verdict on device copies, and the worse way counts."""
    bars = bench_device.bars(HOST_ONLY)
    assert {name: bar["met"] for name, bar in bars.items()} == {
        "python_lock_held_ms": True,
        "host_copies_30x192_kib_x2": False,
    }


def test_a_devices_figures_are_judged_at_64_kib():
    """Rates are judged at 64 KiB, and the model's loss beside saves."""
    report = copy.deepcopy(HOST_ONLY)
    report["device"] = "a card"
    good = {"load_ratio": 0.95, "save_ratio": 0.85, "both_ratio": 0.8}
    report["sizes"] = [
        {"block_kib": 4, "flat": dict.fromkeys(good, 0.0)},
        {"block_kib": 64, "flat": good},
    ]
    report["model"] = [
        {"way": "flat", "copies": "load", "products": {"loss_percent": 50.0}},
        {"way": "flat", "copies": "save", "products": {"loss_percent": 3.5}},
    ]
    met = {name: bar["met"] for name, bar in bench_device.bars(report).items()}
    assert met["host_to_device_64_kib"]
    assert not met["device_to_host_64_kib"]
    assert met["both_ways_64_kib"]
    assert not met["products_loss_percent"]


def test_plan_time_leaves_out_the_time_in_which_the_lock_is_free():
    """The lock is held for less than all of Python's time, and both are measured."""
    report = bench_copies.plan_time(blocks=500, regions=8)
    for way in ("flat", "rows"):
        assert report[way]["lock_held_ms"] > 0
        assert report[way]["python_ms"] > 0


@pytest.mark.parametrize("name", ["create_stream", "copy_batch", "reached"])
def test_the_null_driver_answers_everything(name):
    """The driver that does nothing has every call."""
    assert getattr(bench_copies.NullDriver(), name)(np.empty(0), stream=1) == 1
