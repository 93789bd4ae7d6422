"""`kvtier bench device`: what its figures are held to."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvtier.tools import bench_copies, bench_device, bench_device_copies
from kvtier.tools.bench_device_copies import Bench, Options

from ..connector.fake_driver import FakeDriver

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
        {"block_kib": 256, "flat": {"failed": "no copy"}},
    ]
    failed = {**report, "sizes": [{"block_kib": 64, "flat": {"failed": "no copy"}}]}
    assert "both_ways_64_kib" not in bench_device.bars(failed)
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


class EagerDriver(FakeDriver):
    """A device that has done everything whenever it is asked."""

    can_batch = True

    def reached(self, event):
        self.run()
        return super().reached(event)

    def stream_idle(self, stream):
        self.run()
        return super().stream_idle(stream)


def fake_bench(**options):
    """A bench whose device is the host's memory."""
    driver = EagerDriver(np.random.default_rng(5))
    cuda = SimpleNamespace(synchronize=lambda: None, empty_cache=lambda: None)
    fake_torch = SimpleNamespace(
        cuda=cuda,
        int64=torch.int64,
        randint=lambda *limits, dtype, device: torch.randint(*limits, dtype=dtype),
    )
    streams = {name: driver.create_stream(urgent=True) for name in ("load", "save")}
    said = []
    return Bench(Options(repeats=1, **options), driver, fake_torch, streams, said.append), driver


def test_every_way_is_measured_with_pinned_pages():
    """The pages stay pinned from one mover to the next: only the large copies go one by one."""
    bench, driver = fake_bench(volume_bytes=4 << 20, block_kib=(4, 16))
    bench_device_copies.measure_sizes(bench)
    assert [row["block_kib"] for row in bench.report["sizes"]] == [4, 16]
    for row in bench.report["sizes"]:
        assert row["flat"]["load_ratio"] > 0
        assert row["rows"]["both_ratio"] > 0
        assert row["kernel"] == row["kernels"] == {"failed": "no kernel"}  # torch has no CUDA
    assert {count for name, count in driver.submitted if name == "each"} == {1}
    assert {name for name, _ in driver.submitted} == {"each", "load", "save", "rows"}
    assert driver.pinned == {}


def test_pythons_time_is_measured_with_pinned_pages():
    """The load of many blocks is the mover's own, in every round."""
    bench, driver = fake_bench(plan_blocks=20)
    bench_device_copies.measure_python_time(bench)
    assert len(bench.report["python_time"]) == 6
    assert {name for name, _ in driver.submitted} == {"load", "rows"}


def test_an_error_beside_another_copy_is_told():
    """What fails on a thread of a measurement both ways ends the measurement."""

    def move(name):
        if name == "save":
            raise RuntimeError("no copy")

    with pytest.raises(RuntimeError, match="no copy"):
        bench_device_copies.both(move, "load", "save")


def test_what_fails_leaves_the_other_figures(monkeypatch):
    """A measurement that cannot be made is named; what was measured is judged all the same."""
    bench, _ = fake_bench()
    said = []

    def sizes(bench):
        good = {"load_ratio": 0.95, "save_ratio": 0.95, "both_ratio": 0.9}
        bench.report["sizes"] = [{"block_kib": 64, "flat": good}]

    def model(_):
        raise RuntimeError("no room")

    monkeypatch.setattr(bench_device.Bench, "open", lambda *_: bench)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")
    monkeypatch.setattr(bench_device, "plan_time", lambda _: HOST_ONLY["plan_time"])
    monkeypatch.setattr(bench_device, "host_copies", lambda: HOST_ONLY["host_copies"])
    monkeypatch.setattr(bench_device, "measure_sizes", sizes)
    model.__name__ = "measure_model"
    monkeypatch.setattr(bench_device, "measure_model", model)
    monkeypatch.setattr(bench_device, "measure_python_time", lambda _: None)
    report = bench_device.run(Options(), said.append)
    assert report["failed"] == {"measure_model": "RuntimeError: no room"}
    assert report["bars"]["both_ways_64_kib"]["met"]
    assert "products_loss_percent" not in report["bars"]
    assert any("no room" in line for line in said)
    monkeypatch.setattr(bench_device, "run", lambda *_: report)
    assert bench_device.main(["--json"]) == 1
