"""Is the system steady: what grows, what is over its cap. Pure functions over samples."""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MIN_POINTS = 8
WARM_UP_SHARE = 0.3
MIB = 1 << 20
CAP_SLACK = 1.02  # a walk over a folder that changes is not one moment


@dataclass(frozen=True, slots=True)
class Allowed:
    """How much a series may grow over the whole watch: the larger of the two."""

    absolute: float
    share: float = 0.0


GROWTH = {
    "rss_bytes": Allowed(48 * MIB, 0.05),
    "fds": Allowed(4),
    "threads": Allowed(4),
    "save_queue_bytes": Allowed(64 * MIB, 0.5),
    "pinned_ram_pages": Allowed(64, 0.5),
    "pinned_device_blocks": Allowed(64, 0.5),
    "waiting": Allowed(8),
}
"""What must be flat. Pinned pages and queues move with the load: at rest they are counted
exactly (`quiet`), here only a drift shows."""


def slope_per_s(points: Sequence[tuple[float, float]]) -> float:
    """Return the median of the slopes between all pairs (Theil and Sen): outliers do not move it.

    Of more than 200 points every n-th is used.
    """
    step = max(1, len(points) // 200)
    some = points[::step]
    slopes = [
        (b[1] - a[1]) / (b[0] - a[0])
        for i, a in enumerate(some)
        for b in some[i + 1 :]
        if b[0] > a[0]
    ]
    return statistics.median(slopes) if slopes else 0.0


def judge_growth(name: str, points: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return the verdict on one series of one engine's life.

    The first part is warm-up. A series fails when its slope over the rest makes more than is
    allowed, and the last third still lies above the middle one: it has not settled.
    """
    allowed = GROWTH[name]
    begin_s = points[0][0] + WARM_UP_SHARE * (points[-1][0] - points[0][0]) if points else 0.0
    watched = [point for point in points if point[0] >= begin_s]
    if len(watched) < MIN_POINTS:
        return {"name": name, "verdict": "too_short", "samples": len(watched), "growth": 0.0,
                "allowed": float(allowed.absolute), "slope_per_h": 0.0, "first": None,
                "last": None, "watched_s": 0.0}  # fmt: skip
    window_s = watched[-1][0] - watched[0][0]
    slope = slope_per_s(watched)
    third = len(watched) // 3
    first, middle, last = (
        statistics.median(v for _, v in part)
        for part in (watched[:third], watched[third : 2 * third], watched[2 * third :])
    )
    limit = max(allowed.absolute, allowed.share * abs(first))
    growth = slope * window_s
    grows = growth > limit and last - middle > limit / 6
    return {
        "name": name,
        "verdict": "grows" if grows else "flat",
        "samples": len(watched),
        "growth": float(round(growth, 3)),
        "allowed": float(limit),
        "slope_per_h": float(round(slope * 3600, 3)),
        "first": float(first),
        "last": float(last),
        "watched_s": round(window_s, 1),
    }


def judge_series(samples: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """Return the verdict on every series, on the engine's longest life for each."""
    lives: dict[int, list[Mapping[str, float]]] = {}
    for sample in samples:
        lives.setdefault(int(sample["incarnation"]), []).append(sample)
    rows = []
    for name in GROWTH:
        found = []
        for life in lives.values():
            points = [(s["at_s"], s[name]) for s in life if name in s]
            if points:
                found.append(judge_growth(name, points))
        worst = sorted(found, key=lambda row: (row["verdict"] == "grows", row["samples"]))
        if worst:
            rows.append(worst[-1])
    return rows


def judge_cap(
    name: str, samples: Sequence[Mapping[str, float]], cap: float, *, moving: float = 0.0
) -> dict[str, Any]:
    """Return whether a series stayed below its cap.

    Args:
        name: of the series, in every sample.
        samples: what was seen.
        cap: what must not be passed.
        moving: what may have come and gone while one sample was taken.
    """
    values = [sample[name] for sample in samples if name in sample]
    most = max(values, default=0.0)
    return {
        "name": name,
        "verdict": "over_cap" if most > cap * CAP_SLACK + moving else "held",
        "most": float(most),
        "cap": float(cap),
    }


# -- what the machine tells --------------------------------------------------


def process_tree(pid: int) -> list[int]:
    """Return a process and everything below it."""
    found, left = [], [pid]
    while left:
        one = left.pop()
        found.append(one)
        try:
            for thread in os.listdir(f"/proc/{one}/task"):
                with open(f"/proc/{one}/task/{thread}/children", encoding="ascii") as file:
                    left += [int(child) for child in file.read().split()]
        except OSError:
            continue
    return found


def process_sample(pid: int) -> dict[str, float]:
    """Return memory, descriptors and threads of a process and its children; empty when gone."""
    rss_pages = fds = threads = 0
    for one in process_tree(pid):
        try:
            with open(f"/proc/{one}/statm", encoding="ascii") as file:
                rss_pages += int(file.read().split()[1])
            fds += len(os.listdir(f"/proc/{one}/fd"))
            threads += len(os.listdir(f"/proc/{one}/task"))
        except OSError:
            continue
    if not threads:
        return {}
    return {"rss_bytes": rss_pages * os.sysconf("SC_PAGE_SIZE"), "fds": fds, "threads": threads}


def folder_bytes(folder: str) -> int:
    """Return the bytes of all records and temporary files below a store's folder."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            if name.endswith((".kvt", ".tmp")):
                try:
                    total += os.stat(os.path.join(root, name)).st_size
                except OSError:
                    continue
    return total
