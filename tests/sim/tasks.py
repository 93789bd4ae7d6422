"""Threads under the simulation's control: only one runs at a time, and a seed says which.

A task runs on a thread of its own, but only between `Tasks.resume` and its next
`Tasks.pause`. Fakes of slow things pause; everything else runs through. So the
interleaving is a function of the random numbers alone.
"""

from __future__ import annotations

import threading
from collections import deque


class Task:
    def __init__(self, tasks, run, name):
        self.name, self.over, self.error = name, False, None
        self._tasks, self._run = tasks, run
        self.until = None  # resumed only once this is true
        self._go, self._stop = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._stop.acquire()
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

    def _main(self):
        self._go.acquire()
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 - told by `Tasks.step`
            self.error = error
        self.over = True
        self._stop.release()

    def resume(self):
        self._tasks.current = self
        self._go.release()
        assert self._stop.acquire(timeout=60), f"{self.name} neither pauses nor ends"
        self._tasks.current = None

    def pause(self):
        self._stop.release()
        self._go.acquire()


class Tasks:
    """All tasks; shared by the lanes and fakes of one simulation."""

    def __init__(self, rng):
        self.rng = rng
        self.current = None
        self.running: list[Task] = []
        self.lanes: list[Lane] = []

    def pause(self, times=1):
        """Give way, from inside a task; elsewhere do nothing."""
        for _ in range(times):
            if self.current is not None:
                self.current.pause()

    def wait_until(self, condition):
        """Give way until ``condition`` holds."""
        while not condition():
            assert self.current is not None, "the engine's thread would wait here"
            self.current.until = condition
            self.current.pause()

    def start(self, run, name):
        task = Task(self, run, name)
        self.running.append(task)
        return task

    def step(self):
        """Resume one task, or begin one that a lane has queued; False when there is nothing."""
        choices = [t for t in self.running if t.until is None or t.until()]
        choices += [lane for lane in self.lanes if lane.can_begin]
        if not choices:
            return False
        choice = self.rng.choice(choices)
        if isinstance(choice, Lane):
            choice = choice.begin()
        choice.until = None
        choice.resume()
        if choice.over:
            self.running.remove(choice)
            if choice.error is not None:
                raise choice.error
        return True

    def run(self, n):
        for _ in range(n):
            if not self.step():
                return


class Lane:
    """Stands in for `kvtier.storage.lanes.Lane`."""

    tasks: Tasks  # set by the simulation

    def __init__(self, name, n_threads, clock, *, max_bytes=None, hang_s=30.0, max_stuck=4):
        self.name, self._clock, self._max_bytes = name, clock, max_bytes
        self._n_threads, self._hang_s, self._max_stuck = n_threads, hang_s, max_stuck
        self._queue: deque = deque()
        self._spare: deque = deque()
        self._busy: dict[int, float] = {}
        self._stuck: set[int] = set()
        self._number = 0
        self._closed = self._helping = False
        self.queued_bytes = 0
        self.tasks.lanes.append(self)

    @property
    def can_begin(self):
        waiting = self._queue or self._spare
        return bool(waiting) and len(self._busy) - len(self._stuck) < self._n_threads

    def offer(self, task, n_bytes=0, *, spare=False):
        full = (
            self._max_bytes is not None
            and self.queued_bytes
            and self.queued_bytes + n_bytes > self._max_bytes
        )
        if self._closed or full:
            return False
        (self._spare if spare else self._queue).append((task, n_bytes))
        self.queued_bytes += n_bytes
        return True

    def begin(self):
        task, n_bytes = (self._queue or self._spare).popleft()
        self._number += 1
        number = self._number
        self._busy[number] = self._clock()

        def run():
            try:
                task()
            finally:
                del self._busy[number]
                self._stuck.discard(number)
                self.queued_bytes -= n_bytes

        return self.tasks.start(run, f"{self.name}-{number}")

    def poll(self):
        late_s = self._clock() - self._hang_s
        for number, since_s in self._busy.items():
            if since_s < late_s and number not in self._stuck:
                if len(self._stuck) >= self._max_stuck:
                    return False
                self._stuck.add(number)
        return len(self._stuck) < self._max_stuck

    def help_while(self, condition):
        if self._closed or self._helping or not (self._queue or self._spare):
            return
        self._helping = True

        def run():
            while condition() and (self._queue or self._spare):
                task, n_bytes = (self._queue or self._spare).popleft()
                try:
                    task()
                finally:
                    self.queued_bytes -= n_bytes
            self._helping = False

        self.tasks.start(run, f"{self.name}-help")

    def close(self):
        self._closed = True
        waiting = [*self._queue, *self._spare]
        left = [task for task, _ in waiting]
        self.queued_bytes -= sum(n for _, n in waiting)
        self._queue.clear()
        self._spare.clear()
        return left

    def join(self, deadline_s):
        if self.tasks.current is not None:
            self.tasks.wait_until(lambda: not self._busy or self._clock() >= deadline_s)
        while self._busy and self._clock() < deadline_s:
            self.tasks.step()
            self.tasks.on_join()
        return not self._busy


class Thread:
    """Stands in for `threading.Thread` where the subject starts one for itself."""

    tasks: Tasks

    def __init__(self, target, name=None, daemon=None):
        self._target, self._name = target, name

    def start(self):
        self.tasks.start(self._target, self._name)
