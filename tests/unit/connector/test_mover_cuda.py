"""The CUDA mover against a fake device that delays, reorders and fails copies."""

from __future__ import annotations

import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvtier.connector.mover import CopyFailed, CopyTimeout
from kvtier.connector.mover_cuda import CopyWay, CudaLimits, CudaMover

from .fake_driver import DMA_COMPUTE, AllPinned, FakeDriver, PumpedClock
from .mover_contract import NUM_BLOCKS, MoverContract, Pages, device_block, make_device

SEED = 77_031
IDS = np.array([3, 1, 9, 5], np.int64)
BOTH_WAYS = ["save", "load"]
KERNEL_WAYS = [CopyWay.KERNEL, CopyWay.KERNELS]


class World:
    def __init__(self, seed=0, layout="layer outermost", pinned=True, way=None, **limits):
        print("seed", SEED, seed)
        self.rng = np.random.default_rng([SEED, seed])
        self.device = make_device(layout, self.rng)
        self.table = self.device.tables[3]
        self.pages = Pages(NUM_BLOCKS, -(-self.table.block_bytes // 4096) * 4096)
        self.pages.fill(self.rng)
        self.driver = FakeDriver(self.rng)
        self.clock = PumpedClock(self.driver)
        limits.setdefault("batch_copies", 12)
        self.mover = CudaMover(
            self.device.tables,
            self.pages,
            self.driver,
            AllPinned(pinned),
            compute_stream=lambda: DMA_COMPUTE,
            ways={3: way} if way else None,
            kernels={3: fake_kernel(self.table, self.driver)},
            limits=CudaLimits(**limits),
            clock=self.clock,
            sleep=self.clock.sleep,
        )

    def start(self, way, ids=IDS, after=None):
        return getattr(self.mover, way)(3, ids, ids, after)

    def landed(self, way, ids=IDS):
        """Whether the device and the pages hold the same in these blocks, and did not before."""
        return all(
            self.pages.bytes_of(i)[: self.table.block_bytes] == device_block(self.table, i)
            for i in ids.tolist()
        )

    def copy_streams(self):
        return [s for s in self.driver.streams if s != DMA_COMPUTE]

    def scribble(self, ids=IDS):
        """A forward pass: writes new bytes into blocks."""
        for block in ids.tolist():
            for base, stride, length in zip(
                self.table.base.tolist(),
                self.table.stride.tolist(),
                self.table.length.tolist(),
                strict=True,
            ):
                ctypes.memset(base + block * stride, 0xA5, length)


def fake_kernel(table, driver):
    """What `copy_kernel` does, as work of the fake device."""
    ranges = list(
        zip(table.base.tolist(), table.stride.tolist(), table.length.tolist(), strict=True)
    )

    def kernel(stream, block_ids, pages, to_device):
        near, far, size = [], [], []
        for block, page in zip(block_ids.tolist(), pages.tolist(), strict=True):
            at = page
            for base, stride, length in ranges:
                near.append(base + block * stride)
                far.append(at)
                size.append(length)
                at += length
        dst, src = (near, far) if to_device else (far, near)
        driver.queue("kernel load" if to_device else "kernel save", dst, src, size, stream)

    return kernel


def _make(way=None, pinned=True, batch=7):
    def make(tables, pages):
        driver = FakeDriver(np.random.default_rng(SEED))
        clock = PumpedClock(driver, steps=40)
        kernels = {group: fake_kernel(table, driver) for group, table in tables.items()}
        return CudaMover(
            tables,
            pages,
            driver,
            AllPinned(pinned),
            compute_stream=lambda: DMA_COMPUTE,
            ways={3: way} if way else None,
            kernels=kernels if way in KERNEL_WAYS else None,
            limits=CudaLimits(batch_copies=batch, in_flight=2),
            clock=clock,
            sleep=clock.sleep,
        )

    return make


class TestCudaMoverFlat(MoverContract):
    @pytest.fixture(params=[1, 7, 1000])
    def make_mover(self, request):
        return _make(batch=request.param)


class TestCudaMoverRows(MoverContract):
    @pytest.fixture
    def make_mover(self):
        return _make(CopyWay.ROWS)


class TestCudaMoverKernel(MoverContract):
    @pytest.fixture(params=KERNEL_WAYS)
    def make_mover(self, request):
        return _make(request.param)


class TestCudaMoverUnpinned(MoverContract):
    @pytest.fixture
    def make_mover(self):
        return _make(pinned=False)


@pytest.mark.parametrize("way", BOTH_WAYS)
@pytest.mark.parametrize("seed", range(25))
def test_done_means_that_every_byte_is_in_place(way, seed):
    """However the device orders its work, no ticket is done before its bytes are there."""
    world = World(seed)
    ticket = world.start(way, after=world.mover.fence())
    assert not world.landed(way)
    steps = 0
    while not ticket.done():
        assert not ticket.fenced()
        assert world.driver.step()
        steps += 1
    assert steps >= 24  # 6 regions of 4 blocks
    assert world.landed(way)
    ticket.wait(0.0)
    assert ticket.fenced()


@pytest.mark.parametrize("seed", range(25))
def test_saves_see_what_the_forward_wrote(seed):
    """A save waits for kernels that were launched before its fence, however late they run."""
    world = World(seed)
    world.driver.launch(world.scribble)
    fence = world.mover.fence()
    assert not fence.reached()
    ticket = world.start("save", after=fence)
    world.driver.run(skip=(DMA_COMPUTE,))
    assert not ticket.done()
    world.driver.run()
    ticket.wait(0.0)
    assert fence.reached()
    assert world.pages.bytes_of(3)[: world.table.block_bytes] == b"\xa5" * world.table.block_bytes


@pytest.mark.parametrize("seed", range(25))
def test_loads_come_after_earlier_users_of_their_blocks(seed):
    """A load waits for kernels before its fence, which may still write its blocks."""
    world = World(seed)
    world.driver.launch(world.scribble)
    ticket = world.start("load", after=world.mover.fence())
    while not ticket.done():
        assert world.driver.step()
    world.driver.run()
    assert world.landed("load")


def test_a_later_fence_does_not_hold_an_earlier_copy():
    """Marks are not shared: a fence dropped and made again still means its own moment."""
    world = World()
    world.driver.launch(lambda: None)
    ticket = world.start("save", after=world.mover.fence())
    world.driver.step(skip=tuple(world.copy_streams()))
    world.driver.step(skip=tuple(world.copy_streams()))
    world.driver.launch(lambda: None)
    later = world.mover.fence()
    world.driver.run(skip=(DMA_COMPUTE,))
    assert ticket.done()
    assert not later.reached()


@pytest.mark.parametrize("way", BOTH_WAYS)
@pytest.mark.parametrize("call", ["copy_batch", "record", "wait_for"])
@pytest.mark.parametrize("calls_before", [0, 1])
def test_an_error_fails_every_copy_and_fences_it(way, call, calls_before):
    """After a driver's error all unfinished and later copies fail, and say when they are still."""
    world = World()
    before = world.start("save" if way == "load" else "load", np.array([2], np.int64))
    fence = world.mover.fence()
    world.driver.fail = {call: calls_before}
    ticket = world.start(way, after=fence)
    if not ticket.done():  # only one wait_for: nothing failed
        assert (call, calls_before) == ("wait_for", 1)
        return
    world.driver.fail = {}
    with pytest.raises(CopyFailed, match="CUDA_ERROR_INVALID_VALUE"):
        ticket.wait(0.0)
    assert before.done()
    with pytest.raises(CopyFailed):
        before.wait(0.0)
    with pytest.raises(CopyFailed):
        world.start(way).wait(0.0)
    for one in (ticket, before):
        while not one.fenced():
            assert world.driver.step()
    stream = world.mover._save if way == "save" else world.mover._load
    assert not any(item[0] == "copies" for item in world.driver.streams[stream.stream])


def test_a_copy_that_had_landed_stays_good():
    """An error of a later call takes nothing from a copy that was complete."""
    world = World()
    ticket = world.start("load")
    world.driver.run()
    world.driver.fail = {"copy_batch": 0}
    assert world.start("save").done()
    ticket.wait(0.0)


def test_a_dead_context_is_still():
    """When the context is torn down, copies fail and nothing waits for them for ever."""
    world = World()
    ticket = world.start("load")
    world.driver.dead = True
    with pytest.raises(CopyFailed, match="ILLEGAL_ADDRESS"):
        ticket.wait(1.0)
    assert ticket.fenced()
    fence = world.mover.fence()
    assert not fence.reached()
    with pytest.raises(CopyFailed):
        world.start("save", after=fence).wait(1.0)


def test_a_late_copy_times_out_and_is_fenced_later():
    """A copy past its deadline is neither done nor fenced until the device has ended it."""
    world = World()
    world.driver.launch(world.scribble)
    ticket = world.start("save", after=world.mover.fence())
    world.clock.skip = (DMA_COMPUTE,)
    with pytest.raises(CopyTimeout, match=r"after 0\.5 s"):
        ticket.wait(0.5)
    assert world.clock.now == pytest.approx(0.5)
    assert not ticket.fenced()
    world.driver.run()
    assert ticket.fenced()
    ticket.wait(0.0)


def test_batches_and_their_number_are_bounded():
    """No batch is larger, and no more batches are queued, than the limits say."""
    world = World(in_flight=3, batch_copies=12)
    ids = np.arange(1, NUM_BLOCKS, dtype=np.int64)
    ticket = world.start("save", ids)
    assert {name for name, _ in world.driver.submitted} == {"save"}
    assert sum(count for _, count in world.driver.submitted) == 6 * len(ids)
    assert max(count for _, count in world.driver.submitted) <= 12
    assert world.driver.most_queued <= 3
    ticket.wait(10.0)
    assert world.landed("save", ids)


def test_a_device_that_stands_still_fails_the_call():
    """A call that finds no room for `stall_s` ends, and its blocks stay fenced off."""
    world = World(in_flight=2, stall_s=5.0)
    world.driver.launch(world.scribble)
    world.clock.skip = (DMA_COMPUTE,)
    ticket = world.start("load", np.arange(1, NUM_BLOCKS, dtype=np.int64), world.mover.fence())
    assert ticket.done()
    with pytest.raises(CopyFailed, match="ended no copy for 5 s"):
        ticket.wait(0.0)
    assert not ticket.fenced()
    world.driver.run()
    assert ticket.fenced()
    world.clock.skip = ()
    world.start("load").wait(1.0)


def test_a_failed_call_is_fenced_by_its_own_work():
    """What others queue behind a failed call does not keep its blocks."""
    world = World(in_flight=2, stall_s=5.0)
    world.driver.launch(world.scribble)
    world.clock.skip = (DMA_COMPUTE,)
    ticket = world.start("load", np.arange(1, NUM_BLOCKS, dtype=np.int64), world.mover.fence())
    assert not ticket.fenced()
    world.driver.run()
    world.driver.launch(world.scribble)
    later = world.start("load", after=world.mover.fence())
    assert ticket.fenced()
    assert not later.done()


def test_loads_are_queued_before_the_rest_of_a_save():
    """A load that comes while a save is being queued gets its batches in first."""
    world = World(yield_s=30.0, in_flight=100)
    threads, batches = [], []

    def until(condition):
        deadline = time.monotonic() + 5.0
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def on_batch(name):
        batches.append(name)
        if batches == ["save"]:
            threads.append(threading.Thread(target=world.start, args=("load",)))
            threads[0].start()
            until(lambda: "load" in batches)
        elif batches == ["save", "load"]:  # the save's thread waits, or comes again too soon
            until(lambda: world.mover._no_loads._waiters or len(batches) > 2)

    world.driver.on_batch = on_batch
    world.start("save", np.arange(1, NUM_BLOCKS, dtype=np.int64))
    threads[0].join()
    assert batches[:3] == ["save", "load", "load"]
    assert set(batches[3:]) == {"save"}


def test_events_are_used_again():
    """A thousand steps with fences and copies need a handful of events."""
    world = World(batch_copies=100)
    for _ in range(1000):
        ticket = world.start("save", after=world.mover.fence())
        world.driver.run()
        ticket.wait(0.0)
    assert len(world.driver.events) < 20


def test_neighbours_that_fill_their_pages_are_one_copy():
    """Adjacent blocks of a block-outermost layout and adjacent pages make one range."""
    world = World(layout="one region")
    blocks = np.array([4, 5, 6, 7, 2, 9, 10], np.int64)
    pages = np.array([0, 1, 2, 5, 6, 11, 12], np.int64)
    ticket = world.mover.load(3, blocks, pages)
    assert world.driver.submitted == [("load", 4)]
    ticket.wait(1.0)
    for block, page in zip(blocks.tolist(), pages.tolist(), strict=True):
        assert device_block(world.table, block) == world.pages.bytes_of(page)


def test_close_waits_for_copies_and_gives_streams_back():
    """Closing lets copies end, destroys the streams and their events, and can be repeated."""
    world = World()
    ticket = world.start("save")
    world.mover.close()
    world.mover.close()
    assert len(world.driver.destroyed) == 2
    ticket.wait(0.0)


def test_close_leaves_a_stream_that_does_not_end(caplog):
    """A stream that stays busy is left alone, with one warning, after a bounded time."""
    world = World()
    world.driver.launch(lambda: None)
    world.clock.skip = (DMA_COMPUTE,)
    world.start("save", after=world.mover.fence())
    world.mover.close()
    assert world.clock.now <= 6.0
    assert len(world.driver.destroyed) == 1
    assert caplog.text.count("still under way") == 1


def test_close_does_not_wait_for_a_call_that_finds_no_room():
    """A call that a stuck device keeps waiting ends when the mover closes, and is not good."""
    world = World(in_flight=1, stall_s=1e12)
    world.driver.launch(lambda: None)
    world.clock.steps = 0  # nothing moves
    fence, waiting = world.mover.fence(), threading.Event()
    world.driver.on_batch = lambda _: waiting.set()
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(world.start, "save", IDS, fence)
        assert waiting.wait(10.0)
        world.mover.close()
        ticket = call.result(timeout=10.0)
    with pytest.raises(CopyFailed, match="closed"):
        ticket.wait(0.0)
    assert not ticket.fenced()
    world.driver.run()
    assert ticket.fenced()


@pytest.mark.parametrize(
    ("way", "names"),
    [
        (CopyWay.KERNEL, {"load": "kernel load", "save": "save"}),
        (CopyWay.KERNELS, {"load": "kernel load", "save": "kernel save"}),
    ],
)
@pytest.mark.parametrize("pinned", [True, False])
def test_the_kernel_serves_the_ways_it_is_for(way, names, pinned):
    """The kernel does loads only, or both ways; never memory that it could not reach."""
    for call, name in names.items():
        world = World(way=way, pinned=pinned)
        world.start(call).wait(10.0)
        assert world.landed(call)
        assert {n for n, _ in world.driver.submitted} == {name if pinned else "each"}


@pytest.mark.parametrize("way", [None, CopyWay.ROWS, CopyWay.KERNELS])
@pytest.mark.parametrize("call", BOTH_WAYS)
def test_the_device_is_given_its_own_addresses_of_pages(call, way):
    """Where the device has pages at other addresses than the host, copies are given those."""
    world = World(way=way)
    others = Pages(NUM_BLOCKS, world.pages.page_bytes)
    others.fill(world.rng)
    world.mover._pinning.alias = others.start - world.pages.start
    before = [world.pages.bytes_of(i) for i in IDS.tolist()]
    world.start(call).wait(10.0)
    assert [world.pages.bytes_of(i) for i in IDS.tolist()] == before
    world.pages = others
    assert world.landed(call)


def test_the_engines_thread_is_left_as_it_is():
    """What the engine's own thread does here never makes it one of ours (`Driver.use`)."""
    world = World()
    world.mover.fence()
    assert world.driver.users == set()
    with ThreadPoolExecutor(1) as threads:
        ticket = threads.submit(world.start, "save").result()
    assert len(world.driver.users) == 1
    assert threading.get_ident() not in world.driver.users
    ticket.wait(1.0)


def test_a_copy_without_an_event_is_still_once_its_stream_is_gone():
    """A failed copy that no event follows asks its stream, and never one that is destroyed."""
    world = World()
    world.driver.fail = {"record": 0}
    ticket = world.start("save")
    assert ticket.done()
    assert not ticket.fenced()
    world.driver.fail = {}
    world.mover.close()
    assert len(world.driver.destroyed) == 2
    assert ticket.fenced()


def test_padding_is_zeroed_in_every_page():
    """Whatever a page held before, after a save it ends in zeros from the end of its block."""
    world = World(layout="odd lengths in padded slots")
    world.start("save").wait(10.0)
    for page in IDS.tolist():
        assert not any(world.pages.bytes_of(page)[world.table.block_bytes :])
