"""`kvtier bench store`: how long people wait for the verbs that look at a large store.

The store is made of small real records; names, folders and headers are those of a store of any
size, and nothing here reads payloads.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from ..storage.disk import DiskTier
from ..storage.disk_layout import WITHOUT_CAP_BYTES, make_folders, rank_folder, record_path
from ..storage.errors import KVTierError
from ..storage.key import chunk_key
from ..storage.tier import RecordSpec

NAMESPACE = bytes(16)
RAW_BYTES = 4096
ROUNDS = 3
BARS = {"stat_s": 5.0, "ls_first_row_s": 1.0, "help_s": 0.3}


def run(n_records: int, folder: str | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Make a store, run the verbs, remove it.

    Args:
        n_records: how many.
        folder: where; None for the temporary folder.
        say: progress.
    """
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=folder) as root:
        say(f"making {n_records:,} records")
        make_store(root, n_records)
        say("stat")
        stat_s, stat_cpu_s = _best([_timed("stat", root, "--json") for _ in range(ROUNDS)])
        say("ls")
        first_s = min(_first_row(root) for _ in range(ROUNDS))
    help_s, help_cpu_s = _best([_timed("--help") for _ in range(ROUNDS)])
    figures = {
        "records": n_records,
        "stat_s": round(stat_s, 2),
        "stat_cpu_s": round(stat_cpu_s, 2),
        "ls_first_row_s": round(first_s, 2),
        "help_s": round(help_s, 2),
        "help_cpu_s": round(help_cpu_s, 2),
    }
    return {**figures, "bars": BARS, "met": all(figures[name] <= bar for name, bar in BARS.items())}


def make_store(root: str, n_records: int) -> None:
    """Fill a folder with records of one namespace: the same bytes under many names."""
    key = chunk_key(hashlib.sha256(b"0").digest(), 0)
    tier = DiskTier(root, NAMESPACE, 0, WITHOUT_CAP_BYTES, description={"model": {"path": "bench"}})
    tier.put(RecordSpec(key, 0, 256, RAW_BYTES), [memoryview(mmap.mmap(-1, RAW_BYTES))])
    tier.close()
    place = rank_folder(root, NAMESPACE, 0)
    with open(record_path(place, key), "rb") as file:
        data = file.read()
    for number in range(1, n_records):
        path = record_path(place, chunk_key(hashlib.sha256(b"%d" % number).digest(), number % 2))
        make_folders(os.path.dirname(path))
        with open(path, "xb", buffering=0) as file:
            file.write(data)


def _timed(*arguments: str) -> tuple[float, float]:
    """Run the command; return wall and processor seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began_s = time.perf_counter()
    done = subprocess.run(  # noqa: S603 - ourselves
        [sys.executable, "-m", "kvtier.tools", *arguments], stdout=subprocess.DEVNULL, check=False
    )
    wall_s = time.perf_counter() - began_s
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise KVTierError(f"kvtier {arguments[0]} ended with {done.returncode}")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall_s, cpu_s


def _best(rounds: list[tuple[float, float]]) -> tuple[float, float]:
    return min(wall_s for wall_s, _ in rounds), min(cpu_s for _, cpu_s in rounds)


def _first_row(root: str) -> float:
    """Return how long ``ls`` takes to its first record."""
    began_s = time.perf_counter()
    with subprocess.Popen(  # noqa: S603 - ourselves
        [sys.executable, "-m", "kvtier.tools", "ls", root], stdout=subprocess.PIPE
    ) as listing:
        assert listing.stdout is not None
        listing.stdout.readline()  # the heading
        listing.stdout.readline()
        first_s = time.perf_counter() - began_s
        listing.stdout.close()
    return first_s
