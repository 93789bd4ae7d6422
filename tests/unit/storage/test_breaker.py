"""The breaker's states, on a clock turned by hand."""

from __future__ import annotations

import threading

import pytest

from kvtier.storage.breaker import Breaker, BreakerState

from .clock import FakeClock


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def changes():
    return []


@pytest.fixture
def breaker(clock, changes):
    return Breaker(
        clock,
        lambda is_open, reason: changes.append((is_open, reason)),
        threshold=3,
        min_backoff_s=1.0,
        max_backoff_s=4.0,
    )


def open_it(breaker):
    for _ in range(3):
        breaker.failure("no answer")


def test_opens_after_failures_in_a_row(breaker, changes):
    """Only failures in a row count, and the change is told once with its reason."""
    for _ in range(5):
        breaker.failure("no answer")
        breaker.failure("no answer")
        breaker.success()
    assert breaker.closed
    open_it(breaker)
    breaker.failure("still no answer")
    assert not breaker.closed
    assert breaker.state is BreakerState.OPEN
    assert changes == [(True, "no answer")]


def test_one_probe_when_the_back_off_has_passed(breaker, clock):
    """Nobody probes early; then exactly one does, however many ask."""
    assert not breaker.take_probe()
    open_it(breaker)
    clock.advance(0.99)
    assert not breaker.take_probe()
    assert breaker.state is BreakerState.OPEN
    clock.advance(0.02)
    assert breaker.state is BreakerState.HALF_OPEN
    took = []
    threads = [threading.Thread(target=lambda: took.append(breaker.take_probe())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(took) == [False] * 7 + [True]
    assert breaker.state is BreakerState.OPEN


def test_failed_probes_back_off(breaker, clock, changes):
    """Each failed probe doubles the wait up to the cap, without telling again."""
    open_it(breaker)
    for wait_s in (1.0, 2.0, 4.0, 4.0):
        clock.advance(wait_s - 0.01)
        assert not breaker.take_probe()
        clock.advance(0.01)
        assert breaker.take_probe()
        breaker.failure("no answer")
    assert changes == [(True, "no answer")]


def test_a_good_probe_closes(breaker, clock, changes):
    """An answer closes the breaker; once it has stayed closed, the back-off starts anew."""
    open_it(breaker)
    clock.advance(1.0)
    assert breaker.take_probe()
    breaker.failure("no answer")
    clock.advance(2.0)
    assert breaker.take_probe()
    breaker.success()
    assert breaker.state is BreakerState.CLOSED
    assert changes == [(True, "no answer"), (False, "answers again")]
    clock.advance(4.0)
    open_it(breaker)
    clock.advance(1.0)
    assert breaker.take_probe()


def test_late_failures_of_before_change_nothing(breaker, clock):
    """Failures of calls that began before it opened do not move the back-off."""
    open_it(breaker)
    clock.advance(0.5)
    breaker.failure("late")
    clock.advance(0.5)
    assert breaker.take_probe()


def test_trip(breaker, clock, changes):
    """A trip opens at once and counts from the last one."""
    breaker.trip("hangs")
    clock.advance(0.9)
    breaker.trip("hangs")
    clock.advance(0.9)
    assert not breaker.take_probe()
    clock.advance(0.1)
    assert breaker.take_probe()
    assert changes == [(True, "hangs")]


def test_what_answers_probes_and_nothing_else(breaker, clock, changes):
    """Opening again right after a probe backs off further: few tries, few lines, no flapping."""
    waits = []
    for _ in range(6):
        open_it(breaker)
        began_s = clock()
        while not breaker.take_probe():
            clock.advance(0.25)
        waits.append(clock() - began_s)
        breaker.success()
    assert waits == [1.0, 2.0, 4.0, 4.0, 4.0, 4.0]
    clock.advance(4.0)
    breaker.trip("hangs")
    clock.advance(1.0)
    assert breaker.take_probe()


def test_a_probe_that_never_comes_back(breaker, clock):
    """It is given up after the longest back-off, and the next one closes the breaker."""
    open_it(breaker)
    clock.advance(1.0)
    assert breaker.take_probe()
    clock.advance(3.9)
    assert not breaker.take_probe()
    assert breaker.state is BreakerState.OPEN
    clock.advance(0.2)
    assert breaker.take_probe()
    assert not breaker.take_probe()
    breaker.success()
    assert breaker.closed
