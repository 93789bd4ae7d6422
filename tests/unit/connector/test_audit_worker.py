"""The worker's part of an audit: each job reports once, and only sound results count."""

import logging
import threading
import time

import numpy as np
import pytest

from kvtier.connector.audit_compare import Layer, Numbers
from kvtier.connector.audit_worker import QUEUE_CHUNKS, AuditRunner, AuditSetup
from kvtier.storage.counts import Counts
from kvtier.storage.disk import DiskTier
from kvtier.storage.jobs import AuditCopied, AuditDone, AuditJob, ChunkStatus
from kvtier.storage.link import LinkLimits, TierLink
from kvtier.storage.ram import Arena
from kvtier.storage.testing import NAMESPACE, key_of
from kvtier.storage.tier import RecordSpec

PAGE = 8192
USED = 4096
LAYERS = {0: (Layer("a", 0, 1024, Numbers.FLOAT32), Layer("b", 1024, 2048, Numbers.FLOAT32))}


class Ticket:
    def __init__(self, mover):
        self.mover = mover

    def wait(self, timeout_s):
        assert self.mover.go.wait(20)
        if self.mover.error is not None:
            raise self.mover.error

    def fenced(self):
        self.mover.asked += 1
        return self.mover.asked > 2  # a failed copy goes on for a moment


class Mover:
    """Device blocks are arrays in a dict."""

    def __init__(self, arena):
        self.arena, self.blocks = arena, {}
        self.go = threading.Event()
        self.go.set()
        self.error, self.asked = None, 0

    def save(self, group, block_ids, page_ids, after=None):
        for block, page in zip(block_ids.tolist(), page_ids.tolist(), strict=True):
            self.arena.buffers([page], USED)[0][:] = self.blocks[block].tobytes()
        return Ticket(self)


class Bench:
    def __init__(self, root):
        self.arena = Arena(PAGE, 20, prefault=False)
        self.arena.start(background=False)
        self.mover = Mover(self.arena)
        rng = np.random.default_rng(3)
        for block in range(1, 9):
            self.mover.blocks[block] = rng.normal(size=USED // 4).astype(np.float32)
        tier = DiskTier(str(root), NAMESPACE, 0, 1 << 30, poll_s=0.05)
        self.link = TierLink(tier, Counts(), time.monotonic, LinkLimits())
        self.generation = 1
        self.runner = AuditRunner(
            AuditSetup(np.arange(4), np.arange(4, 8), LAYERS),
            self.arena,
            {0: USED},
            self.mover,
            lambda: {"disk": self.link},
            lambda: self.generation,
            time.monotonic,
        )
        self.events = []

    def put(self, pages, blocks):
        """Have RAM pages hold what these blocks do."""
        for page, block in zip(pages, blocks, strict=True):
            self.arena.buffers([page], USED)[0][:] = self.mover.blocks[block].tobytes()

    def store(self, pages):
        spec = RecordSpec(key_of(1), 0, 64, len(pages) * USED)
        assert self.link.save(spec, self.arena.buffers(pages, USED))

    def submit(self, number, blocks, pages=None, source="ram", n_blocks=4, offset=0, generation=1):
        ids = None if pages is None else np.array(pages)
        job = AuditJob(
            number, generation, key_of(1), 0, 0, 64, source, n_blocks, offset, np.array(blocks), ids
        )
        self.runner.submit(job)

    def result(self, number):
        """The result of a job, told once and after its copy."""
        for _ in range(2000):
            self.events += self.runner.take_events()
            mine = [e for e in self.events if e.job_id == number]
            if any(isinstance(e, AuditDone) for e in mine):
                assert [type(e) for e in mine] == [AuditCopied, AuditDone]
                return mine[1]
            time.sleep(0.01)
        raise AssertionError(f"no result of {number}")

    def close(self):
        self.mover.go.set()
        self.runner.close(time.monotonic() + 10)
        self.link.close(time.monotonic() + 10)
        self.arena.close()


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path)
    yield bench
    bench.close()


@pytest.mark.parametrize("source", ["ram", "disk"])
def test_what_was_computed_is_compared_with_what_is_stored(bench, source):
    """From RAM or a lower tier, equal blocks are exact and a changed layer is named."""
    bench.put([10, 11, 12, 13], [1, 2, 3, 4])
    pages = [10, 11, 12, 13] if source == "ram" else None
    bench.store([10, 11, 12, 13])
    bench.submit(1, [1, 2, 3, 4], pages, source)
    done = bench.result(1)
    assert done.status is ChunkStatus.OK
    assert [(f.layer, f.exact, f.values) for f in done.layers] == [
        ("a", 1024, 1024),
        ("b", 2048, 2048),
    ]
    bench.mover.blocks[4] = bench.mover.blocks[4].copy()
    bench.mover.blocks[4][300:400] += 1.0  # of layer b
    bench.submit(2, [3, 4], pages, source, offset=2)
    a, b = bench.result(2).layers
    assert (a.differs, b.differs, b.block) == (False, True, 1)


def test_nothing_follows_from_what_could_not_be_read(bench):
    """A missing record, an unknown tier, another generation and a failed copy compare nothing."""
    bench.submit(1, [1], None, "disk")
    assert bench.result(1) == AuditDone(1, ChunkStatus.MISSING)
    bench.submit(2, [1], None, "redis")
    assert bench.result(2) == AuditDone(2, ChunkStatus.TIER_DOWN)
    bench.submit(3, [1], [10], n_blocks=1, generation=0)
    assert bench.result(3) == AuditDone(3, ChunkStatus.CANCELLED)


def test_a_failed_copy_is_told_when_no_byte_moves(bench, caplog):
    """The device's blocks are given up only when the copy is fenced."""
    bench.mover.error = RuntimeError("device")
    with caplog.at_level(logging.CRITICAL, "kvtier.audit"):
        bench.submit(1, [1], [10], n_blocks=1)
        assert bench.result(1) == AuditDone(1, ChunkStatus.COPY_FAILED)
    assert bench.mover.asked > 2


def test_a_full_queue_gives_up_at_once(bench):
    """Nobody waits for an audit: past a short queue a job is over as soon as it comes."""
    bench.mover.go.clear()
    n = QUEUE_CHUNKS + 5
    for number in range(1, n + 1):
        bench.submit(number, [1], [10], n_blocks=1)
    for number in range(QUEUE_CHUNKS + 1, n + 1):
        assert bench.result(number) == AuditDone(number, ChunkStatus.CANCELLED)
    bench.mover.go.set()
    assert bench.result(1).status is ChunkStatus.OK


def test_the_end_reports_every_job(bench):
    """At shutdown what waits is cancelled and what runs ends; all of it is told."""
    bench.mover.go.clear()
    for number in range(1, 6):
        bench.submit(number, [1], [10], n_blocks=1)
    threading.Timer(0.1, bench.mover.go.set).start()
    bench.runner.close(time.monotonic() + 10)
    statuses = {bench.result(number).status for number in range(1, 6)}
    assert statuses <= {ChunkStatus.OK, ChunkStatus.CANCELLED}
    bench.submit(9, [1], [10], n_blocks=1)
    assert bench.result(9).status is ChunkStatus.CANCELLED
