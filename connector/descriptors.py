"""Addresses of the copies of one call, as the arrays that the driver reads.

One copy a region and block is what any layout needs (`flat_batches`); where a
block is rows at equal distances, one strided copy is enough for it
(`row_batches`), and where a block is one range that fills its page, one copy is
enough for a run of neighbours. NumPy only; nothing here is per copy in Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .copyplan import GroupShape, find_runs
from .cuda_driver import OVERLAP_COMPUTE, POINTER_OPERAND, ROWS_DTYPE

if TYPE_CHECKING:
    from .regions import RegionTable

Addresses = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Flat:
    """Copies of ``size[i]`` bytes between ``device[i]`` and ``host[i]``, all (n,) uint64."""

    device: Addresses
    host: Addresses
    size: Addresses


class Scratch:
    """Arrays that one direction's descriptors are built in, used again for each batch."""

    def __init__(self, copies: int) -> None:
        self.copies = copies
        self.device = np.empty(copies, np.uint64)
        self.host = np.empty(copies, np.uint64)
        self.operations = np.zeros(copies, ROWS_DTYPE)


class GroupDescriptors:
    """Builds the descriptors of one group's copies."""

    def __init__(self, table: RegionTable, shape: GroupShape, page_bytes: int) -> None:
        self.shape = shape
        self._base = table.base.astype(np.uint64)
        self._stride = table.stride.astype(np.uint64)
        self._length = table.length.astype(np.uint64)
        self._offset = np.cumsum(self._length, dtype=np.uint64) - self._length
        self._one_stride = bool((self._stride == self._stride[0]).all())
        self._page_bytes = page_bytes
        self._sizes = np.empty(0, np.uint64)
        part = shape.parts[0]
        self._is_page_run = (
            len(table.base) == 1 and part.stride_bytes == part.length_bytes == page_bytes
        )

    @property
    def ranges(self) -> int:
        """Copies of one block."""
        return len(self._base)

    def flat_batches(
        self, block_ids: NDArray[np.int64], pages: Addresses, scratch: Scratch
    ) -> Iterator[Flat]:
        """Yield one copy a region and block, at most ``scratch.copies`` (one block at least).

        What is yielded lives until the next is asked for.
        """
        if self._is_page_run:
            yield from self._page_runs(block_ids, pages, scratch.copies)
            return
        ranges = self.ranges
        if ranges > scratch.copies:
            scratch = Scratch(ranges)
        step = scratch.copies // ranges
        if len(self._sizes) != step * ranges:
            self._sizes = np.tile(self._length, step)
        blocks = block_ids.astype(np.uint64)
        if self._one_stride:
            blocks *= self._stride[0]
        for first in range(0, len(blocks), step):
            here = blocks[first : first + step, None]
            count = len(here) * ranges
            device, host = scratch.device[:count], scratch.host[:count]
            table = device.reshape(len(here), ranges)
            if self._one_stride:
                np.add(here, self._base, out=table)
            else:
                np.multiply(here, self._stride, out=table)
                table += self._base
            np.add(
                pages[first : first + step, None],
                self._offset,
                out=host.reshape(len(here), ranges),
            )
            yield Flat(device, host, self._sizes[:count])

    def _page_runs(
        self, block_ids: NDArray[np.int64], pages: Addresses, copies: int
    ) -> Iterator[Flat]:
        runs = list(find_runs(block_ids, pages, self._page_bytes))
        first = np.array([run.first for run in runs], np.int64)
        count = np.array([run.count for run in runs], np.uint64)
        device = self._base[0] + block_ids[first].astype(np.uint64) * self._stride[0]
        host, size = pages[first], count * self._length[0]
        for i in range(0, len(runs), copies):
            yield Flat(device[i : i + copies], host[i : i + copies], size[i : i + copies])

    def row_batches(
        self,
        block_ids: NDArray[np.int64],
        pages: Addresses,
        scratch: Scratch,
        *,
        to_device: bool,
        order: int,
    ) -> Iterator[NDArray[np.void]]:
        """Yield one strided copy a part (`copyplan.Rows`) and block.

        What is yielded lives until the next is asked for.
        """
        near, far = ("dst", "src") if to_device else ("src", "dst")
        blocks = block_ids.astype(np.uint64)
        for part in self.shape.parts:
            for first in range(0, len(blocks), scratch.copies):
                here = blocks[first : first + scratch.copies]
                operations = scratch.operations[: len(here)]
                operations["src_type"] = operations["dst_type"] = POINTER_OPERAND
                operations[near] = here * np.uint64(part.stride_bytes) + np.uint64(part.base)
                operations[near + "_pitch"] = part.pitch_bytes
                operations[far] = pages[first : first + scratch.copies] + np.uint64(
                    part.page_offset_bytes
                )
                operations[far + "_pitch"] = part.length_bytes
                operations["src_rows"] = operations["dst_rows"] = part.rows
                operations["width"] = part.length_bytes
                operations["height"] = part.rows
                operations["depth"] = 1
                operations["order"] = order
                operations["flags"] = OVERLAP_COMPUTE
                yield operations
