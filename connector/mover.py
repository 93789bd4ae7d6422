"""Copies between device blocks and RAM pages.

A mover is called from worker threads, never from the engine's (`Mover.fence`
alone belongs there), and is thread-safe. Block ``i`` of a call goes to page
``i``; a page holds the block's regions one after another in region order, and
after a save zeros from the end of the block to its padded size.

`HostMover` serves a device whose memory is the host's (vLLM on CPU);
`kvtier.connector.mover_cuda` the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..storage.errors import AddressError, KVTierError
from .copyplan import GroupShape, Rows, Run, check_blocks, find_runs, group_shape
from .regions import RegionTable

Ids = NDArray[np.int64]


class CopyError(KVTierError):
    """A copy did not end well; its destination holds nothing that may be used."""


class CopyFailed(CopyError):
    """The copy failed, now or before it started."""


class CopyTimeout(CopyError):
    """Not done in time. Bytes may still move: release nothing before `CopyTicket.fenced`."""


class Fence(Protocol):
    """A point of the engine's compute stream."""

    def reached(self) -> bool:
        """Tell whether everything launched before the fence has ended. Never blocks."""


class CopyTicket(Protocol):
    """One save or load under way."""

    def done(self) -> bool:
        """Tell whether the copy has ended, well or not (`wait` says which). Never blocks."""

    def wait(self, timeout_s: float) -> None:
        """Return once every byte is in place.

        Raises:
            CopyFailed: it ended badly.
            CopyTimeout: it has not ended after ``timeout_s`` seconds.
        """

    def fenced(self) -> bool:
        """Tell whether no byte of this copy can move any more. Never blocks.

        Whoever gives up on a copy keeps its blocks and pages until this is true.
        """


class Mover(Protocol):
    """Moves whole blocks of one rank."""

    def fence(self) -> Fence:
        """Mark this point of the calling thread's compute stream. Never blocks."""

    def save(
        self, group: int, block_ids: Ids, page_ids: Ids, after: Fence | None = None
    ) -> CopyTicket:
        """Copy device blocks to RAM pages, after what ``after`` marks.

        Args:
            group: engine id of the KV cache group.
            block_ids: (n,) int64, read before the call returns.
            page_ids: (n,) int64, likewise; distinct.
            after: None if the blocks are known to be written.

        Raises:
            AddressError: ids out of range; nothing was copied.
        """

    def load(
        self, group: int, block_ids: Ids, page_ids: Ids, after: Fence | None = None
    ) -> CopyTicket:
        """Copy RAM pages to device blocks; arguments and errors as for `save`."""

    def close(self) -> None:
        """Wait for what is under way (bounded) and give back streams. Idempotent."""


class PageAddresses(Protocol):
    """Where RAM pages are; `kvtier.storage.ram.Arena` is one."""

    @property
    def page_bytes(self) -> int:
        """Size of a page, a multiple of 4096."""

    def addresses(self, page_ids: Ids) -> NDArray[np.uint64]:
        """Return the address of each page; raises AddressError for pages that are not there."""


class HostFence:
    """The forward of a host device has ended when it returns."""

    def reached(self) -> bool:
        """Tell that it has."""
        return True


class EndedTicket:
    """A copy that ended before its call returned."""

    def __init__(self, error: CopyFailed | None = None) -> None:
        self._error = error

    def done(self) -> bool:
        """See `CopyTicket.done`."""
        return True

    def wait(self, timeout_s: float = 0.0) -> None:  # noqa: ARG002 - it has ended
        """See `CopyTicket.wait`."""
        if self._error is not None:
            raise self._error

    def fenced(self) -> bool:
        """See `CopyTicket.fenced`."""
        return True


class HostMover:
    """Copies between KV cache in host memory and RAM pages, in the calling thread.

    The engine's Python thread is busy, and taking the interpreter lock back
    from a busy thread costs up to `sys.getswitchinterval` (5 ms): each call
    releases the lock for all its bytes once, whatever the blocks are
    (docs/decisions/host-copies.md). Speed is that of one thread's memcpy.
    """

    def __init__(self, tables: Mapping[int, RegionTable], pages: PageAddresses) -> None:
        self._shapes = {group: group_shape(table) for group, table in tables.items()}
        self._pages = pages
        self._closed = False
        check_page_room(self._shapes, pages)
        self._parts = {
            group: [_Part(part, shape, pages.page_bytes) for part in shape.parts]
            for group, shape in self._shapes.items()
        }

    def fence(self) -> Fence:
        """See `Mover.fence`."""
        return HostFence()

    def save(
        self,
        group: int,
        block_ids: Ids,
        page_ids: Ids,
        after: Fence | None = None,  # noqa: ARG002 - see HostFence
    ) -> CopyTicket:
        """See `Mover.save`. Returns after the last byte."""
        return self._copy(group, block_ids, page_ids, to_page=True)

    def load(
        self,
        group: int,
        block_ids: Ids,
        page_ids: Ids,
        after: Fence | None = None,  # noqa: ARG002 - see HostFence
    ) -> CopyTicket:
        """See `Mover.load`. Returns after the last byte."""
        return self._copy(group, block_ids, page_ids, to_page=False)

    def close(self) -> None:
        """See `Mover.close`."""
        self._closed = True

    def _copy(self, group: int, block_ids: Ids, page_ids: Ids, *, to_page: bool) -> CopyTicket:
        shape = shape_of(self._shapes, group)
        n = check_blocks(block_ids, page_ids, shape.num_blocks)
        if self._closed:
            return EndedTicket(CopyFailed("the mover is closed"))
        if n == 0:
            return EndedTicket()
        addresses = self._pages.addresses(page_ids)
        batch = _Batch(self._pages.page_bytes)
        for run in find_runs(block_ids, addresses, self._pages.page_bytes):
            page = int(addresses[run.first])
            batch.add(self._parts[group], run, int(block_ids[run.first]), page, to_page)
            if to_page:
                batch.zero(shape, run, page)
        batch.copy()
        return EndedTicket()


def shape_of(shapes: Mapping[int, GroupShape], group: int) -> GroupShape:
    """Return a group's shape.

    Raises:
        AddressError: not a group that is kept.
    """
    try:
        return shapes[group]
    except KeyError:
        raise AddressError(f"KV cache group {group} is not kept, only {sorted(shapes)}") from None


def check_page_room(shapes: Mapping[int, GroupShape], pages: PageAddresses) -> None:
    """Check that a page has room for a block of any group.

    Raises:
        AddressError: it has not.
    """
    for group, shape in shapes.items():
        if shape.padded_bytes > pages.page_bytes:
            raise AddressError(
                f"a block of KV cache group {group} takes {shape.padded_bytes} bytes, "
                f"a RAM page has {pages.page_bytes}"
            )


class _Memory:
    """Bytes at an address, shown to NumPy through the array interface."""

    __slots__ = ("__array_interface__",)

    def __init__(
        self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], kind: str
    ) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": shape,
            "strides": strides,
            "typestr": kind,
        }


# torch copies a tensor of at least 32,768 elements with its thread pool, which
# belongs to the engine: pieces stay below that, in the widest elements.
_PIECE_ELEMENTS = 32_767
_ELEMENTS = ((16, "<c16"), (8, "<u8"), (1, "|u1"))
_ZEROS = np.zeros(4096, np.uint8)


class _Part:
    """One `Rows` of a group as an array over all blocks, in the widest elements that fit."""

    def __init__(self, part: Rows, shape: GroupShape, page_bytes: int) -> None:
        self.offset_bytes = part.page_offset_bytes
        alignment = (
            part.base | part.stride_bytes | part.pitch_bytes
            | part.length_bytes | part.page_offset_bytes
        )  # fmt: skip
        width, self._kind = next(e for e in _ELEMENTS if alignment % e[0] == 0)
        self._form = (part.rows, part.length_bytes // width)
        self._page_strides = (page_bytes, part.length_bytes, width)
        strides = (part.stride_bytes, part.pitch_bytes, width)
        memory = _Memory(part.base, (shape.num_blocks, *self._form), strides, self._kind)
        self.blocks = np.asarray(memory)

    def pages(self, address: int, count: int) -> NDArray[Any]:
        """Return this part of ``count`` neighbouring pages."""
        memory = _Memory(
            address + self.offset_bytes, (count, *self._form), self._page_strides, self._kind
        )
        return np.asarray(memory)


class _Batch:
    """(destination, source) array pairs of one call."""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._pairs: list[tuple[NDArray[Any], NDArray[Any]]] = []
        self._zeroed: list[tuple[NDArray[Any], NDArray[Any]]] = []

    def add(self, parts: list[_Part], run: Run, block: int, page: int, to_page: bool) -> None:
        for part in parts:
            here, there = part.pages(page, run.count), part.blocks[block : block + run.count]
            self._pairs.append((here, there) if to_page else (there, here))

    def zero(self, shape: GroupShape, run: Run, page: int) -> None:
        padding = shape.padded_bytes - shape.block_bytes
        if padding:
            strides = (self._page_bytes, 1)
            memory = _Memory(page + shape.block_bytes, (run.count, padding), strides, "|u1")
            self._zeroed.append((np.asarray(memory), _ZEROS[:padding]))

    def copy(self) -> None:
        for destination, source in self._zeroed:
            np.copyto(destination, source)
        copy_many = _copy_many() if len(self._pairs) > 1 else None
        if copy_many is None:
            for destination, source in self._pairs:
                np.copyto(destination, source)
        else:
            copy_many(self._pairs)


@cache
def _copy_many() -> Callable[[list[tuple[NDArray[Any], NDArray[Any]]]], None] | None:
    """Return a function that copies all pairs and releases the interpreter lock once."""
    try:
        import torch  # noqa: PLC0415 - heavy, and not needed by whoever only has one pair
    except ImportError:
        return None
    from_numpy, foreach_copy = torch.from_numpy, torch._foreach_copy_

    def copy_many(pairs: list[tuple[NDArray[Any], NDArray[Any]]]) -> None:
        destinations, sources = [], []
        for destination, source in pairs:
            for index in _pieces(destination.shape):
                destinations.append(from_numpy(destination[index]))
                sources.append(from_numpy(source[index]))
        foreach_copy(destinations, sources)

    return copy_many


@lru_cache(maxsize=64)
def _pieces(shape: tuple[int, ...]) -> tuple[tuple[Any, ...], ...]:
    """Cut (blocks, rows, elements) into indices of at most `_PIECE_ELEMENTS` elements."""
    blocks, rows, width = shape
    if width > _PIECE_ELEMENTS:
        cuts = range(0, width, _PIECE_ELEMENTS)
        return tuple(
            (b, r, slice(c, c + _PIECE_ELEMENTS))
            for b in range(blocks) for r in range(rows) for c in cuts
        )  # fmt: skip
    step = max(1, _PIECE_ELEMENTS // width)
    return tuple((b, slice(r, r + step)) for b in range(blocks) for r in range(0, rows, step))
