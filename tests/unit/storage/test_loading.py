"""One load's promises: `LoadDone` once and final, `LoadRetired` once and last."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from kvtier.storage.jobs import ChunkStatus, LoadChunk, LoadDone, LoadJob, LoadRetired
from kvtier.storage.loading import LoadState, Need

ONE = np.array([1], np.int64)


def job_of(n, doomed=False):
    chunks = tuple(LoadChunk(bytes([i]) * 9, 0, i, i + 1, "disk", 1, 0, ONE, ONE) for i in range(n))
    return LoadJob(7, 0, "r", 1.0, chunks, doomed)


@pytest.fixture
def events():
    return []


def state_of(events, n, **options):
    return LoadState(job_of(n, **options), 100.0, events.append)


def kinds(events):
    return [type(event) for event in events]


def test_all_well(events):
    """Every chunk landed: done and ok, then retired with what was filled."""
    state = state_of(events, 2)
    for i in (1, 0):
        assert state.begin_copy(i)
        state.filled(i)
        state.end_copy()
        assert not events
        state.finish(i, ChunkStatus.OK)
    assert events == [LoadDone(7, "r", bytes([1, 1]), ok=True), LoadRetired(7, bytes([1, 1]))]
    assert state.done


def test_no_copy_after_done(events):
    """Once a load is told as over, no copy may begin."""
    state = state_of(events, 1)
    state.close(ChunkStatus.DEADLINE)
    assert events == [LoadDone(7, "r", bytes([ChunkStatus.DEADLINE]), ok=False)]
    assert not state.begin_copy(0)
    state.finish(0, ChunkStatus.CANCELLED)
    assert kinds(events) == [LoadDone, LoadRetired]


def test_close_waits_for_a_copy_under_way(events):
    """A closed load is told as over only when its last copy has ended, even if that went well."""
    state = state_of(events, 3)
    assert state.begin_copy(0)
    assert state.begin_copy(1)
    assert state.close(ChunkStatus.DEADLINE)
    assert not state.close(ChunkStatus.CANCELLED)
    assert not state.begin_copy(0)
    state.end_copy()
    assert not events
    state.end_copy()
    assert kinds(events) == [LoadDone]
    assert not events[0].ok
    assert events[0].statuses == bytes([ChunkStatus.DEADLINE] * 3)
    for i in range(3):
        state.finish(i, ChunkStatus.OK)
    assert kinds(events) == [LoadDone, LoadRetired]


class SlowTeller:
    """Takes events, but is held up in the middle of taking the first one."""

    def __init__(self):
        self.events = []
        self.held = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, event):
        if not self.held.is_set():
            self.held.set()
            self.go_on.wait(5.0)
        self.events.append(event)


def test_retired_is_told_after_done_whichever_thread_is_quicker():
    """A thread that is held up while it tells of a bad chunk is not overtaken by the last one."""
    told = SlowTeller()
    state = LoadState(job_of(2), 100.0, told)
    slow = threading.Thread(target=state.finish, args=(0, ChunkStatus.DAMAGED))
    slow.start()
    assert told.held.wait(5.0)
    last = threading.Thread(target=state.finish, args=(1, ChunkStatus.OK))
    last.start()
    last.join(0.1)
    assert not state.retired
    told.go_on.set()
    slow.join()
    last.join()
    assert kinds(told.events) == [LoadDone, LoadRetired]
    assert state.retired


def test_no_event_is_on_its_way_once_a_load_is_closed():
    """Who closes a load that has just ended finds it told: a clear takes back what it says."""
    told = SlowTeller()
    state = LoadState(job_of(1), 100.0, told)
    last = threading.Thread(target=state.finish, args=(0, ChunkStatus.OK))
    last.start()
    assert told.held.wait(5.0)
    threading.Timer(0.1, told.go_on.set).start()
    assert not state.close(ChunkStatus.CANCELLED)
    assert LoadDone(7, "r", bytes([1]), ok=True) in told.events
    last.join()


def test_a_bad_chunk_ends_the_load_when_those_before_it_have_landed(events):
    """The request does not wait for what is behind a bad chunk, and no byte of that reaches it."""
    state = state_of(events, 4)
    state.finish(1, ChunkStatus.DAMAGED)
    assert [state.need(i) for i in (0, 2, 3)] == [Need.LOAD, Need.CHECK, Need.CHECK]
    assert not state.begin_copy(2)
    assert state.begin_copy(0)
    assert not events
    state.end_copy()
    state.finish(0, ChunkStatus.OK)
    (done,) = events
    assert [ChunkStatus(s) for s in done.statuses] == [
        ChunkStatus.OK,
        ChunkStatus.DAMAGED,
        ChunkStatus.NOT_ATTEMPTED,
        ChunkStatus.NOT_ATTEMPTED,
    ]
    assert not done.ok
    assert state.done
    assert not state.retired


def test_what_is_found_bad_after_the_load_is_told(events):
    """Chunks behind a bad one are checked: each missing or damaged one is named at the end."""
    state = state_of(events, 5)
    state.finish(0, ChunkStatus.DAMAGED)
    assert kinds(events) == [LoadDone]
    state.finish(3, ChunkStatus.MISSING)
    state.filled(2)
    state.finish(2, ChunkStatus.CANCELLED)
    assert state.need(4) is Need.CHECK
    state.finish(4, ChunkStatus.CANCELLED)
    state.finish(1, ChunkStatus.DAMAGED)
    assert events[1] == LoadRetired(7, bytes([0, 0, 1, 0, 0]), lost=(1, 3))
    assert state.retired


@pytest.mark.parametrize(
    "status", [ChunkStatus.TIER_DOWN, ChunkStatus.DEADLINE, ChunkStatus.COPY_FAILED]
)
def test_a_tier_that_fails_is_not_asked_further(events, status):
    """Behind a chunk that failed for another reason than its record nothing is read."""
    state = state_of(events, 3)
    state.finish(1, status)
    assert state.need(0) is Need.LOAD
    assert state.need(2) is Need.NOTHING


def test_checks_end_with_the_load_s_deadline_or_the_engine(events):
    """What is still to be checked is left alone once the load is closed, told or not."""
    state = state_of(events, 3)
    state.finish(0, ChunkStatus.MISSING)
    assert state.need(1) is Need.CHECK
    assert not state.close(ChunkStatus.DEADLINE), "told before"
    assert state.need(1) is Need.NOTHING
    state.finish(1, ChunkStatus.CANCELLED)
    state.finish(2, ChunkStatus.CANCELLED)
    assert kinds(events) == [LoadDone, LoadRetired]
    assert events[1].lost == ()


def test_a_late_read_that_went_well_still_fills_ram(events):
    """A read that outlives its deadline can keep its RAM pages, but not reach the device."""
    state = state_of(events, 1)
    state.close(ChunkStatus.DEADLINE)
    state.filled(0)
    assert not state.begin_copy(0)
    state.finish(0, ChunkStatus.CANCELLED)
    assert events[1] == LoadRetired(7, bytes([1]))


@pytest.mark.parametrize("doomed", [False, True])
def test_nothing_to_do(events, doomed):
    """An empty job is over at once and ok; a doomed one is over at once and not."""
    state = state_of(events, 3 if doomed else 0, doomed=doomed)
    state.start(doomed=doomed)
    assert kinds(events) == [LoadDone, LoadRetired]
    assert events[0].ok is not doomed
    assert not state.close(ChunkStatus.DEADLINE)
    assert len(events) == 2


@pytest.mark.parametrize("seed", range(30))
def test_threads(seed):
    """With chunks ending on many threads and a close at any moment, each end is told once."""
    rng = random.Random(seed)
    n, lock, events, copying, late = 6, threading.Lock(), [], [0], []

    def emit(event):
        with lock:
            if isinstance(event, LoadDone):
                late.append(copying[0])
            events.append(event)

    state = LoadState(job_of(n), 100.0, emit)
    start = threading.Barrier(n + 1)
    statuses = [rng.choice([ChunkStatus.OK, ChunkStatus.OK, ChunkStatus.MISSING]) for _ in range(n)]

    def work(i):
        start.wait()
        status = ChunkStatus.CANCELLED
        if state.need(i) is Need.LOAD and state.begin_copy(i):
            with lock:
                copying[0] += 1
            status = statuses[i]
            with lock:
                copying[0] -= 1
            state.end_copy()
        state.finish(i, status)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    start.wait()
    state.close(ChunkStatus.DEADLINE)
    for thread in threads:
        thread.join()
    assert sorted(kinds(events), key=str) == [LoadDone, LoadRetired], f"seed {seed}"
    assert late == [0]
