"""Where a group's blocks lie in this process's memory.

The addresses come from vLLM's `KVCacheTensor` arithmetic on the base of the one
backing allocation, and every layer's tensor is checked against it: a layout that
is packed in an unknown way is refused, never guessed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..storage.errors import GeometryError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from .geometry import Geometry, GroupGeometry, Region


@dataclass(frozen=True, slots=True)
class RegionTable:
    """Merged regions of one group.

    Block ``b`` is, in the payload's order, the byte ranges
    ``[base[r] + b * stride[r], + length[r])`` for r = 0 .. R-1. Regions whose pages
    touch in every block are one range, so the number of ranges may be smaller
    than the number of layers; the order of bytes stays that of `GroupGeometry`.

    Attributes:
        group_id: the engine's id of the group.
        base: addresses of block 0, uint64 (R,).
        stride: bytes from one block to the next, uint64 (R,).
        length: bytes of a block, uint64 (R,).
        num_blocks: block ids are 1 .. num_blocks - 1.
    """

    group_id: int
    base: NDArray[np.uint64]
    stride: NDArray[np.uint64]
    length: NDArray[np.uint64]
    num_blocks: int

    @property
    def n_ranges(self) -> int:
        """Ranges of one block (R)."""
        return len(self.base)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all ranges."""
        return int(self.length.sum())


def region_table(
    group_id: int, ranges: Iterable[tuple[int, int, int]], num_blocks: int
) -> RegionTable:
    """Build a table from (base address, stride, length) in payload order; merge what touches."""
    merged: list[list[int]] = []
    for base, stride, length in ranges:
        last = merged[-1] if merged else None
        if last and last[1] == stride and last[0] + last[2] == base and last[2] + length <= stride:
            last[2] += length
        else:
            merged.append([base, stride, length])
    columns = np.array(merged, dtype=np.uint64).reshape(-1, 3)
    rows = np.ascontiguousarray(columns.T)
    return RegionTable(group_id, rows[0], rows[1], rows[2], num_blocks)


def build_region_tables(
    kv_cache_config: Any, geometry: Geometry, kv_caches: Mapping[str, Any]
) -> dict[int, RegionTable]:
    """Return the region table of every kept group, by group id.

    Args:
        kv_cache_config: the worker's `KVCacheConfig`.
        geometry: read from the same configuration.
        kv_caches: what vLLM hands to `register_kv_caches`: layer name to tensor.
            The addresses hold as long as the caller keeps these tensors.

    Raises:
        GeometryError: a tensor is not where, or not what, the configuration says.
    """
    base = _backing_base(kv_cache_config, geometry, kv_caches)
    tables = {}
    for group in geometry.groups:
        for region in group.regions:
            _check_layer(region, kv_caches[region.layer], base, geometry.num_blocks)
        tables[group.group_id] = region_table(
            group.group_id,
            ((base + r.offset_bytes, r.stride_bytes, r.length_bytes) for r in group.regions),
            geometry.num_blocks,
        )
    return tables


def _backing_base(kv_cache_config: Any, geometry: Geometry, kv_caches: Mapping[str, Any]) -> int:
    bases: set[int] = set()
    room_bytes = 0
    for group in geometry.groups:
        for region in group.regions:
            tensor = kv_caches.get(region.layer)
            if tensor is None or not hasattr(tensor, "untyped_storage"):
                raise GeometryError(
                    f"layer {region.layer}: the engine registered no KV cache tensor for it"
                )
            storage = tensor.untyped_storage()
            bases.add(int(storage.data_ptr()))
            room_bytes = int(storage.nbytes())
    if len(bases) != 1:
        raise GeometryError(f"KV cache is {len(bases)} allocations; kvtier supports one")
    # Some platforms round the allocation up, so it may be larger than was asked for.
    need_bytes = max(_end_bytes(group, geometry.num_blocks) for group in geometry.groups)
    sizes = {int(t.size) for t in kv_cache_config.kv_cache_tensors}
    if room_bytes < max(need_bytes, *sizes):
        raise GeometryError(
            f"KV cache allocation of {room_bytes} bytes is smaller than its configuration says"
        )
    return bases.pop()


def _end_bytes(group: GroupGeometry, num_blocks: int) -> int:
    return max(
        r.offset_bytes + (num_blocks - 1) * r.stride_bytes + r.length_bytes for r in group.regions
    )


def _check_layer(region: Region, tensor: Any, base: int, num_blocks: int) -> None:
    """Check one layer's view: blocks outermost, each a dense run at the stride that was said.

    A backend may split a block into several kernel blocks; then dim 0 is longer by
    that ratio and the pieces must lie one after another.
    """
    where = f"layer {region.layer}"
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    item_bytes = int(tensor.element_size())
    if len(shape) < 2 or shape[0] % num_blocks:
        raise GeometryError(f"{where}: shape {shape} does not hold {num_blocks} blocks")
    ratio = shape[0] // num_blocks
    if int(tensor.data_ptr()) != base + region.offset_bytes:
        raise GeometryError(f"{where}: tensor is not at its place in the KV cache allocation")
    if strides[0] * item_bytes * ratio != region.stride_bytes:
        raise GeometryError(
            f"{where}: blocks are {strides[0] * item_bytes * ratio} bytes apart, "
            f"expected {region.stride_bytes}"
        )
    count = int(np.prod(shape[1:], dtype=np.int64))
    span = 1 + sum((n - 1) * s for n, s in zip(shape[1:], strides[1:], strict=True))
    if min(strides) < 0 or span != count:
        raise GeometryError(f"{where}: a block is not one contiguous run (strides {strides})")
    if ratio > 1 and strides[0] != count:
        raise GeometryError(f"{where}: kernel blocks do not fill their block without gaps")
    if count * item_bytes * ratio != region.length_bytes:
        raise GeometryError(
            f"{where}: a block holds {count * item_bytes * ratio} bytes, expected "
            f"{region.length_bytes}"
        )
