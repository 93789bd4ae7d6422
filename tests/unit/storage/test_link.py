"""A tier behind its link: every way to fail ends in a status and a count, never in an exception."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from kvtier.storage import link as link_module
from kvtier.storage.breaker import BreakerState
from kvtier.storage.counts import Counts
from kvtier.storage.errors import (
    DamageReason,
    RecordDamaged,
    RecordMissing,
    TierRefused,
    TierUnavailable,
)
from kvtier.storage.jobs import ChunkStatus
from kvtier.storage.link import LinkLimits, TierLink
from kvtier.storage.tier import RecordSpec, TierChanges

from .clock import FakeClock
from .transfer_helpers import PAGE, WAIT_S, HeldTier, key

SPEC = RecordSpec(key(1), 0, 16, PAGE)


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def counts():
    return Counts()


@pytest.fixture
def tier():
    return HeldTier()


@pytest.fixture
def link(tier, counts, clock):
    limits = LinkLimits(failures_to_open=2, min_backoff_s=1.0, max_backoff_s=8.0)
    link = TierLink(tier, counts, clock, limits)
    yield link
    for gate in tier.gates.values():
        gate.open()
    link.close(clock() + WAIT_S)


def page():
    return [memoryview(bytearray(PAGE))]


LOAD_FAULTS = [
    (RecordMissing("gone"), ChunkStatus.MISSING, "missing", True),
    *(
        (RecordDamaged(reason, "x"), ChunkStatus.DAMAGED, reason.value, True)
        for reason in DamageReason
        if reason is not DamageReason.KEY
    ),
    # Another key's record is fine where that key is: not ours to take away.
    (
        RecordDamaged(DamageReason.KEY, "x"),
        ChunkStatus.MISSING,
        "encryption_key",
        True,
    ),
    (TierUnavailable("dead"), ChunkStatus.TIER_DOWN, "unavailable", False),
    (OSError("raw"), ChunkStatus.TIER_DOWN, "unexpected", False),
    (MemoryError(), ChunkStatus.TIER_DOWN, "unexpected", False),
]


@pytest.mark.parametrize(("error", "status", "name", "is_fine"), LOAD_FAULTS)
def test_load_faults(link, tier, counts, error, status, name, is_fine):
    """Each fault has its status and its count; only those of the tier open the breaker."""
    tier.records[SPEC.key] = bytes(PAGE)
    tier.errors["get"] = error
    assert link.load(SPEC, page()) is status
    assert link.load(SPEC, page()) is status
    assert counts.take().items() >= {f"load_failed_chunks.disk.{name}": 2}.items()
    assert link.online is is_fine
    assert bool(tier.quarantined) == (status is ChunkStatus.DAMAGED)


def test_load_and_save_count_what_moved(link, counts):
    """Bytes and chunks of what went well."""
    data = bytes(range(256)) * (PAGE // 256)
    assert link.save(SPEC, [memoryview(data)])
    into = page()
    assert link.load(SPEC, into) is ChunkStatus.OK
    assert bytes(into[0]) == data
    got = counts.take()
    assert (got["save_bytes.disk"], got["save_chunks.disk"]) == (PAGE, 1)
    assert (got["load_bytes.disk"], got["load_chunks.disk"]) == (PAGE, 1)


def test_a_record_of_another_key_is_replaced_by_the_next_save(link, tier):
    """What lacks only our encryption key stays where it is until we save that chunk ourselves."""
    tier.records[SPEC.key] = bytes(PAGE)
    tier.errors["get"] = RecordDamaged(DamageReason.KEY, "sealed otherwise")
    assert link.load(SPEC, page()) is ChunkStatus.MISSING
    assert not tier.quarantined
    for _ in range(2):
        assert link.save(SPEC, page())
    assert tier.replaced == [SPEC.key]


SAVE_FAULTS = [
    (TierUnavailable("dead"), "unavailable"),
    (OSError("raw"), "unexpected"),
]


@pytest.mark.parametrize(("error", "name"), SAVE_FAULTS)
def test_save_faults(link, tier, counts, error, name):
    """A save that fails is dropped and counted, and the tier goes off."""
    tier.errors["put"] = error
    for _ in range(2):
        assert not link.save(SPEC, page())
    assert counts.take()[f"save_dropped_chunks.disk.{name}"] == 2
    assert not link.online
    assert not link.save(SPEC, page())
    assert counts.take() == {"save_dropped_chunks.disk.tier_off": 1}


def test_a_quarantine_that_fails(link, tier, counts):
    """A damaged record that cannot be moved away is counted, and replaced by the next save."""
    tier.errors["get"] = RecordDamaged(DamageReason.PAYLOAD, "x")
    tier.errors["quarantine"] = OSError("read-only")
    assert link.load(SPEC, page()) is ChunkStatus.DAMAGED
    assert counts.take()["quarantine_failed.disk"] == 1
    for _ in range(2):
        assert link.save(SPEC, page())
    assert tier.replaced == [SPEC.key]


def test_a_damaged_record_that_is_gone_needs_no_replacing(link, tier):
    """After quarantine the next save is one like any other."""
    tier.errors["get"] = RecordDamaged(DamageReason.PAYLOAD, "x")
    assert link.load(SPEC, page()) is ChunkStatus.DAMAGED
    assert link.save(SPEC, page())
    assert tier.replaced == []


def test_a_condemned_record_is_never_taken_for_the_save_s_own(link, tier):
    """A save that comes before the condemned record is gone replaces it, and is left in peace."""
    gate = tier.gates["get"]
    gate.shut()
    for _ in range(LinkLimits().load_threads):
        link.load_lane.offer(lambda: link.load(SPEC, page()))
    gate.wait_came(LinkLimits().load_threads)
    link.condemn(SPEC.key, "audit")
    assert link.save(SPEC, page())
    assert tier.replaced == [SPEC.key]
    gate.open()
    until(lambda: link.load_lane.idle)
    assert tier.quarantined == []
    link.condemn(SPEC.key, "audit")
    until(lambda: tier.quarantined)


def test_a_condemned_record_is_not_read_while_it_is_still_there(link, tier, counts):
    """What is known to be wrong is missing from now on, however long its removal takes."""
    tier.records[SPEC.key] = bytes(PAGE)
    gate = tier.gates["get"]
    gate.shut()
    for _ in range(LinkLimits().load_threads):
        link.load_lane.offer(lambda: link.load(RecordSpec(key(2), 0, 16, PAGE), page()))
    gate.wait_came(LinkLimits().load_threads)
    link.condemn(SPEC.key, "audit")
    assert link.load(SPEC, page()) is ChunkStatus.MISSING
    assert counts.take() == {"load_failed_chunks.disk.missing": 1}
    gate.open()
    until(lambda: tier.quarantined)
    until(lambda: link.load_lane.idle)
    assert link.save(SPEC, page())
    assert link.load(SPEC, page()) is ChunkStatus.OK


def test_slow_reads_open_the_breaker(link, tier, clock, counts):
    """Records that come later than anybody waits for them count against the tier."""
    tier.records[SPEC.key] = bytes(PAGE)
    real = tier._pass

    def slow(verb):
        clock.advance(3.0)
        real(verb)

    tier._pass = slow
    for _ in range(2):
        assert link.online
        assert link.load(SPEC, page(), slow_s=2.0) is ChunkStatus.OK
    assert not link.online
    assert counts.take()["breaker_opened.disk"] == 1


def test_a_slow_read_among_quick_ones(link, tier, clock):
    """One late record now and then is no outage."""
    tier.records[SPEC.key] = bytes(PAGE)
    for _ in range(5):
        link.late()
        assert link.load(SPEC, page(), slow_s=2.0) is ChunkStatus.OK
    assert link.online


def test_what_waits_behind_hung_threads_is_told(tier, counts, clock):
    """Once the tier is off nobody waits for a thread that may never come back."""
    link = TierLink(tier, counts, clock, LinkLimits(load_threads=1, save_threads=1))
    tier.gates["get"].shut()
    tier.gates["put"].shut()
    link.load_lane.offer(lambda: link.load(SPEC, page()))
    link.save_lane.offer(lambda: link.save(SPEC, page()))
    tier.gates["get"].wait_came(1)
    tier.gates["put"].wait_came(1)
    told = []
    link.load_lane.offer(lambda: told.append(link.load(SPEC, page())))
    link.save_lane.offer(lambda: told.append(link.save(SPEC, page())))
    link.breaker.trip("all threads hang")
    link.poll()
    end_s = time.monotonic() + WAIT_S / 4  # long before the gates let go by themselves
    while len(told) < 2:
        assert time.monotonic() < end_s, told
        time.sleep(0.005)
    assert set(told) == {ChunkStatus.TIER_DOWN, False}
    tier.gates["get"].open()
    tier.gates["put"].open()
    link.close(clock() + WAIT_S)


def test_a_full_tier_goes_on_reading(link, tier, counts, clock, caplog):
    """Refused saves stop saves only, with one line; one save probes, backing off; one line back."""
    tier.records[SPEC.key] = bytes(PAGE)
    tier.errors["put"] = TierRefused("no space left")
    with caplog.at_level(logging.WARNING, "kvtier.tier"):
        assert not link.save(SPEC, page())
        assert not link.writable
        assert link.load(SPEC, page()) is ChunkStatus.OK
        tried = []
        for _ in range(80):
            clock.advance(0.25)
            link.poll()
            before = tier.gates["put"].came
            if link.writable:
                link.save(SPEC, page())
            tried.append(tier.gates["put"].came - before)
        assert sum(tried) == 4  # after 1, 2, 4 and 8 seconds
        assert link.online
        del tier.errors["put"]
        clock.advance(8.0)
        assert link.writable
        assert link.save(SPEC, page())
        assert link.writable
    lines = [record.message for record in caplog.records]
    assert len(lines) == 2
    assert "no space left" in lines[0]
    assert "takes saves again" in lines[1]
    got = counts.take()
    assert got["refusal_began.disk"] == got["refusal_ended.disk"] == 1
    assert got["save_dropped_chunks.disk.refused"] == 5


@pytest.mark.parametrize("error", [TierUnavailable("dead"), RuntimeError("bug")])
def test_a_probing_save_that_fails_otherwise_ends_the_probe(link, tier, clock, error):
    """After a refusal, a probing save may fail in any way and another one follows."""
    tier.errors["put"] = TierRefused("full")
    link.save(SPEC, page())
    clock.advance(1.0)
    tier.errors["put"] = error
    assert link.writable
    assert not link.save(SPEC, page())
    assert not link.writable
    del tier.errors["put"]
    clock.advance(2.0)
    assert link.save(SPEC, page())


def test_only_one_save_probes(link, tier, counts, clock):
    """While one save probes a tier that refused, others are dropped at once."""
    tier.errors["put"] = TierRefused("full")
    link.save(SPEC, page())
    clock.advance(1.0)
    gate = tier.gates["put"]
    gate.shut()
    assert link.save_lane.offer(lambda: link.save(SPEC, page()))
    gate.wait_came(2)
    assert not link.writable
    assert not link.save(SPEC, page())
    assert gate.came == 2
    gate.open()


def test_an_outage_ends_by_a_probe(link, tier, counts, clock, caplog):
    """An open breaker fails loads at once; a probe brings the tier back; one line each."""
    tier.records[SPEC.key] = bytes(PAGE)
    tier.errors["get"] = tier.errors["contains_many"] = TierUnavailable("dead")
    with caplog.at_level(logging.WARNING, "kvtier.tier"):
        for _ in range(2):
            link.load(SPEC, page())
        came = tier.gates["get"].came
        assert link.load(SPEC, page()) is ChunkStatus.TIER_DOWN
        assert tier.gates["get"].came == came
        for n, wait_s in enumerate((1.0, 2.0), 1):
            clock.advance(wait_s)
            link.poll()
            tier.gates["contains_many"].wait_came(n)
            until(lambda: link.save_lane.idle)
            assert not link.online
        tier.errors.clear()
        clock.advance(4.0)
        link.poll()
        until(lambda: link.online)
        assert link.load(SPEC, page()) is ChunkStatus.OK
    assert ["is off: dead" in r.message for r in caplog.records] == [True, False]
    got = counts.take()
    assert (got["breaker_opened.disk"], got["breaker_closed.disk"]) == (1, 1)


def test_too_many_hung_reads(tier, counts, clock):
    """Reads that never come back cost threads up to a bound, then the tier is off."""
    limits = LinkLimits(load_threads=1, hang_s=5.0, max_stuck_threads=2, min_backoff_s=1.0)
    link = TierLink(tier, counts, clock, limits)
    tier.gates["get"].shut()
    for _ in range(3):
        link.load_lane.offer(lambda: link.load(SPEC, page()))
    tier.gates["get"].wait_came(1)
    clock.advance(6.0)
    link.poll()
    assert link.online
    tier.gates["get"].wait_came(2)
    clock.advance(6.0)
    link.poll()
    assert not link.online
    tier.gates["get"].open()
    until(lambda: link.load_lane.idle and not link.load_lane._stuck)
    clock.advance(1.0)
    link.poll()
    until(lambda: link.online)
    link.close(clock() + WAIT_S)


@pytest.mark.parametrize("verb", ["touch", "changes", "stat"])
def test_small_calls_never_raise(link, tier, verb):
    """What the engine's thread asks in passing never raises, whatever the tier does."""
    tier.errors[verb] = RuntimeError("bug")
    link.touch([key(1)])
    until(lambda: link.save_lane.idle)
    assert link.changes().complete is (verb != "changes")
    assert link.stored_bytes() == 0


def test_touch_waits_for_nobody(link, tier):
    """A touch of a tier that hangs returns at once, and is done later."""
    tier.gates["touch"].shut()
    link.touch([key(1), key(2)])
    tier.gates["touch"].wait_came(1)
    assert not tier.touched
    tier.gates["touch"].open()
    until(lambda: link.save_lane.idle)
    assert tier.touched == [key(1), key(2)]


def test_changes_pass_through(link, tier):
    """News of a tier that is well come through as they are."""
    tier.news = TierChanges((key(1),), (key(2),))
    assert link.changes() == TierChanges((key(1),), (key(2),))


def test_close(link, tier, clock):
    """A closed link asks the tier nothing more, also in what its lanes hand back."""
    tier.errors["contains_many"] = tier.errors["touch"] = AssertionError("asked after close")
    tier.gates["put"].shut()
    for _ in range(2):  # both save threads
        link.save_lane.offer(lambda: link.save(SPEC, page()))
    tier.gates["put"].wait_came(2)
    link.touch([key(1)])
    link.breaker.trip("for a probe")
    clock.advance(2.0)  # past the back-off, before the held threads count as stuck
    link.poll()
    link.close(clock() - 1.0)
    assert tier.closed
    assert not link.online
    assert not link.writable
    assert tier.gates["contains_many"].came == tier.gates["touch"].came == 0
    assert link.breaker.state is not BreakerState.CLOSED
    tier.gates["put"].open()


def until(condition):
    """Wait for a thread to get there; fails after a bound."""
    import threading

    for _ in range(int(WAIT_S / 0.005)):
        if condition():
            return
        threading.Event().wait(0.005)
    raise AssertionError("it never happened")


def test_close_of_a_tier_that_hangs_or_raises(tier, counts, clock, monkeypatch):
    """Shutdown does not wait for a disk that never answers, nor ends with its exception."""
    monkeypatch.setattr(link_module, "CLOSE_S", 0.05)
    go = threading.Event()
    for close in (lambda: go.wait(WAIT_S), lambda: 1 / 0):
        tier.close = close
        began_s = time.monotonic()
        TierLink(tier, counts, clock, LinkLimits()).close(clock() + 1.0)
        assert time.monotonic() - began_s < WAIT_S / 4
    go.set()
