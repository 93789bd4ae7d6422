"""Copies of small rows by a kernel that reads and writes pinned host pages itself.

The copy engines handle each row of a batch on its own and fall far behind the
bus when rows are small; a few warps with many loads in flight do not. It takes
streaming multiprocessors from the model while it runs, so it is only for loads
of small rows (docs/decisions/device-copies.md has figures).
Needs torch and triton; addresses are worked out on the device, so a call hands
over two numbers a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .regions import RegionTable

PROGRAMS = 32  # each copies one row after another
WORD_BYTES = 8


# Triton evaluates annotations in the kernel's source; it knows its own alone.
@triton.jit(do_not_specialize=["n_jobs", "n_rows"])  # type: ignore[untyped-decorator]
def _copy_rows(  # type: ignore[no-untyped-def]
    blocks,  # noqa: ANN001 - as all that have none
    pages,  # noqa: ANN001
    base,  # noqa: ANN001
    stride,  # noqa: ANN001
    length,  # noqa: ANN001
    offset,  # noqa: ANN001
    n_jobs,  # noqa: ANN001
    n_rows,  # noqa: ANN001
    TO_DEVICE: tl.constexpr,  # noqa: N803 - triton's way to spell constants
    WORDS: tl.constexpr,  # noqa: N803
) -> None:
    job = tl.program_id(0)
    lanes = tl.arange(0, WORDS)
    while job < n_jobs:
        block = job // n_rows
        row = job % n_rows
        device = tl.load(base + row) + tl.load(blocks + block) * tl.load(stride + row)
        host = tl.load(pages + block) + tl.load(offset + row)
        words = tl.load(length + row) // 8
        near = device.to(tl.pointer_type(tl.int64))
        far = host.to(tl.pointer_type(tl.int64))
        for start in range(0, words, WORDS):
            index = start + lanes
            if TO_DEVICE:
                tl.store(near + index, tl.load(far + index, mask=index < words), mask=index < words)
            else:
                tl.store(far + index, tl.load(near + index, mask=index < words), mask=index < words)
        job += tl.num_programs(0)


class RowKernel:
    """The kernel with one group's region table on the device.

    Raises:
        ValueError: lengths or addresses that are no multiples of 8 bytes.
    """

    def __init__(self, table: RegionTable, device: Any, programs: int = PROGRAMS) -> None:
        offset = np.cumsum(table.length, dtype=np.uint64) - table.length
        columns = [table.base, table.stride, table.length, offset]
        if any((column % WORD_BYTES).any() for column in columns):
            raise ValueError("rows are no multiples of 8 bytes")
        self._columns = [_tensor(column).to(device) for column in columns]
        self._device = device
        self._programs = programs
        self._words = min(1024, triton.next_power_of_2(int(table.length.max()) // WORD_BYTES))

    def copy(
        self, block_ids: NDArray[np.int64], pages: NDArray[np.uint64], *, to_device: bool
    ) -> None:
        """Queue the copies on torch's current stream; the arrays are read before it returns."""
        rows = len(self._columns[0])
        jobs = len(block_ids) * rows
        ids = torch.from_numpy(np.ascontiguousarray(block_ids)).to(self._device, non_blocking=True)
        far = _tensor(pages).to(self._device, non_blocking=True)
        _copy_rows[(max(1, min(self._programs, jobs)),)](
            ids, far, *self._columns, jobs, rows, TO_DEVICE=to_device, WORDS=self._words
        )


def _tensor(array: NDArray[np.uint64]) -> Any:
    return torch.from_numpy(np.ascontiguousarray(array).view(np.int64))
