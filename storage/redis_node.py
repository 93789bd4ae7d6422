"""One Redis server: its kept connections, and whether it is worth asking.

A bounded lane for payloads and a small one for questions, so that a lookup
never queues behind a transfer. A node of a cluster that fails is left alone for
a while, with back-off, so that the chunks of the others do not wait for it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from .errors import TierUnavailable
from .redis_url import RedisSettings
from .redis_wire import Wire

logger = logging.getLogger("kvtier.tier")

T = TypeVar("T")
_QUESTION_CONNECTIONS = 2
_MIN_BACKOFF_S = 1.0
_MAX_BACKOFF_S = 30.0


class NodeGoneError(Exception):
    """The node of a cluster that holds a record does not answer, where others do."""


class BusyError(TierUnavailable):
    """All connections are in use; of the server this says nothing."""


class Lane:
    """At most ``size`` connections of one kind to one server.

    Thread-safe; a thread waits for a free one at most ``wait_s``.
    """

    def __init__(self, connect: Callable[[], Wire], size: int, wait_s: float) -> None:
        self._connect = connect
        self._free = threading.BoundedSemaphore(size)
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._idle: list[Wire] = []
        self._used: set[Wire] = set()
        self._closed = False

    def call(self, work: Callable[[Wire], T]) -> T:
        """Return ``work(wire)``; made once more where a kept connection proves closed."""
        with self.use() as wire:
            try:
                return work(wire)
            except TierUnavailable:
                if not wire.stale:
                    raise
        self.drop_idle()  # a restarted server closed them all
        with self.use() as wire:
            return work(wire)

    @contextlib.contextmanager
    def use(self) -> Iterator[Wire]:
        """Lend a connection, kept afterwards only if no answer is owed on it."""
        if not self._free.acquire(timeout=self._wait_s):
            raise BusyError("redis: all connections are busy")
        try:
            wire = self._take()
            try:
                yield wire
            finally:
                self._give(wire)
        finally:
            self._free.release()

    def _take(self) -> Wire:
        with self._lock:
            if self._closed:
                raise TierUnavailable("redis: closed")
            wire = self._idle.pop() if self._idle else None
            if wire is not None:
                wire.reused = True
                self._used.add(wire)
                return wire
        wire = self._connect()
        if self._lent(wire):
            return wire
        wire.close()
        raise TierUnavailable("redis: closed")

    def _lent(self, wire: Wire) -> bool:
        with self._lock:
            if not self._closed:
                self._used.add(wire)
            return not self._closed

    def _give(self, wire: Wire) -> None:
        with self._lock:
            self._used.discard(wire)
            if not wire.broken and wire.pending == 0 and not self._closed:
                self._idle.append(wire)
                return
        wire.close()

    def drop_idle(self) -> None:
        """Close the connections that nobody uses now."""
        with self._lock:
            idle, self._idle = self._idle, []
        for wire in idle:
            wire.close()

    def close(self) -> None:
        """Close all; threads that wait on one are woken. Idempotent."""
        with self._lock:
            self._closed = True
            for wire in self._used:
                wire.shutdown()
        self.drop_idle()


class Node:
    """One server: ``payloads`` and ``questions`` are its lanes. Thread-safe."""

    def __init__(
        self,
        where: str,
        settings: RedisSettings,
        connect: Callable[[], Wire],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.where = where
        wait_s = settings.timeout_s
        self.payloads = Lane(connect, settings.connections, wait_s)
        self.questions = Lane(connect, _QUESTION_CONNECTIONS, wait_s)
        self._clock = clock
        self._lock = threading.Lock()
        self._backoff_s = _MIN_BACKOFF_S
        self._retry_at_s: float | None = None  # set while it is left alone

    @property
    def is_off(self) -> bool:
        """Whether it failed and has not answered since."""
        return self._retry_at_s is not None

    def usable(self) -> bool:
        """Whether to ask it now; of a node that is off, True for one caller once it is due."""
        if not self.is_off:
            return True
        with self._lock:
            if self._retry_at_s is None:
                return True
            if self._clock() < self._retry_at_s:
                return False
            self._backoff_s = min(2 * self._backoff_s, _MAX_BACKOFF_S)
            self._retry_at_s = self._clock() + self._backoff_s
            return True

    def failed(self, reason: str) -> None:
        """Leave it alone for a while."""
        with self._lock:
            if self._retry_at_s is not None:
                return
            self._retry_at_s = self._clock() + self._backoff_s
        logger.warning(
            "kvtier: a node of the cluster is off, its chunks are misses: %s; "
            "it is tried again by itself",
            reason,
        )

    def answered(self) -> None:
        """Use it as any other again."""
        if not self.is_off:
            return
        with self._lock:
            if self._retry_at_s is None:
                return
            self._retry_at_s, self._backoff_s = None, _MIN_BACKOFF_S
        logger.warning("kvtier: node %s of the cluster answers again", self.where)

    def drop_idle(self) -> None:
        """Close the connections that nobody uses now."""
        self.payloads.drop_idle()
        self.questions.drop_idle()

    def close(self) -> None:
        """Close both lanes. Idempotent."""
        self.payloads.close()
        self.questions.close()
