"""The engine's KV cache as kvtier sees it: groups, blocks, regions, chunks.

Plain data, read once from vLLM's `kv_cache_config`. What is not recognised is
refused with `GeometryError`, one line that says what and what it means; the
connector then serves no external hits instead of guessing.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from ..storage.errors import GeometryError
from . import engine_api, reuse
from .engine_api import SpecKind as GroupKind

DEFAULT_CHUNK_TOKENS = 256
PAGE_ALIGN_BYTES = 4096
MAX_GROUPS = 256  # a key has one byte for the group

__all__ = ["Geometry", "GroupGeometry", "GroupKind", "Region", "from_kv_cache_config"]


@dataclass(frozen=True, slots=True)
class Region:
    """One layer's slice of the KV cache allocation.

    Block ``b`` is the bytes ``[offset + b * stride, + length)`` of the allocation.
    """

    layer: str
    offset_bytes: int
    stride_bytes: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """One KV cache group.

    Attributes:
        group_id: index in the engine's `kv_cache_groups`.
        kind: what a hit needs of this group.
        block_tokens: tokens that a block spans (context parallel ranks together).
        window_tokens: sliding window or local chunk; None otherwise.
        regions: one a layer, in the payload's order.
        is_draft: holds a draft model's layers.
    """

    group_id: int
    kind: GroupKind
    block_tokens: int
    window_tokens: int | None
    regions: tuple[Region, ...]
    is_draft: bool = False

    @property
    def n_regions(self) -> int:
        """Layers of this group on this rank."""
        return len(self.regions)

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Layer names in the payload's order."""
        return tuple(region.layer for region in self.regions)

    @property
    def page_bytes(self) -> tuple[int, ...]:
        """Useful bytes of one block in each region."""
        return tuple(region.length_bytes for region in self.regions)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all regions."""
        return sum(region.length_bytes for region in self.regions)

    @property
    def padded_block_bytes(self) -> int:
        """Bytes that one block takes in a record and in a RAM page."""
        return -(-self.block_bytes // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES

    def first_needed_block(self, hit_tokens: int) -> int:
        """Return the first block index that a hit of ``hit_tokens`` needs.

        The engine computes the same in `get_num_skipped_tokens`. It can equal the
        block count (a chunked-local group at its own boundary needs nothing).
        """
        if hit_tokens <= 0 or self.kind is GroupKind.FULL:
            return 0
        if self.kind is GroupKind.RECURRENT:
            return (hit_tokens - 1) // self.block_tokens
        window = self.window_tokens or 1
        if self.kind is GroupKind.CHUNKED_LOCAL:
            return hit_tokens // window * window // self.block_tokens
        return max(0, hit_tokens - window + 1) // self.block_tokens


@dataclass(frozen=True, slots=True)
class Geometry:
    """The KV cache of one rank.

    Byte sizes are this rank's. The scheduler's copy describes rank 0 and, where
    a group mixes page sizes, only by what the tensors' strides tell: plans carry
    blocks and pages, never bytes.

    Attributes:
        groups: groups that are kept, by ascending `group_id`.
        hash_block_tokens: tokens that each of a request's block hashes covers.
        hit_alignment_tokens: hits end on multiples of this.
        scheduler_block_tokens: least common multiple of all groups' blocks.
        chunk_tokens: tokens of a whole chunk.
        num_blocks: size of the engine's block pool (block 0 is the null block).
        layout: the engine's name of the layout.
        n_engine_groups: how many groups the engine's block tables have.
        draft_drop_tokens: how far before the last match a hit ends, because a draft head's
            KV at a position depends on the token after it.
        computed_tokens: at a prompt's end, what no hit may cover.
    """

    groups: tuple[GroupGeometry, ...]
    hash_block_tokens: int
    hit_alignment_tokens: int
    scheduler_block_tokens: int
    chunk_tokens: int
    num_blocks: int
    layout: str
    n_engine_groups: int
    draft_drop_tokens: int = 0
    computed_tokens: int = 1

    @property
    def page_bytes(self) -> int:
        """Size of a RAM page: room for one block of any group."""
        return max(group.padded_block_bytes for group in self.groups)

    def group(self, group_id: int) -> GroupGeometry:
        """Return the group with this engine id.

        Raises:
            KeyError: not a group that is kept.
        """
        for group in self.groups:
            if group.group_id == group_id:
                return group
        raise KeyError(group_id)

    def chunk_blocks(self, group: GroupGeometry) -> int:
        """Return how many blocks of ``group`` a whole chunk spans."""
        return self.chunk_tokens // group.block_tokens

    def stored_blocks(self, group: GroupGeometry) -> int:
        """Return how many blocks a whole chunk of ``group`` keeps at most."""
        spans = self.chunk_blocks(group)
        if group.kind is GroupKind.RECURRENT:
            return 1
        if group.kind is GroupKind.SLIDING_WINDOW and group.window_tokens is not None:
            return min(spans, -(-(group.window_tokens - 1) // group.block_tokens))
        return spans

    def blocks_in_span(
        self, group: GroupGeometry, start_tokens: int, end_tokens: int
    ) -> tuple[int, int]:
        """Return (first block index, number of blocks) that the chunk [start, end) keeps.

        A last block that the chunk covers only in part counts. Windowed groups keep
        what any hit at or after ``end_tokens`` can need, and may keep nothing;
        recurrent groups keep the block whose state is that at ``end_tokens``.
        """
        if end_tokens <= start_tokens:
            return start_tokens // group.block_tokens, 0
        end_block = -(-end_tokens // group.block_tokens)
        first = max(start_tokens // group.block_tokens, group.first_needed_block(end_tokens))
        return first, max(0, end_block - first)

    def chunk_end_tokens(self, n_tokens: int) -> range:
        """Return the ends of all whole chunks within the first ``n_tokens`` tokens."""
        return range(self.chunk_tokens, n_tokens + 1, self.chunk_tokens)


def layer_sort_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Order layer names as people count: numbers as numbers, the rest as text."""
    return tuple(
        (1, int(part), "") if part.isdigit() else (0, 0, part)
        for part in re.split(r"(\d+)", name)
        if part
    )


def from_kv_cache_config(
    vllm_config: Any, kv_cache_config: Any, chunk_tokens: int | None = None
) -> Geometry:
    """Read the geometry of this rank from vLLM's configuration objects.

    Args:
        vllm_config: vLLM's `VllmConfig`.
        kv_cache_config: vLLM's `KVCacheConfig`, a worker's or the scheduler's.
        chunk_tokens: wished length of a chunk; rounded up to whole blocks of every
            group. None: 256.

    Raises:
        GeometryError: one line that says what is not supported.
    """
    layout = engine_api.layout_name(vllm_config, kv_cache_config)
    if layout not in engine_api.BLOCK_COMPACT_LAYOUTS:
        raise GeometryError(
            f"KV cache layout {layout} scatters a block over its heads; kvtier supports "
            f"{', '.join(sorted(engine_api.BLOCK_COMPACT_LAYOUTS))} (VLLM_KV_CACHE_LAYOUT)"
        )
    pcp = engine_api.pcp_size(vllm_config)
    if pcp != 1:
        raise GeometryError(f"prefill context parallel size {pcp} is not supported, only 1")
    if getattr(getattr(vllm_config, "cache_config", None), "calculate_kv_scales", False):
        raise GeometryError(
            "KV scales that are calculated at run time lie outside the blocks "
            "(--calculate-kv-scales); use scales from the checkpoint"
        )
    obstacle = reuse.obstacle(vllm_config, kv_cache_config)
    if obstacle is not None:
        raise GeometryError(obstacle)
    engine_groups = kv_cache_config.kv_cache_groups
    ids = engine_api.cacheable_group_ids(kv_cache_config)
    if not ids:
        raise GeometryError("the engine has no KV cache group that prefix hashes can address")
    if max(ids) >= MAX_GROUPS:
        raise GeometryError(f"{max(ids) + 1} KV cache groups; kvtier supports {MAX_GROUPS}")
    dcp = engine_api.dcp_size(vllm_config)
    groups = tuple(
        _read_group(group_id, engine_groups[group_id], kv_cache_config, layout, dcp)
        for group_id in ids
    )
    spans = [
        engine_api.block_tokens(engine_api.first_spec(group), dcp)
        for i, group in enumerate(engine_groups)
        if i in ids or not getattr(group, "host_resident", False)
    ]
    scheduler_block = math.lcm(*spans)
    hash_block = engine_api.hash_block_tokens(kv_cache_config)
    if hash_block is None:
        unit = getattr(vllm_config.cache_config, "prefix_match_unit", None)
        hash_block = int(unit) if unit else math.gcd(*(g.block_tokens for g in groups))
    alignment = engine_api.hit_alignment_tokens(kv_cache_config) or scheduler_block
    return check_geometry(
        Geometry(
            groups=groups,
            hash_block_tokens=hash_block,
            hit_alignment_tokens=alignment,
            scheduler_block_tokens=scheduler_block,
            chunk_tokens=round_chunk_tokens(chunk_tokens, groups),
            num_blocks=int(kv_cache_config.num_blocks),
            layout=layout,
            n_engine_groups=len(engine_groups),
            draft_drop_tokens=_draft_drop_tokens(vllm_config, groups, hash_block, alignment),
            computed_tokens=max(1, engine_api.lookahead_hash_tokens(vllm_config)),
        )
    )


def _draft_drop_tokens(
    vllm_config: Any, groups: tuple[GroupGeometry, ...], hash_block: int, alignment: int
) -> int:
    """Return what the engine drops of its own hits for a draft head (`eagle_proof_margin`)."""
    if not engine_api.drops_draft_block(vllm_config):
        return 0
    attention = [g for g in groups if g.kind is not GroupKind.RECURRENT]
    # An engine that has not found the draft's group takes every one for it.
    drafts = [g for g in attention if g.is_draft] or attention
    if alignment == hash_block:
        return hash_block
    return max((group.block_tokens for group in drafts), default=0)


def round_chunk_tokens(wish_tokens: int | None, groups: tuple[GroupGeometry, ...]) -> int:
    """Round a wished chunk length up to whole blocks of every group."""
    unit = math.lcm(*(group.block_tokens for group in groups))
    return -(-(wish_tokens or DEFAULT_CHUNK_TOKENS) // unit) * unit


def check_geometry(geometry: Geometry) -> Geometry:
    """Return ``geometry`` after checking that its numbers fit each other.

    Raises:
        GeometryError: they do not.
    """
    unit = geometry.hash_block_tokens
    for group in geometry.groups:
        if group.block_tokens % unit:
            raise GeometryError(
                f"KV cache group {group.group_id}: block of {group.block_tokens} tokens is no "
                f"multiple of the hash block of {unit}"
            )
    if geometry.hit_alignment_tokens % unit:
        raise GeometryError(
            f"hit alignment of {geometry.hit_alignment_tokens} tokens is no multiple of the hash "
            f"block of {unit}"
        )
    return geometry


def _read_group(
    group_id: int, group: Any, kv_cache_config: Any, layout: str, dcp: int
) -> GroupGeometry:
    spec = engine_api.first_spec(group)
    where = f"KV cache group {group_id} ({type(spec).__name__})"
    kind = engine_api.spec_kind(spec)
    if kind is GroupKind.UNSUPPORTED:
        raise GeometryError(f"{where} is of a kind that kvtier does not know")
    if getattr(group, "host_resident", False):
        raise GeometryError(f"{where} lives in host memory, which kvtier does not address")
    if kind is GroupKind.RECURRENT and getattr(spec, "mamba_cache_mode", "none") != "align":
        raise GeometryError(
            f"{where} keeps no reusable states in mamba_cache_mode "
            f"{getattr(spec, 'mamba_cache_mode', 'none')!r}; start vLLM with prefix caching on "
            "(--mamba-cache-mode align)"
        )
    for other in engine_api.layer_specs(group).values():
        if engine_api.spec_kind(other) is not kind or other.block_size != spec.block_size:
            raise GeometryError(f"{where} mixes kinds of layers or block sizes")
    regions = _read_regions(where, group, kv_cache_config, layout)
    return GroupGeometry(
        group_id=group_id,
        kind=kind,
        block_tokens=engine_api.block_tokens(spec, dcp),
        window_tokens=engine_api.window_tokens(spec),
        regions=regions,
        is_draft=bool(getattr(group, "is_eagle_group", False)),
    )


def _read_regions(where: str, group: Any, kv_cache_config: Any, layout: str) -> tuple[Region, ...]:
    # Names in the group but in no tensor share another layer's memory (KV sharing).
    names = set(group.layer_names)
    specs = engine_api.layer_specs(group)
    own_specs = hasattr(group.kv_cache_spec, "kv_cache_specs")
    regions = []
    for tensor in kv_cache_config.kv_cache_tensors:
        layers = engine_api.tensor_layers(tensor)
        if not layers or layers[0] not in names:
            continue
        if getattr(tensor, "host_resident", False):
            raise GeometryError(f"{where} lives in host memory, which kvtier does not address")
        outermost = layout in engine_api.BLOCK_OUTERMOST_LAYOUTS
        slot = int(tensor.layer_stride if outermost else tensor.block_stride)
        for position, layer in enumerate(layers):
            spec = specs.get(layer)
            page = 0 if spec is None else int(spec.page_size_bytes)
            # The scheduler's flattened copy has one spec for layers of several sizes.
            exact = page == slot or (0 < page < slot and own_specs)
            regions.append(
                Region(
                    layer=layer,
                    offset_bytes=int(tensor.offset) + position * int(tensor.layer_stride),
                    stride_bytes=int(tensor.block_stride),
                    length_bytes=engine_api.useful_page_bytes(spec) if exact else slot,
                )
            )
    if not regions:
        raise GeometryError(f"{where} has no layer in the KV cache tensors")
    return tuple(sorted(regions, key=lambda region: layer_sort_key(region.layer)))
