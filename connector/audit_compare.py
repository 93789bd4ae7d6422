"""Comparing KV that was computed anew with KV that was stored.

Computing again is not bit exact where batches have other shapes, so values are
compared as numbers. The measure is relative and local: the sum of differences
over the sum of magnitudes, in slices of `SLICE_BYTES`, judged by the worst
slice. A slice is small enough that one wrong token fills a good part of it, and
large enough that single values near zero do not matter.

Numbers of one byte are compared as codes: int8 as they are, float8 with sign
and magnitude apart, where neighbours differ by one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..storage.jobs import LayerDifference
from .geometry import GroupGeometry

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

SLICE_BYTES = 4096
FLOOR = 1e-6  # a slice whose values are smaller counts as if they were this large


class Numbers(str, Enum):
    """How a layer's bytes are read as numbers."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8 = "float8"
    INT8 = "int8"


TOLERANCES = {
    Numbers.FLOAT32: 1e-2,
    Numbers.FLOAT16: 5e-2,
    Numbers.BFLOAT16: 2e-1,
    Numbers.FLOAT8: 2e-1,
    Numbers.INT8: 2e-1,
}
"""Mean relative difference of a slice that computing again may give; see docs/audit.md."""

_WORDS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_ITEM_BYTES = {Numbers.FLOAT32: 4, Numbers.FLOAT16: 2, Numbers.BFLOAT16: 2}


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's part of a block in a page.

    Attributes:
        name: the engine's.
        offset_bytes: where it begins in the page.
        length_bytes: how much of a block it is.
        numbers: how to read it.
    """

    name: str
    offset_bytes: int
    length_bytes: int
    numbers: Numbers


def numbers_of(dtype: object) -> Numbers:
    """Return how values of a torch dtype are read; what is not known, as float8's codes."""
    name = str(dtype).removeprefix("torch.")
    try:
        return Numbers(name)
    except ValueError:
        return Numbers.FLOAT8


def layers_of(group: GroupGeometry, dtypes: Mapping[str, object]) -> tuple[Layer, ...]:
    """Return where the group's layers lie in a page, given each layer's dtype."""
    layers = []
    offset = 0
    for region in group.regions:
        numbers = numbers_of(dtypes.get(region.layer))
        if region.length_bytes % _ITEM_BYTES.get(numbers, 1):
            numbers = Numbers.FLOAT8
        layers.append(Layer(region.layer, offset, region.length_bytes, numbers))
        offset += region.length_bytes
    return tuple(layers)


def compare(
    computed: Sequence[memoryview],
    stored: Sequence[memoryview],
    layers: Sequence[Layer],
    tolerance: float | None = None,
) -> tuple[LayerDifference, ...]:
    """Compare blocks, layer by layer. Allocates a few times one layer of them.

    Args:
        computed: one view of a page for each block.
        stored: likewise.
        layers: where each layer lies in a page.
        tolerance: instead of `TOLERANCES`.
    """
    ours = [np.frombuffer(view, np.uint8) for view in computed]
    theirs = [np.frombuffer(view, np.uint8) for view in stored]
    return tuple(_compare_layer(ours, theirs, layer, tolerance) for layer in layers)


def _compare_layer(
    computed: list[Bytes], stored: list[Bytes], layer: Layer, tolerance: float | None
) -> LayerDifference:
    word = _WORDS[_ITEM_BYTES.get(layer.numbers, 1)]
    place = slice(layer.offset_bytes, layer.offset_bytes + layer.length_bytes)
    a = np.stack([block[place] for block in computed]).view(word)
    b = np.stack([block[place] for block in stored]).view(word)
    same = a == b
    exact = int(np.count_nonzero(same))
    if exact == a.size:
        return LayerDifference(layer.name, exact, exact, 0.0, 0.0, 0, differs=False)
    slices = layer.length_bytes // SLICE_BYTES if layer.length_bytes % SLICE_BYTES == 0 else 1
    shape = (len(computed), slices, -1)
    x, y = (_decode(raw, layer.numbers).reshape(shape) for raw in (a, b))
    with np.errstate(all="ignore"):
        difference = np.abs(x - y)
        difference[same.reshape(shape)] = 0.0
        difference[~np.isfinite(difference)] = math.inf
        size = np.maximum(np.abs(x), np.abs(y))
        size[~np.isfinite(size)] = 0.0
        typical = np.maximum(size.mean(axis=2), FLOOR)
        means = difference.mean(axis=2) / typical
        largest = float((difference / np.maximum(size, typical[:, :, None])).max())
    worst = means.max(axis=1)
    limit = TOLERANCES[layer.numbers] if tolerance is None else tolerance
    beyond = np.flatnonzero(worst > limit)
    return LayerDifference(
        layer.name,
        int(a.size),
        exact,
        largest,
        float(worst.max()),
        int(beyond[0]) if len(beyond) else int(worst.argmax()),
        differs=len(beyond) > 0,
    )


def _decode(raw: NDArray[Any], numbers: Numbers) -> Floats:
    if numbers is Numbers.FLOAT8:
        magnitude = (raw & 0x7F).astype(np.float32)
        return np.where(raw & 0x80, -magnitude, magnitude)
    if numbers is Numbers.BFLOAT16:
        raw = raw.astype(np.uint32) << np.uint32(16)
    kinds = {Numbers.FLOAT16: np.float16, Numbers.INT8: np.int8}
    return raw.view(kinds.get(numbers, np.float32)).astype(np.float32, copy=False)
