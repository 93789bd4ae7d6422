"""Which bytes a copy between device blocks and RAM pages moves, as few shapes.

A page holds its block's regions one after another. Two things make copies
large: regions that lie at equal distances (one layer after another) are one
strided shape a block, and neighbouring blocks that go to neighbouring pages are
one shape together. Pure functions over arrays; used by every mover.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..storage.errors import AddressError
from .geometry import PAGE_ALIGN_BYTES

if TYPE_CHECKING:
    from .regions import RegionTable


@dataclass(frozen=True, slots=True)
class Rows:
    """Regions at equal distances that a page holds one after another.

    Block ``b`` is ``rows`` rows of ``length_bytes`` bytes, row ``i`` at
    ``base + b * stride_bytes + i * pitch_bytes``; in the page they start at
    ``page_offset_bytes`` and have no gaps.
    """

    base: int
    rows: int
    pitch_bytes: int
    stride_bytes: int
    length_bytes: int
    page_offset_bytes: int


@dataclass(frozen=True, slots=True)
class GroupShape:
    """What one block of a group is made of."""

    parts: tuple[Rows, ...]
    block_bytes: int
    padded_bytes: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Run:
    """Items ``first .. first + count - 1`` of a call: neighbours on both sides."""

    first: int
    count: int


def group_shape(table: RegionTable) -> GroupShape:
    """Join a group's regions into as few `Rows` as can be."""
    regions = list(
        zip(table.base.tolist(), table.stride.tolist(), table.length.tolist(), strict=True)
    )
    parts: list[Rows] = []
    page_offset = 0
    i = 0
    while i < len(regions):
        base, stride, length = regions[i]
        end = i + 1
        pitch = regions[end][0] - base if end < len(regions) else length
        while (
            end < len(regions)
            and pitch > 0
            and regions[end] == (regions[end - 1][0] + pitch, stride, length)
        ):
            end += 1
        if end == i + 1:
            pitch = length
        parts.append(Rows(base, end - i, pitch, stride, length, page_offset))
        page_offset += (end - i) * length
        i = end
    padded = -(-page_offset // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES
    return GroupShape(tuple(parts), page_offset, padded, table.num_blocks)


def check_blocks(block_ids: NDArray[np.int64], page_ids: NDArray[np.int64], num_blocks: int) -> int:
    """Return how many blocks a call moves.

    Raises:
        AddressError: ids that are no blocks (0 is the engine's null block), or
            not one page for each block.
    """
    n = len(block_ids)
    if len(page_ids) != n:
        raise AddressError(f"{n} blocks but {len(page_ids)} pages")
    if n and not 0 < int(block_ids.min()) <= int(block_ids.max()) < num_blocks:
        raise AddressError(
            f"block ids {int(block_ids.min())}..{int(block_ids.max())} are not all in "
            f"1..{num_blocks - 1}"
        )
    return n


def find_runs(
    block_ids: NDArray[np.int64], page_addresses: NDArray[np.uint64], page_bytes: int
) -> Iterator[Run]:
    """Yield the maximal runs of neighbouring blocks that go to neighbouring pages, in order."""
    n = len(block_ids)
    if n == 0:
        return
    # uint64 differences wrap around, so a step backwards never equals page_bytes.
    breaks = (np.diff(block_ids) != 1) | (np.diff(page_addresses) != np.uint64(page_bytes))
    edges = [0, *(np.flatnonzero(breaks) + 1).tolist(), n]
    for first, end in pairwise(edges):
        yield Run(first, end - first)
