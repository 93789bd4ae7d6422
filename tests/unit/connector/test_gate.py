"""The gate: what it measures, what it refuses, and how long a load may take."""

from __future__ import annotations

import pytest

from kvtier.connector.gate import (
    EXPLORE_EVERY,
    FIRST_DEADLINE_S,
    MAX_DEADLINE_S,
    MIN_DEADLINE_S,
    MIN_SAMPLES,
    Gate,
)

MIB = 1 << 20


def measured(policy="auto", *, prefill_s=1e-3, load_s=0.1, n_bytes=MIB, tier="disk"):
    """A gate that has seen steps and loads of one speed."""
    gate, now_s = Gate(policy), 0.0
    for _ in range(MIN_SAMPLES + 1):
        gate.note_step(now_s, 1000)
        now_s += 1000 * prefill_s
    for _ in range(MIN_SAMPLES):
        gate.note_load({tier: n_bytes}, load_s)
    return gate


@pytest.mark.parametrize(("load_s", "pays"), [(0.5, True), (2.0, False)])
def test_loading_must_beat_computing(load_s, pays):
    """A thousand tokens take a second to compute: loads that take longer do not pay."""
    gate = measured(load_s=load_s)
    assert gate.pays("disk", 1000, MIB) is pays
    assert gate.doubts(1000, MIB) is not pays
    assert gate.pays("disk", 10_000, MIB)


def test_what_was_not_measured_is_loaded():
    """Without speeds of both sides nothing is refused."""
    gate = Gate()
    assert gate.pays("disk", 1, 1 << 40)
    assert not gate.doubts(1, 1 << 40)
    assert measured(load_s=9.0).pays("redis", 1, 1 << 40)


def test_policies():
    """Always and never measure nothing and ask nothing."""
    assert measured("always", load_s=9.0).pays("disk", 1, MIB)
    assert not measured("never", load_s=1e-9).pays("disk", 1 << 20, MIB)


def test_larger_loads_are_expected_to_take_longer():
    """A size that was not seen is judged by the nearest one, a larger one in proportion."""
    gate = measured(load_s=0.4)
    assert gate.pays("disk", 1000, MIB)
    assert not gate.pays("disk", 1000, 4 * MIB)
    assert gate.pays("disk", 1000, MIB // 8)


def test_a_refused_tier_gets_another_chance():
    """One refusal in so many loads anyway, and a tier that is quick again is used again."""
    gate = measured(load_s=5.0)
    answers = [gate.pays("disk", 1000, MIB) for _ in range(3 * EXPLORE_EVERY)]
    assert sum(answers) == 3
    for _ in range(30):
        gate.note_load({"disk": MIB}, 0.01)
    assert gate.pays("disk", 1000, MIB)


def test_loads_that_never_end_count_as_slow():
    """A tier that misses its deadlines is not waited for by every request to come."""
    gate = measured(load_s=0.1)
    gate.note_late({"disk": MIB}, 3.0)
    assert not gate.pays("disk", 1000, MIB)
    assert not gate.pays("disk", 1000, 8 * MIB)
    assert gate.doubts(1000, MIB)
    assert gate.pays("disk", 1000, MIB // 8)
    assert gate.pays("redis", 1000, MIB)
    gate.note_load({"disk": MIB}, 0.1)
    assert gate.pays("disk", 1000, MIB)


def test_a_tier_that_never_answered_in_time_is_refused():
    """Also when no load of it has ever ended."""
    gate = measured(tier="ram")
    gate.note_late({"disk": MIB}, 30.0)
    assert not gate.pays("disk", 1000, MIB)


def test_missed_deadlines_do_not_make_the_next_one_longer():
    """What was waited for in vain says nothing of how long to wait."""
    gate = measured(load_s=0.1)
    before_s = gate.deadline_s({"disk": MIB}, 100)
    for _ in range(5):
        gate.note_late({"disk": MIB}, before_s)
    assert gate.deadline_s({"disk": MIB}, 100) == before_s


@pytest.mark.parametrize(
    ("load_s", "n_tokens", "expected_s"),
    [(0.001, 10, MIN_DEADLINE_S), (2.0, 10, 8.0), (0.1, 20_000, 20.0), (90.0, 10, MAX_DEADLINE_S)],
)
def test_deadline_from_measured_speed(load_s, n_tokens, expected_s):
    """Four times the load, or the computing, between floor and cap."""
    assert measured(load_s=load_s).deadline_s({"disk": MIB}, n_tokens) == pytest.approx(expected_s)


def test_deadline_before_anything_was_measured():
    """From the size alone: seconds for a small load, no more than the cap for the largest."""
    gate = Gate()
    small_s, large_s = (gate.deadline_s({"disk": n}, 1000) for n in (MIB, 1 << 30))
    assert MIN_DEADLINE_S < small_s < large_s < FIRST_DEADLINE_S
    assert gate.deadline_s({"disk": 1 << 40}, 1000) == FIRST_DEADLINE_S
    assert measured().deadline_s({"redis": MIB}, 1000) == small_s
