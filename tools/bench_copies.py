"""The parts of `kvtier bench device` that need no device.

`host_copies`: the mover for host memory against one memcpy of the same bytes,
alone and beside a busy Python thread. `plan_time`: what a CUDA load of many
blocks costs in Python, with a driver that does nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from ..connector import descriptors
from ..connector import pinning as pinned
from ..connector.mover import HostMover
from ..connector.mover_cuda import CopyWay, CudaLimits, CudaMover
from ..connector.pinning import Pinning
from ..connector.regions import RegionTable, region_table
from ..storage.ram import Arena

KIB = 1 << 10
SEGMENT_BYTES = 1 << 28  # as the arena's
SEED = 1208
ROUNDS = 40


def host_copies() -> list[dict[str, Any]]:
    """Measure chunks as CPU engines have them; a second or two.

    ``ratio`` is memcpy's best time over the mover's, for chunks of scattered blocks
    and pages; ``busy_*_ms`` is the mean beside a Python thread that never waits.
    """
    return [
        _host_chunk(regions=30, row_kib=192, chunk_blocks=2),
        _host_chunk(regions=64, row_kib=64, chunk_blocks=4),
        _host_chunk(regions=64, row_kib=64, chunk_blocks=16),
        _host_chunk(regions=64, row_kib=4, chunk_blocks=16),
    ]


def _host_chunk(regions: int, row_kib: int, chunk_blocks: int) -> dict[str, Any]:
    row = row_kib * KIB
    block = regions * row
    pool = max(4 * chunk_blocks, (256 << 20) // block) + 1
    memory = mmap.mmap(-1, block * pool)
    device = np.frombuffer(memory, np.uint8)
    device[::4096] = 1
    start = device.ctypes.data
    table = region_table(0, [(start + r * pool * row, row, row) for r in range(regions)], pool)
    arena = Arena(block, pool)
    arena.start(background=False)
    mover = HostMover({0: table}, arena)
    rng = np.random.default_rng(SEED)
    ids = [rng.permutation(np.arange(1, pool))[:chunk_blocks] for _ in range(ROUNDS)]
    pages = [rng.permutation(pool)[:chunk_blocks] for _ in range(ROUNDS)]
    first_page = int(arena.addresses(np.zeros(1, np.int64))[0])
    room = pool - chunk_blocks

    def memcpy(i: int) -> None:
        to = first_page + int(pages[i][0]) % room * block
        ctypes.memmove(to, start + int(ids[i][0]) % room * block, block * chunk_blocks)

    def save(i: int) -> None:
        mover.save(0, ids[i], pages[i], None).wait(0.0)

    def load(i: int) -> None:
        mover.load(0, ids[i], pages[i], None).wait(0.0)

    report: dict[str, Any] = {
        "regions": regions, "row_kib": row_kib, "chunk_blocks": chunk_blocks,
    }  # fmt: skip
    times = _times(memcpy, save, load)
    with _BusyThread():
        busy = _times(memcpy, save, load)
    base_s = min(times["memcpy"])
    report["memcpy_gb_per_s"] = round(block * chunk_blocks / base_s / 1e9, 2)
    for name in ("save", "load"):
        report[f"{name}_ratio"] = round(base_s / min(times[name]), 3)
    for name, seconds in busy.items():
        report[f"busy_{name}_ms"] = round(statistics.mean(seconds) * 1e3, 2)
    mover.close()
    arena.close()
    return report


def _times(*functions: Callable[[int], None]) -> dict[str, list[float]]:
    """Time each function in every round, so that a noisy moment falls on all of them."""
    seconds: dict[str, list[float]] = {function.__name__: [] for function in functions}
    for i in range(ROUNDS):
        for function in functions:
            start = time.perf_counter()
            function(i)
            seconds[function.__name__].append(time.perf_counter() - start)
    return seconds


class _BusyThread:
    """A Python thread that gives the interpreter lock away only when asked."""

    def __enter__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._spin)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _spin(self) -> None:
        count = 0
        while not self._stop.is_set():
            for _ in range(1000):
                count += 1


class NullDriver:
    """A `Driver` that does nothing, at once."""

    def __getattr__(self, name: str) -> Any:
        return self._nothing

    def _nothing(self, *_: Any, **__: Any) -> int:
        return 1

    def numa_node(self) -> int | None:
        """See `Driver.numa_node`: none, so that this thread's memory stays where it is."""
        return None


class _Pages:
    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes

    def addresses(self, page_ids: NDArray[np.int64]) -> NDArray[np.uint64]:
        return np.asarray(page_ids.astype(np.uint64) * np.uint64(self.page_bytes))


def plan_time(blocks: int = 12_500, regions: int = 64, row_bytes: int = 64 * KIB) -> dict[str, Any]:
    """Measure the thread time of `CudaMover.load` without the driver's own, for each way.

    ``python_ms`` is all of it; ``lock_held_ms`` leaves out the additions and the search
    over arrays, in which NumPy gives the interpreter lock away.
    """
    pool = blocks + 1
    table = region_table(
        0, [((1 << 44) + r * pool * row_bytes, row_bytes, row_bytes) for r in range(regions)], pool
    )
    ids = np.random.default_rng(SEED).permutation(np.arange(1, pool)).astype(np.int64)
    report: dict[str, Any] = {"blocks": blocks, "regions": regions, "numpy": np.__version__}
    for way in (CopyWay.FLAT, CopyWay.ROWS):
        report[way.value] = _plan_time(table, ids, regions * row_bytes, way)
    return report


def _plan_time(
    table: RegionTable, ids: NDArray[np.int64], page_bytes: int, way: CopyWay
) -> dict[str, float]:
    driver: Any = NullDriver()
    pinning = Pinning(driver, len(ids) * page_bytes)
    step = max(1, SEGMENT_BYTES // page_bytes)
    for first in range(0, len(ids), step):
        pinning.on_segment(first * page_bytes, min(step, len(ids) - first) * page_bytes)
    mover = CudaMover(
        {0: table}, _Pages(page_bytes), driver, pinning,
        compute_stream=lambda: 0, ways={0: way}, limits=CudaLimits(),
    )  # fmt: skip
    free_s = 0.0

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal free_s
            start = time.thread_time()
            result = function(*args, **kwargs)
            free_s += time.thread_time() - start
            return result

        return call

    def once() -> float:
        start = time.thread_time()
        mover.load(0, ids, ids - 1, None)
        return time.thread_time() - start

    python_s = min(once() for _ in range(9))
    held_s = []
    numpy = _NumpyWith(add=timed(np.add), searchsorted=timed(np.searchsorted))
    with mock.patch.object(descriptors, "np", numpy), mock.patch.object(pinned, "np", numpy):
        for _ in range(9):
            free_s = 0.0
            held_s.append(once() - free_s)
    return {"python_ms": round(python_s * 1e3, 3), "lock_held_ms": round(min(held_s) * 1e3, 3)}


class _NumpyWith:
    """NumPy with some other functions."""

    def __init__(self, **functions: Callable[..., Any]) -> None:
        self.__dict__.update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)
