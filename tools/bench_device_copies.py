"""The parts of `kvtier bench device` that need a CUDA device.

`measure_sizes`: rates of small copies against one large one. `measure_model`:
what a model's loops lose beside copies. `measure_python_time`: what a load of
many blocks takes from other Python threads. Each adds to `Bench.report`.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ..connector.cuda_device import open_cuda_mover
from ..connector.cuda_driver import CudaDriver
from ..connector.mover import CopyError
from ..connector.mover_cuda import CopyWay, CudaLimits, CudaMover
from ..connector.pinning import Pinning
from ..connector.regions import RegionTable, region_table
from ..storage.ram import Arena

GIB = 1 << 30
KIB = 1 << 10
REGIONS = 64
SEED = 1207


@dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes:
        volume_bytes: moved by each copy that is timed.
        repeats: of each measurement; the median counts.
        block_kib: row sizes, one region of one block each.
    """

    device: int = 0
    volume_bytes: int = 2 * GIB
    repeats: int = 5
    block_kib: tuple[int, ...] = (4, 16, 32, 64, 256)
    plan_blocks: int = 12_500


@dataclass
class Bench:
    """One device with pinned pages, and what was measured on it."""

    options: Options
    driver: CudaDriver
    torch: Any
    streams: dict[str, int]
    say: Callable[[str], None]
    report: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, options: Options, say: Callable[[str], None]) -> Bench:
        """Start on a device."""
        import torch

        torch.cuda.set_device(options.device)
        torch.empty(1, device="cuda")
        driver = CudaDriver(options.device)
        driver.use()
        streams = {n: driver.create_stream(urgent=n == "load") for n in ("load", "save")}
        return cls(options, driver, torch, streams, say)

    def seconds(self, work: Callable[[], Any]) -> float:
        """Median wall time of ``work``, the device idle before it."""
        times = []
        for _ in range(self.options.repeats + 1):
            self.torch.cuda.synchronize()
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])


class KeptPins:
    """Pinned pages that outlive the movers that use them."""

    def __init__(self, pinning: Pinning) -> None:
        self.reach = pinning.reach

    def close(self) -> None:
        """Keep them; a mover that closes would unpin its own."""


class Setup:
    """A KV cache of equal regions, pages for all of its blocks, and a mover between them."""

    def __init__(self, bench: Bench, row_bytes: int, blocks: int, regions: int = REGIONS) -> None:
        self.bench, self.blocks, self.block_bytes = bench, blocks, row_bytes * regions
        pool = blocks + 1
        self.memory = bench.torch.randint(
            0, 127, (regions * pool * row_bytes // 8,), dtype=bench.torch.int64, device="cuda"
        )
        start = self.memory.data_ptr()
        ranges = [(start + r * pool * row_bytes, row_bytes, row_bytes) for r in range(regions)]
        self.table: RegionTable = region_table(0, ranges, pool)
        page_bytes = -(-self.block_bytes // 4096) * 4096
        self.pinning = Pinning(bench.driver, page_bytes * blocks)
        self.arena = Arena(
            page_bytes, blocks, segment_bytes=64 * GIB, on_segment=self.pinning.on_segment
        )
        began = time.perf_counter()
        self.arena.start(background=False)
        self.grow_s = time.perf_counter() - began
        if self.arena.failure or self.pinning.failure:
            raise RuntimeError(f"{self.arena.failure or self.pinning.failure}")
        rng = np.random.default_rng(SEED)
        self.block_ids = rng.permutation(np.arange(1, pool)).astype(np.int64)
        self.page_ids = rng.permutation(blocks).astype(np.int64)

    def mover(
        self, way: CopyWay, limits: CudaLimits | None = None, driver: Any = None
    ) -> CudaMover:
        """Return a new mover between the two."""
        pins: Any = KeptPins(self.pinning)
        return open_cuda_mover(
            {0: self.table}, self.arena, driver or self.bench.driver, pins,
            ordinal=self.bench.options.device, ways={0: way}, limits=limits,
        )  # fmt: skip

    def move(self, mover: CudaMover, name: str) -> None:
        """Copy all blocks and wait without sleeping.

        Nor holding the interpreter lock: another copy's thread would be kept from queueing.
        """
        ticket = getattr(mover, name)(0, self.block_ids, self.page_ids, None)
        while not ticket.done():
            time.sleep(0)
        ticket.wait(0.0)

    def move_asleep(self, mover: CudaMover) -> None:
        """Load all blocks as a worker thread would, leaving the interpreter to others."""
        mover.load(0, self.block_ids, self.page_ids, None).wait(60.0)

    def large_copy(self, name: str) -> None:
        """One copy of the same bytes, both sides contiguous."""
        size = np.array([self.blocks * self.block_bytes], np.uint64)
        device, host = self.table.base[:1], self.arena.addresses(np.zeros(1, np.int64))
        to, start = (device, host) if name == "load" else (host, device)
        stream = self.bench.streams[name]
        self.bench.driver.copy_each(to, start, size, stream)
        while not self.bench.driver.stream_idle(stream):
            time.sleep(0)

    def close(self) -> None:
        """Give the memory back."""
        self.bench.torch.cuda.synchronize()
        self.pinning.close()
        self.arena.close()
        del self.memory
        self.bench.torch.cuda.empty_cache()


def both(move: Callable[[str], None], *names: str) -> None:
    """Run ``move`` for several names at once; raises what any of them raised."""
    with ThreadPoolExecutor(len(names)) as threads:
        list(threads.map(move, names))


def measure_sizes(bench: Bench) -> None:
    """Each row size and way, alone and both ways at once, against one large copy."""
    rows = []
    for kib in bench.options.block_kib:
        setup = Setup(bench, kib * KIB, bench.options.volume_bytes // (kib * KIB * REGIONS))
        one = _rates(bench, setup, setup.large_copy)
        row: dict[str, Any] = {
            "block_kib": kib,
            "copies": setup.blocks * REGIONS,
            "bytes": setup.blocks * setup.block_bytes,
            "pin_gib_per_s": round(setup.blocks * setup.block_bytes / GIB / setup.grow_s, 2),
            "one_large_copy_gb_per_s": _gb(one),
        }
        for way in CopyWay:
            row[way.value] = _one_way(bench, setup, way, one)
        rows.append(row)
        bench.say(json.dumps(row))
        setup.close()
    bench.report["sizes"] = rows


def _rates(bench: Bench, setup: Setup, move: Callable[[str], None]) -> dict[str, float]:
    """Bytes a second of ``move`` each way and both ways at once."""
    total = setup.blocks * setup.block_bytes
    return {
        "load": total / bench.seconds(lambda: move("load")),
        "save": total / bench.seconds(lambda: move("save")),
        "both": 2 * total / bench.seconds(lambda: both(move, "load", "save")),
    }


def _one_way(bench: Bench, setup: Setup, way: CopyWay, one: dict[str, float]) -> dict[str, Any]:
    mover = setup.mover(way)
    if way in {CopyWay.KERNEL, CopyWay.KERNELS} and not mover.uses_kernel(0):
        mover.close()
        return {"failed": "no kernel"}
    try:
        rate = _rates(bench, setup, partial(setup.move, mover))
    except CopyError as error:
        return {"failed": str(error)}
    finally:
        mover.close()
    return {
        "gb_per_s": _gb(rate),
        "load_ratio": round(rate["load"] / one["load"], 3),
        "save_ratio": round(rate["save"] / one["save"], 3),
        "both_ratio": round(rate["both"] / (2 * max(one["load"], one["save"])), 3),
        "both_of_both_large": round(rate["both"] / one["both"], 3),
    }


def _gb(rates: dict[str, float]) -> dict[str, float]:
    return {name: round(rate / 1e9, 1) for name, rate in rates.items()}


class TimedDriver:
    """Passes everything on, and adds up the time inside calls that release the lock."""

    def __init__(self, inner: CudaDriver) -> None:
        self._inner = inner
        self.inside_s: list[float] = []  # wall
        self.inside_cpu_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def copy_batch(self, *args: Any, **kwargs: Any) -> None:
        """See `CudaDriver.copy_batch`."""
        self._timed(self._inner.copy_batch, *args, **kwargs)

    def copy_rows(self, *args: Any, **kwargs: Any) -> None:
        """See `CudaDriver.copy_rows`."""
        self._timed(self._inner.copy_rows, *args, **kwargs)

    def _timed(self, call: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        wall, cpu = time.perf_counter(), time.thread_time()
        call(*args, **kwargs)
        self.inside_cpu_s += time.thread_time() - cpu
        self.inside_s.append(time.perf_counter() - wall)


def measure_python_time(bench: Bench) -> None:
    """Python's own time for a load of many blocks, and what an engine thread feels meanwhile."""
    options = bench.options
    setup = Setup(bench, 4 * KIB, options.plan_blocks)
    rows = []
    for way, batch, in_flight in (
        (CopyWay.FLAT, 2048, 16), (CopyWay.FLAT, 8192, 8), (CopyWay.FLAT, 65536, 4),
        (CopyWay.ROWS, 512, 8), (CopyWay.ROWS, 4096, 8), (CopyWay.KERNEL, 65536, 8),
    ):  # fmt: skip
        timed = TimedDriver(bench.driver)
        mover = setup.mover(way, CudaLimits(batch_copies=batch, in_flight=10**6), timed)
        own, inside = [], []
        for _ in range(options.repeats):
            timed.inside_s, timed.inside_cpu_s = [], 0.0
            start = time.thread_time()
            ticket = mover.load(0, setup.block_ids, setup.page_ids, None)
            own.append(time.thread_time() - start - timed.inside_cpu_s)
            inside.append(max(timed.inside_s, default=0.0))
            ticket.wait(60.0)
        mover.close()
        bounded = setup.mover(way, CudaLimits(batch_copies=batch, in_flight=in_flight))
        load = partial(setup.move, bounded, "load")
        seconds, gaps = bench.seconds(load), engine_gaps(partial(setup.move_asleep, bounded))
        bounded.close()
        rows.append(
            {
                "way": way.value, "batch_copies": batch, "blocks": options.plan_blocks,
                "regions": REGIONS, "python_ms": round(statistics.median(own) * 1e3, 3),
                "longest_driver_call_ms": round(statistics.median(inside) * 1e3, 3),
                "load_ms": round(seconds * 1e3, 1), **gaps,
            }
        )  # fmt: skip
        bench.say(json.dumps(rows[-1]))
    bench.report["python_time"] = rows
    setup.close()


def engine_gaps(work: Callable[[], Any]) -> dict[str, float]:
    """How long a busy Python thread stands still while ``work`` runs on another."""
    done, gaps = threading.Event(), []

    def spin() -> None:
        last = time.perf_counter()
        while not done.is_set():
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=spin)
    thread.start()
    work()
    done.set()
    thread.join()
    worst = sorted(gaps)[-5:]
    lost = sum(gap for gap in gaps if gap > 5e-5)
    return {
        "busy_thread_longest_stop_ms": round(worst[-1] * 1e3, 3),
        "busy_thread_stopped_ms": round(lost * 1e3, 3),
    }


def measure_model(bench: Bench) -> None:
    """What a matrix-product loop, and a loop of tiny kernels, lose while copies run."""
    torch = bench.torch
    setup = Setup(bench, 64 * KIB, bench.options.volume_bytes // (64 * KIB * REGIONS))
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    small = torch.randn(256, device="cuda")

    def products() -> float:
        return _on_stream(torch, lambda: torch.mm(left, right), 250)

    def tiny() -> float:
        return _on_stream(torch, lambda: small.add_(1.0), 30_000)

    rows = []
    for way, name in (
        (CopyWay.FLAT, "save"), (CopyWay.FLAT, "load"), (CopyWay.ROWS, "save"),
        (CopyWay.KERNEL, "load"),
    ):  # fmt: skip
        mover = setup.mover(way)
        row: dict[str, Any] = {"way": way.value, "copies": name}
        for label, loop in (("products", products), ("tiny_kernels", tiny)):
            loop()
            alone, beside = [], []
            for _ in range(bench.options.repeats):
                alone.append(loop())
                stop = threading.Event()
                with ThreadPoolExecutor(1) as threads:
                    copying = threads.submit(_keep, setup, mover, name, stop)
                    try:
                        time.sleep(0.02)
                        beside.append(loop())
                    finally:
                        stop.set()
                copying.result()  # a loss beside copies that failed would mean nothing
            loss = statistics.median(beside) / statistics.median(alone) - 1
            row[label] = {
                "alone_ms": round(statistics.median(alone) * 1e3, 2),
                "loss_percent": round(loss * 100, 2),
            }
        mover.close()
        rows.append(row)
        bench.say(json.dumps(row))
    bench.report["model"] = rows
    setup.close()


def _on_stream(torch: Any, step: Callable[[], Any], times: int) -> float:
    stream = torch.cuda.Stream()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        start.record()
        for _ in range(times):
            step()
        end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _keep(setup: Setup, mover: CudaMover, name: str, stop: threading.Event) -> None:
    """Copy chunk by chunk, always two under way, until told to stop."""
    tickets: list[Any] = []
    i, chunk = 0, 16
    while not stop.is_set():
        if i + chunk > setup.blocks:
            i = 0
        part = slice(i, i + chunk)
        tickets.append(getattr(mover, name)(0, setup.block_ids[part], setup.page_ids[part], None))
        i += chunk
        if len(tickets) > 4:
            tickets.pop(0).wait(10.0)
    for ticket in tickets:
        ticket.wait(10.0)
