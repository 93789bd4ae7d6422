from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest

from kvtier.tools.soak_steady import (
    MIB,
    folder_bytes,
    judge_cap,
    judge_growth,
    judge_series,
    process_sample,
    slope_per_s,
)


def series(at, seconds=600, step=5.0):
    return [(t * step, at(t * step)) for t in range(int(seconds / step))]


def noisy(mean, spread, seed=1):
    rng = random.Random(seed)
    return lambda _: mean + rng.uniform(-spread, spread)


def test_the_slope_is_that_of_the_line_and_outliers_do_not_move_it():
    """Theil and Sen's: a fifth of wild points changes nothing much."""
    points = series(lambda t: 3.0 * t + 7)
    assert slope_per_s(points) == pytest.approx(3.0)
    wild = [(t, 1e9 if i % 5 == 0 else v) for i, (t, v) in enumerate(points)]
    assert slope_per_s(wild) == pytest.approx(3.0, rel=0.5)
    assert slope_per_s(points[:1]) == 0.0


@pytest.mark.parametrize(
    ("name", "points", "verdict"),
    [
        ("rss_bytes", series(noisy(800 * MIB, 30 * MIB)), "flat"),
        ("rss_bytes", series(lambda t: 800 * MIB + MIB * t), "grows"),
        ("rss_bytes", series(lambda t: 800 * MIB + 0.01 * MIB * t), "flat"),
        ("rss_bytes", series(lambda t: (800 + min(t, 150)) * MIB), "flat"),  # the arena warms up
        ("rss_bytes", series(lambda t: (800 + 3 * min(t, 330)) * MIB), "flat"),  # it has settled
        ("fds", series(lambda t: 60 + t // 60), "grows"),
        ("fds", series(noisy(60, 3)), "flat"),
        ("threads", series(lambda t: 50 + t // 40), "grows"),
        ("save_queue_bytes", series(noisy(20 * MIB, 20 * MIB)), "flat"),
        ("save_queue_bytes", series(lambda t: t * MIB), "grows"),
        ("fds", series(lambda _: 60, seconds=30), "too_short"),
    ],
    ids=["noise", "leak", "slow", "warm-up", "settled", "fd leak", "fd noise", "threads", "queue",
         "backlog", "short"],
)  # fmt: skip
def test_what_grows_is_found_and_what_settles_is_not(name, points, verdict):
    """A leak of each kind fails; noise, warm-up and a short watch do not."""
    row = judge_growth(name, points)
    assert row["verdict"] == verdict
    if verdict == "grows":
        assert row["growth"] > row["allowed"]
        assert row["slope_per_h"] > 0


def test_every_life_of_the_engine_is_judged_by_itself():
    """A restart is no growth, and a leak in one life is found beside a longer flat one."""
    flat = [{"at_s": float(t), "incarnation": 1, "fds": 90.0} for t in range(60)]
    after = [{"at_s": 100.0 + t, "incarnation": 2, "fds": 20.0 + t} for t in range(40)]
    (row,) = judge_series(flat + [{**s, "fds": 30.0} for s in after])
    assert row["verdict"] == "flat"
    (row,) = judge_series(flat + after)
    assert row["verdict"] == "grows"


def test_a_cap_counts_the_most():
    """Once over it fails; the slack is that of a walk over a changing folder."""
    samples = [{"disk_bytes": v} for v in (10.0, 101.0, 50.0)] + [{}]
    assert judge_cap("disk_bytes", samples, 100)["verdict"] == "held"
    assert judge_cap("disk_bytes", samples, 90)["verdict"] == "over_cap"
    assert judge_cap("disk_bytes", [], 90)["most"] == 0


def test_processes_are_measured_with_their_children(tmp_path):
    """Memory, descriptors and threads of a tree; nothing of a process that is gone."""
    alone = process_sample(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        both = process_sample(os.getpid())
        assert both["threads"] == alone["threads"] + 1
        assert both["fds"] > alone["fds"]
        assert both["rss_bytes"] > alone["rss_bytes"]
    finally:
        child.communicate(b"\n")
    assert process_sample(child.pid) == {}
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.kvt").write_bytes(b"12345")
    (tmp_path / "y.tmp").write_bytes(b"12")
    (tmp_path / "z.txt").write_bytes(b"123456")
    assert folder_bytes(str(tmp_path)) == 7
