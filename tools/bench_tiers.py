"""`kvtier bench tiers`: RAM and disk against a plain copy, read and write of the same bytes.

The bytes go the way they go in an engine: plans into a worker half, blocks in host memory that
stand for the device, verification on every read. Ours and the plain way alternate in one run,
and only ratios are reported, of medians (verification: of best times): 1 is as fast as the
machine does it without kvtier.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from ..connector.mover import HostMover
from ..connector.plan import NamespaceInfo, Plan
from ..connector.regions import region_table
from ..connector.worker import ArenaPlan, WorkerHalf
from ..storage import disk_file
from ..storage.disk import DiskTier
from ..storage.errors import KVTierError
from ..storage.jobs import (
    Event,
    LoadChunk,
    LoadDone,
    LoadJob,
    SaveChunk,
    SaveCopied,
    SaveJob,
    SaveRetired,
)
from ..storage.ram import Arena
from ..storage.record import payload_checksum
from .plain_io import time_plain_read, write_plain
from .reporting import table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ..storage.tier import Tier

REGIONS = 64
REGION_BYTES = 16 << 10  # of one block: 64 x 16 KiB is a block of 1 MiB
BLOCK_BYTES = REGIONS * REGION_BYTES
BLOCK_TOKENS = 16
GROUP = 0
NAMESPACE = NamespaceInfo(b"kvtier-bench\0\0\0\0", 1, {"model": "kvtier bench tiers"})
JOB_TIMEOUT_S = 120.0
VERIFY_ROUNDS = 6  # in each round, verified first and last in turns: the two differ by little
RAM_ROUNDS = 3  # in each round: copies are short, so take more of them


@dataclass(frozen=True, slots=True)
class TiersBench:
    """What to measure."""

    record_mib: tuple[int, ...] = (4, 8, 16, 32)
    total_mib: int = 256
    rounds: int = 5
    folder: str | None = None


@dataclass(slots=True)
class _Times:
    """Seconds of ours and of the plain way, round by round."""

    ours: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)

    def add(self, number: int, ours_s: float, plain_s: float) -> None:
        if number:
            self.ours.append(ours_s)
            self.plain.append(plain_s)

    @property
    def ratio(self) -> float:
        return statistics.median(self.plain) / statistics.median(self.ours)


def run(options: TiersBench, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the figures; the headline ratios are the worst over the record sizes."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=options.folder) as folder:
        for record_mib in options.record_mib:
            say(f"records of {record_mib} MiB")
            rows.append(_measure(options, record_mib, folder))

    def worst(name: str) -> float:
        return min(float(row[name]) for row in rows)

    return {
        "ram": {
            "load_ratio_to_memcpy": worst("ram_load_ratio_to_memcpy"),
            "save_ratio_to_memcpy": worst("ram_save_ratio_to_memcpy"),
        },
        "disk": {
            "load_ratio_to_odirect": worst("disk_load_ratio_to_odirect"),
            "save_ratio_to_odirect": worst("disk_save_ratio_to_odirect"),
            # All sizes' loads that trust the disk over all that check: of one size alone the two
            # differ by no more than the machine's noise.
            "verified_ratio_to_unverified": round(
                sum(row["unverified_s"] for row in rows) / sum(row["verified_s"] for row in rows), 3
            ),
        },
        "rows": rows,
    }


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print one row for each size of records."""
    table(
        ("record", "RAM load", "RAM save", "disk load", "disk save", "verifying", "copy", "read",
         "write"),
        [
            (
                f"{row['record_mib']} MiB",
                *(
                    f"{row[ratio]:.2f}"
                    for ratio in (
                        "ram_load_ratio_to_memcpy",
                        "ram_save_ratio_to_memcpy",
                        "disk_load_ratio_to_odirect",
                        "disk_save_ratio_to_odirect",
                        "disk_verified_ratio_to_unverified",
                    )
                ),
                *(
                    f"{row['bytes'] / max(row[seconds], 1e-9) / 1e9:.2f} GB/s"
                    for seconds in ("memcpy_s", "plain_read_s", "plain_write_s")
                ),
            )
            for row in rows
        ],
    )  # fmt: skip
    print(
        "RAM and disk: 1 is as fast as the plain copy, read or write of the same bytes (right).\n"
        "verifying: a disk load against one without checksums."
    )


def _measure(options: TiersBench, record_mib: int, folder: str) -> dict[str, Any]:
    n_blocks = record_mib * (1 << 20) // BLOCK_BYTES
    n_chunks = max(1, options.total_mib // record_mib)
    total_bytes = n_chunks * n_blocks * BLOCK_BYTES
    plain_file = os.path.join(folder, "plain")
    ram_load, ram_save, disk_load, disk_save = _Times(), _Times(), _Times(), _Times()
    verified = _Times()
    large: list[float] = []
    bench = _Rig(n_chunks, n_blocks, os.path.join(folder, f"store-{record_mib}"), total_bytes)
    try:
        for number in range(options.rounds + 1):  # the first warms up and is not counted
            for _ in range(RAM_ROUNDS):
                plain_s = bench.time_memcpy()
                large.append(bench.time_large_memcpy())
                ram_save.add(number, bench.time_save(number, ())[0], plain_s)
                ram_load.add(number, bench.time_load(number, "ram"), plain_s)
            plain_s = write_plain(plain_file, total_bytes)
            disk_save.add(number, bench.time_save(number, ("disk",))[1], plain_s)
            plain_s = time_plain_read(plain_file, total_bytes)
            disk_load.add(number, bench.time_load(number, "disk"), plain_s)
            for turn in range(VERIFY_ROUNDS):
                verified.add(number, *_verified_and_not(bench, number, turn))
    finally:
        bench.close()
    return {
        "record_mib": record_mib,
        "bytes": total_bytes,
        "ram_load_ratio_to_memcpy": round(ram_load.ratio, 3),
        "ram_save_ratio_to_memcpy": round(ram_save.ratio, 3),
        "disk_load_ratio_to_odirect": round(disk_load.ratio, 3),
        "disk_save_ratio_to_odirect": round(disk_save.ratio, 3),
        "disk_verified_ratio_to_unverified": round(verified.ratio, 3),
        "verified_s": round(statistics.median(verified.ours), 4),
        "unverified_s": round(statistics.median(verified.plain), 4),
        "memcpy_s": round(statistics.median(ram_load.plain), 4),
        "one_large_memcpy_s": round(statistics.median(large), 4),
        "plain_read_s": round(statistics.median(disk_load.plain), 4),
        "plain_write_s": round(statistics.median(disk_save.plain), 4),
    }


class _Agrees:
    """A checksum that agrees with every other, at no cost."""

    def __init__(self, parts: Iterable[Any]) -> None:
        """Look at nothing; the parts are read from the disk as they are taken."""
        deque(parts, maxlen=0)

    def __ne__(self, _: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


def _verified_and_not(bench: _Rig, number: int, turn: int) -> tuple[float, float]:
    """Return the seconds of a load of the same records as it is, and without checksums."""
    took_s = [0.0, 0.0]
    for unverified in (False, True) if turn % 2 else (True, False):
        way = _Agrees if unverified else payload_checksum
        with mock.patch.object(disk_file, "checksum_of", way):
            took_s[unverified] = bench.time_load(number, "disk")
    return took_s[0], took_s[1]


class _Rig:
    """A worker half over host memory that stands for a device, stepped as an engine does."""

    def __init__(self, n_chunks: int, n_blocks: int, root: str, total_bytes: int) -> None:
        self._n_chunks, self._n_blocks = n_chunks, n_blocks
        n_all = n_chunks * n_blocks
        self._device = np.zeros((REGIONS, n_all + 1, REGION_BYTES), dtype=np.uint8)
        self._device[:] = np.arange(REGIONS, dtype=np.uint8)[:, None, None]
        self._device[:, :, :8] = np.arange(8, dtype=np.uint8)
        self._flat = np.zeros((2, total_bytes), dtype=np.uint8)
        self._flat[:] = 1
        self._record_bytes = n_blocks * BLOCK_BYTES
        base, stride = self._device.ctypes.data, REGION_BYTES
        span = self._device.strides[0]
        tables = {
            GROUP: region_table(
                GROUP, [(base + r * span, stride, REGION_BYTES) for r in range(REGIONS)], n_all + 1
            )
        }
        slots = 8
        staging_pages = slots * n_blocks
        arena = Arena(BLOCK_BYTES, staging_pages + n_all)
        arena.start(background=False)
        self._pages = np.arange(staging_pages, staging_pages + n_all, dtype=np.int64)
        self._blocks = np.random.default_rng(7).permutation(n_all).astype(np.int64) + 1

        def open_tiers(namespace: NamespaceInfo) -> list[Tier]:
            return [DiskTier(root, namespace.digest, 0, 4 * total_bytes + (1 << 30))]

        self._worker = WorkerHalf(
            rank=0,
            arena=arena,
            plan=ArenaPlan(BLOCK_BYTES, staging_pages, n_all, n_blocks),
            block_bytes={GROUP: BLOCK_BYTES},
            mover=HostMover(tables, arena),
            open_tiers=open_tiers,
            clock=time.monotonic,
        )
        self._worker.begin(Plan(namespace=NAMESPACE))
        self._worker.collect()
        self._job_id = 0
        self._events: deque[Event] = deque()

    def time_memcpy(self) -> float:
        """Return the seconds of plain copies of the same bytes, a record at a time."""
        into, source = self._flat
        begin_s = time.perf_counter()
        for at in range(0, len(into), self._record_bytes):
            np.copyto(into[at : at + self._record_bytes], source[at : at + self._record_bytes])
        return time.perf_counter() - begin_s

    def time_large_memcpy(self) -> float:
        """Return the seconds of one plain copy of all bytes.

        Past some tens of MiB the C library writes around the caches, which is up to twice as
        quick as any copy of the pieces that blocks are.
        """
        begin_s = time.perf_counter()
        np.copyto(self._flat[0], self._flat[1])
        return time.perf_counter() - begin_s

    def time_save(self, number: int, tiers: tuple[str, ...]) -> tuple[float, float]:
        """Return the seconds until RAM has the blocks, and from there until the tiers have them."""
        chunks = tuple(
            SaveChunk(key, GROUP, start, end, blocks, pages, tiers)
            for key, start, end, blocks, pages in self._chunks(number)
        )
        self._job_id += 1
        begin_s = time.perf_counter()
        self._worker.begin(
            Plan(idle=True, saves=(SaveJob(self._job_id, NAMESPACE.generation, chunks),))
        )
        self._worker.forward_launched()
        self._wait_for(SaveCopied)
        copied_s = time.perf_counter()
        retired = self._wait_for(SaveRetired)
        written_s = time.perf_counter()
        if len(retired.written) != len(tiers) * len(chunks):
            raise KVTierError(f"the disk took {len(retired.written)} of {len(chunks)} records")
        return copied_s - begin_s, written_s - copied_s

    def time_load(self, number: int, source: str) -> float:
        """Return the seconds until all blocks are back."""
        chunks = tuple(
            LoadChunk(key, GROUP, start, end, source, self._n_blocks, 0, blocks, pages)
            for key, start, end, blocks, pages in self._chunks(number)
        )
        self._job_id += 1
        job = LoadJob(self._job_id, NAMESPACE.generation, "bench", JOB_TIMEOUT_S, chunks)
        begin_s = time.perf_counter()
        self._worker.begin(Plan(idle=True, loads=(job,)))
        done = self._wait_for(LoadDone)
        took_s = time.perf_counter() - begin_s
        if not done.ok:
            raise KVTierError(f"a load from {source} failed: {list(done.statuses)}")
        return took_s

    def _chunks(self, number: int) -> Any:
        """Yield key, token range, blocks and pages of each chunk; other keys every round."""
        n, chunk_tokens = self._n_blocks, self._n_blocks * BLOCK_TOKENS
        for i in range(self._n_chunks):
            key = f"{number:016x}{i:016x}".encode() + bytes((GROUP,))
            part = slice(i * n, (i + 1) * n)
            start = i * chunk_tokens
            yield key, start, start + chunk_tokens, self._blocks[part], self._pages[part]

    def _wait_for(self, kind: type) -> Any:
        deadline_s = time.monotonic() + JOB_TIMEOUT_S
        while time.monotonic() < deadline_s:
            while self._events:
                event = self._events.popleft()
                if isinstance(event, kind):
                    return event
            self._worker.collect()
            report = self._worker.report()
            self._events.extend(report.events if report else ())
            if not self._events:
                self._worker.transfer.wait(0.001)
        raise KVTierError(f"no {kind.__name__} within {JOB_TIMEOUT_S:.0f} s")

    def close(self) -> None:
        self._worker.shutdown()
