"""What the CUDA mover hands out: fences and tickets, and the events behind them."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from .descriptors import Scratch
from .mover import CopyFailed, CopyTimeout

if TYPE_CHECKING:
    from .mover_cuda import CudaMover


class PooledEvent:
    """A driver event that returns to its pool with its last reference."""

    __slots__ = ("_pool", "handle")

    def __init__(self, handle: int, pool: deque[int]) -> None:
        self.handle = handle
        self._pool = pool

    def __del__(self) -> None:
        self._pool.append(self.handle)


class CudaFence:
    """A point of the engine's compute stream; see `kvtier.connector.mover.Fence`."""

    __slots__ = ("_mover", "event")

    def __init__(self, mover: CudaMover, event: PooledEvent | None) -> None:
        self._mover = mover
        self.event = event

    def reached(self) -> bool:
        """See `Fence.reached`; never, where recording it failed."""
        return self.event is not None and self._mover.query(self.event) is True


class CudaTicket:
    """One copy under way; see `kvtier.connector.mover.CopyTicket`."""

    __slots__ = ("_direction", "_done", "_error", "_event", "_mover")

    def __init__(
        self,
        mover: CudaMover,
        direction: Direction,
        event: PooledEvent | None,
        error: CopyFailed | None = None,
    ) -> None:
        self._mover = mover
        self._direction = direction
        self._event = event
        self._error = error
        self._done = False

    def done(self) -> bool:
        """See `CopyTicket.done`."""
        if self._done or self._error is not None:
            return True
        # The event first: what had landed before the mover broke is good.
        reached = self._event is not None and self._mover.query(self._event)
        if reached:
            self._done = True
        else:
            self._error = self._mover.broken
        return self._done or self._error is not None

    def wait(self, timeout_s: float) -> None:
        """See `CopyTicket.wait`."""
        if not self._mover.poll(self.done, timeout_s):
            raise CopyTimeout(f"a copy has not ended after {timeout_s:g} s")
        if self._error is not None:
            raise CopyFailed(str(self._error))

    def fenced(self) -> bool:
        """See `CopyTicket.fenced`."""
        return self._done or self._mover.quiet(self._direction, self._event)


class Direction:
    """One way: its stream, the batches under way, room for descriptors."""

    def __init__(self, stream: int, to_device: bool, batch_copies: int) -> None:
        self.stream = stream
        self.to_device = to_device
        self.lock = threading.Lock()
        self.under_way: deque[PooledEvent] = deque()
        self.scratch = Scratch(batch_copies)
        self.ended = False  # the stream was idle and is destroyed
