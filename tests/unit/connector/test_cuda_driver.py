"""How libcuda is called: prototypes, structures and constants, with each generation of it."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvtier.connector import cuda_driver
from kvtier.connector.cuda_driver import ORDER_ANY, ROWS_DTYPE, CudaDriver, DriverError

from .fake_libcuda import FakeLibcuda

STREAM = (1 << 45) + 7
RELAXED = 2


@pytest.fixture(params=["12.8", "13.0"])
def version(request):
    return request.param


@pytest.fixture
def lib(monkeypatch, version):
    return load(monkeypatch, version)


def load(monkeypatch, version):
    fake = FakeLibcuda(version)
    for loader in ("CDLL", "PyDLL"):
        monkeypatch.setattr(cuda_driver.ctypes, loader, lambda name: fake)
    return fake


def on_a_thread(work):
    """Run ``work`` on a thread of its own and return its result."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(work).result()


def copies(rng, n=5, room=64):
    """(destinations, sources, sizes) and the memory that they are addresses in."""
    memory = rng.integers(0, 256, (2, n, room), dtype=np.uint8)
    start = memory.ctypes.data
    places = start + np.arange(2 * n, dtype=np.uint64).reshape(2, n) * np.uint64(room)
    return memory, places[0].copy(), places[1].copy(), rng.integers(1, room, n).astype(np.uint64)


@pytest.mark.parametrize("to_device", [True, False])
def test_a_batch_is_passed_as_the_driver_declares_it(lib, version, to_device):
    """Addresses, sizes, attributes and stream arrive, with the index of failure up to 12.9."""
    rng = np.random.default_rng(5)
    memory, dst, src, size = copies(rng)
    expected = memory.copy()
    for i, count in enumerate(size.tolist()):
        expected[0, i, :count] = memory[1, i, :count]
    CudaDriver(0).copy_batch(dst, src, size, STREAM, to_device=to_device)
    assert np.array_equal(memory, expected)
    name = "cuMemcpyBatchAsync_v2" if version == "13.0" else "cuMemcpyBatchAsync"
    (arguments,) = lib.named(name)
    assert len(arguments) == (8 if version == "13.0" else 9)
    assert arguments[-1] == STREAM
    (attributes,) = lib.attributes
    assert attributes.order == (3 if to_device else 1)
    assert attributes.flags == 1
    assert bytes(attributes)[4:20] == bytes(16)


def test_rows_are_passed_as_the_driver_declares_them(lib):
    """A strided copy is CUDA_MEMCPY3D_BATCH_OP, field by field."""
    rng = np.random.default_rng(6)
    memory = rng.integers(0, 256, 4096, dtype=np.uint8)
    before, start = memory.copy(), memory.ctypes.data
    operations = np.zeros(2, ROWS_DTYPE)
    operations["src_type"] = operations["dst_type"] = 1
    operations["src"], operations["src_pitch"] = [start, start + 1000], 100
    operations["dst"], operations["dst_pitch"] = [start + 2000, start + 3000], 40
    operations["src_rows"] = operations["dst_rows"] = operations["height"] = [3, 4]
    operations["width"], operations["depth"] = 32, 1
    operations["order"], operations["flags"] = ORDER_ANY, 1
    CudaDriver(0).copy_rows(operations, STREAM)
    for first, to, rows in ((0, 2000, 3), (1000, 3000, 4)):
        for row in range(rows):
            there = memory[to + row * 40 : to + row * 40 + 32]
            assert np.array_equal(there, before[first + row * 100 : first + row * 100 + 32])
    assert all((c.order, c.flags, c.dst.op.layer_height) in {(3, 1, 3), (3, 1, 4)}
               for c in lib.attributes)  # fmt: skip
    *_, flags, stream = lib.calls[-1][1]
    assert (flags, stream) == (0, STREAM)


def test_a_driver_without_batches_copies_one_by_one(monkeypatch):
    """Before CUDA 12.8 a batch is as many copies as it has addresses."""
    lib = load(monkeypatch, "12.4")
    driver = CudaDriver(0)
    assert not driver.can_batch
    memory, dst, src, size = copies(np.random.default_rng(7))
    driver.copy_batch(dst, src, size, STREAM, to_device=True)
    assert [a[2:] for a in lib.named("cuMemcpyAsync")] == [(n, STREAM) for n in size.tolist()]
    assert np.array_equal(memory[0, 0, : int(size[0])], memory[1, 0, : int(size[0])])


def test_every_device_has_its_own_context(lib):
    """Each rank's driver works in the primary context of its own device, with its NUMA node."""
    drivers = [CudaDriver(0), CudaDriver(1)]
    contexts = []
    for driver in drivers:
        driver.use()
        contexts.append(lib.context())
    assert contexts == [(1 << 44) + 40, (1 << 44) + 41]
    assert [driver.numa_node() for driver in drivers] == [None, 3]


def test_the_context_is_put_back_where_another_library_changed_it(lib):
    """What else runs on a thread of ours may switch devices between two calls."""
    driver = CudaDriver(1)

    def work():
        driver.use()
        lib.thread.context = 12345
        driver.use()
        return lib.context(), lib.capture_mode()

    assert on_a_thread(work) == ((1 << 44) + 41, RELAXED)


def test_the_engines_thread_stays_as_it_is(lib):
    """Streams and events are made without a trace in the thread that asks for them.

    Captures of CUDA graphs on the engine's thread keep the checks that its mode stands for.
    """
    driver = CudaDriver(1)

    def work():
        lib.thread.context = 12345
        stream = driver.create_stream(urgent=True), driver.create_stream(urgent=False)
        event = driver.create_event()
        driver.record(event, stream[0])
        assert lib.thread.stack == []
        return lib.context(), lib.capture_mode(), stream

    context, mode, streams = on_a_thread(work)
    assert (context, mode) == (12345, 0)
    assert streams == ((1 << 45) + 105, (1 << 45) + 100)
    assert [a[1] for a in lib.named("cuStreamCreateWithPriority")] == [1, 1]  # not blocking


def test_a_failed_stream_leaves_the_thread_as_it_is(lib):
    """An error on the way takes the context off again."""
    driver = CudaDriver(0)
    lib.fail["cuStreamCreateWithPriority"] = 2
    with pytest.raises(DriverError):
        driver.create_stream(urgent=True)
    assert lib.context() is None
    assert lib.thread.stack == []


def test_pinned_memory_is_for_all_contexts_and_for_kernels(lib):
    """Memory is registered portable and mapped, since kernels read and write it too."""
    driver = CudaDriver(0)
    assert driver.pin(1 << 40, 1 << 28) == 1 << 40
    assert lib.named("cuMemHostRegister_v2") == [(1 << 40, 1 << 28, 1 | 2)]
    driver.unpin(1 << 40)
    assert lib.named("cuMemHostUnregister") == [(1 << 40,)]


def test_the_devices_own_address_of_pinned_memory_is_told(lib):
    """Some machines (WSL) let a device reach registered memory by another address alone."""
    lib.alias = 1 << 20
    assert CudaDriver(0).pin(1 << 40, 1 << 28) == (1 << 40) + (1 << 20)


def test_memory_that_the_device_cannot_reach_is_not_pinned(lib):
    """Without an address for the device the registration is undone, and the copies go unpinned."""
    driver = CudaDriver(0)
    lib.fail = {"cuMemHostGetDevicePointer_v2": 1}
    with pytest.raises(DriverError, match="cuMemHostGetDevicePointer"):
        driver.pin(1 << 40, 1 << 28)
    assert lib.named("cuMemHostUnregister") == [(1 << 40,)]


@pytest.mark.parametrize(("code", "answer"), [(0, True), (600, False)])
def test_an_event_that_is_not_reached_is_no_error(lib, code, answer):
    """CUDA_ERROR_NOT_READY is an answer, of events and of streams."""
    driver = CudaDriver(0)
    lib.fail = {"cuEventQuery": code, "cuStreamQuery": code}
    assert driver.reached(1 << 46) is answer
    assert driver.stream_idle(STREAM) is answer
    assert lib.named("cuEventQuery") == [(1 << 46,)]


@pytest.mark.parametrize(
    "call", ["cuEventRecord", "cuEventQuery", "cuStreamWaitEvent", "cuMemcpyAsync"]
)
def test_errors_name_the_call_and_the_code(lib, call):
    """A refusal says which call it was and what the driver calls it."""
    driver = CudaDriver(0)
    one = np.array([1 << 40], np.uint64)
    calls = {
        "cuEventRecord": lambda: driver.record(1, 2),
        "cuEventQuery": lambda: driver.reached(1),
        "cuStreamWaitEvent": lambda: driver.wait_for(1, 2),
        "cuMemcpyAsync": lambda: driver.copy_each(one, one, one, STREAM),
    }
    lib.fail = {call: 700}
    with pytest.raises(DriverError, match=rf"{call}: CUDA_ERROR_700 \(700\)") as caught:
        calls[call]()
    assert caught.value.code == 700


def test_the_structures_have_the_sizes_of_the_header():
    """CUDA_MEMCPY3D_BATCH_OP has 112 bytes, and an item of the descriptors' array as many."""
    from .fake_libcuda import Attributes, RowsCopy

    assert ctypes.sizeof(RowsCopy) == ROWS_DTYPE.itemsize == 112
    assert ctypes.sizeof(Attributes) == 24
