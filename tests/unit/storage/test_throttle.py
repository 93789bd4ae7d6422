"""A key has its turn so often, and no more often."""

from __future__ import annotations

from kvtier.storage.throttle import Throttle

from .clock import FakeClock


def test_a_key_is_due_once_in_so_many_seconds():
    """The first time, and again when the time is over; others are not held up."""
    clock = FakeClock()
    throttle = Throttle(10.0, clock)
    assert throttle.due([b"a"]) == [b"a"]
    clock.advance(9.0)
    assert throttle.due([b"a", b"b"]) == [b"b"]
    clock.advance(1.0)
    assert throttle.due([b"a", b"b"]) == [b"a"]


def test_what_was_not_done_is_due_again():
    """A turn that failed does not count."""
    throttle = Throttle(10.0, FakeClock())
    throttle.due([b"a"])
    throttle.forget([b"a", b"never"])
    assert throttle.due([b"a"]) == [b"a"]


def test_a_clock_that_is_set_back_holds_nothing_up():
    """Unix time may jump; nobody waits for it to come round again."""
    now_s = [1000.0]
    throttle = Throttle(10.0, lambda: now_s[0])
    throttle.due([b"a"])
    now_s[0] = 500.0
    assert throttle.due([b"a"]) == [b"a"]


def test_it_is_bounded():
    """The oldest turns are forgotten first."""
    clock = FakeClock()
    throttle = Throttle(10.0, clock, max_keys=2)
    throttle.due([b"a", b"b", b"c"])
    assert throttle.due([b"c", b"b", b"a"]) == [b"a"]
