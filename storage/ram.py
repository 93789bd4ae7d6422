"""The RAM tier's memory: an arena of equal pages.

The arena is made of segments (anonymous mappings), so that it can grow in the
background while its first pages are in use, and so that a hook can register
each segment with a device. A page never straddles two segments, and every page
starts at a multiple of `ALIGN_BYTES`. Which page holds what is the catalog's
business; the arena only knows addresses.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import threading
from typing import TYPE_CHECKING

import numpy as np

from .errors import AddressError, ConfigError
from .memory_limit import check_memory, memory_limit_bytes
from .tier import ALIGN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import ArrayLike, NDArray

__all__ = ["Arena", "check_memory", "memory_limit_bytes"]

_LOG = logging.getLogger("kvtier.ram")
_MADV_POPULATE_WRITE = 23  # Linux 5.14
# Untouched address space behind a segment. Neighbouring pages are one copy of the device, and
# no copy may reach from what was registered with it at one time into what was at another.
_GAP_BYTES = 2 << 20
_POPULATE_BYTES = 64 << 20  # one call; short, so that close() is prompt
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Arena:
    """Equal pages of host memory.

    Created empty; `start` makes it grow. Thread-safe.

    Attributes:
        page_bytes: length of a page, a multiple of `ALIGN_BYTES`.
        n_pages: pages once fully grown.
        segment_pages: pages in each segment but perhaps the last.
    """

    def __init__(
        self,
        page_bytes: int,
        n_pages: int,
        *,
        segment_bytes: int = 1 << 28,
        prefault: bool = True,
        on_segment: Callable[[int, int], None] | None = None,
    ) -> None:
        """Reserve nothing yet.

        Args:
            page_bytes: length of a page, a multiple of `ALIGN_BYTES`.
            n_pages: how many pages there will be.
            segment_bytes: the most that is mapped at once (at least one page).
            prefault: touch all memory while growing, so that no copy pays page faults.
            on_segment: called with (address, length) after a segment is mapped and before its
                pages are ready, on the thread that grows; an exception from it stops the growth.

        Raises:
            ConfigError: the numbers make no arena.
        """
        if page_bytes <= 0 or page_bytes % ALIGN_BYTES or n_pages <= 0:
            raise ConfigError(
                f"an arena of {n_pages} pages of {page_bytes} bytes: pages must be positive"
                f" multiples of {ALIGN_BYTES} bytes, and at least one"
            )
        self.page_bytes = page_bytes
        self.n_pages = n_pages
        self.segment_pages = min(n_pages, max(1, segment_bytes // page_bytes))
        self._prefault = prefault
        self._on_segment = on_segment
        n_segments = -(-n_pages // self.segment_pages)
        self._bases = np.zeros(n_segments, np.uint64)
        self._views: list[memoryview] = []
        self._maps: list[mmap.mmap] = []
        self._ready_pages = 0
        self._grown = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None
        self.failure: str | None = None  # why growth stopped early

    @property
    def ready_pages(self) -> int:
        """Pages 0 to this are usable; grows to ``n_pages``, never shrinks before `close`."""
        return self._ready_pages

    def start(self, *, background: bool = True) -> None:
        """Grow to the full size, on a thread of its own or before returning."""
        if not background:
            self._grow()
            return
        with self._grown:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._grow, name="kvtier-arena", daemon=True)
                self._thread.start()

    def wait_ready(self, pages: int, timeout_s: float) -> bool:
        """Block until ``pages`` pages are ready; return whether they are."""
        with self._grown:
            self._grown.wait_for(
                lambda: self._ready_pages >= pages or self._closed or self.failure is not None,
                timeout_s,
            )
            return self._ready_pages >= pages

    def buffers(self, page_ids: Sequence[int], used_bytes: int) -> list[memoryview]:
        """Return writable views of the first ``used_bytes`` of each page, in order.

        Pages next to each other in one segment become one view where ``used_bytes`` is the whole
        page. The views stay valid until `close`, and keep the memory mapped while they live.

        Raises:
            AddressError: a page that is not ready, or more bytes than a page has.
        """
        if not 0 < used_bytes <= self.page_bytes:
            raise AddressError(f"{used_bytes} bytes of a page of {self.page_bytes}")
        ready, per_segment = self._ready_pages, self.segment_pages
        result: list[memoryview] = []
        index, n_pages = 0, len(page_ids)
        while index < n_pages:
            page = int(page_ids[index])
            if not 0 <= page < ready:
                raise AddressError(f"page {page} of {ready} ready pages")
            segment, first = divmod(page, per_segment)
            run = 1
            if used_bytes == self.page_bytes:
                room = min(ready - page, per_segment - first, n_pages - index)
                while run < room and page_ids[index + run] == page + run:
                    run += 1
            start = first * self.page_bytes
            result.append(
                self._views[segment][start : start + (run - 1) * self.page_bytes + used_bytes]
            )
            index += run
        return result

    def addresses(self, page_ids: ArrayLike) -> NDArray[np.uint64]:
        """Return the address of each page, as a uint64 array of the same shape.

        Raises:
            AddressError: a page that is not ready.
        """
        pages = np.asarray(page_ids, np.int64)
        if pages.size and not 0 <= int(pages.min()) <= int(pages.max()) < self._ready_pages:
            raise AddressError(f"pages beyond the {self._ready_pages} ready pages")
        segments, first = np.divmod(pages, self.segment_pages)
        return np.asarray(
            self._bases[segments] + first.astype(np.uint64) * np.uint64(self.page_bytes)
        )

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop growing and give the memory back (once the last view is gone). Idempotent."""
        with self._grown:
            self._closed = True
            self._ready_pages = 0
            self._grown.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
        with self._grown:
            self._views.clear()
            self._bases[:] = 0
            maps, self._maps = self._maps, []
        for mapping in maps:
            with contextlib.suppress(BufferError):  # a view is still held; unmapped when it dies
                mapping.close()

    def _grow(self) -> None:
        try:
            for segment in range(len(self._bases)):
                if self._closed or not self._add_segment(segment):
                    return
        except Exception as error:  # noqa: BLE001 - mapping, or the hook of another library
            self.failure = f"{type(error).__name__}: {error}"
            _LOG.warning(
                "RAM tier stays at %d of %d pages: %s", self._ready_pages, self.n_pages, error
            )
        finally:
            with self._grown:
                self._grown.notify_all()

    def _add_segment(self, segment: int) -> bool:
        """Map one segment and make its pages ready; False when closed meanwhile."""
        pages = min(self.segment_pages, self.n_pages - segment * self.segment_pages)
        length = pages * self.page_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        mapping = mmap.mmap(-1, length + _GAP_BYTES, flags=flags)
        address = int(np.frombuffer(mapping, np.uint8).ctypes.data)
        if not self._prepare(address, length):
            return False
        if self._on_segment is not None:
            self._on_segment(address, length)
        with self._grown:
            if self._closed:
                return False
            self._maps.append(mapping)
            self._views.append(memoryview(mapping)[:length])
            self._bases[segment] = address
            self._ready_pages += pages
            self._grown.notify_all()
        return True

    def _prepare(self, address: int, length: int) -> bool:
        """Advise huge pages and touch the memory, both best effort; False when closed meanwhile."""
        # A fork (a compiler that is started) would copy page tables of hundreds of GiB, and
        # could leave a device reading a page that is not the one written to any more.
        _libc.madvise(address, length, mmap.MADV_DONTFORK)
        # mmap.madvise would hold the interpreter lock while the kernel clears the pages.
        _libc.madvise(address, length, mmap.MADV_HUGEPAGE)
        for start in range(0, length if self._prefault else 0, _POPULATE_BYTES):
            if self._closed:
                return False
            part = min(_POPULATE_BYTES, length - start)
            if _libc.madvise(address + start, part, _MADV_POPULATE_WRITE) != 0:
                code = ctypes.get_errno()
                if code == errno.EINVAL:  # an older kernel: pages fault in on first use
                    break
                if code not in (errno.EINTR, errno.EAGAIN):
                    raise MemoryError(os.strerror(code))
        return True
