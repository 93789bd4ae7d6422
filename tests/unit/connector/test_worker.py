"""The worker half: runs plans over real memory, reports once, survives its tiers."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest

from kvtier.connector.mover import HostMover
from kvtier.connector.mover_cuda import CudaMover
from kvtier.connector.plan import NamespaceInfo, Plan
from kvtier.connector.regions import region_table
from kvtier.connector.worker import ArenaPlan, WorkerHalf
from kvtier.storage.errors import RecordMissing
from kvtier.storage.jobs import (
    LoadChunk,
    LoadDone,
    LoadJob,
    LoadRetired,
    SaveChunk,
    SaveCopied,
    SaveJob,
    SaveRetired,
    TierNews,
)
from kvtier.storage.ram import Arena
from kvtier.storage.tier import PutResult, Tier, TierCapabilities, TierChanges, TierStat
from kvtier.storage.transfer import TransferLimits

from .fake_driver import DMA_COMPUTE, AllPinned, FakeDriver
from .halves import Clock

PAGE = 4096
WAIT_S = 20.0


class DictTier(Tier):
    """Records in a dict."""

    name = "disk"
    capabilities = TierCapabilities(persistent=False, shared=False, evicts=False)

    def __init__(self, records):
        self.records, self.touched, self.gone = records, [], []
        self.error = None

    def put(self, spec, payload, *, replace=False):
        self.records[spec.key] = b"".join(payload)
        return PutResult.STORED

    def get(self, spec, into):
        if spec.key not in self.records:
            raise RecordMissing("nothing there")
        data = self.records[spec.key]
        at = 0
        for view in into:
            view[:] = data[at : at + len(view)]
            at += len(view)
        return len(data)

    def contains_many(self, keys):
        return [key in self.records for key in keys]

    def delete(self, keys):
        self.gone += keys
        return sum(self.records.pop(key, None) is not None for key in keys)

    def scan(self):
        return iter(())

    def touch(self, keys):
        if self.error:
            raise self.error
        self.touched += keys

    def changes(self):
        if self.error:
            raise self.error
        return TierChanges()

    def stat(self):
        if self.error:
            raise self.error
        return TierStat(len(self.records), sum(map(len, self.records.values())), None)

    def clear(self):
        self.records.clear()

    def close(self):
        pass


class Rank:
    """A worker half on a small device in host memory."""

    def __init__(self, rank=0, replicas=1, open_tiers=None, make_mover=HostMover):
        self.memory = np.zeros(20 * PAGE, np.uint8)
        self.device = self.memory.reshape(20, PAGE)
        tables = {0: region_table(0, [(self.memory.ctypes.data, PAGE, PAGE)], 20)}
        arena = Arena(PAGE, 12, prefault=False)
        arena.start(background=False)
        self.stores = {}
        self.tiers = []
        self.half = WorkerHalf(
            rank,
            arena,
            ArenaPlan(PAGE, 2, 10, 2),
            {0: PAGE},
            make_mover(tables, arena),
            open_tiers or self.open,
            Clock(),
            TransferLimits(),
            flush_s=1.0,
            replicas=replicas,
        )
        self.arena = arena
        self.finished, self.failed, self.events = [], [], []

    def open(self, info):
        self.tiers.append(DictTier(self.stores.setdefault(info.digest, {})))
        return [self.tiers[-1]]

    def step(self, plan=None, *, launched=True):
        self.half.begin(plan or Plan())
        if launched:
            self.half.forward_launched()
        finished, failed = self.half.collect()
        self.finished += finished
        self.failed += failed
        report = self.half.report()
        if report is not None:
            self.events += report.events

    def of(self, kind):
        return [e for e in self.events if type(e) is kind]

    def until(self, kind, n=1):
        for _ in range(int(WAIT_S / 0.005)):
            if len(self.of(kind)) >= n:
                return self.of(kind)
            self.step(Plan(idle=True))
            threading.Event().wait(0.005)
        raise AssertionError(f"no {kind.__name__}")


@pytest.fixture
def ranks():
    made = []
    yield lambda *args, **options: made.append(Rank(*args, **options)) or made[-1]
    for rank in made:
        rank.half.shutdown()


def ids(*numbers):
    return np.array(numbers, np.int64)


def key(n):
    return n.to_bytes(8, "big") + b"\0"


def namespace(generation=0):
    return NamespaceInfo(bytes([generation]) * 16, generation, {})


def save(job_id, n, blocks, pages, generation=0):
    chunk = SaveChunk(key(n), 0, 0, 32, ids(*blocks), ids(*pages), ("disk",))
    return SaveJob(job_id, generation, (chunk,))


def load(job_id, n, blocks, pages=None, source="disk", generation=0):
    own = None if pages is None else ids(*pages)
    chunk = LoadChunk(key(n), 0, 0, 32, source, len(blocks), 0, ids(*blocks), own)
    return LoadJob(job_id, generation, f"r{job_id}", 10.0, (chunk,))


def test_there_and_back(ranks):
    """Bytes go from the device to RAM and the tier, and come back from either."""
    rank = ranks()
    rank.device[3], rank.device[4] = 33, 44
    rank.step(Plan(namespace=namespace(), saves=(save(1, 1, [3, 4], [5, 6]),)))
    (retired,) = rank.until(SaveRetired)
    assert retired.written == ((0, "disk"),)
    rank.device[:] = 0
    rank.step(Plan(loads=(load(2, 1, [7, 8]), load(3, 1, [9, 10], [5, 6], "ram"))))
    rank.until(LoadRetired, 2)
    assert [rank.device[b][0] for b in (7, 8, 9, 10)] == [33, 44, 33, 44]
    assert sorted(rank.finished) == ["r2", "r3"]
    assert rank.failed == []


def test_a_request_is_told_once(ranks):
    """Finished and failed ids come with the step that knows them, and never again."""
    rank = ranks()
    rank.step(Plan(namespace=namespace(), loads=(load(1, 1, [7, 8]),)))
    rank.until(LoadRetired)
    for _ in range(5):
        rank.step()
    assert rank.finished == ["r1"]
    assert rank.failed == ["r1"]
    assert len(rank.of(LoadDone)) == 1


def test_saves_wait_for_the_forward(ranks):
    """A save begins once its step's forward has been launched, however the engine says so."""
    rank = ranks()
    rank.half.begin(Plan(namespace=namespace(), saves=(save(1, 1, [3, 4], [5, 6]),)))
    assert rank.half._saves
    rank.device[3] = 33  # the forward
    rank.half.forward_launched()
    rank.until(SaveCopied)
    rank.step(Plan(saves=(save(2, 2, [3, 4], [7, 8]),)), launched=False)
    assert len(rank.until(SaveCopied, 2)) == 2


class OnDevice:
    """A rank whose device is fake: its copies are queued, and made when a test says so."""

    def __init__(self, ranks):
        self.driver = FakeDriver(np.random.default_rng(3))
        self.rank = ranks(make_mover=self.mover)

    def mover(self, tables, arena):
        return CudaMover(
            tables, arena, self.driver, AllPinned(), compute_stream=lambda: DMA_COMPUTE
        )

    def copies_queued(self):
        """Wait until the worker's thread has queued its copies, and let the device make them."""
        for _ in range(int(WAIT_S / 0.005)):
            if self.driver.submitted:
                break
            threading.Event().wait(0.005)
        self.driver.run(skip=(DMA_COMPUTE,))
        threading.Event().wait(0.05)  # for a thread that would find them ended
        self.rank.step(Plan(idle=True))


def test_on_a_device_saves_come_after_the_forward(ranks):
    """What the engine launches before it says so is in what is saved, however late it runs."""
    on = OnDevice(ranks)
    on.rank.half.begin(Plan(namespace=namespace(), saves=(save(1, 1, [3, 4], [5, 6]),)))
    on.driver.launch(lambda: on.rank.device[3].fill(33))
    on.rank.half.forward_launched()
    on.copies_queued()
    assert not on.rank.of(SaveCopied)
    on.driver.run()
    on.rank.until(SaveCopied)
    assert bytes(on.rank.arena.buffers([5], PAGE)[0]) == bytes([33]) * PAGE


def test_on_a_device_loads_come_after_what_the_step_began_with(ranks):
    """Zeroing and copy-on-write, launched before the plan is bound, never hit loaded blocks."""
    on = OnDevice(ranks)
    on.rank.arena.buffers([5], PAGE)[0][:] = bytes([55]) * PAGE
    on.driver.launch(lambda: on.rank.device[7].fill(1))
    on.rank.half.begin(Plan(namespace=namespace(), loads=(load(2, 1, [7], [5], "ram"),)))
    on.copies_queued()
    assert not on.rank.of(LoadDone)
    assert on.rank.finished == []
    on.driver.run()
    on.rank.until(LoadDone)
    assert on.rank.failed == []
    assert (on.rank.device[7] == 55).all()


def test_plans_are_left_as_they_are(ranks):
    """In one process both halves hold the same plan: nobody changes it."""
    rank = ranks(rank=1, replicas=2)
    job = save(1, 1, [3, 4], [5, 6])
    rank.step(Plan(namespace=namespace(), saves=(job,)))
    rank.until(SaveRetired)
    assert job.chunks[0].tiers == ("disk",)


def test_replicas_write_once(ranks):
    """Of ranks with identical bytes the first writes; the others only copy to RAM."""
    first, second = ranks(rank=0, replicas=2), ranks(rank=1, replicas=2)
    for rank in (first, second):
        rank.step(Plan(namespace=namespace(), saves=(save(1, 1, [3, 4], [5, 6]),)))
    assert first.until(SaveRetired)[0].written == ((0, "disk"),)
    assert second.until(SaveRetired)[0].written == ()
    assert second.stores[bytes(16)] == {}
    assert (first.half.holder, second.half.holder) == (0, 0)


def test_a_new_namespace(ranks):
    """After a reset, jobs of before are refused and new ones go to the new tiers."""
    rank = ranks()
    rank.step(Plan(namespace=namespace(), saves=(save(1, 1, [3, 4], [5, 6]),)))
    rank.until(SaveRetired)
    rank.step(
        Plan(
            namespace=namespace(1),
            saves=(save(2, 2, [3, 4], [7, 8]), save(3, 3, [3, 4], [9, 10], generation=1)),
            loads=(load(4, 1, [11, 12], [5, 6], "ram"), load(5, 1, [13, 14], generation=1)),
        )
    )
    rank.until(SaveRetired, 3)
    rank.until(LoadRetired, 2)
    assert sorted(rank.failed) == ["r4", "r5"]
    assert list(rank.stores[bytes([1]) * 16]) == [key(3)]
    assert not rank.device[11:15].any()


def test_tiers_that_cannot_be_opened(ranks, caplog):
    """Without its tiers a rank works on with RAM, and says it in one line."""

    def broken(info):
        raise OSError("no such device")

    rank = ranks(open_tiers=broken)
    rank.device[3], rank.device[4] = 33, 44
    with caplog.at_level(logging.ERROR, "kvtier.worker"):
        rank.step(Plan(namespace=namespace(), saves=(save(1, 1, [3, 4], [5, 6]),)))
    assert len(caplog.records) == 1
    assert rank.until(SaveRetired)[0].written == ()
    rank.step(Plan(loads=(load(2, 1, [7, 8], [5, 6], "ram"), load(3, 1, [9, 10]))))
    rank.until(LoadRetired, 2)
    assert rank.device[7][0] == 33
    assert rank.failed == ["r3"]


def test_cancel_and_touch(ranks):
    """Cancelled loads still report; touches and condemned records reach the tier."""
    rank = ranks()
    rank.stores[bytes(16)] = {key(1): bytes(2 * PAGE)}
    rank.step(Plan(namespace=namespace(), loads=(load(1, 1, [7, 8]),)))
    rank.step(
        Plan(
            cancels=(1, 99),
            touches=(("disk", (key(1),)), ("redis", (key(1),))),
            removals=(("disk", key(1), "audit"), ("redis", key(1), "audit")),
        )
    )
    rank.until(LoadRetired)
    for _ in range(1000):
        if rank.tiers[0].touched and rank.tiers[0].gone:
            break
        threading.Event().wait(0.005)
    assert rank.tiers[0].touched == rank.tiers[0].gone == [key(1)]


def test_a_load_planned_with_a_removal(ranks):
    """What a plan takes out of sight, a load of the same plan does not read."""
    rank = ranks()
    rank.step(Plan(namespace=namespace()))
    removals = (("disk", key(1), "audit"),)
    for number in range(1, 6):
        rank.stores[bytes(16)][key(1)] = bytes(2 * PAGE)
        rank.step(Plan(loads=(load(number, 1, [7, 8]),), removals=removals))
        rank.until(LoadRetired, number)
        while len(rank.tiers[0].gone) < number:
            threading.Event().wait(0.001)
    assert len(rank.failed) == 5


def test_a_tier_with_a_bug_does_not_reach_the_engine(ranks):
    """Whatever a tier raises, no call of the engine's thread raises."""
    rank = ranks()
    rank.step(Plan(namespace=namespace()))
    rank.tiers[0].error = RuntimeError("bug")
    for _ in range(5):
        rank.half._clock.advance(0.2)
        rank.step(Plan(touches=(("disk", (key(1),)),)))
        assert rank.half.gauges()["resident_bytes.disk"] == 0
    assert rank.half.gauges()["tier_online.disk"] == 0.0
    assert not rank.of(TierNews)[-1].online


def test_reports(ranks):
    """The first report tells of the pages; one without news is none."""
    rank = ranks()
    rank.half.collect()
    assert rank.half.report().ready_pages == 12
    rank.half.collect()
    assert rank.half.report() is None
    assert rank.half.first_pages() == 12


def test_counts(ranks):
    """What moved is counted in bytes, by tier and direction."""
    rank = ranks()
    rank.step(Plan(namespace=namespace(), saves=(save(1, 1, [3, 4], [5, 6]),)))
    rank.until(SaveRetired)
    rank.step(Plan(loads=(load(2, 1, [7, 8]), load(3, 1, [9, 10], [5, 6], "ram"))))
    rank.until(LoadRetired, 2)
    counts = rank.half.take_counts()
    for name in ("save_bytes.ram", "save_bytes.disk", "load_bytes.ram", "load_bytes.disk"):
        assert counts[name] == 2 * PAGE, name
    for name in ("save_chunks.ram", "save_chunks.disk", "load_chunks.ram", "load_chunks.disk"):
        assert counts[name] == 1, name
    assert rank.half.gauges()["save_queue_bytes"] == 0
    assert rank.half.gauges()["resident_bytes.disk"] == 2 * PAGE


def test_shutdown(ranks):
    """What is queued is written, everything reports, and a second shutdown does nothing."""
    rank = ranks()
    rank.device[3], rank.device[4] = 33, 44
    rank.step(Plan(namespace=namespace(), saves=(save(1, 1, [3, 4], [5, 6]),)))
    rank.half.shutdown()
    rank.half.shutdown()
    assert list(rank.stores[bytes(16)]) == [key(1)]
    kinds = [type(e) for e in rank.half._events + rank.half.transfer.take_events() + rank.events]
    assert kinds.count(SaveCopied) == kinds.count(SaveRetired) == 1
    assert rank.arena.ready_pages == 0
