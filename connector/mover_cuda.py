"""Copies between CUDA device memory and pinned RAM pages.

Loads and saves have a stream each. A call waits, on the device, for the fence it
was given, and is cut into batches, so that the driver is never busy for long
with one of them while the engine wants to launch kernels. An event after the
last batch says when the call's bytes are in place; nothing else does.

Guarantees: a ticket that has not failed is done only after its event. The
first error of the driver breaks the mover: every ticket that was not done fails,
and so does every later call. `CudaTicket.fenced` says when a failed or late copy
can no longer touch its blocks and pages.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial

import numpy as np
from numpy.typing import NDArray

from .copyplan import GroupShape, check_blocks, group_shape
from .cuda_driver import ORDER_ANY, ORDER_STREAM, Driver, DriverError
from .cuda_tickets import CudaFence, CudaTicket, Direction, PooledEvent
from .descriptors import Addresses, GroupDescriptors
from .mover import (
    CopyFailed,
    CopyTicket,
    CopyTimeout,
    EndedTicket,
    Fence,
    Ids,
    PageAddresses,
    check_page_room,
    shape_of,
)
from .pinning import Pinning
from .regions import RegionTable

logger = logging.getLogger("kvtier.mover")

# `ctypes.memset` gives the interpreter lock away, and would wait for it again after every page.
_memset = ctypes.PyDLL(None).memset
_memset.restype = None


class CopyWay(Enum):
    """How a group's blocks are described to the driver."""

    FLAT = "flat"  # one copy a region and block
    ROWS = "rows"  # one strided copy a block
    KERNEL = "kernel"  # loads by `copy_kernel`, saves as FLAT
    KERNELS = "kernels"  # both by `copy_kernel`


@dataclass(frozen=True, slots=True)
class CudaLimits:
    """Bounds.

    Attributes:
        batch_copies: copies handed to the driver at once.
        in_flight: batches of one direction that the device may not have ended yet.
        yield_s: the longest that a batch of a save waits for a load's batches to be queued.
        stall_s: a call whose batches make no room for so long fails.
        close_s: how long `close` waits for what is under way.
    """

    batch_copies: int = 8192
    in_flight: int = 8
    yield_s: float = 0.02
    stall_s: float = 60.0
    close_s: float = 5.0


Kernel = Callable[[int, Ids, Addresses, bool], None]
"""Queues a copy of (stream, block ids, page addresses, to device) by `copy_kernel`."""


class CudaMover:
    """Copies for one device. All but `fence` may block the calling thread.

    Args:
        tables: each group's regions in device memory.
        pages: the RAM pages.
        driver: the device's.
        pinning: which pages are pinned.
        compute_stream: returns the handle of the calling thread's compute stream.
        ways: how each group is copied (`CopyWay.FLAT` where not given).
        kernels: for each group of `CopyWay.KERNEL` or `KERNELS`, its kernel.
    """

    def __init__(
        self,
        tables: Mapping[int, RegionTable],
        pages: PageAddresses,
        driver: Driver,
        pinning: Pinning,
        *,
        compute_stream: Callable[[], int],
        ways: Mapping[int, CopyWay] | None = None,
        kernels: Mapping[int, Kernel] | None = None,
        limits: CudaLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._limits = limits or CudaLimits()
        self._shapes = {group: group_shape(table) for group, table in tables.items()}
        check_page_room(self._shapes, pages)
        self._groups = {
            group: GroupDescriptors(table, self._shapes[group], pages.page_bytes)
            for group, table in tables.items()
        }
        self._ways = dict(ways or {})
        self._kernels = dict(kernels or {})
        self._pages = pages
        self._driver = driver
        self._pinning = pinning
        self._compute_stream = compute_stream
        self._clock = clock
        self._sleep = sleep
        self._events: deque[int] = deque()
        self._loads = 0  # load calls that are queueing batches
        self._no_loads = threading.Condition()
        self._closed = False
        self.broken: CopyFailed | None = None
        copies = self._limits.batch_copies
        self._load = Direction(driver.create_stream(urgent=True), True, copies)
        self._save = Direction(driver.create_stream(urgent=False), False, copies)

    def uses_kernel(self, group: int) -> bool:
        """Tell whether loads of a group go through `copy_kernel`."""
        return self._ways.get(group) in {CopyWay.KERNEL, CopyWay.KERNELS}

    def fence(self) -> Fence:
        """See `Mover.fence`. On the engine's thread, after the step's launches."""
        try:  # the engine's thread has the context: it has just launched a forward
            event = self._event()
            self._driver.record(event.handle, self._compute_stream())
        except DriverError as error:
            self._break(error)
            return CudaFence(self, None)
        return CudaFence(self, event)

    def save(
        self, group: int, block_ids: Ids, page_ids: Ids, after: Fence | None = None
    ) -> CopyTicket:
        """See `Mover.save`. Returns once the copies are queued."""
        return self._copy(self._save, group, block_ids, page_ids, after)

    def load(
        self, group: int, block_ids: Ids, page_ids: Ids, after: Fence | None = None
    ) -> CopyTicket:
        """See `Mover.load`. Returns once the copies are queued; goes before queueing saves."""
        with self._no_loads:
            self._loads += 1
        try:
            return self._copy(self._load, group, block_ids, page_ids, after)
        finally:
            with self._no_loads:
                self._loads -= 1
                self._no_loads.notify_all()

    def close(self) -> None:
        """See `Mover.close`; also unpins the pages.

        Streams that are still busy after `CudaLimits.close_s` are left, and so are the pins.
        """
        if self._closed:
            return
        self._closed = True
        all_quiet = True
        for direction in (self._load, self._save):
            # A call that waits for room gives up when it sees that the mover is closed.
            locked = direction.lock.acquire(timeout=self._limits.close_s)
            if not locked or not self.poll(
                partial(self.quiet, direction, None), self._limits.close_s
            ):
                logger.warning("copies are still under way at shutdown; their stream is left")
                all_quiet = False
            else:
                direction.under_way.clear()
                direction.ended = True
                self._drop(self._driver.destroy_stream, direction.stream)
            if locked:
                direction.lock.release()
        if all_quiet:
            self._pinning.close()
        while self._events:
            self._drop(self._driver.destroy_event, self._events.popleft())

    def query(self, event: PooledEvent) -> bool | None:
        """Tell whether an event is reached; None (and the mover broken) if the driver failed."""
        try:
            self._driver.use()
            return self._driver.reached(event.handle)
        except DriverError as error:
            self._break(error)
            return None

    def quiet(self, direction: Direction, event: PooledEvent | None) -> bool:
        """Tell whether an event is reached, or, without one, whether a stream has nothing left.

        A driver that answers with an error has torn its context down: nothing moves any more.
        """
        if event is not None:
            return self.query(event) is not False
        if direction.ended:
            return True
        try:
            self._driver.use()
            return self._driver.stream_idle(direction.stream)
        except DriverError as error:
            self._break(error)
            return True

    def poll(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until ``condition`` holds, looking every 0.05 to 1 ms; tell whether it does."""
        deadline = self._clock() + timeout_s
        pause_s = 5e-5
        while not condition():
            left_s = deadline - self._clock()
            if left_s <= 0:
                return False
            self._sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, 1e-3)
        return True

    def _copy(
        self, direction: Direction, group: int, block_ids: Ids, page_ids: Ids, after: Fence | None
    ) -> CopyTicket:
        shape = shape_of(self._shapes, group)
        if check_blocks(block_ids, page_ids, shape.num_blocks) == 0:
            return EndedTicket()
        addresses = self._pages.addresses(page_ids)
        with direction.lock:
            if self._closed:
                return EndedTicket(CopyFailed("the mover is closed"))
            if self.broken is not None:
                return EndedTicket(self.broken)
            if not direction.to_device:
                zero_padding(shape, addresses)
            error = None
            try:
                self._driver.use()
                self._follow(direction, after)
                for queue in self._batches(direction, group, block_ids, addresses):
                    self._make_room(direction)
                    queue()
                    direction.under_way.append(self._mark(direction))
            except DriverError as failure:
                error = self._break(failure)
            except CopyTimeout as failure:
                error = CopyFailed(str(failure))
            if error is None:
                return CudaTicket(self, direction, direction.under_way[-1])
            # Earlier batches, or part of the last, may be under way.
            return CudaTicket(self, direction, self._last_mark(direction), error)

    def _follow(self, direction: Direction, after: Fence | None) -> None:
        if after is None:
            return
        assert isinstance(after, CudaFence)
        if after.event is None:
            raise DriverError("cuEventRecord", 0, "the fence could not be recorded")
        self._driver.wait_for(direction.stream, after.event.handle)

    def _batches(
        self, direction: Direction, group: int, block_ids: Ids, addresses: Addresses
    ) -> Iterator[Callable[[], None]]:
        """Yield a function for each batch that hands it to the driver."""
        builder, scratch = self._groups[group], direction.scratch
        driver, stream, to_device = self._driver, direction.stream, direction.to_device
        way = self._ways.get(group, CopyWay.FLAT)
        reached = self._pinning.reach(addresses)
        if reached is None:
            for flat in builder.flat_batches(block_ids, addresses, scratch):
                to, start = (flat.device, flat.host) if to_device else (flat.host, flat.device)
                yield partial(driver.copy_each, to, start, flat.size, stream)
        elif way is CopyWay.KERNELS or (way is CopyWay.KERNEL and to_device):
            kernel = self._kernels[group]
            step = max(1, scratch.copies // builder.ranges)
            for i in range(0, len(block_ids), step):
                part = slice(i, i + step)
                yield partial(kernel, stream, block_ids[part], reached[part], to_device)
        elif way is CopyWay.ROWS:
            order = ORDER_ANY if to_device else ORDER_STREAM
            for operations in builder.row_batches(
                block_ids, reached, scratch, to_device=to_device, order=order
            ):
                yield partial(driver.copy_rows, operations, stream)
        else:
            for flat in builder.flat_batches(block_ids, reached, scratch):
                to, start = (flat.device, flat.host) if to_device else (flat.host, flat.device)
                yield partial(driver.copy_batch, to, start, flat.size, stream, to_device=to_device)

    def _make_room(self, direction: Direction) -> None:
        """Wait until another batch may be queued; saves let loads go first, for a moment."""
        if not direction.to_device:
            with self._no_loads:
                self._no_loads.wait_for(lambda: self._loads == 0, self._limits.yield_s)
        under_way = direction.under_way
        while under_way and self._driver.reached(under_way[0].handle):
            under_way.popleft()
        if len(under_way) < self._limits.in_flight:
            return
        oldest = under_way[0]
        if not self.poll(
            lambda: self._closed or self.query(oldest) is not False, self._limits.stall_s
        ):
            raise CopyTimeout(f"the device has ended no copy for {self._limits.stall_s:g} s")
        if self._closed:
            raise CopyTimeout("the mover is closed")
        if self.broken is not None:
            raise DriverError("cuEventQuery", 0, str(self.broken))
        under_way.popleft()

    def _event(self) -> PooledEvent:
        try:
            handle = self._events.popleft()
        except IndexError:
            handle = self._driver.create_event()
        return PooledEvent(handle, self._events)

    def _mark(self, direction: Direction) -> PooledEvent:
        event = self._event()
        self._driver.record(event.handle, direction.stream)
        return event

    def _last_mark(self, direction: Direction) -> PooledEvent | None:
        try:
            return self._mark(direction)
        except DriverError:
            return None

    def _break(self, error: DriverError) -> CopyFailed:
        if self.broken is None:
            self.broken = CopyFailed(f"the CUDA driver failed: {error}")
            logger.error("no more copies to or from the device: %s", error)
        return self.broken

    def _drop(self, destroy: Callable[[int], None], handle: int) -> None:
        try:
            destroy(handle)
        except DriverError as error:
            logger.debug("%s", error)


def zero_padding(shape: GroupShape, pages: NDArray[np.uint64]) -> None:
    """Zero what a block leaves of its padded size, less than 4096 bytes, in every page."""
    padding = shape.padded_bytes - shape.block_bytes
    if padding:
        for page in pages.tolist():
            _memset(ctypes.c_void_p(page + shape.block_bytes), 0, ctypes.c_size_t(padding))
