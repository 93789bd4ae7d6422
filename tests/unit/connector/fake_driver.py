"""A device that is slow, reorders what it may, and fails when told to.

Streams are queues; `step` lets one stream, drawn at random, do the next thing:
one copy of a batch (in random order within it), one mark, one wait that is
satisfied. Device memory is host memory. Calls may come from several threads.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque

import numpy as np

from kvtier.connector.cuda_driver import DriverError

DMA_COMPUTE = 1  # the engine's stream


class FakeDriver:
    def __init__(self, rng) -> None:
        self.rng = rng
        self.streams = {DMA_COMPUTE: deque()}
        self.events = {}  # handle -> (times recorded, times reached)
        self.next_handle = 100
        self.fail = {}  # call name -> calls left until it fails
        self.dead = False  # the context is torn down
        self.submitted = []  # ("load" or "save" or "each", number of copies)
        self.most_queued = 0
        self.pinned = {}
        self.pin_limit = None
        self.alias = 0  # from host addresses to those that the device has for them
        self.on_batch = None
        self.destroyed = []
        self.node = None
        self.users = set()  # threads
        self.lock = threading.RLock()

    # Driver

    def use(self):
        self.users.add(threading.get_ident())

    def create_stream(self, *, urgent):
        handle = self._handle()
        self.streams[handle] = deque()
        return handle

    def destroy_stream(self, stream):
        assert not self.streams.pop(stream)
        self.destroyed.append(stream)

    def stream_idle(self, stream):
        self._may_fail("stream_idle")
        with self.lock:
            return not self.streams[stream]

    def create_event(self):
        with self.lock:
            handle = self._handle()
            self.events[handle] = [0, 0]
        return handle

    def destroy_event(self, event):
        del self.events[event]

    def record(self, event, stream):
        self._may_fail("record")
        with self.lock:
            self.events[event][0] += 1
            self.streams[stream].append(("mark", event, self.events[event][0]))

    def reached(self, event):
        self._may_fail("reached")
        recorded, reached = self.events[event]
        return reached >= recorded

    def wait_for(self, stream, event):
        self._may_fail("wait_for")
        with self.lock:
            self.streams[stream].append(("wait", event, self.events[event][0]))

    def copy_batch(self, dst, src, size, stream, *, to_device):
        if self.on_batch is not None:
            self.on_batch("load" if to_device else "save")
        self._may_fail("copy_batch")
        self.queue("load" if to_device else "save", dst, src, size, stream)

    def copy_each(self, dst, src, size, stream):
        self._may_fail("copy_each")
        self.queue("each", dst, src, size, stream)

    def copy_rows(self, operations, stream):
        self._may_fail("copy_rows")
        dst, src, size = [], [], []
        for op in operations:
            for row in range(int(op["height"])):
                dst.append(int(op["dst"]) + row * int(op["dst_pitch"]))
                src.append(int(op["src"]) + row * int(op["src_pitch"]))
                size.append(int(op["width"]))
        self.queue("rows", dst, src, size, stream)

    def pin(self, address, length):
        if self.pin_limit is not None and sum(self.pinned.values()) + length > self.pin_limit:
            raise DriverError("cuMemHostRegister_v2", 2, "CUDA_ERROR_OUT_OF_MEMORY")
        self.pinned[address] = length
        return address + self.alias

    def unpin(self, address):
        del self.pinned[address]

    def numa_node(self):
        return self.node

    # the device's own side

    def launch(self, function):
        """Queue a kernel on the engine's stream."""
        self.streams[DMA_COMPUTE].append(("call", function))

    def step(self, skip=()):
        """Do one thing of one stream that can; tell whether there was any."""
        with self.lock:
            return self._step(skip)

    def _step(self, skip):
        able = [s for s in self.streams if s not in skip and self._able(s)]
        if not able:
            return False
        queue = self.streams[able[int(self.rng.integers(len(able)))]]
        kind, *rest = queue[0]
        if kind == "copies":
            copies = rest[0]
            dst, src, size = copies.pop(int(self.rng.integers(len(copies))))
            ctypes.memmove(dst, src, size)
            if copies:
                return True
        elif kind == "mark":
            event, generation = rest
            if event in self.events:
                self.events[event][1] = max(self.events[event][1], generation)
        elif kind == "call":
            rest[0]()
        queue.popleft()
        return True

    def run(self, skip=()):
        while self.step(skip):
            pass

    def _able(self, stream):
        queue = self.streams[stream]
        if not queue or self.dead:
            return False
        if queue[0][0] == "wait":
            _, event, generation = queue[0]
            return event not in self.events or self.events[event][1] >= generation
        return True

    def queue(self, name, dst, src, size, stream):
        copies = [(int(d), int(s), int(n)) for d, s, n in zip(dst, src, size, strict=True)]
        with self.lock:
            self.submitted.append((name, len(copies)))
            self.streams[stream].append(("copies", copies))
            batches = sum(item[0] == "copies" for item in self.streams[stream])
            self.most_queued = max(self.most_queued, batches)

    def _may_fail(self, call):
        if self.dead:
            raise DriverError(call, 700, "CUDA_ERROR_ILLEGAL_ADDRESS")
        if call in self.fail:
            self.fail[call] -= 1
            if self.fail[call] < 0:
                raise DriverError(call, 1, "CUDA_ERROR_INVALID_VALUE")

    def _handle(self):
        self.next_handle += 1
        return self.next_handle


class PumpedClock:
    """Sleeping lets the device work a little; time is what was slept."""

    def __init__(self, driver, steps=3):
        self.driver, self.steps, self.now, self.skip = driver, steps, 0.0, ()

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        for _ in range(self.steps):
            self.driver.step(self.skip)


class AllPinned:
    def __init__(self, answer=True, alias=0):
        self.answer = answer
        self.alias = alias
        self.closed = False

    def reach(self, addresses):
        return addresses + np.uint64(self.alias % 2**64) if self.answer else None

    def close(self):
        self.closed = True
