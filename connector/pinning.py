"""Page-locks the RAM arena for the device, one segment at a time.

`Pinning.on_segment` is the arena's hook: it runs on the thread that grows the
arena, so the first pages are in use long before hundreds of GiB are pinned.
Segments come with huge pages advised (the arena does that). Where the device
hangs off one of several NUMA nodes, the growing thread prefers that node's
memory from the first segment on, and the first segment is moved there.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import threading

import numpy as np
from numpy.typing import NDArray

from .cuda_driver import Driver, DriverError

logger = logging.getLogger("kvtier.pinning")

_MPOL_PREFERRED = 1
_MPOL_MF_MOVE = 2
_MAX_NODES = 1024
_SYSCALLS = {  # (mbind, set_mempolicy)
    "x86_64": (237, 238),
    "aarch64": (235, 237),
}


class Pinning:
    """Which memory is pinned; thread-safe.

    Args:
        driver: the device's.
        total_bytes: the arena's full size, for messages.
    """

    def __init__(self, driver: Driver, total_bytes: int) -> None:
        self._driver = driver
        self._total_bytes = total_bytes
        self._lock = threading.Lock()
        self._segments: dict[int, tuple[int, int]] = {}  # address: length, device's address
        self._starts = np.empty(0, np.uint64)
        self._ends = np.empty(0, np.uint64)
        self._shifts = np.empty(0, np.uint64)  # modulo 2**64, as the additions are
        self._placed = False
        self._closed = threading.Event()
        self.pinned_bytes = 0
        self.failure: str | None = None  # why some memory is not pinned

    def on_segment(self, address: int, length_bytes: int) -> None:
        """Pin a segment; blocks for as long as the kernel needs. Never raises.

        After the first failure no more is tried: the limit that was hit stays. Nor after
        `close`, though the arena may still be growing.
        """
        if self._closed.is_set():
            return
        if not self._placed:
            self._placed = True
            node = self._driver.numa_node()
            if node is not None:
                prefer_numa_node(node, address, length_bytes)
        if self.failure is not None:
            return
        try:
            reached = self._driver.pin(address, length_bytes)
        except DriverError as error:
            self.failure = str(error)
            logger.warning(
                "RAM tier: only %.1f of %.1f GiB of host memory could be pinned (%s); copies to "
                "the rest are several times slower. Lower `ram`, or raise the limit on locked "
                "memory (ulimit -l, or the container's memlock and memory limits).",
                self.pinned_bytes / 2**30,
                self._total_bytes / 2**30,
                error,
            )
            return
        with self._lock:
            if not self._closed.is_set():
                self._segments[address] = length_bytes, reached
                rows = [(a, a + n, (r - a) % 2**64) for a, (n, r) in sorted(self._segments.items())]
                self._starts, self._ends, self._shifts = np.array(rows, np.uint64).T
                self.pinned_bytes += length_bytes
                return
        self._unpin(address)  # closed meanwhile: memory that is freed pinned stays in use

    def reach(self, addresses: NDArray[np.uint64]) -> NDArray[np.uint64] | None:
        """Return the device's addresses of these pages, None if they are not all pinned.

        Pages never straddle segments. All (n,) uint64.
        """
        with self._lock:
            starts, ends, shifts = self._starts, self._ends, self._shifts
        if not len(starts):
            return None if len(addresses) else addresses
        segment = np.searchsorted(starts, addresses, side="right") - 1
        if (segment < 0).any() or (addresses >= ends[segment]).any():
            return None
        return np.asarray(addresses + shifts[segment])

    def close(self) -> None:
        """Unpin everything; before the arena is closed, after the last copy. Idempotent."""
        with self._lock:
            self._closed.set()
            segments, self._segments = self._segments, {}
            self._starts = self._ends = self._shifts = np.empty(0, np.uint64)
            self.pinned_bytes = 0
        for address in segments:
            self._unpin(address)

    def _unpin(self, address: int) -> None:
        try:
            self._driver.unpin(address)
        except DriverError as error:
            logger.debug("unpinning failed: %s", error)


def prefer_numa_node(node: int, address: int, length_bytes: int) -> bool:
    """Let the calling thread's new memory, and this memory, lie on a NUMA node; best effort.

    Raw system calls, since libnuma is rarely installed. Other threads are not touched.

    Returns:
        whether the kernel agreed (False too where there is only one node).
    """
    numbers = _SYSCALLS.get(platform.machine())
    if numbers is None or not os.path.exists("/sys/devices/system/node/node1"):
        return False
    mbind, set_mempolicy = numbers
    mask = (ctypes.c_ulong * (_MAX_NODES // 64))()
    mask[node // 64] = 1 << (node % 64)
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    thread = syscall(ctypes.c_long(set_mempolicy), ctypes.c_long(_MPOL_PREFERRED), mask,
                     ctypes.c_ulong(_MAX_NODES))  # fmt: skip
    memory = syscall(
        ctypes.c_long(mbind), ctypes.c_void_p(address), ctypes.c_ulong(length_bytes),
        ctypes.c_long(_MPOL_PREFERRED), mask, ctypes.c_ulong(_MAX_NODES),
        ctypes.c_ulong(_MPOL_MF_MOVE),
    )  # fmt: skip
    return bool(thread == 0 and memory == 0)
