"""A libcuda of Python functions behind C prototypes, as cuda.h declares them.

A call with arguments of the wrong kind, or too few, fails in ctypes; one with too
many puts a wrong value where the stream belongs. Copies are done at once.
"""

from __future__ import annotations

import ctypes
import threading

I32, U32, U64, SIZE, PTR = (
    ctypes.c_int, ctypes.c_uint, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p,
)  # fmt: skip

_BATCH = (PTR, PTR, PTR, SIZE, PTR, PTR, SIZE)
PROTOTYPES = {
    "cuInit": (U32,),
    "cuDeviceGet": (PTR, I32),
    "cuDeviceGetAttribute": (PTR, I32, I32),
    "cuDevicePrimaryCtxRetain": (PTR, I32),
    "cuCtxSetCurrent": (PTR,),
    "cuCtxPushCurrent_v2": (PTR,),
    "cuCtxPopCurrent_v2": (PTR,),
    "cuCtxGetStreamPriorityRange": (PTR, PTR),
    "cuThreadExchangeStreamCaptureMode": (PTR,),
    "cuStreamCreateWithPriority": (PTR, U32, I32),
    "cuStreamDestroy_v2": (PTR,),
    "cuStreamQuery": (PTR,),
    "cuStreamWaitEvent": (PTR, PTR, U32),
    "cuEventCreate": (PTR, U32),
    "cuEventDestroy_v2": (PTR,),
    "cuEventRecord": (PTR, PTR),
    "cuEventQuery": (PTR,),
    "cuMemcpyAsync": (U64, U64, SIZE, PTR),
    "cuMemHostRegister_v2": (PTR, SIZE, U32),
    "cuMemHostUnregister": (PTR,),
    "cuMemHostGetDevicePointer_v2": (PTR, PTR, U32),
    "cuGetErrorName": (I32, PTR),
}
BATCHES = {  # the oldest driver that has them, and what it adds
    "12.8": {
        "cuMemcpyBatchAsync": (*_BATCH, PTR, PTR),
        "cuMemcpy3DBatchAsync": (SIZE, PTR, PTR, ctypes.c_ulonglong, PTR),
    },
    "13.0": {
        "cuMemcpyBatchAsync_v2": (*_BATCH, PTR),
        "cuMemcpy3DBatchAsync_v2": (SIZE, PTR, ctypes.c_ulonglong, PTR),
    },
}


class Location(ctypes.Structure):
    _fields_ = (("type", I32), ("id", I32))


class Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (("order", I32), ("source", Location), ("destination", Location), ("flags", U32))


class Pointer(ctypes.Structure):
    _fields_ = (("ptr", U64), ("row_length", SIZE), ("layer_height", SIZE), ("hint", Location))


class Operand(ctypes.Structure):
    """CUmemcpy3DOperand; its other member, an array, is as large."""

    _fields_ = (("type", I32), ("op", Pointer))


class Extent(ctypes.Structure):
    _fields_ = (("width", SIZE), ("height", SIZE), ("depth", SIZE))


class RowsCopy(ctypes.Structure):
    """CUDA_MEMCPY3D_BATCH_OP."""

    _fields_ = (
        ("src", Operand), ("dst", Operand), ("extent", Extent), ("order", I32), ("flags", U32),
    )  # fmt: skip


class FakeLibcuda:
    """What `CDLL` and `PyDLL` are to return."""

    def __init__(self, version: str) -> None:
        self.calls = []  # (name, arguments)
        self.fail = {}  # name -> code
        self.thread = threading.local()  # .context, .capture_mode, .stack
        self.attributes = []
        self.alias = 0  # from host addresses to those that the device has for them
        self._functions = {}
        known = dict(PROTOTYPES)
        for first, functions in BATCHES.items():
            if version >= first:
                known.update(functions)
        for name, arguments in known.items():
            prototype = ctypes.CFUNCTYPE(I32, *arguments)
            self._functions[name] = prototype(self._wrap(name))

    def __getattr__(self, name):
        try:
            return self.__dict__["_functions"][name]
        except KeyError:
            raise AttributeError(name) from None

    def named(self, name):
        """Arguments of each call of a function."""
        return [arguments for called, arguments in self.calls if called == name]

    def context(self):
        return getattr(self.thread, "context", None)

    def capture_mode(self):
        return getattr(self.thread, "capture_mode", 0)

    def _wrap(self, name):
        work = getattr(self, "_" + name.removesuffix("_v2"), None)

        def call(*arguments):
            self.calls.append((name, arguments))
            if name in self.fail:
                return self.fail[name]
            return (work(*arguments) if work else None) or 0

        return call

    @staticmethod
    def _put(kind, address, value):
        kind.from_address(address).value = value

    def _cuDeviceGet(self, out, ordinal):  # noqa: N802 - the driver's names
        self._put(I32, out, 40 + ordinal)

    def _cuDeviceGetAttribute(self, out, attribute, device):  # noqa: N802
        self._put(I32, out, 3 if (attribute, device) == (134, 41) else -1)

    def _cuDevicePrimaryCtxRetain(self, out, device):  # noqa: N802
        self._put(PTR, out, (1 << 44) + device)

    def _cuCtxSetCurrent(self, context):  # noqa: N802
        self.thread.context = context

    def _cuCtxPushCurrent(self, context):  # noqa: N802
        self.thread.stack = [*getattr(self.thread, "stack", []), self.context()]
        self.thread.context = context

    def _cuCtxPopCurrent(self, out):  # noqa: N802
        self._put(PTR, out, self.context())
        self.thread.context = self.thread.stack.pop()

    def _cuThreadExchangeStreamCaptureMode(self, mode):  # noqa: N802
        old = self.capture_mode()
        self.thread.capture_mode = I32.from_address(mode).value
        self._put(I32, mode, old)

    def _cuCtxGetStreamPriorityRange(self, least, greatest):  # noqa: N802
        self._put(I32, least, 0)
        self._put(I32, greatest, -5)

    def _cuStreamCreateWithPriority(self, out, flags, priority):  # noqa: N802
        assert self.context() is not None
        self._put(PTR, out, (1 << 45) + 100 - priority)

    def _cuMemHostGetDevicePointer(self, out, address, flags):  # noqa: N802
        assert flags == 0
        self._put(U64, out, address + self.alias)

    def _cuEventCreate(self, out, flags):  # noqa: N802
        assert self.context() is not None
        self._put(PTR, out, 1 << 46)

    def _cuGetErrorName(self, code, out):  # noqa: N802
        self.name = ctypes.create_string_buffer(f"CUDA_ERROR_{code}".encode())
        self._put(PTR, out, ctypes.addressof(self.name))

    def _cuMemcpyAsync(self, dst, src, count, stream):  # noqa: N802
        ctypes.memmove(dst, src, count)

    def _cuMemcpyBatchAsync(  # noqa: N802
        self, dst, src, size, count, attributes, indices, n_attributes, *rest
    ):
        assert n_attributes == 1
        assert SIZE.from_address(indices).value == 0
        self.attributes.append(Attributes.from_buffer_copy(ctypes.string_at(attributes, 24)))
        for i in range(count):
            at = 8 * i
            ctypes.memmove(
                U64.from_address(dst + at).value,
                U64.from_address(src + at).value,
                SIZE.from_address(size + at).value,
            )

    def _cuMemcpy3DBatchAsync(self, count, operations, *rest):  # noqa: N802
        for copy in (RowsCopy * count).from_address(operations):
            assert (copy.src.type, copy.dst.type, copy.extent.depth) == (1, 1, 1)
            self.attributes.append(RowsCopy.from_buffer_copy(copy))
            for row in range(copy.extent.height):
                ctypes.memmove(
                    copy.dst.op.ptr + row * copy.dst.op.row_length,
                    copy.src.op.ptr + row * copy.src.op.row_length,
                    copy.extent.width,
                )
