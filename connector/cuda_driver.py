"""The few calls of the CUDA driver that copies need, straight from libcuda.

Arrays of addresses go to the driver as they are: a call for thousands of copies
takes no Python object for any of them. Calls that can take long release the
interpreter lock; those of about a microsecond keep it, because taking it back
from a busy engine thread can cost 5 ms (`sys.getswitchinterval`).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Addresses = NDArray[np.uint64]

ROWS_DTYPE = np.dtype(
    {
        # CUDA_MEMCPY3D_BATCH_OP of cuda.h, for two pointer operands.
        "names": [
            "src_type", "src", "src_pitch", "src_rows",
            "dst_type", "dst", "dst_pitch", "dst_rows",
            "width", "height", "depth", "order", "flags",
        ],
        "formats": [
            "<u4", "<u8", "<u8", "<u8", "<u4", "<u8", "<u8", "<u8",
            "<u8", "<u8", "<u8", "<u4", "<u4",
        ],
        "offsets": [0, 8, 16, 24, 40, 48, 56, 64, 80, 88, 96, 104, 108],
        "itemsize": 112,
    }
)  # fmt: skip

ORDER_STREAM, ORDER_ANY = 1, 3  # CU_MEMCPY_SRC_ACCESS_ORDER_*
OVERLAP_COMPUTE = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
POINTER_OPERAND = 1  # CU_MEMCPY_OPERAND_TYPE_POINTER

_SUCCESS, _NOT_READY = 0, 600
_STREAM_NON_BLOCKING = 1
_EVENT_DISABLE_TIMING = 2
_HOST_REGISTER_PORTABLE, _HOST_REGISTER_MAPPED = 1, 2
_ATTRIBUTE_HOST_NUMA_ID = 134
_CAPTURE_MODE_RELAXED = 2


class DriverError(Exception):
    """The driver refused a call, or reports the failure of an earlier one."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name} ({code})")
        self.call = call
        self.code = code


class Driver(Protocol):
    """What the mover and the pinned arena need of a device; streams and events are handles."""

    def use(self) -> None:
        """Make the device's context current in the calling thread, one of ours.

        Each time: other libraries switch devices too. Afterwards the thread's calls are
        allowed while another captures a CUDA graph (otherwise they fail, and the capture
        with them). Not for the engine's thread, whose own captures would go unchecked.
        """

    def create_stream(self, *, urgent: bool) -> int:
        """Return a new stream, of the highest or the lowest priority. On any thread."""

    def destroy_stream(self, stream: int) -> None:
        """Destroy a stream that is idle."""

    def stream_idle(self, stream: int) -> bool:
        """Tell whether all work of a stream has ended."""

    def create_event(self) -> int:
        """Return a new event. On any thread."""

    def destroy_event(self, event: int) -> None:
        """Destroy an event."""

    def record(self, event: int, stream: int) -> None:
        """Let ``event`` mark the end of what ``stream`` was given so far."""

    def reached(self, event: int) -> bool:
        """Tell whether ``event`` has been reached (also if it was never recorded)."""

    def wait_for(self, stream: int, event: int) -> None:
        """Hold all further work of ``stream`` until ``event`` is reached."""

    def copy_batch(
        self, dst: Addresses, src: Addresses, size: Addresses, stream: int, *, to_device: bool
    ) -> None:
        """Queue copies of (n,) addresses and byte counts, read before the call returns.

        In no order among themselves, in order with the rest of the stream.
        """

    def copy_rows(self, operations: NDArray[np.void], stream: int) -> None:
        """Queue strided copies (`ROWS_DTYPE`), ordered as in `copy_batch`."""

    def copy_each(self, dst: Addresses, src: Addresses, size: Addresses, stream: int) -> None:
        """Queue copies one by one; the way for host memory that is not pinned. May block."""

    def pin(self, address: int, length_bytes: int) -> int:
        """Page-lock host memory for copies. Blocks for as long as the kernel needs.

        Returns:
            the address by which the device reaches it; the host's own on most machines,
            but not where `CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM`
            is 0 (WSL). A batch or a kernel that is given the host's there ends the context.
        """

    def unpin(self, address: int) -> None:
        """Undo `pin`."""

    def numa_node(self) -> int | None:
        """Return the host's NUMA node next to the device, None if there is only one."""


class CudaDriver:
    """`Driver` over libcuda for one device, in its primary context (torch's own).

    Raises:
        OSError: no CUDA driver on this machine.
        DriverError: the device cannot be used.
    """

    def __init__(self, ordinal: int) -> None:
        self._slow = ctypes.CDLL("libcuda.so.1")
        self._quick = ctypes.PyDLL("libcuda.so.1")
        self._local = threading.local()
        self._call("cuInit", 0)
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        self._device = device.value
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self._context = context
        self._attributes = {
            order: np.array([order, 0, 0, 0, 0, OVERLAP_COMPUTE], np.uint32)
            for order in (ORDER_STREAM, ORDER_ANY)
        }
        self._first = np.zeros(1, np.uint64)
        self._batch = self._find_batch("cuMemcpyBatchAsync")
        self._batch_rows = self._find_batch("cuMemcpy3DBatchAsync")

    @property
    def can_batch(self) -> bool:
        """Whether the driver has batched copies (12.8 and later)."""
        return self._batch is not None

    def use(self) -> None:
        """See `Driver.use`."""
        self._check("cuCtxSetCurrent", self._quick.cuCtxSetCurrent(self._context))
        if not getattr(self._local, "relaxed", False):
            mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
            self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
            self._local.relaxed = True

    def create_stream(self, *, urgent: bool) -> int:
        """See `Driver.create_stream`."""
        lowest, highest = ctypes.c_int(), ctypes.c_int()
        stream = ctypes.c_void_p()
        with self._context_for_a_moment():
            self._call("cuCtxGetStreamPriorityRange", ctypes.byref(lowest), ctypes.byref(highest))
            priority = (highest if urgent else lowest).value
            self._call(
                "cuStreamCreateWithPriority", ctypes.byref(stream), _STREAM_NON_BLOCKING, priority
            )
        return int(stream.value or 0)

    def destroy_stream(self, stream: int) -> None:
        """See `Driver.destroy_stream`."""
        self._call("cuStreamDestroy_v2", ctypes.c_void_p(stream))

    def stream_idle(self, stream: int) -> bool:
        """See `Driver.stream_idle`."""
        return self._ready("cuStreamQuery", stream)

    def create_event(self) -> int:
        """See `Driver.create_event`."""
        event = ctypes.c_void_p()
        with self._context_for_a_moment():
            self._call("cuEventCreate", ctypes.byref(event), _EVENT_DISABLE_TIMING)
        return int(event.value or 0)

    def destroy_event(self, event: int) -> None:
        """See `Driver.destroy_event`."""
        self._call("cuEventDestroy_v2", ctypes.c_void_p(event))

    def record(self, event: int, stream: int) -> None:
        """See `Driver.record`."""
        code = self._quick.cuEventRecord(ctypes.c_void_p(event), ctypes.c_void_p(stream))
        self._check("cuEventRecord", code)

    def reached(self, event: int) -> bool:
        """See `Driver.reached`."""
        return self._ready("cuEventQuery", event)

    def wait_for(self, stream: int, event: int) -> None:
        """See `Driver.wait_for`."""
        code = self._quick.cuStreamWaitEvent(ctypes.c_void_p(stream), ctypes.c_void_p(event), 0)
        self._check("cuStreamWaitEvent", code)

    def copy_batch(
        self, dst: Addresses, src: Addresses, size: Addresses, stream: int, *, to_device: bool
    ) -> None:
        """See `Driver.copy_batch`; one by one where the driver has no batches."""
        if self._batch is None:
            self.copy_each(dst, src, size, stream)
            return
        assert len(dst) == len(src) == len(size)
        # A page that is loaded was written before the call; device blocks are
        # written by kernels that the stream waits for.
        attributes = self._attributes[ORDER_ANY if to_device else ORDER_STREAM]
        function, has_fail_index = self._batch
        unused = (ctypes.byref(ctypes.c_size_t()),) if has_fail_index else ()
        code = function(
            _pointer(dst), _pointer(src), _pointer(size), ctypes.c_size_t(len(dst)),
            _pointer(attributes), _pointer(self._first), ctypes.c_size_t(1),
            *unused, ctypes.c_void_p(stream),
        )  # fmt: skip
        self._check("cuMemcpyBatchAsync", code)

    def copy_rows(self, operations: NDArray[np.void], stream: int) -> None:
        """See `Driver.copy_rows`."""
        assert operations.dtype == ROWS_DTYPE
        assert self._batch_rows is not None
        function, has_fail_index = self._batch_rows
        unused = (ctypes.byref(ctypes.c_size_t()),) if has_fail_index else ()
        code = function(
            ctypes.c_size_t(len(operations)), _pointer(operations),
            *unused, ctypes.c_ulonglong(0), ctypes.c_void_p(stream),
        )  # fmt: skip
        self._check("cuMemcpy3DBatchAsync", code)

    def copy_each(self, dst: Addresses, src: Addresses, size: Addresses, stream: int) -> None:
        """See `Driver.copy_each`."""
        copy, handle = self._slow.cuMemcpyAsync, ctypes.c_void_p(stream)
        for to, start, count in zip(dst.tolist(), src.tolist(), size.tolist(), strict=True):
            code = copy(ctypes.c_uint64(to), ctypes.c_uint64(start), ctypes.c_size_t(count), handle)
            self._check("cuMemcpyAsync", code)

    def pin(self, address: int, length_bytes: int) -> int:
        """See `Driver.pin`."""
        self.use()
        self._call(
            "cuMemHostRegister_v2",
            ctypes.c_void_p(address),
            ctypes.c_size_t(length_bytes),
            _HOST_REGISTER_PORTABLE | _HOST_REGISTER_MAPPED,
        )
        reached = ctypes.c_uint64()
        try:
            self._call(
                "cuMemHostGetDevicePointer_v2", ctypes.byref(reached), ctypes.c_void_p(address), 0
            )
        except DriverError:
            self.unpin(address)
            raise
        return reached.value

    def unpin(self, address: int) -> None:
        """See `Driver.unpin`."""
        self.use()
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def numa_node(self) -> int | None:
        """See `Driver.numa_node`."""
        node = ctypes.c_int()
        code = self._slow.cuDeviceGetAttribute(
            ctypes.byref(node), _ATTRIBUTE_HOST_NUMA_ID, self._device
        )
        if code == _SUCCESS and node.value >= 0:
            return node.value
        return None

    @contextmanager
    def _context_for_a_moment(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _find_batch(self, name: str) -> tuple[Any, bool] | None:
        """Return (function, whether it takes an index of failure); CUDA 13 dropped that one."""
        for suffix, has_fail_index in (("_v2", False), ("", True)):
            function = getattr(self._slow, name + suffix, None)
            if function is not None:
                return function, has_fail_index
        return None

    def _ready(self, call: str, handle: int) -> bool:
        code = getattr(self._quick, call)(ctypes.c_void_p(handle))
        if code == _NOT_READY:
            return False
        self._check(call, code)
        return True

    def _call(self, name: str, *args: Any) -> None:
        self._check(name, getattr(self._slow, name)(*args))

    def _check(self, call: str, code: int) -> None:
        if code == _SUCCESS:
            return
        name = ctypes.c_char_p()
        self._slow.cuGetErrorName(code, ctypes.byref(name))
        raise DriverError(call, code, (name.value or b"unknown error").decode())


def _pointer(array: NDArray[Any]) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)
