"""The CUDA mover on a real device: bytes, order, growth, failure."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvtier.connector.cuda_device import open_cuda_mover  # noqa: E402
from kvtier.connector.cuda_driver import CudaDriver  # noqa: E402
from kvtier.connector.mover_cuda import CopyWay, CudaLimits  # noqa: E402
from kvtier.connector.pinning import Pinning  # noqa: E402
from kvtier.connector.regions import region_table  # noqa: E402
from kvtier.storage.ram import Arena  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SEED = 4711
BLOCKS = 40  # in the pool, the null block included


@pytest.fixture(scope="module")
def driver():
    torch.empty(1, device="cuda")
    return CudaDriver(0)


class Cache:
    """A KV cache on the device, pinned pages, a mover. Rows are one block of one region."""

    def __init__(
        self, driver, rng, *, layout="layer", regions=6, row_bytes=65_536, slot_bytes=None,
        blocks=BLOCKS, way=None, pin=True, limits=None,
    ):  # fmt: skip
        slot_bytes = slot_bytes or row_bytes
        size = regions * blocks * slot_bytes
        data = rng.integers(0, 256, size, dtype=np.uint8)
        self.memory = torch.from_numpy(data).cuda()
        start = self.memory.data_ptr()
        self.form = (layout, regions, blocks, slot_bytes, row_bytes)
        self.view = self.view_of(self.memory)
        if layout == "layer":
            ranges = [(start + r * blocks * slot_bytes, slot_bytes) for r in range(regions)]
        else:
            ranges = [(start + r * slot_bytes, regions * slot_bytes) for r in range(regions)]
        ranges = [(base, stride, row_bytes) for base, stride in ranges]
        self.table = table = region_table(0, ranges, blocks)
        self.block_bytes = regions * row_bytes
        self.page_bytes = -(-self.block_bytes // 4096) * 4096
        self.driver = driver
        self.pinning = Pinning(driver, self.page_bytes * blocks)
        hook = self.pinning.on_segment if pin else None
        self.arena = Arena(self.page_bytes, blocks, segment_bytes=1 << 22, on_segment=hook)
        self.arena.start(background=False)
        self.mover = open_cuda_mover(
            {0: table}, self.arena, driver, self.pinning, ordinal=0,
            ways={0: way} if way else None, limits=limits,
        )  # fmt: skip

    def fill_slowly(self, cycles, value):
        """Overwrite everything on a stream of its own after so many cycles; return its fence."""
        torch.empty_like(self.memory).fill_(value)  # loading a kernel may wait for running ones
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(cycles)
            self.memory.fill_(value)
            return self.mover.fence()

    def view_of(self, memory):
        """(blocks, regions, row) of memory that is laid out as the cache is."""
        layout, regions, blocks, slot_bytes, row_bytes = self.form
        if layout == "layer":
            view = memory.view(regions, blocks, slot_bytes).transpose(0, 1)
        else:
            view = memory.view(blocks, regions, slot_bytes)
        return view[:, :, :row_bytes]

    def page(self, page_id):
        return np.frombuffer(self.arena.buffers([page_id], self.page_bytes)[0], np.uint8)

    def block(self, block_id):
        return self.view[block_id].cpu().numpy().reshape(-1)

    def close(self):
        torch.cuda.synchronize()
        self.mover.close()
        self.pinning.close()
        self.arena.close()


@pytest.fixture
def make_cache(driver):
    caches = []

    def make(rng, **options):
        caches.append(Cache(driver, rng, **options))
        return caches[-1]

    yield make
    for cache in caches:
        cache.close()


def random_ids(rng, blocks=BLOCKS):
    n = int(rng.integers(1, blocks - 1))
    ids = rng.permutation(np.arange(1, blocks))[:n].astype(np.int64)
    return ids, rng.permutation(blocks)[:n].astype(np.int64)


SHAPES = {
    "fp8 3 KiB in padded slots": {"row_bytes": 3000, "slot_bytes": 3072},
    "4 KiB": {"row_bytes": 4096, "regions": 61},
    "bf16 16 KiB": {"row_bytes": 16_384, "regions": 32},
    "bf16 64 KiB": {"row_bytes": 65_536},
    "fp32 192 KiB": {"row_bytes": 196_608},
    "odd bytes": {"row_bytes": 1001, "slot_bytes": 1024, "regions": 3},
    "state of 1 MiB": {"row_bytes": 1 << 20, "regions": 2},
}


@pytest.mark.parametrize("way", [*CopyWay, None])
@pytest.mark.parametrize("layout", ["layer", "block"])
@pytest.mark.parametrize("shape", SHAPES)
def test_round_trips_are_byte_exact(make_cache, shape, layout, way):
    """Random blocks come back from random pages byte for byte, and nothing else changes."""
    print("seed", SEED)
    rng = np.random.default_rng([SEED, len(shape)])
    cache = make_cache(
        rng, layout=layout, way=way, limits=CudaLimits(batch_copies=50), **SHAPES[shape]
    )
    if way in {CopyWay.KERNEL, CopyWay.KERNELS}:  # else the batches would do it unseen
        assert cache.mover.uses_kernel(0) is (shape != "odd bytes")
    for _ in range(3):
        blocks, pages = random_ids(rng)
        untouched = set(range(BLOCKS)) - set(pages.tolist())
        for page in range(BLOCKS):
            cache.page(page)[:] = 0xEE
        cache.mover.save(0, blocks, pages, cache.mover.fence()).wait(20.0)
        for block, page in zip(blocks.tolist(), pages.tolist(), strict=True):
            assert np.array_equal(cache.page(page)[: cache.block_bytes], cache.block(block))
            assert not cache.page(page)[cache.block_bytes :].any()
        assert all((cache.page(page) == 0xEE).all() for page in untouched)
        # Back into other blocks.
        targets = rng.permutation(np.arange(1, BLOCKS))[: len(blocks)].astype(np.int64)
        expected = cache.memory.cpu().clone()
        rows = cache.view_of(expected)
        for target, page in zip(targets.tolist(), pages.tolist(), strict=True):
            data = torch.from_numpy(cache.page(page)[: cache.block_bytes].copy())
            rows[target] = data.view(rows.shape[1:])
        cache.mover.load(0, targets, pages, cache.mover.fence()).wait(20.0)
        assert torch.equal(cache.memory.cpu(), expected)


@pytest.mark.parametrize("way", [CopyWay.FLAT, CopyWay.ROWS, CopyWay.KERNELS])
def test_saves_wait_for_a_slow_forward(make_cache, way):
    """A save after a fence sees what a slow kernel wrote; one without a fence does not wait."""
    rng = np.random.default_rng(SEED)
    cache = make_cache(rng, way=way)
    ids = np.arange(1, 30, dtype=np.int64)
    cache.mover.save(0, ids, ids, None).wait(10.0)
    old = cache.page(5).copy()
    fence = cache.fill_slowly(1_500_000_000, 0x5A)
    early = cache.mover.save(0, ids, ids, None)
    early.wait(10.0)
    assert not fence.reached(), "the slow kernel was not slow enough to show anything"
    assert np.array_equal(cache.page(5), old)
    ticket = cache.mover.save(0, ids, ids, fence)
    assert not ticket.done()
    assert not ticket.fenced()
    ticket.wait(20.0)
    assert fence.reached()
    assert (cache.page(5)[: cache.block_bytes] == 0x5A).all()


@pytest.mark.parametrize("way", [CopyWay.FLAT, CopyWay.ROWS, CopyWay.KERNEL])
def test_loads_wait_for_earlier_writers_of_their_blocks(make_cache, way):
    """A load after a fence overwrites what a slow kernel still writes, never the reverse."""
    rng = np.random.default_rng(SEED)
    cache = make_cache(rng, way=way)
    ids = np.arange(1, 30, dtype=np.int64)
    for page in ids.tolist():
        cache.page(page)[:] = page
    fence = cache.fill_slowly(1_000_000_000, 0x5A)
    ticket = cache.mover.load(0, ids, ids, fence)
    assert not ticket.done()
    ticket.wait(20.0)
    for block in ids.tolist():
        assert (cache.block(block) == block).all()


def test_saves_see_what_a_graph_wrote(make_cache):
    """A fence after the replay of a CUDA graph covers the graph's kernels."""
    rng = np.random.default_rng(SEED)
    cache = make_cache(rng)
    value = torch.zeros(1, dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    cache.memory.copy_(value.expand_as(cache.memory))
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        cache.memory.copy_(value.expand_as(cache.memory))
    ids = np.arange(1, 30, dtype=np.int64)
    for number in (7, 9, 11):
        value.fill_(number)
        torch.cuda._sleep(50_000_000)
        graph.replay()
        cache.mover.save(0, ids, ids, cache.mover.fence()).wait(10.0)
        assert all((cache.page(i)[: cache.block_bytes] == number).all() for i in ids.tolist())


def test_copies_and_pinning_leave_a_capture_alone(driver, make_cache):
    """While the engine captures graphs, other threads may pin memory and copy."""
    rng = np.random.default_rng(SEED)
    cache = make_cache(rng)
    room = Arena(1 << 20, 64, segment_bytes=1 << 24)
    room.start(background=False)
    ids = np.arange(1, 30, dtype=np.int64)
    stop, failures, rounds = threading.Event(), [], []

    def work():
        try:
            while not stop.is_set():
                pinning = Pinning(driver, 1 << 26)
                for page in (0, 16, 32, 48):
                    pinning.on_segment(int(room.addresses([page])[0]), 1 << 24)
                assert pinning.failure is None
                cache.mover.save(0, ids, ids, None).wait(10.0)
                cache.mover.load(0, ids, ids, None).wait(10.0)
                pinning.close()
                rounds.append(1)
        except BaseException as error:  # noqa: BLE001 - handed to the test's thread
            failures.append(error)

    value = torch.ones(1 << 20, device="cuda")
    value.mul_(2).add_(1)
    torch.cuda.synchronize()
    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(30):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(200):
                value.mul_(0.5).add_(1)
        graph.replay()
    stop.set()
    thread.join()
    torch.cuda.synchronize()
    assert failures == []
    assert rounds
    room.close()


def test_both_ways_at_once(make_cache):
    """Loads and saves that run at the same time do not disturb each other."""
    rng = np.random.default_rng(SEED)
    cache = make_cache(rng, regions=16, blocks=129)
    saved, loaded = np.arange(1, 65, dtype=np.int64), np.arange(65, 129, dtype=np.int64)
    failures = []

    def load():
        try:
            for i in range(20):
                for page in loaded.tolist():
                    cache.page(page)[:] = (page + i) % 251
                cache.mover.load(0, loaded, loaded, None).wait(10.0)
                for block in loaded[::7].tolist():
                    assert (cache.block(block) == (block + i) % 251).all()
        except BaseException as error:  # noqa: BLE001 - handed to the test's thread
            failures.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    for _ in range(20):
        for page in saved.tolist():
            cache.page(page)[:] = 0
        cache.mover.save(0, saved, saved, None).wait(10.0)
        for block in saved[::7].tolist():
            assert np.array_equal(cache.page(block), cache.block(block))
    thread.join()
    assert failures == []


def test_copies_while_the_arena_grows(driver):
    """The first pages serve while later segments are still being pinned."""
    rng = np.random.default_rng(SEED)
    cache = Cache(driver, rng, blocks=65)
    total = 24
    pinning = Pinning(driver, total << 28)
    arena = Arena(cache.page_bytes, (total << 28) // cache.page_bytes, segment_bytes=1 << 28,
                  on_segment=pinning.on_segment)  # fmt: skip
    arena.start()
    assert arena.wait_ready(64, 30.0)
    mover = open_cuda_mover({0: cache.table}, arena, driver, pinning, ordinal=0)
    ids = np.arange(1, 65, dtype=np.int64)
    during = 0
    while arena.ready_pages < arena.n_pages and arena.failure is None:
        mover.save(0, ids, ids - 1, None).wait(10.0)
        view = np.frombuffer(arena.buffers([9], cache.page_bytes)[0], np.uint8)
        assert np.array_equal(view, cache.block(10))
        during += 1
    assert arena.failure is None
    assert pinning.failure is None
    assert during > 0
    print("saves while growing:", during)
    last = np.arange(arena.n_pages - 64, arena.n_pages, dtype=np.int64)
    mover.save(0, ids, last, None).wait(10.0)
    assert pinning.reach(arena.addresses(last)) is not None
    torch.cuda.synchronize()
    mover.close()
    pinning.close()
    del view
    arena.close()
    cache.close()


@pytest.mark.parametrize("layout", ["layer", "block"])
def test_pages_that_could_not_be_pinned_work_too(make_cache, layout):
    """Without pinned memory copies are slower and no less exact."""
    rng = np.random.default_rng(SEED)
    cache = make_cache(rng, layout=layout, pin=False, row_bytes=16_384)
    blocks, pages = random_ids(rng)
    cache.mover.save(0, blocks, pages, cache.mover.fence()).wait(20.0)
    data = {block: cache.block(block) for block in blocks.tolist()}
    for block, page in zip(blocks.tolist(), pages.tolist(), strict=True):
        assert np.array_equal(cache.page(page)[: cache.block_bytes], data[block])
    cache.memory.zero_()
    torch.cuda.synchronize()
    cache.mover.load(0, blocks, pages, cache.mover.fence()).wait(20.0)
    for block in blocks.tolist():
        assert np.array_equal(cache.block(block), data[block])


def test_memory_that_cannot_be_pinned_is_said_once(driver, caplog):
    """A refused pin is one warning with the amount and the knob; the arena goes on."""
    pinning = Pinning(driver, 1 << 30)
    for _ in range(2):
        pinning.on_segment(4096, 1 << 20)  # nobody's memory
    assert pinning.failure is not None
    assert caplog.text.count("could be pinned") == 1
    assert "Lower `ram`" in caplog.text


MOVER_SCRIPT = """
    import numpy as np, torch
    from kvtier.connector.cuda_driver import CudaDriver
    from kvtier.connector.cuda_device import open_cuda_mover
    from kvtier.connector.mover import CopyFailed
    from kvtier.connector.mover_cuda import CopyWay
    from kvtier.connector.regions import region_table

    class Nowhere:
        page_bytes = 4096
        def addresses(self, ids):
            return np.asarray(ids, np.uint64) * np.uint64(PAGE)

    class Pinned:
        def reach(self, addresses):
            return addresses
        def close(self):
            pass

    memory = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    table = region_table(0, [(memory.data_ptr(), 4096, 4096)], 256)
    mover = open_cuda_mover({0: table}, Nowhere(), CudaDriver(0), Pinned(), ordinal=0,
                            ways={0: WAY})
    ids = np.arange(1, 9, dtype=np.int64)
    fence = mover.fence()
    ticket = mover.load(0, ids, ids * 3, fence)
    try:
        ticket.wait(10.0)
    except CopyFailed as error:
        print("failed as it should:", error)
    assert mover.poll(ticket.fenced, 10.0)
    try:
        mover.save(0, ids, ids, None).wait(10.0)
    except CopyFailed as error:
        print("no more copies:", error)
    mover.close()
"""


@pytest.mark.parametrize(
    ("way", "page_bytes", "after"),
    [
        # The driver refuses a copy from address 0; the context lives on.
        ("CopyWay.FLAT", 0, 'assert int(memory.add_(1).sum()) == 1 << 20; print("lives on")'),
        # A kernel that reads what is no memory takes the context with it.
        ("CopyWay.KERNEL", 4096, 'assert mover.uses_kernel(0); print("lives on")'),
    ],
)
def test_a_refused_copy_fails_its_ticket(way, page_bytes, after):
    """Whether refused or fatal, a bad copy is a failed ticket, fenced, and the process goes on."""
    script = textwrap.dedent(MOVER_SCRIPT).replace("WAY", way).replace("PAGE", str(page_bytes))
    done = subprocess.run(
        [sys.executable, "-c", script + after],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    for line in ("failed as it should", "no more copies", "lives on"):
        assert line in done.stdout, done.stdout + done.stderr
