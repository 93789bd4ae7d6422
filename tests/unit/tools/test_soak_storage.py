from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvtier.storage.disk_layout import iter_record_files
from kvtier.tools.soak_ledger import ACKED, BEGUN, DELETED, HURT, STATE, STORED, Ledger, Payloads
from kvtier.tools.soak_listener import Listener
from kvtier.tools.soak_options import SoakOptions
from kvtier.tools.soak_storage import StorageSoak, _once_below
from kvtier.tools.soak_storage_child import Work, Worker, Wrong, check, open_tier

from .stores import golden

SEED = 11


def work(folder, **more):
    return Work(
        **{
            "folder": str(folder / "store"), "ledger": str(folder / "ledger"),
            "capacity_bytes": 1 << 26, "redis": None, "n_keys": 8, "threads": 1,
            "record_bytes": 8192, "seed": SEED, "life": 1, **more,
        }
    )  # fmt: skip


@pytest.fixture
def done(tmp_path):
    """A store worked on for a while, its ledger, and what was done."""
    job = work(tmp_path)
    ledger = Ledger(Path(job.ledger), job.n_keys)
    tier = open_tier(job)
    worker = Worker(0, job, tier, ledger)
    for _ in range(20):
        worker._put()
        worker._get()
    tier.close()
    assert (ledger.keys[:, STATE] == STORED).any()
    return job, ledger


def stored(ledger):
    return int((ledger.keys[:, STATE] == STORED).argmax())


def path_of(job, number):
    from kvtier.tools.soak_ledger import key_of

    return next(f.path for f in iter_record_files(job.folder) if f.key == key_of(number, SEED))


def test_what_was_acknowledged_is_there(done):
    """The check of an untouched store finds every key right."""
    job, ledger = done
    found = check(job, ledger, lossless=True)
    assert found["wrong"] == []
    assert found["there"] == int((ledger.keys[:, STATE] == STORED).sum())


@pytest.mark.parametrize("what", ["lost", "damaged", "old", "new", "deleted", "other bytes"])
def test_every_kind_of_wrong_is_found(done, what):
    """A lost, damaged, outdated, unwritten or undeleted record, and bytes of another key."""
    job, ledger = done
    number = stored(ledger)
    if what == "lost":
        os.unlink(path_of(job, number))
    elif what == "damaged":
        with open(path_of(job, number), "r+b") as file:
            file.seek(6000)
            old = file.read(1)
            file.seek(6000)
            file.write(bytes((old[0] ^ 4,)))
    elif what == "old":
        ledger.keys[number][ACKED] += 1
    elif what == "new":
        ledger.keys[number][ACKED] -= 1
        ledger.keys[number][BEGUN] = ledger.keys[number][ACKED]
    elif what == "deleted":
        ledger.keys[number][STATE] = DELETED
    else:
        right = Payloads.version_of
        try:
            Payloads.version_of = lambda self, view, n: right(self, view, n + 1)
            assert check(job, ledger, lossless=True)["wrong"]
        finally:
            Payloads.version_of = right
        return
    wrong = check(job, ledger, lossless=True)["wrong"]
    assert len(wrong) == 1
    assert f"key {number}" in wrong[0]
    if what == "lost":
        assert check(job, ledger, lossless=False)["wrong"] == []
    if what == "damaged":
        ledger.keys[number][HURT] = 1
        assert check(job, ledger, lossless=True)["wrong"] == []


def test_a_worker_stops_at_the_first_wrong_byte(done):
    """While it works, too: a record that verifies and holds another version is told at once."""
    job, ledger = done
    tier = open_tier(job)
    try:
        worker = Worker(0, job, tier, ledger)
        ledger.keys[:, ACKED] += 5
        ledger.keys[:, BEGUN] += 5
        worker._rng.randrange = lambda n: stored(ledger)
        with pytest.raises(Wrong, match="had been acknowledged"):
            worker._get()
    finally:
        tier.close()


def test_a_tier_may_refuse_for_a_while_but_not_for_ever(done, monkeypatch):
    """Busy with eviction it stores nothing for some seconds; for longer than that is wrong."""
    from kvtier.storage.errors import TierRefused
    from kvtier.tools import soak_storage_child as child

    job, ledger = done
    tier = open_tier(job)
    put, refusals = tier.put, []

    def refusing(*arguments, **more):
        if len(refusals) < most:
            refusals.append(1)
            raise TierRefused("busy")
        stopped.set()
        return put(*arguments, **more)

    tier.put = refusing
    monkeypatch.setattr(child, "WEIGHTS", {"put": 1})
    try:
        for most, patience_s in ((3, 60.0), (10**6, 0.3)):
            stopped = threading.Event()
            refusals.clear()
            monkeypatch.setattr(child, "REFUSED_S", patience_s)
            worker = Worker(0, job, tier, ledger)
            if most == 3:
                worker.run(stopped)
                assert len(refusals) == 3
            else:
                with pytest.raises(Wrong, match="put: the tier does not serve: busy"):
                    worker.run(stopped)
    finally:
        tier.close()


def test_what_a_process_found_is_heard_though_it_is_killed(tmp_path, monkeypatch):
    """It says so at once, and not when it is done, which may never be."""
    code = (
        "import json, sys; from kvtier.tools import soak_storage_child as child\n"
        "def broken(self): raise child.Wrong('as planned')\n"
        "child.Worker._get = broken\n"
        "close = child.DiskTier.close\n"
        "def slow(self):\n    import time; time.sleep(60)\n"
        "child.DiskTier.close = slow\n"
        "child.main(sys.argv[1:])"
    )
    popen = subprocess.Popen

    def start(arguments, **more):
        return popen([sys.executable, "-c", code, arguments[-1]], **more)

    monkeypatch.setattr("kvtier.tools.soak_storage.subprocess.Popen", start)
    monkeypatch.setattr("kvtier.tools.soak_storage.LIFE_S", (3.0, 3.0))
    options = SoakOptions(minutes=0.2, report=tmp_path, seed=SEED)
    found = StorageSoak(options, Listener(), threading.Event(), None, n_keys=300).run()
    assert found["lives"][0]["killed"]
    assert any("as planned" in row["text"] for row in found["findings"])


def soak(tmp_path, operations=4000, **more):
    options = SoakOptions(
        **{"minutes": 5, "report": tmp_path, "seed": SEED, "faults": ("disk-corrupt",), **more}
    )
    found = StorageSoak(options, Listener(), threading.Event(), operations, n_keys=300).run()
    json.dumps(found, allow_nan=False)
    return found


def test_a_healthy_tier_passes(tmp_path, monkeypatch):
    """Thousands of operations, killed processes, flipped bits: nothing is wrong."""
    print("seed", SEED)
    monkeypatch.setattr("kvtier.tools.soak_storage.FLIPS_EVERY_S", 0.1)
    found = soak(tmp_path, 12_000)
    assert found["findings"] == []
    assert found["ok"]
    assert found["operations"]["all"] >= 12_000
    assert sum(life["killed"] for life in found["lives"]) >= 2
    assert sum(life["flipped"] for life in found["lives"]) >= 1
    assert {life["roomy"] for life in found["lives"]} == {True, False}
    assert not (tmp_path / "store").exists()
    assert {row["verdict"] for row in found["steadiness"]["caps"]} == {"held"}
    # A quick machine's lives are over before the first sample.
    golden("soak-storage", {**found, "samples": [], "steadiness": sorted(found["steadiness"])})


def test_a_tier_that_loses_records_fails(tmp_path, monkeypatch):
    """Files that vanish behind the tier's back are acknowledged records that are lost."""
    monkeypatch.setattr(StorageSoak, "_flip_one", lambda self, _: unlink_some(self._folder))
    monkeypatch.setattr("kvtier.tools.soak_storage.FLIPS_EVERY_S", 0.1)
    found = soak(tmp_path)
    assert not found["ok"]
    assert any("is lost" in row["text"] for row in found["findings"])


def unlink_some(folder):
    for file in list(iter_record_files(str(folder)))[:60]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file.path)
    return 1


def test_redis_can_be_soaked_too(tmp_path):
    """The same, on a server of the soak's own."""
    found = soak(tmp_path, 1000, redis="start", faults=())
    assert found["findings"] == []
    assert found["setup"]["tier"] == "redis"
    assert found["operations"]["all"] >= 1000


def test_a_cap_counts_from_when_it_is_first_held():
    """A life that begins with more than its cap may come below it; then it must stay there."""
    samples = [{"at_s": float(i), "disk_bytes": b} for i, b in enumerate((90, 60, 40, 70))]
    assert [s["disk_bytes"] for s in _once_below(samples, 50)] == [40, 70]
    assert [s["disk_bytes"] for s in _once_below(samples, 100)] == [90, 60, 40, 70]
    late = [{"at_s": float(20 * i), "disk_bytes": 90.0} for i in range(3)]
    assert len(_once_below(late, 50)) == 2


def test_ctrl_c_ends_with_a_report(tmp_path):
    """The command says 130 and has written both files; the store is gone."""
    child = subprocess.Popen(
        [sys.executable, "-c", "from kvtier.tools.cli import main; main()", "soak",
         "--storage-only", "--minutes", "30", "--report", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    end_s = time.monotonic() + 120
    while not list(tmp_path.rglob("*.kvt")) and time.monotonic() < end_s:
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=120)
    assert child.returncode == 130, err
    assert "nothing was wrong" in out
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["ok"]
    assert found["interrupted"]
    assert "ended early" in (tmp_path / "report.html").read_text()
    assert not list(tmp_path.rglob("*.kvt"))
