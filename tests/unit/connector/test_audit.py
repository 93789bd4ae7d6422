"""Which hits are audited, what is compared, and what follows from a difference."""

import logging
from types import SimpleNamespace

import pytest

from kvtier.connector.audit import (
    MAX_OPEN,
    WRITE_PATIENCE_S,
    AuditOptions,
    Auditor,
    AuditTracker,
)
from kvtier.connector.geometry import Geometry, GroupGeometry, GroupKind, Region
from kvtier.connector.ledger import Ledger
from kvtier.storage.catalog import Catalog
from kvtier.storage.counts import Counts
from kvtier.storage.jobs import AuditCopied, AuditDone, ChunkStatus, LayerDifference

BLOCK, CHUNK = 16, 64
HASHES = [bytes([i]) * 32 for i in range(1, 33)]
TABLE = [[100 + i for i in range(32)]]


def group(kind=GroupKind.FULL, window=None, number=0):
    regions = tuple(Region(f"layer.{i}", 4096 * i, 4096, 4096) for i in range(2))
    return GroupGeometry(number, kind, BLOCK, window, regions)


class Bench:
    """An auditor over a real catalog and ledger; device pins are counted."""

    def __init__(self, rate=1.0, draw=lambda: 0.0, n_ranks=1, num_blocks=1000):
        self.geometry = Geometry((group(),), BLOCK, BLOCK, BLOCK, CHUNK, num_blocks, "x", 1)
        self.catalog = Catalog(("disk",), 1)
        self.catalog.add_pages(200)
        self.pins = []
        self.now_s = 0.0
        self.ledger = Ledger(
            self.catalog, n_ranks, self.pins.extend, self.unpin, lambda: self.now_s
        )
        self.counts = Counts()
        ids = iter(range(1, 1000))
        self.auditor = Auditor(
            self.geometry,
            self.catalog,
            self.ledger,
            self.counts,
            lambda: next(ids),
            lambda: 7,
            AuditOptions(rate, draw),
        )
        self.audit = AuditTracker()

    def unpin(self, blocks):
        for block in blocks:
            self.pins.remove(block)

    def store(self, *ends, ram=True, disk=True):
        """Have records that end at these tokens."""
        for end in ends:
            start = (end - 1) // CHUNK * CHUNK
            key = self.key(end)
            if ram:
                entry = self.catalog.begin_save(key, -(-(end - start) // BLOCK))
                self.catalog.filled(entry, ok=True)
                self.catalog.unpin(entry)
            if disk:
                self.catalog.tier_added("disk", key, 0, -(-(end - start) // BLOCK))

    def key(self, end):
        return HASHES[end // BLOCK - 1] + b"\0"

    def admit(self, local, hit):
        assert self.auditor.wants(self.audit, local, hit)
        self.auditor.admitted(self.audit, HASHES)

    def plan(self, valid, table=TABLE):
        self.auditor.plan(self.audit, HASHES, table, valid)
        return self.auditor.take_jobs()

    def end(self, job, *layers, status=ChunkStatus.OK, copied=True):
        if copied:
            self.ledger.audit_copied(AuditCopied(job.job_id))
        self.auditor.settle(AuditDone(job.job_id, status, layers))


def layer(differs, block=0, name="layer.1", mean=0.0):
    return LayerDifference(name, 1000, 400 if differs else 1000, 0.5, mean, block, differs)


def test_the_share_that_is_drawn():
    """A hit is audited as often as drawn; the answer stays until the request is admitted."""
    draws = iter([0.29, 0.31])
    bench = Bench(rate=0.3, draw=lambda: next(draws))
    yes, no = AuditTracker(), AuditTracker()
    assert bench.auditor.wants(yes, 0, 64)
    assert bench.auditor.wants(yes, 0, 128)
    assert yes.span == (0, 128)
    assert not bench.auditor.wants(no, 0, 64)
    assert not bench.auditor.wants(no, 0, 64)
    bench.auditor.admitted(yes, HASHES)
    assert not bench.auditor.wants(yes, 64, 128), "a request is audited once"


def test_nothing_is_drawn_at_rate_nought():
    """Without the setting nothing is drawn, nothing audited, nothing counted."""
    bench = Bench(rate=0.0, draw=lambda: pytest.fail("drawn"))
    assert not bench.auditor.wants(bench.audit, 0, 64)
    bench.auditor.admitted(bench.audit, HASHES)
    assert not bench.audit.pieces
    assert not bench.counts.take()


def test_chunks_are_compared_when_they_are_complete():
    """Each record is compared in the step that completes its blocks, from where it is kept."""
    bench = Bench()
    bench.store(64, 128)
    bench.store(176, ram=False)
    bench.admit(32, 176)
    assert bench.plan(63) == ()
    (first,) = bench.plan(127)
    assert (first.key, first.source, first.generation) == (bench.key(64), "ram", 7)
    assert (first.n_blocks, first.offset_blocks, first.blocks.tolist()) == (4, 2, [102, 103])
    assert first.pages is not None
    second, third = bench.plan(500)
    assert (second.key, second.offset_blocks) == (bench.key(128), 0)
    assert (third.key, third.source, third.pages) == (bench.key(176), "disk", None)
    assert third.blocks.tolist() == [108, 109, 110]
    assert bench.pins == [102, 103, *range(104, 111)]
    for job in (first, second, third):
        bench.end(job, layer(differs=False, mean=1e-6))
    assert bench.pins == []
    assert not bench.ledger.outstanding
    assert bench.catalog.pinned_pages == 0
    seen = bench.counts.take()
    assert (seen["audits"], seen["audited_chunks"], seen["audited_values"]) == (1, 3, 3000)
    assert bench.auditor.worst_mean == 1e-6


def test_a_block_that_the_hit_covers_in_part_is_not_compared():
    """What lies behind the hit's end in its last block was never stored."""
    bench = Bench()
    bench.store(64)
    bench.admit(0, 40)
    (job,) = bench.plan(64)
    assert job.blocks.tolist() == [100, 101]


def test_device_blocks_are_let_go_once_copied():
    """The device's blocks come back with the copy, RAM pages with the result of the last rank."""
    bench = Bench(n_ranks=2)
    bench.store(64)
    bench.admit(0, 64)
    (job,) = bench.plan(64)
    bench.ledger.audit_copied(AuditCopied(job.job_id))
    assert bench.pins
    bench.ledger.audit_copied(AuditCopied(job.job_id))
    assert not bench.pins
    assert bench.catalog.pinned_pages == 4
    bench.end(job, layer(differs=False), copied=False)
    assert bench.catalog.pinned_pages == 4
    bench.end(job, layer(differs=False), copied=False)
    assert bench.catalog.pinned_pages == 0
    assert bench.counts.take()["audited_chunks"] == 1


def test_few_at_once_and_what_is_left_is_counted():
    """A bounded number is out; the rest goes on in later steps, or is counted as left out."""
    bench = Bench()
    bench.store(*range(64, 513, 64))
    bench.store(*[])
    bench.admit(0, 512)
    jobs = list(bench.plan(512))
    assert len(jobs) == MAX_OPEN == 8
    many = Bench(num_blocks=80)  # so that ten blocks may be pinned
    many.store(64, 128, 192)
    many.admit(0, 192)
    assert len(many.plan(192)) == 2
    assert many.plan(192) == ()
    many.auditor.finished(many.audit)
    assert many.counts.take()["audit_skipped_chunks.busy"] == 1
    tiny = Bench(num_blocks=16)
    tiny.store(64)
    tiny.admit(0, 64)
    assert tiny.plan(64) == ()
    assert tiny.counts.take()["audit_skipped_chunks.pins"] == 1


def test_what_cannot_be_compared_is_counted():
    """Records that went and blocks that the engine gave up are left out, with their reason."""
    bench = Bench()
    bench.store(64, 128)
    bench.admit(0, 128)
    bench.catalog.drop(bench.key(64))
    assert bench.plan(128, [[0] * 32]) == ()
    seen = bench.counts.take()
    assert (seen["audit_skipped_chunks.gone"], seen["audit_skipped_chunks.block_gone"]) == (1, 1)


@pytest.mark.parametrize("status", [ChunkStatus.CANCELLED, ChunkStatus.MISSING])
def test_an_audit_that_came_to_nothing(status):
    """One that was given up, or found no record, says nothing against the record."""
    bench = Bench()
    bench.store(64)
    bench.admit(0, 64)
    (job,) = bench.plan(64)
    bench.end(job, status=status)
    assert bench.counts.take()[f"audit_skipped_chunks.{status.name.lower()}"] == 1
    assert bench.catalog.source(bench.key(64)) == "ram"
    assert bench.auditor.take_removals() == ()


def test_a_difference_drops_the_rest_of_the_chain(caplog):
    """The record and all that ends after its start go, on every tier; what is before stays."""
    bench = Bench()
    bench.store(64, 128, 176, 192)
    bench.admit(0, 192)
    jobs = bench.plan(192)
    bad = [layer(False), layer(True, 2, "layer.1", 0.7), layer(True, 3, "layer.0", 0.9)]
    with caplog.at_level(logging.ERROR, "kvtier.audit"):
        bench.end(jobs[1], *bad)
        bench.end(jobs[2], layer(True))
        bench.end(jobs[0], layer(False))
    (line,) = [record.getMessage() for record in caplog.records]
    assert "\n" not in line
    assert "of layer.1 (group 0)" in line
    assert "tokens 96 to 112" in line
    assert bench.key(128)[:-1].hex() in line
    left = [end for end in (64, 128, 176, 192) if bench.catalog.get(bench.key(end)) is not None]
    assert left == [64]
    removed = bench.auditor.take_removals()
    assert {key for _, key, _ in removed} == {bench.key(end) for end in (128, 176, 192)}
    assert {(tier, reason) for tier, _, reason in removed} == {("disk", "audit")}
    assert bench.auditor.take_removals() == ()
    seen = bench.counts.take()
    assert (seen["audit_differing_chunks"], seen["audit_dropped_chunks"]) == (2, 3)
    assert bench.catalog.pinned_pages == 0


def test_a_write_under_way_is_undone_when_it_has_ended():
    """A record that is being written while it is condemned is removed after that once more."""
    bench = Bench()
    bench.store(64)
    entry = bench.catalog.get(bench.key(64))
    entry.writes += 1
    bench.admit(0, 64)
    (job,) = bench.plan(64)
    bench.end(job, layer(True))
    assert len(bench.auditor.take_removals()) == 1
    assert bench.auditor.waiting
    assert bench.auditor.take_removals() == ()
    entry.writes -= 1
    assert bench.auditor.take_removals() == (("disk", bench.key(64), "audit"),)
    assert bench.catalog.get(bench.key(64)) is None
    assert not bench.auditor.waiting


def test_a_condemned_record_is_not_served_before_its_write_has_ended():
    """Its tier tells of it when it is there, before the job that wrote it is over: nobody hits."""
    bench = Bench()
    bench.store(64, disk=False)
    entry = bench.catalog.get(bench.key(64))
    entry.writes += 1
    bench.admit(0, 64)
    (job,) = bench.plan(64)
    bench.end(job, layer(True))
    bench.auditor.take_removals()
    bench.catalog.tier_added("disk", bench.key(64), 0)
    assert bench.catalog.source(bench.key(64)) is None
    assert bench.auditor.take_removals() == ()
    entry.writes -= 1
    assert bench.auditor.take_removals() == (("disk", bench.key(64), "audit"),)
    bench.catalog.tier_added("disk", bench.key(64), 0)  # one that was computed anew
    assert bench.catalog.source(bench.key(64)) == "disk"


def test_a_write_that_hangs_keeps_no_engine_stepping():
    """A condemned record that is being written is waited for, but not for ever."""
    bench = Bench()
    bench.store(64)
    entry = bench.catalog.get(bench.key(64))
    entry.writes += 1
    bench.admit(0, 64)
    (job,) = bench.plan(64)
    bench.end(job, layer(True))
    bench.auditor.take_removals()
    assert bench.auditor.waiting
    bench.now_s += WRITE_PATIENCE_S + 1.0
    assert not bench.auditor.waiting
    entry.writes -= 1
    assert bench.auditor.waiting
    assert len(bench.auditor.take_removals()) == 1
    assert not bench.auditor.waiting


def test_a_reset_forgets_what_was_condemned():
    """After a reset the keys mean other bytes."""
    bench = Bench()
    bench.store(64)
    entry = bench.catalog.get(bench.key(64))
    entry.writes += 1
    bench.admit(0, 64)
    (job,) = bench.plan(64)
    bench.end(job, layer(True))
    bench.catalog.clear()
    bench.auditor.reset()
    bench.catalog.tier_added("disk", bench.key(64), 0)
    assert bench.catalog.source(bench.key(64)) == "disk"
    assert not bench.auditor.waiting


def test_a_reset_leaves_nothing_to_remove():
    """After a reset the old namespace's records are nobody's; nothing of the new one goes."""
    bench = Bench()
    bench.store(64)
    bench.admit(0, 64)
    (job,) = bench.plan(64)
    bench.end(job, layer(True))
    bench.auditor.reset()
    assert bench.auditor.take_removals() == ()


def test_states_are_not_compared():
    """A recurrent group's state is not in the request's table for long; it is left out."""
    recurrent = group(GroupKind.RECURRENT, number=1)
    bench = Bench()
    bench.auditor._geometry = SimpleNamespace(group=lambda number: recurrent)
    piece = SimpleNamespace(group_id=1, first_block=0, n_blocks=1)
    assert bench.auditor._whole_blocks(piece, 64) is None
