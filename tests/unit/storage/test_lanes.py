"""Lanes: real threads, held and let go by events."""

from __future__ import annotations

import logging
import threading

import pytest

from kvtier.storage.lanes import SPARE_PATIENCE_S, Lane

from .clock import FakeClock

WAIT_S = 20.0  # a bound, never waited for when all is well


class Held:
    """A task that says when it runs and goes on when it is told."""

    def __init__(self):
        self.began, self.go, self.ended = (threading.Event() for _ in range(3))

    def __call__(self):
        self.began.set()
        assert self.go.wait(WAIT_S)
        self.ended.set()


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def lanes():
    made = []
    yield lambda *args, **options: made.append(Lane("test", *args, **options)) or made[-1]
    for lane in made:
        lane.close()


def settled(lane):
    """Wait until the lane's threads have done their book-keeping."""
    for _ in range(2000):
        if lane.idle:
            return True
        threading.Event().wait(0.005)
    return False


def test_spare_tasks_come_last(lanes, clock):
    """A spare task waits for every other, also one that came later, and is handed back too."""
    lane, ran, held = lanes(1, clock), [], Held()
    lane.offer(held)
    assert held.began.wait(WAIT_S)
    lane.offer(lambda: ran.append("spare"), 10, spare=True)
    lane.offer(lambda: ran.append("first"), 10)
    lane.offer(lambda: ran.append("second"), 10)
    assert lane.queued_bytes == 30
    held.go.set()
    assert settled(lane)
    assert ran == ["first", "second", "spare"]
    again = Held()
    lane.offer(again)
    assert again.began.wait(WAIT_S)
    lane.offer(lambda: ran.append("left"), 10, spare=True)
    (left,) = lane.close()
    left()
    assert ran[-1] == "left"
    assert lane.queued_bytes == 0
    again.go.set()


def test_spare_tasks_do_not_starve(lanes, clock):
    """On a lane that always has something to do, a spare task has its turn after a while."""
    lane, ran, held = lanes(1, clock), [], Held()
    lane.offer(held)
    assert held.began.wait(WAIT_S)
    lane.offer(lambda: ran.append("spare"), spare=True)
    clock.advance(SPARE_PATIENCE_S + 1)
    lane.offer(lambda: ran.append("late spare"), spare=True)
    lane.offer(lambda: ran.append("other"))
    held.go.set()
    assert settled(lane)
    assert ran == ["spare", "other", "late spare"]


def test_runs_every_task_once(lanes, clock):
    """Whatever is accepted runs, in order on one thread."""
    lane, ran = lanes(1, clock), []
    for n in range(50):
        assert lane.offer(lambda n=n: ran.append(n), 10)
    assert settled(lane)
    assert ran == list(range(50))
    assert lane.queued_bytes == 0


def test_bound_of_bytes(lanes, clock):
    """Running tasks count; beyond the bound the lane refuses; one task always fits."""
    lane, first = lanes(1, clock, max_bytes=100), Held()
    assert lane.offer(first, 1000)
    assert first.began.wait(WAIT_S)
    assert not lane.offer(lambda: None, 1)
    first.go.set()
    assert settled(lane)
    held = Held()
    assert lane.offer(held, 60)
    assert held.began.wait(WAIT_S)
    assert lane.offer(lambda: None, 40)
    assert not lane.offer(lambda: None, 1)
    held.go.set()
    assert settled(lane)


def test_a_task_that_raises_costs_nothing(lanes, clock, caplog):
    """The thread lives on, and the log tells."""
    lane, ran = lanes(1, clock), threading.Event()
    with caplog.at_level(logging.ERROR, "kvtier.lanes"):
        lane.offer(lambda: 1 / 0, 5)
        lane.offer(ran.set)
        assert ran.wait(WAIT_S)
    assert settled(lane)
    assert lane.queued_bytes == 0
    assert "failed unexpectedly" in caplog.text


def test_a_stuck_thread_is_replaced(lanes, clock):
    """A task that hangs costs one thread, and that thread ends when it comes back."""
    lane, stuck, ran = lanes(1, clock, hang_s=5.0), Held(), threading.Event()
    lane.offer(stuck)
    assert stuck.began.wait(WAIT_S)
    lane.offer(ran.set)
    clock.advance(4.0)
    assert lane.poll()
    assert not ran.is_set()
    clock.advance(2.0)
    assert lane.poll()
    assert ran.wait(WAIT_S)
    assert settled(lane)
    threads = list(lane._threads.values())
    stuck.go.set()
    for thread in threads:
        if thread.name.endswith("-0"):
            thread.join(WAIT_S)
            assert not thread.is_alive()
    again = threading.Event()
    lane.offer(again.set)
    assert again.wait(WAIT_S)


def test_replacements_are_bounded(lanes, clock):
    """With too many stuck the lane says so instead of starting more, and recovers."""
    lane = lanes(1, clock, hang_s=5.0, max_stuck=2)
    held = [Held() for _ in range(4)]
    for task in held:
        lane.offer(task)
    answers = []
    for task in held[:3]:
        assert task.began.wait(WAIT_S)
        clock.advance(6.0)
        answers.append(lane.poll())
    assert answers == [True, False, False]
    assert not held[3].began.is_set()
    for task in held:
        task.go.set()
    for task in held:
        assert task.ended.wait(WAIT_S)
    assert settled(lane)
    assert lane.poll()


def test_close_hands_back_what_had_not_begun(lanes, clock):
    """Every accepted task has run or is handed back, and none is accepted after."""
    lane, first, ran = lanes(1, clock), Held(), []
    lane.offer(first, 7)
    assert first.began.wait(WAIT_S)
    tasks = [lambda n=n: ran.append(n) for n in range(3)]
    for task in tasks:
        lane.offer(task, 5)
    assert lane.close() == tasks
    assert not lane.offer(lambda: None)
    assert lane.queued_bytes == 7
    first.go.set()
    assert lane.join(clock() + WAIT_S)
    assert ran == []
    assert lane.queued_bytes == 0
    assert lane.close() == []


def test_join_gives_up(lanes, clock):
    """A join past its deadline says that something still runs."""
    lane, stuck = lanes(1, clock), Held()
    lane.offer(stuck)
    assert stuck.began.wait(WAIT_S)
    lane.close()
    assert not lane.join(clock() - 1.0)
    stuck.go.set()
    assert lane.join(clock() + WAIT_S)


def test_help_while_all_threads_are_stuck(lanes, clock):
    """What waits behind stuck threads is run by one more, as long as that is wanted."""
    lane, stuck = lanes(1, clock, max_stuck=1), Held()
    lane.offer(stuck)
    assert stuck.began.wait(WAIT_S)
    wanted, ran = [True], []
    lane.help_while(lambda: wanted[0])  # nothing waits: no thread is begun
    assert [t.name for t in threading.enumerate() if t.name.endswith("-help")] == []
    for n in range(3):
        lane.offer(lambda n=n: ran.append(n), 10, spare=n == 0)
    lane.offer(lambda: wanted.clear() or wanted.append(False), 10)
    lane.offer(lambda: ran.append("left"), 10)
    lane.help_while(lambda: wanted[0])
    for _ in range(2000):
        if not wanted[0] and not any(t.name.endswith("-help") for t in threading.enumerate()):
            break
        threading.Event().wait(0.005)
    assert ran == [1, 2]  # a spare task comes last, and the rest was not wanted any more
    assert lane.queued_bytes == 20
    stuck.go.set()
    assert settled(lane)
    assert ran == [1, 2, "left", 0]
    assert lane.queued_bytes == 0


def test_help_survives_a_task_that_raises(lanes, clock, caplog):
    """Like any of the lane's threads."""
    lane, stuck, ran = lanes(1, clock), Held(), threading.Event()
    lane.offer(stuck)
    assert stuck.began.wait(WAIT_S)
    lane.offer(lambda: 1 / 0, 5)
    lane.offer(ran.set)
    lane.help_while(lambda: True)
    assert ran.wait(WAIT_S)
    assert "failed unexpectedly" in caplog.text
    stuck.go.set()
    assert settled(lane)
    assert lane.queued_bytes == 0


def test_a_system_without_threads(lanes, clock, monkeypatch):
    """Where no thread can be begun the lane says that too many are stuck, and raises nothing."""
    lane, stuck, ran = lanes(1, clock, hang_s=5.0), Held(), threading.Event()
    lane.offer(stuck)
    assert stuck.began.wait(WAIT_S)
    lane.offer(ran.set)
    clock.advance(6.0)

    def refuse(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert not lane.poll()
        lane.help_while(lambda: True)
    assert lane.poll()
    assert ran.wait(WAIT_S)
    stuck.go.set()
    assert settled(lane)
