"""A transfer's promises: where bytes may land, and that every job tells both of its ends."""

from __future__ import annotations

import threading
import time

import pytest

from kvtier.storage.errors import DamageReason, RecordDamaged, TierUnavailable
from kvtier.storage.jobs import ChunkStatus, LoadDone, LoadRetired, SaveCopied, SaveRetired
from kvtier.storage.tier import TierChanges

from .transfer_helpers import PAGE, WAIT_S, Bench, HeldTier, key, load_chunk, save_chunk

OK, DEADLINE, CANCELLED = ChunkStatus.OK, ChunkStatus.DEADLINE, ChunkStatus.CANCELLED


@pytest.fixture
def benches():
    made = []
    yield lambda **options: made.append(Bench(**options)) or made[-1]
    for bench in made:
        bench.close()


@pytest.fixture
def bench(benches):
    return benches()


def keep(bench, n, *numbers, tier=None):
    """Put a record of these blocks on the tier."""
    data = b"".join(bytes([number]) * PAGE for number in numbers)
    (tier or bench.tier).records[key(n)] = data


def statuses(event):
    return [ChunkStatus(s) for s in event.statuses]


def until(condition):
    for _ in range(int(WAIT_S / 0.005)):
        if condition():
            return
        threading.Event().wait(0.005)
    raise AssertionError("it never happened")


# -- saves -----------------------------------------------------------------------


def test_save_copies_then_writes_behind(bench):
    """Device blocks are free after the copy; pages only after the write."""
    bench.mover.blocks = {(0, 5): 50, (0, 6): 60}
    bench.tier.gates["put"].shut()
    job = bench.save(save_chunk(1, [5, 6], [10, 11]))
    assert statuses(bench.wait(job, SaveCopied)) == [OK]
    bench.tier.gates["put"].wait_came(1)
    assert not bench.of(job, SaveRetired)
    assert bench.transfer.busy
    bench.tier.gates["put"].open()
    assert bench.wait(job, SaveRetired).written == ((0, "disk"),)
    assert bench.tier.records[key(1)] == bytes([50]) * PAGE + bytes([60]) * PAGE


def test_save_of_two_groups(bench):
    """Chunks of several groups are one job; each goes to its own pages."""
    bench.mover.blocks = {(0, 5): 50, (1, 5): 51}
    job = bench.save(save_chunk(1, [5], [10]), save_chunk(1, [5], [11], group=1))
    bench.ended(job)
    assert bench.tier.records == {key(1): bytes([50]) * PAGE, key(1, 1): bytes([51]) * PAGE}


def test_full_queue_drops_the_write(benches):
    """When the write queue is full a save stays in RAM only: counted, and still retired."""
    bench = benches(save_threads=1, save_queue_bytes=PAGE)
    bench.tier.gates["put"].shut()
    first = bench.save(save_chunk(1, [5], [10]))
    bench.tier.gates["put"].wait_came(1)
    second = bench.save(save_chunk(2, [6], [11]))
    copied, retired = bench.ended(second)
    assert statuses(copied) == [OK]
    assert retired.written == ()
    assert bench.counts()["save_dropped_chunks.disk.queue_full"] == 1
    bench.tier.gates["put"].open()
    bench.ended(first)


def test_failed_copy_out(bench):
    """A copy that fails keeps nothing and writes nothing."""
    bench.mover.error = RuntimeError("lost")
    copied, retired = bench.ended(bench.save(save_chunk(1, [5], [10]), save_chunk(2, [6], [11])))
    assert statuses(copied) == [ChunkStatus.COPY_FAILED] * 2
    assert retired.written == ()
    assert bench.tier.records == {}
    assert bench.counts()["save_failed_chunks.device"] == 2


@pytest.mark.parametrize("verb", ["save", "load"])
def test_failed_copies_are_fenced(bench, verb):
    """Blocks of a failed copy are given back only when no byte of it can move any more."""
    moving = threading.Event()
    bench.mover.error, bench.mover.fenced = RuntimeError("lost"), moving.is_set
    if verb == "save":
        job, kind = bench.save(save_chunk(1, [5], [10])), SaveCopied
        bench.mover.save_gate.wait_came(1)
    else:
        job, kind = bench.load(load_chunk(1, [5], [10], "ram"), deadline_s=1.0), LoadDone
        bench.mover.load_gate.wait_came(1)
        bench.clock.advance(5.0)
    bench.transfer.poll()
    assert not bench.of(job, kind)
    moving.set()
    bench.ended(job)


def test_a_write_that_fails_or_raises(bench):
    """A job whose write fails in any way is retired without it."""
    for error in (TierUnavailable("dead"), RuntimeError("bug")):
        bench.tier.errors["put"] = error
        assert bench.ended(bench.save(save_chunk(1, [5], [10])))[1].written == ()


def test_write_back(bench):
    """Chunks that are in RAM already are written without touching the device."""
    bench.page(10)[:] = bytes([7]) * PAGE
    copied, retired = bench.ended(bench.save(save_chunk(1, [], [10])))
    assert statuses(copied) == [OK]
    assert retired.written == ((0, "disk"),)
    assert bench.mover.save_gate.came == 0
    assert bench.tier.records[key(1)] == bytes([7]) * PAGE


# -- loads -----------------------------------------------------------------------


def test_load_from_ram(bench):
    """Pages reach the device; only the blocks that are wanted."""
    for page in (10, 11, 12):
        bench.page(page)[:] = bytes([page]) * PAGE
    chunk = load_chunk(1, [5, 6], [10, 11, 12], "ram", n_blocks=3, offset=1)
    done, retired = bench.ended(bench.load(chunk))
    assert done.ok
    assert retired.filled == bytes([0])
    assert bench.mover.blocks == {(0, 5): 11, (0, 6): 12}


def test_load_from_a_tier_into_pages(bench):
    """The record lands in its RAM pages and on the device, and the pages may be kept."""
    keep(bench, 1, 41, 42)
    done, retired = bench.ended(bench.load(load_chunk(1, [5, 6], [20, 21])))
    assert done.ok
    assert retired.filled == bytes([1])
    assert bench.mover.blocks == {(0, 5): 41, (0, 6): 42}
    assert bytes(bench.page(21)) == bytes([42]) * PAGE


def test_load_streams_through_staging(benches):
    """Chunks without pages of their own pass through few staging slots, all of them."""
    bench = benches(staging_pages=2, slot_pages=2, load_threads=3)
    for n in range(6):
        keep(bench, n, 2 * n, 2 * n + 1)
    job = bench.load(*(load_chunk(n, [10 + 2 * n, 11 + 2 * n], None) for n in range(6)))
    done, retired = bench.ended(job)
    assert done.ok
    assert retired.filled == bytes(6)
    assert bench.mover.blocks == {(0, 10 + n): n for n in range(12)}


def test_a_tier_that_hangs_leaves_the_others_a_staging_slot(benches):
    """Reads that hang keep their slots, but never the last one that another tier could use."""
    bench = benches(staging_pages=6, slot_pages=2, tiers=[HeldTier(), HeldTier("redis")])
    disk, redis = bench.tiers
    redis.records[key(9)] = bytes([9]) * PAGE
    disk.gates["get"].shut()
    hung = [bench.load(load_chunk(n, [5], None)) for n in range(1, 5)]
    disk.gates["get"].wait_came(2)
    job = bench.load(load_chunk(9, [6], None, "redis"))
    assert statuses(bench.wait(job, LoadDone)) == [OK]
    disk.gates["get"].open()
    for each in hung:
        bench.ended(each)
    assert len(bench.transfer.staging._slots) == 3


def test_no_staging_slot_in_time(bench):
    """A load that finds no staging slot until its deadline says so."""
    bench.transfer.staging.take(0.0)
    job = bench.load(load_chunk(1, [5], None), deadline_s=0.05)
    until(lambda: bench.of(job, LoadRetired))
    assert statuses(bench.wait(job, LoadDone)) == [DEADLINE]


def test_given_up_while_it_waits_for_staging(bench):
    """A load that is over when its staging slot comes reads nothing."""
    keep(bench, 1, 41)
    slot = bench.transfer.staging.take(0.0)
    job = bench.load(load_chunk(1, [5], None))
    bench.transfer.cancel_load(job.job_id)
    assert statuses(bench.wait(job, LoadDone)) == [CANCELLED]
    bench.transfer.staging.give(slot)
    bench.wait(job, LoadRetired)
    assert bench.tier.gates["get"].came == 0
    assert bench.transfer.staging.take(0.0) is not None


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RecordDamaged(DamageReason.PAYLOAD, "x"), ChunkStatus.DAMAGED),
        (TierUnavailable("dead"), ChunkStatus.TIER_DOWN),
        (RuntimeError("bug"), ChunkStatus.TIER_DOWN),
    ],
)
def test_load_faults(bench, error, status):
    """A chunk that cannot be read fails the job with its reason, and fills nothing."""
    bench.tier.errors["get"] = error
    done, retired = bench.ended(bench.load(load_chunk(1, [5], [20])))
    assert not done.ok
    assert statuses(done) == [status]
    assert retired.filled == bytes([0])
    assert bench.mover.blocks == {}


def test_load_of_a_missing_record(bench):
    """A record that is gone is missing; what is before it has landed."""
    keep(bench, 0, 1)
    job = bench.load(*(load_chunk(n, [5 + n], [20 + n]) for n in (0, 1)))
    done, _ = bench.ended(job)
    assert not done.ok
    assert statuses(done) == [OK, ChunkStatus.MISSING]


def test_one_load_finds_every_bad_record(benches):
    """What is behind a bad record is checked after the load is told, and fills RAM where good."""
    bench = benches(load_threads=1)
    for n in (1, 3, 5):
        keep(bench, n, 30 + n)
    bench.tier.gates["get"].shut()
    job = bench.load(*(load_chunk(n, [5 + n], None if n in {2, 3} else [20 + n]) for n in range(6)))
    bench.tier.gates["get"].open()
    done, retired = bench.ended(job)
    assert statuses(done) == [ChunkStatus.MISSING, *[ChunkStatus.NOT_ATTEMPTED] * 5]
    assert retired.lost == (2, 4)
    assert retired.filled == bytes([0, 1, 0, 0, 0, 1])
    assert bench.mover.blocks == {}
    assert bench.counts()["load_failed_chunks.disk.missing"] == 3


def test_checks_give_way_to_loads(benches):
    """A load that somebody waits for goes before what is only to be checked."""
    bench = benches(load_threads=1)
    for n in range(1, 6):
        keep(bench, n, 30 + n)
    bench.tier.gates["get"].shut()
    bad = bench.load(*(load_chunk(n, [5 + n], [20 + n]) for n in (0, 1, 2, 3)))
    bench.tier.gates["get"].wait_came(1)
    load = bench.load(load_chunk(4, [40], [30]), load_chunk(5, [41], [31]))
    order = []
    get = bench.tier.get
    bench.tier.get = lambda spec, into: order.append(spec.key) or get(spec, into)
    bench.tier.gates["get"].open()
    bench.ended(load)
    bench.ended(bad)
    assert order == [key(n) for n in (4, 5, 1, 2, 3)]


def test_failed_copy_in(bench):
    """A copy to the device that fails fails the load, but the RAM pages are good."""
    keep(bench, 1, 41)
    bench.mover.error = RuntimeError("lost")
    done, retired = bench.ended(bench.load(load_chunk(1, [5], [20])))
    assert statuses(done) == [ChunkStatus.COPY_FAILED]
    assert retired.filled == bytes([1])
    done, _ = bench.ended(bench.load(load_chunk(2, [6], [21], "ram")))
    assert statuses(done) == [ChunkStatus.COPY_FAILED]


@pytest.mark.parametrize("verb", ["save", "load"])
def test_copies_that_keep_failing_are_said_once(bench, caplog, verb):
    """One line when copies begin to fail and one when they work again, however many there are."""

    def lines_after(jobs):
        caplog.clear()
        for i in range(jobs):
            if verb == "save":
                bench.ended(bench.save(save_chunk(1, [5], [10 + i], tiers=())))
            else:
                bench.ended(bench.load(load_chunk(1, [5], [10 + i], "ram")))
        return [record.getMessage() for record in caplog.records]

    caplog.set_level("INFO", logger="kvtier.transfer")
    assert lines_after(2) == []
    bench.mover.error = RuntimeError("lost")
    (line,) = lines_after(4)
    assert "failed" in line
    bench.mover.error = None
    (line,) = lines_after(3)
    assert "again" in line


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("source", ["ram", "disk"])
def test_a_job_that_makes_no_sense_still_reports(bench, source):
    """Also what raises where nothing should raise ends in a report: nobody waits for ever."""
    bench.arena.close()
    done, retired = bench.ended(bench.load(load_chunk(1, [5], [20], source)))
    assert not done.ok
    assert retired.filled == bytes([0])


def test_unknown_tier(bench):
    """A chunk of a tier that this rank does not have fails at once."""
    done, _ = bench.ended(bench.load(load_chunk(1, [5], [20], "redis")))
    assert statuses(done) == [ChunkStatus.TIER_DOWN]


# -- deadlines and cancels -----------------------------------------------------------


@pytest.mark.parametrize("pages", [[20], None])
def test_deadline_while_a_read_hangs(bench, pages):
    """Past the deadline the request goes on at once; the late read reaches no device block."""
    keep(bench, 1, 41)
    bench.tier.gates["get"].shut()
    job = bench.load(load_chunk(1, [5], pages), deadline_s=10.0)
    bench.tier.gates["get"].wait_came(1)
    bench.clock.advance(9.9)
    bench.transfer.poll()
    assert not bench.of(job, LoadDone)
    bench.clock.advance(0.2)
    for _ in range(3):
        bench.transfer.poll()
    assert statuses(bench.wait(job, LoadDone)) == [DEADLINE]
    assert not bench.of(job, LoadRetired)
    assert bench.counts()["load_deadline_missed"] == 1
    bench.tier.gates["get"].open()
    retired = bench.wait(job, LoadRetired)
    assert retired.filled == bytes([pages is not None])
    assert bench.mover.blocks == {}
    assert bench.mover.load_gate.came == 0


def test_missed_deadlines_open_the_breaker(benches):
    """Loads that are given up while their reads hang: after a few, nobody waits for that tier."""
    bench = benches(load_threads=8, failures_to_open=3)
    for n in range(4):
        keep(bench, n, n)
    gate = bench.tier.gates["get"]
    gate.shut()
    for n in range(3):
        assert bench.transfer.links["disk"].online
        bench.load(load_chunk(n, [n], [10 + n]), deadline_s=1.0)
        gate.wait_came(n + 1)
        bench.clock.advance(1.5)
        bench.transfer.poll()
    assert not bench.transfer.links["disk"].online
    done, _ = bench.ended(bench.load(load_chunk(3, [3], [13])))
    assert statuses(done) == [ChunkStatus.TIER_DOWN]
    gate.open()


def test_a_load_that_only_waited_its_turn_is_not_the_tier_s_fault(benches):
    """Past the deadline in the queue, with no read of its own under way: an overload, no outage."""
    bench = benches(load_threads=1, failures_to_open=2)
    keep(bench, 1, 1)
    gate = bench.tier.gates["get"]
    gate.shut()
    bench.load(load_chunk(1, [5], [10]), deadline_s=100.0)
    gate.wait_came(1)
    for n in range(4):
        bench.load(load_chunk(1, [6 + n], [11 + n]), deadline_s=1.0)
    bench.clock.advance(1.5)
    bench.transfer.poll()
    assert bench.transfer.links["disk"].online
    gate.open()


def test_pages_of_loads_behind_hung_reads_come_back(benches):
    """With every thread and slot stuck, loads that wait are over once the tier is off."""
    bench = benches(load_threads=2, staging_pages=2, slot_pages=1)
    gate = bench.tier.gates["get"]
    gate.shut()
    hung = [bench.load(load_chunk(n, [n], None), deadline_s=1e6) for n in range(2)]
    gate.wait_came(2)
    waiting = [
        bench.load(load_chunk(n, [n], [10 + n] if n % 2 else None), deadline_s=1e6)
        for n in range(3, 9)
    ]
    bench.transfer.links["disk"].breaker.trip("all threads hang")
    bench.clock.advance(0.2)
    bench.transfer.poll()
    end_s = time.monotonic() + WAIT_S / 4  # long before the gate lets go by itself
    while not all(bench.of(job, LoadRetired) for job in waiting):
        assert time.monotonic() < end_s
        bench.transfer.wait(0.01)
    assert all(statuses(bench.of(job, LoadDone)[0]) == [ChunkStatus.TIER_DOWN] for job in waiting)
    assert not bench.of(hung[0], LoadRetired)
    gate.open()
    for job in hung:
        bench.ended(job)


def test_a_copy_that_is_late_is_not_the_tier_s_fault(benches):
    """The record was read in time; the device was not written in time."""
    bench = benches(failures_to_open=1)
    keep(bench, 1, 50)
    bench.mover.load_gate.shut()
    job = bench.load(load_chunk(1, [5], [10]), deadline_s=1.0)
    bench.mover.load_gate.wait_came(1)
    bench.clock.advance(1.5)
    bench.transfer.poll()
    assert bench.counts()["load_deadline_missed"] == 1
    assert bench.transfer.links["disk"].online
    bench.mover.load_gate.open()
    bench.ended(job)


def test_deadline_while_a_copy_is_under_way(bench):
    """A copy that has begun is waited for: its blocks are not given away under it."""
    bench.mover.load_gate.shut()
    job = bench.load(load_chunk(1, [5], [20], "ram"), deadline_s=1.0)
    bench.mover.load_gate.wait_came(1)
    bench.clock.advance(2.0)
    for _ in range(3):
        bench.transfer.poll()
    assert not bench.of(job, LoadDone)
    assert bench.transfer.loading
    bench.mover.load_gate.open()
    done, _ = bench.ended(job)
    assert not done.ok
    assert bench.counts()["load_deadline_missed"] == 1


def test_a_slot_of_a_hung_read_comes_back(bench):
    """The staging slot that a hung read holds serves again once the read has returned."""
    keep(bench, 1, 41)
    bench.tier.gates["get"].shut()
    job = bench.load(load_chunk(1, [5], None), deadline_s=1.0)
    bench.tier.gates["get"].wait_came(1)
    bench.clock.advance(2.0)
    bench.transfer.poll()
    bench.tier.gates["get"].open()
    bench.wait(job, LoadRetired)
    assert bench.ended(bench.load(load_chunk(1, [6], None)))[0].ok


def test_cancel(bench):
    """A load that nobody waits for still reports both ends, and may not touch the device."""
    keep(bench, 1, 41)
    bench.tier.gates["get"].shut()
    job = bench.load(load_chunk(1, [5], [20]))
    bench.tier.gates["get"].wait_came(1)
    bench.transfer.cancel_load(job.job_id)
    bench.transfer.cancel_load(99)
    assert statuses(bench.wait(job, LoadDone)) == [CANCELLED]
    bench.tier.gates["get"].open()
    bench.wait(job, LoadRetired)
    assert bench.mover.blocks == {}


# -- namespaces ----------------------------------------------------------------------


def test_doomed_and_foreign_jobs(bench):
    """A job that was doomed, or belongs to another generation, is over at once, unread."""
    keep(bench, 1, 41)
    for job in (
        bench.load(load_chunk(1, [5], [20]), doomed=True),
        bench.load(load_chunk(1, [5], [20]), generation=1),
        bench.load(load_chunk(1, [5], [20], "ram"), generation=1),
    ):
        done, retired = bench.ended(job)
        assert not done.ok
        assert retired.filled == bytes([0])
    assert bench.tier.gates["get"].came == 0
    assert bench.mover.blocks == {}


def test_saves_of_another_generation_are_not_written(bench):
    """What was computed before a reset may be copied, but reaches no tier."""
    copied, retired = bench.ended(bench.save(save_chunk(1, [5], [10]), generation=1))
    assert statuses(copied) == [OK]
    assert retired.written == ()
    assert bench.tier.records == {}


def test_a_reset_reaches_saves_that_are_being_copied(bench):
    """A save that was under way at a reset lands in no namespace but its own."""
    bench.mover.save_gate.shut()
    job = bench.save(save_chunk(1, [5], [10]))
    bench.mover.save_gate.wait_came(1)
    new = HeldTier()
    bench.transfer.set_tiers([new], 1)
    bench.mover.save_gate.open()
    assert bench.ended(job)[1].written == ()
    assert new.records == {}
    assert bench.tier.records == {}


@pytest.mark.parametrize("source", ["ram", "disk"])
def test_a_reset_reaches_loads_under_way(bench, source):
    """A load that was under way at a reset fails, and waits for its copy before it says so."""
    keep(bench, 1, 41)
    gate = bench.mover.load_gate if source == "ram" else bench.tier.gates["get"]
    gate.shut()
    job = bench.load(load_chunk(1, [5], [20], source))
    gate.wait_came(1)
    bench.transfer.set_tiers([HeldTier()], 1)
    assert bool(bench.of(job, LoadDone)) is (source == "disk")
    gate.open()
    assert not bench.wait(job, LoadDone).ok
    bench.wait(job, LoadRetired)


def test_a_reset_reaches_loads_that_are_over_but_not_told(bench):
    """Old bytes that have landed, and were not told yet, are told as failed."""
    job = bench.load(load_chunk(1, [5], [20], "ram"))
    until(lambda: not bench.transfer.loading)
    until(lambda: len([e for e in bench.transfer._events if isinstance(e, LoadRetired)]) == 1)
    bench.transfer.set_tiers([HeldTier()], 1)
    assert not bench.wait(job, LoadDone).ok


def test_old_tiers_are_closed(bench):
    """Tiers of the namespace before are closed, and what waited for them is told."""
    bench.tier.gates["put"].shut()
    jobs = [bench.save(save_chunk(n, [5], [10 + n])) for n in range(4)]
    bench.tier.gates["put"].wait_came(2)
    for job in jobs:
        bench.wait(job, SaveCopied)
    bench.transfer.set_tiers([HeldTier()], 1)
    bench.tier.gates["put"].open()
    written = [bench.wait(job, SaveRetired).written for job in jobs]
    assert sum(map(len, written)) == 2
    until(lambda: bench.tier.closed)


def test_old_tiers_that_close_after_the_pages_are_gone(benches):
    """A shutdown right after a reset: what waited for the old tier is told, the tier closed."""
    bench = benches(save_threads=1)
    bench.tier.gates["put"].shut()
    jobs = [bench.save(save_chunk(n, [5], [10 + n])) for n in range(3)]
    bench.tier.gates["put"].wait_came(1)
    for job in jobs:
        bench.wait(job, SaveCopied)
    link = bench.transfer.links["disk"]
    bench.arena.close()
    link.close(0.0)
    assert [bench.wait(job, SaveRetired).written for job in jobs[1:]] == [(), ()]
    assert bench.tier.closed
    bench.tier.gates["put"].open()
    bench.wait(jobs[0], SaveRetired)


# -- news ------------------------------------------------------------------------------


def test_news(bench):
    """What a tier says comes through, and that it is complete is told once."""
    assert [(n.reset, n.complete) for n in bench.news()] == [(True, False)]
    bench.tier.news = TierChanges((key(1),), (), complete=False)
    told = []
    for _ in range(3):
        bench.clock.advance(0.2)
        bench.transfer.poll()
    bench.tier.news = TierChanges()
    for _ in range(3):
        bench.clock.advance(0.2)
        bench.transfer.poll()
    told = [(n.added, n.complete) for n in bench.news()[1:]]
    assert told == [((key(1),), False), ((), False), ((), False), ((), True)]


def test_news_of_an_outage(benches):
    """A tier that goes off, and comes back, is told once each."""
    bench = benches(failures_to_open=1, min_backoff_s=1.0)
    bench.clock.advance(0.2)
    bench.transfer.poll()
    bench.tier.errors["get"] = bench.tier.errors["contains_many"] = TierUnavailable("dead")
    bench.ended(bench.load(load_chunk(1, [5], [20])))
    for _ in range(3):
        bench.clock.advance(0.2)
        bench.transfer.poll()
    bench.tier.errors.clear()
    bench.clock.advance(1.0)
    bench.transfer.poll()
    until(lambda: bench.transfer.links["disk"].online)
    bench.clock.advance(0.2)
    bench.transfer.poll()
    assert [n.online for n in bench.news()] == [True, True, False, True]


def test_news_of_a_tier_that_could_not_be_opened(bench):
    """A tier that this rank should have and has not counts as off, and nobody waits for it."""
    bench.take()
    bench.events.clear()
    bench.transfer.set_tiers([], 1)
    (news,) = bench.news()
    assert (news.tier, news.online, news.reset, news.complete) == ("disk", False, True, True)


def test_a_tier_that_stays_goes_on_as_it_was(bench):
    """The same tier again, of the same generation: loads go on, nothing known of it is void."""
    bench.transfer.poll()
    link = bench.transfer.links["disk"]
    bench.take()
    bench.events.clear()
    keep(bench, 1, 41)
    bench.tier.gates["get"].shut()
    job = bench.load(load_chunk(1, [5], [20]))
    bench.tier.gates["get"].wait_came(1)
    bench.transfer.set_tiers([bench.tier, HeldTier("redis")], 0)
    bench.tier.gates["get"].open()
    assert bench.wait(job, LoadDone).ok
    bench.clock.advance(1.0)
    bench.transfer.poll()
    assert {(n.tier, n.reset) for n in bench.news()} >= {("redis", True)}
    assert "disk" not in {n.tier for n in bench.news()}
    assert bench.transfer.links["disk"] is link
    bench.transfer.set_tiers([HeldTier(), HeldTier("redis")], 0)
    until(lambda: bench.tier.closed)


def test_a_tier_that_raises_does_not_reach_poll(bench):
    """`poll` runs on the engine's thread: no bug of a tier gets through it."""
    bench.tier.errors["changes"] = RuntimeError("bug")
    for _ in range(5):
        bench.clock.advance(0.2)
        bench.transfer.poll()
    assert not bench.transfer.links["disk"].online


# -- the end -----------------------------------------------------------------------------


def test_close_with_everything_in_flight(benches):
    """Every job tells both ends at the end; those that hang, when they come back."""
    bench = benches(load_threads=1, save_threads=1, staging_pages=2)
    for n in range(4):
        keep(bench, n, n + 1)
    bench.tier.gates["get"].shut()
    bench.tier.gates["put"].shut()
    saves = [bench.save(save_chunk(10 + n, [5], [10 + n])) for n in range(2)]
    bench.tier.gates["put"].wait_came(1)
    loads = [
        bench.load(load_chunk(0, [1], [20])),
        bench.load(load_chunk(1, [2], [21]), load_chunk(2, [3], [22])),
        bench.load(load_chunk(3, [4], None)),
    ]
    bench.tier.gates["get"].wait_came(1)
    bench.mover.load_gate.shut()
    bench.mover.save_gate.shut()
    loads.append(bench.load(load_chunk(5, [6], [23], "ram")))
    bench.mover.load_gate.wait_came(1)
    loads.append(bench.load(load_chunk(6, [7], [24], "ram")))
    saves += [bench.save(save_chunk(20 + n, [8], [30 + n])) for n in range(2)]
    bench.mover.save_gate.wait_came(3)

    closer = threading.Thread(target=bench.transfer.close, args=(0.0,))
    closer.start()
    until(lambda: bench.transfer._closed)
    bench.open_gates()
    closer.join(WAIT_S)
    assert not closer.is_alive()
    late = [bench.load(load_chunk(0, [1], [20])), bench.load(load_chunk(0, [1], [20], "ram"))]
    late_save = bench.save(save_chunk(1, [5], [10]))
    for job in [*saves, *loads, *late, late_save]:
        bench.ended(job)
    kinds = [type(e) for e in bench.events if hasattr(e, "job_id")]
    assert sorted(kinds.count(k) for k in (LoadDone, LoadRetired)) == [7, 7]
    assert sorted(kinds.count(k) for k in (SaveCopied, SaveRetired)) == [5, 5]
    assert not any(e.ok for e in bench.events if isinstance(e, LoadDone))
    assert bench.tier.closed
    assert not bench.transfer.busy


def test_close_flushes(bench):
    """What is queued for a tier is written out before the end, if there is time."""
    bench.mover.save_gate.shut()
    job = bench.save(save_chunk(1, [5], [10]))
    bench.mover.save_gate.wait_came(1)
    closer = threading.Thread(target=bench.transfer.close, args=(WAIT_S,))
    closer.start()
    bench.mover.save_gate.open()
    closer.join(WAIT_S)
    assert bench.ended(job)[1].written == ((0, "disk"),)


def test_close_does_not_wait_for_what_hangs(bench):
    """A read that never returns does not hold the shutdown, and what waited behind it reports."""
    bench.tier.gates["get"].shut()
    stuck = bench.load(load_chunk(1, [5], [20]))
    bench.tier.gates["get"].wait_came(1)
    real = bench.transfer._clock
    bench.transfer._clock = lambda: real() - 1000.0  # the time to stop has passed already
    bench.transfer.close(0.0)
    bench.transfer._clock = real
    assert statuses(bench.wait(stuck, LoadDone)) == [CANCELLED]
    assert not bench.of(stuck, LoadRetired)
    bench.tier.gates["get"].open()
    bench.wait(stuck, LoadRetired)
    assert bench.mover.blocks == {}
