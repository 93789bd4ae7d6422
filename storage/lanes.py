"""Worker threads with a queue: one lane for each kind of work on each tier.

Guarantees: a task that was accepted runs exactly once or is handed back by
`close`; a task never raises into the lane (tasks report for themselves); a
thread stuck in a task is replaced, up to a bound, so that one hung read costs
one thread and not the lane.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

logger = logging.getLogger("kvtier.lanes")

Task = Callable[[], None]

_HELPER = -1  # the number of the thread that helps out

SPARE_PATIENCE_S = 60.0  # whoever offers spare tasks holds something until they have run


class Lane:
    """A queue of tasks and the threads that run them.

    Args:
        max_bytes: bound on the bytes of queued and running tasks; None has no
            bound of its own (loads, which the engine's admission bounds).
        max_stuck: threads that may be stuck at once before `poll` says so.
    """

    def __init__(
        self,
        name: str,
        n_threads: int,
        clock: Callable[[], float],
        *,
        max_bytes: int | None = None,
        hang_s: float = 30.0,
        max_stuck: int = 4,
    ) -> None:
        self.name = name
        self._clock = clock
        self._max_bytes = max_bytes
        self._hang_s = hang_s
        self._max_stuck = max_stuck
        self._cond = threading.Condition()
        self._queue: deque[tuple[Task, int]] = deque()
        self._spare: deque[tuple[Task, int, float]] = deque()  # since when
        self._queued_bytes = 0
        self._busy: dict[int, float] = {}  # worker number -> since when
        self._stuck: set[int] = set()
        self._closed = False
        self._n_started = 0
        self._threads: dict[int, threading.Thread] = {}
        self._helping = False
        with self._cond:
            for _ in range(n_threads):
                self._start_thread()

    def _start_thread(self) -> None:
        number = self._n_started
        thread = threading.Thread(
            target=self._run, args=(number,), name=f"kvtier-{self.name}-{number}", daemon=True
        )
        thread.start()
        self._n_started += 1
        self._threads[number] = thread

    @property
    def queued_bytes(self) -> int:
        """Bytes of tasks that wait or run."""
        return self._queued_bytes

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing runs, stuck threads aside."""
        with self._cond:
            waiting = self._queue or self._spare
            return not waiting and len(self._busy) == len(self._stuck)

    def offer(self, task: Task, n_bytes: int = 0, *, spare: bool = False) -> bool:
        """Queue a task; False when the lane is full or closed. Never blocks.

        A ``spare`` task runs when no other waits, or has waited for `SPARE_PATIENCE_S`.
        """
        with self._cond:
            full = (
                self._max_bytes is not None
                and self._queued_bytes > 0
                and self._queued_bytes + n_bytes > self._max_bytes
            )
            if self._closed or full:
                return False
            if spare:
                self._spare.append((task, n_bytes, self._clock()))
            else:
                self._queue.append((task, n_bytes))
            self._queued_bytes += n_bytes
            self._cond.notify()
            return True

    def _run(self, number: int) -> None:
        while True:
            with self._cond:
                while not (self._queue or self._spare or self._closed or number in self._stuck):
                    self._cond.wait()
                if number in self._stuck or not (self._queue or self._spare):
                    self._threads.pop(number, None)
                    self._stuck.discard(number)
                    return
                task, n_bytes = self._next()
                self._busy[number] = self._clock()
            try:
                task()
            except Exception:  # a bug of ours: the thread lives on, the log tells
                logger.exception("kvtier: a %s task failed unexpectedly", self.name)
            finally:
                with self._cond:
                    self._busy.pop(number, None)
                    self._queued_bytes -= n_bytes

    def _next(self) -> tuple[Task, int]:
        late_s = self._clock() - SPARE_PATIENCE_S
        if self._queue and not (self._spare and self._spare[0][2] < late_s):
            return self._queue.popleft()
        task, n_bytes, _ = self._spare.popleft()
        return task, n_bytes

    def poll(self) -> bool:
        """Replace threads stuck for longer than ``hang_s``; False when too many are.

        Cheap; called now and then from the engine's thread.
        """
        if not self._busy:
            return True
        with self._cond:
            if self._closed:
                return True
            late_s = self._clock() - self._hang_s
            for number, since_s in self._busy.items():
                if since_s < late_s and number not in self._stuck:
                    if len(self._stuck) >= self._max_stuck:
                        return False
                    self._stuck.add(number)
                    try:
                        self._start_thread()
                    except RuntimeError:  # the system has no thread left: later, perhaps
                        self._stuck.discard(number)
                        return False
            return len(self._stuck) < self._max_stuck

    def help_while(self, condition: Callable[[], bool]) -> None:
        """Run what waits on one more thread for as long as ``condition`` holds. Never blocks.

        For a lane whose tasks do nothing but report meanwhile, and whose threads may all hang.
        """
        with self._cond:
            if self._closed or self._helping or not (self._queue or self._spare):
                return
            thread = threading.Thread(
                target=self._help, args=(condition,), name=f"kvtier-{self.name}-help", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:
                return  # the system has no thread left: later, perhaps
            self._helping = True
            self._threads[_HELPER] = thread

    def _help(self, condition: Callable[[], bool]) -> None:
        try:
            while condition():
                with self._cond:
                    if not (self._queue or self._spare):
                        return
                    task, n_bytes = self._next()
                try:
                    task()
                except Exception:
                    logger.exception("kvtier: a %s task failed unexpectedly", self.name)
                finally:
                    with self._cond:
                        self._queued_bytes -= n_bytes
        finally:
            with self._cond:
                self._helping = False
                self._threads.pop(_HELPER, None)

    def close(self) -> list[Task]:
        """Refuse new tasks and return those that had not started. Does not wait."""
        with self._cond:
            self._closed = True
            waiting = [*self._queue, *((task, n_bytes) for task, n_bytes, _ in self._spare)]
            left = [task for task, _ in waiting]
            self._queued_bytes -= sum(n_bytes for _, n_bytes in waiting)
            self._queue.clear()
            self._spare.clear()
            self._cond.notify_all()
            return left

    def join(self, deadline_s: float) -> bool:
        """Wait for the threads until the clock shows ``deadline_s``; True when all ended."""
        for thread in list(self._threads.values()):
            thread.join(max(0.0, deadline_s - self._clock()))
        return not any(thread.is_alive() for thread in list(self._threads.values()))
