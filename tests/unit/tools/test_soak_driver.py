from __future__ import annotations

import threading
import time
from dataclasses import replace
from itertools import pairwise

import pytest

from kvtier.tools.soak_driver import DriverOptions, Traffic, earlier_loads, mismatch_row
from kvtier.tools.soak_faults import COUNTED, FaultRunner, Planned, plan_faults
from kvtier.tools.soak_run import play
from kvtier.tools.soak_types import ChunkUse, EngineGone, SoakError

from .soak_fakes import FakeEngine, script


def drive(engine, script_, most_s=20.0, **options):
    results = []
    traffic = Traffic(
        script_, lambda: engine, DriverOptions(**{"passes": 2, "abort_share": 0.0, **options}),
        1e-3, results.append,
    )  # fmt: skip
    from kvtier.tools.soak_listener import Listener

    play(traffic, Listener(), threading.Event(), most_s)
    return traffic, results


def test_every_turn_is_asked_in_order_and_right():
    """Two rounds of all turns, each session's in order, all right."""
    traffic, results = drive(FakeEngine(), script(), users=3)
    assert traffic.tally.answered == 18
    assert traffic.tally.wrong == 0
    assert [r.turn.number for r in results if r.turn.session == "session-1"] == [1, 2, 3] * 2
    assert traffic.tally.sessions == 6


def test_salts_change_with_every_second_round():
    """Inside a pair of rounds everything comes back; the next pair is new to the engine."""
    engine = FakeEngine()
    _, results = drive(engine, script(), passes=4, users=1)
    assert {r.round: r.salt for r in results} == {
        1: "soak-1-0", 2: "soak-1-0", 3: "soak-1-1", 4: "soak-1-1",
    }  # fmt: skip
    restored = {r.round: 0 for r in results}
    for r in results:
        restored[r.round] += r.reply.restored_tokens
    assert restored[1] == restored[3] < restored[2] == restored[4]


def test_a_wrong_answer_is_told_with_position_and_chunks():
    """The row has session, turn, position and the chunks of this and earlier turns."""
    engine = FakeEngine(wrong=lambda ask, restored: restored > 128)
    traffic, results = drive(engine, script(), users=1, passes=1)
    wrong = [r for r in results if r.difference is not None]
    assert traffic.tally.wrong == len(wrong) > 0
    row = mismatch_row(wrong[0], "kvtier", ["disk-corrupt"])
    assert row["position"] == row["prompt_tokens"] + row["answer_position"]
    assert row["chunks"][0]["start_tokens"] == 0
    assert row["faults"] == ["disk-corrupt"]


def test_given_up_requests_are_asked_again():
    """Every turn is answered in the end, however many are given up."""
    traffic, results = drive(FakeEngine(), script(), abort_share=1.0, passes=1)
    assert len(results) == 9
    assert traffic.tally.aborted == 9


def test_what_was_loaded_for_a_request_given_up_is_remembered():
    """The device's cache may serve it to the next request, which has then loaded nothing."""
    engine = FakeEngine(wrong=lambda ask, restored: ask.abort_after_s is None)
    engine.ask_ = engine.ask

    def ask(asked):
        reply = engine.ask_(asked)
        if reply.aborted:
            return reply
        return replace(reply, loads=(), restored={}, device_tokens=len(asked.prompt))

    engine.ask = ask
    _, results = drive(engine, script(sessions=1), users=1, passes=2, abort_share=1.0)
    last = results[-1]
    assert last.difference is not None
    assert last.reply.loads == ()
    assert last.earlier_loads


def test_a_request_outlives_its_engine():
    """A turn whose engine is gone is asked of the next one."""
    engines = [FakeEngine(), FakeEngine()]
    engines[0].gone = True
    seen = []

    class Both:
        def ask(self, ask):
            seen.append(ask)
            return engines[min(1, len(seen) // 3)].ask(ask)

    traffic, results = drive(Both(), script(sessions=1), users=1, passes=1)
    assert len(results) == 3
    assert traffic.tally.asked_again == 2


def test_a_users_failure_ends_the_traffic():
    """An engine that refuses is the soak's error, not an endless silence."""

    class Refuses:
        def ask(self, ask):
            raise SoakError("no")

    with pytest.raises(SoakError, match="no"):
        drive(Refuses(), script())


def test_pause_holds_everybody_off():
    """After a pause nothing is asked until it is resumed."""
    engine = FakeEngine()
    traffic = Traffic(script(), lambda: engine, DriverOptions(users=3), 1e-3, lambda _: None)
    traffic.start()
    try:
        assert traffic.pause(10)
        asked = len(engine.asked)
        time.sleep(0.05)
        assert len(engine.asked) == asked
        traffic.resume()
        end_s = time.monotonic() + 10
        while len(engine.asked) == asked and time.monotonic() < end_s:
            time.sleep(0.01)
        assert len(engine.asked) > asked
    finally:
        traffic.stop()


def test_earlier_loads_are_those_whose_tokens_were_hit():
    """Chunks beyond the common beginning, or beyond what the device held, are not named."""
    loads = tuple(ChunkUse(f"{i}-g0", 64 * i, 64 * i + 64, "disk") for i in range(3))
    prompt = tuple(range(200))
    other = (*range(100), *range(500, 600))
    assert [c.key for c in earlier_loads(prompt, 192, [(other, loads)])] == ["0-g0", "1-g0"]
    assert [c.key for c in earlier_loads(prompt, 64, [(other, loads)])] == ["0-g0"]
    assert earlier_loads(prompt, 0, [(other, loads)]) == ()


# -- faults ----------------------------------------------------------------------


def test_faults_come_from_the_seed_one_at_a_time():
    """Each kind at least once, none over another, all inside the soak."""
    kinds = ["a", "b", "c"]
    for duration_s in (20.0, 120.0, 7200.0):
        planned = plan_faults(kinds, duration_s, 7)
        assert {p.kind for p in planned} == set(kinds)
        assert planned == plan_faults(kinds, duration_s, 7)
        assert planned != plan_faults(kinds, duration_s, 8)
        for before, after in pairwise(planned):
            assert before.at_s + before.for_s < after.at_s
        assert planned[-1].at_s + planned[-1].for_s < 0.9 * duration_s
    assert plan_faults([], 60, 1) == []


class Noted:
    def __init__(self, fails=False):
        self.calls = []
        self._fails = fails

    def begin(self, rng):
        self.calls.append("begin")
        if self._fails:
            raise EngineGone("nobody there")
        return "something"

    def end(self):
        self.calls.append("end")


def test_what_followed_a_fault_is_counted_and_faults_end():
    """Counters that grew after it are its doing; one under way when the soak ends is undone."""
    counts = {"loads_failed": 1.0, "hits": 5.0}
    fault = Noted()
    began = time.monotonic()
    runner = FaultRunner(
        [Planned("x", 0.0, 60.0)], {"x": fault}, lambda: dict(counts),
        lambda: time.monotonic() - began, 1,
    )  # fmt: skip
    runner.start()
    while not fault.calls:
        time.sleep(0.005)
    counts.update({"loads_failed": 3.0, "hits": 9.0, "load_failed_chunks.disk.missing": 2.0})
    runner.note(time.monotonic() - began, True)
    runner.stop()
    assert fault.calls == ["begin", "end"]
    (row,) = runner.rows
    assert row["followed"] == {"load_failed_chunks.disk.missing": 2.0, "loads_failed": 2.0}
    assert row["answers"] == {"right": 1, "wrong": 0}
    assert runner.active(row["at_s"]) == ["x"]
    assert set(COUNTED).isdisjoint({"hits"})


def test_a_fault_that_cannot_be_made_is_told():
    """Its row says why, and the others still come."""
    bad, good = Noted(fails=True), Noted()
    runner = FaultRunner(
        [Planned("bad", 0.0, 0.0), Planned("good", 0.0, 0.0)], {"bad": bad, "good": good},
        dict, lambda: 0.0, 1,
    )  # fmt: skip
    runner.start()
    end_s = time.monotonic() + 10
    while good.calls != ["begin", "end"] and time.monotonic() < end_s:
        time.sleep(0.005)
    runner.stop()
    assert "nobody there" in runner.rows[0]["failed"]
    assert runner.rows[1]["failed"] is None
