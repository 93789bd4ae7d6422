"""What each kind of group keeps of a span, and what is refused, on made-up configurations."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.connector.geometry import (
    Geometry,
    GroupGeometry,
    GroupKind,
    Region,
    from_kv_cache_config,
    layer_sort_key,
)
from kvtier.storage.errors import GeometryError

# Classes named like vLLM's: the geometry goes by exact class names and attributes.


@dataclass
class FullAttentionSpec:
    block_size: int = 16
    page_size_bytes: int = 4096
    real_page_size_bytes: int | None = None
    dcp_sharded: bool = True
    prefix_cacheable: bool = True
    non_causal: bool = False


@dataclass
class SlidingWindowSpec(FullAttentionSpec):
    sliding_window: int = 64
    extra_retained_tokens: int = 0


@dataclass
class ChunkedLocalAttentionSpec(FullAttentionSpec):
    attention_chunk_size: int = 64


@dataclass
class MambaSpec:
    block_size: int = 32
    page_size_bytes: int = 4096
    real_page_size_bytes: int = 1000
    mamba_cache_mode: str = "align"
    dcp_sharded: bool = False
    prefix_cacheable: bool = True


@dataclass
class UniformTypeKVCacheSpecs:
    kv_cache_specs: dict[str, Any]
    prefix_cacheable: bool = True

    @property
    def block_size(self) -> int:
        return next(iter(self.kv_cache_specs.values())).block_size


@dataclass
class OddSpec(FullAttentionSpec):
    """A subclass that nobody told us about."""


@dataclass
class Group:
    layer_names: list[str]
    kv_cache_spec: Any
    is_eagle_group: bool = False
    host_resident: bool = False


@dataclass
class Tensor:
    layers: list[str]
    layer_stride: int
    block_stride: int
    offset: int = 0
    size: int = 1 << 30
    host_resident: bool = False


@dataclass
class CacheConfig:
    kv_cache_groups: list[Group]
    kv_cache_tensors: list[Tensor]
    num_blocks: int = 100
    kv_cache_layout: str | None = "LBHNC"
    hash_block_size: int | None = None
    cache_hit_alignment_tokens: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def vllm_config(**parallel: int) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        cache_config=SimpleNamespace(prefix_match_unit=None, kv_cache_layout=None),
    )


def config(*specs: Any, **kwargs: Any) -> CacheConfig:
    """One group a spec, two layers each, layer-outermost."""
    groups, tensors = [], []
    for number, spec in enumerate(specs):
        names = [f"layers.{number * 2 + i}.attn" for i in range(2)]
        groups.append(Group(names, spec))
        tensors.append(Tensor(names, spec.page_size_bytes * 100, spec.page_size_bytes))
    return CacheConfig(groups, tensors, **kwargs)


def group(kind: GroupKind, block: int = 16, window: int | None = None) -> GroupGeometry:
    return GroupGeometry(0, kind, block, window, (Region("l", 0, 10, 10),))


def geometry(one: GroupGeometry, chunk: int = 256) -> Geometry:
    return Geometry((one,), 16, 16, 16, chunk, 100, "LBHNC", 1)


def needed_by_hit(one: GroupGeometry, hit: int) -> set[int]:
    """Blocks that attention at position ``hit`` can read, token by token."""
    if one.kind is GroupKind.RECURRENT:
        return {(hit - 1) // one.block_tokens}
    first = 0
    if one.kind is GroupKind.SLIDING_WINDOW:
        first = hit - one.window_tokens + 1  # query at hit sees window_tokens with itself
    if one.kind is GroupKind.CHUNKED_LOCAL:
        first = hit - hit % one.window_tokens
    read = {token // one.block_tokens for token in range(max(0, first), hit)}
    # The block that the next token is written into is needed as well.
    return read | ({hit // one.block_tokens} if hit % one.block_tokens else set())


GROUPS = [
    group(GroupKind.FULL),
    group(GroupKind.RECURRENT),
    group(GroupKind.RECURRENT, 64),
    *[group(GroupKind.SLIDING_WINDOW, 16, w) for w in (1, 2, 16, 17, 18, 33, 100, 1000)],
    *[group(GroupKind.CHUNKED_LOCAL, 16, w) for w in (16, 24, 64, 512)],
]


@pytest.mark.parametrize("one", GROUPS, ids=lambda g: f"{g.kind.value}-{g.window_tokens}")
def test_what_a_hit_needs_is_what_attention_reads(one: GroupGeometry) -> None:
    """first_needed_block marks exactly the blocks that the next token's attention reads."""
    for hit in range(1, 400):
        end = -(-hit // one.block_tokens)
        assert set(range(one.first_needed_block(hit), end)) == needed_by_hit(one, hit), hit


@pytest.mark.parametrize("one", GROUPS, ids=lambda g: f"{g.kind.value}-{g.window_tokens}")
def test_chunks_keep_all_that_later_hits_need(one: GroupGeometry) -> None:
    """Whatever a hit at a chunk's end or later reads inside the chunk, the chunk keeps."""
    shape = geometry(one, chunk=128)
    for start in range(0, 640, 128):
        first, count = shape.blocks_in_span(one, start, start + 128)
        kept = set(range(first, first + count))
        inside = set(range(start // one.block_tokens, (start + 128) // one.block_tokens))
        assert kept <= inside
        assert count <= shape.stored_blocks(one)
        if one.kind is GroupKind.RECURRENT:
            assert kept == needed_by_hit(one, start + 128)
            continue
        for hit in range(start + 128, start + 128 + 300):
            assert needed_by_hit(one, hit) & inside <= kept, hit
        # And nothing that no hit needs.
        assert kept == needed_by_hit(one, start + 128) & inside


def test_a_partial_last_block_counts_as_a_block() -> None:
    """A tail that ends inside a block keeps that block."""
    one = group(GroupKind.FULL, 32)
    assert geometry(one).blocks_in_span(one, 0, 48) == (0, 2)
    assert geometry(one).blocks_in_span(one, 64, 65) == (2, 1)
    assert geometry(one).blocks_in_span(one, 64, 64) == (2, 0)


def test_chunks_are_whole_blocks_of_every_group() -> None:
    """The chunk is 256 tokens rounded up to a multiple of all blocks, or the wish rounded up."""
    read = from_kv_cache_config(vllm_config(), config(FullAttentionSpec(48), MambaSpec(32)))
    assert read.chunk_tokens == 288
    assert [read.chunk_blocks(g) for g in read.groups] == [6, 9]
    assert (read.hash_block_tokens, read.scheduler_block_tokens) == (16, 96)
    assert read.hit_alignment_tokens == 96
    wished = from_kv_cache_config(vllm_config(), config(FullAttentionSpec(48)), chunk_tokens=100)
    assert wished.chunk_tokens == 144


def test_the_engine_knows_hash_block_and_alignment_best() -> None:
    """What the engine resolved is taken as it is."""
    read = from_kv_cache_config(
        vllm_config(),
        config(
            FullAttentionSpec(32), MambaSpec(32), hash_block_size=8, cache_hit_alignment_tokens=8
        ),
    )
    assert (read.hash_block_tokens, read.hit_alignment_tokens) == (8, 8)


def test_context_parallel_blocks_span_all_ranks() -> None:
    """Attention blocks span block_size times the ranks; recurrent states do not."""
    read = from_kv_cache_config(
        vllm_config(decode_context_parallel_size=2), config(FullAttentionSpec(16), MambaSpec(32))
    )
    assert [g.block_tokens for g in read.groups] == [32, 32]


def test_windows_include_tokens_kept_for_speculation() -> None:
    """The window is as long as the engine keeps blocks."""
    read = from_kv_cache_config(
        vllm_config(), config(SlidingWindowSpec(sliding_window=60, extra_retained_tokens=4))
    )
    assert read.groups[0].window_tokens == 64
    assert read.stored_blocks(read.groups[0]) == 4


def test_sizes_are_those_of_useful_bytes() -> None:
    """A padded state is kept without its padding, a block is padded to whole 4 KiB."""
    read = from_kv_cache_config(vllm_config(), config(MambaSpec(), FullAttentionSpec()))
    states, attention = read.groups
    assert states.page_bytes == (1000, 1000)
    assert (states.block_bytes, states.padded_block_bytes) == (2000, 4096)
    assert (attention.block_bytes, attention.padded_block_bytes) == (8192, 8192)
    assert read.page_bytes == 8192


@pytest.mark.parametrize("layout", ["BLHNC", "LBHNC"])
def test_layers_of_unequal_size_in_one_group(layout: str) -> None:
    """Each layer of a uniform-type group has its own page size, in the workers' configuration."""
    names = ["m.10.k", "m.2.k", "m.1.k"]
    specs = {
        name: FullAttentionSpec(16, size)
        for name, size in zip(names, (100, 100, 300), strict=False)
    }
    one = Group(names, UniformTypeKVCacheSpecs(specs))
    if layout == "BLHNC":
        tensors = [Tensor(names[:2], 100, 500), Tensor(names[2:], 300, 500, 200)]
    else:
        tensors = [Tensor(names[:2], 10_000, 100), Tensor(names[2:], 30_000, 300, 20_000)]
    read = from_kv_cache_config(vllm_config(), CacheConfig([one], tensors, kv_cache_layout=layout))
    assert read.groups[0].layer_names == ("m.1.k", "m.2.k", "m.10.k")
    assert read.groups[0].page_bytes == (300, 100, 100)
    # The scheduler's copy has only one layer's spec; strides tell the same sizes.
    flat = CacheConfig([Group(names, specs["m.2.k"])], tensors, kv_cache_layout=layout)
    assert from_kv_cache_config(vllm_config(), flat).groups == read.groups


def test_layers_that_share_memory_are_kept_once() -> None:
    """A name that no tensor places (KV sharing) is no region."""
    made = config(FullAttentionSpec())
    made.kv_cache_groups[0].layer_names = [*made.kv_cache_groups[0].layer_names, "layers.9.attn"]
    assert from_kv_cache_config(vllm_config(), made).groups[0].n_regions == 2


def test_groups_outside_prefix_caching_are_left_out() -> None:
    """Groups that hashes do not address are neither kept nor in the way; ids stay the engine's."""
    ring = FullAttentionSpec(prefix_cacheable=False)
    read = from_kv_cache_config(vllm_config(), config(ring, FullAttentionSpec()))
    assert [g.group_id for g in read.groups] == [1]
    assert read.n_engine_groups == 2
    with pytest.raises(KeyError):
        read.group(0)


def test_draft_groups_are_marked() -> None:
    """A group with a draft model's layers says so."""
    made = config(FullAttentionSpec(), FullAttentionSpec())
    made.kv_cache_groups[1].is_eagle_group = True
    read = from_kv_cache_config(vllm_config(), made)
    assert [g.is_draft for g in read.groups] == [False, True]


def _host_group(made: CacheConfig) -> None:
    made.kv_cache_groups[0].host_resident = True


def _host_tensor(made: CacheConfig) -> None:
    made.kv_cache_tensors[0].host_resident = True


def _old_tensor(made: CacheConfig) -> None:
    made.kv_cache_tensors[0] = SimpleNamespace(shared_by=["layers.0.attn"], size=1)


def _no_layout(made: CacheConfig) -> None:
    made.kv_cache_layout = None


def _no_groups(made: CacheConfig) -> None:
    made.kv_cache_groups = []


def _mixed(made: CacheConfig) -> None:
    made.kv_cache_groups[0].kv_cache_spec = UniformTypeKVCacheSpecs(
        {"layers.0.attn": FullAttentionSpec(), "layers.1.attn": SlidingWindowSpec()}
    )


@pytest.mark.parametrize(
    ("made", "change", "says"),
    [
        (config(OddSpec()), None, "OddSpec.*does not know"),
        (config(MambaSpec(mamba_cache_mode="none")), None, "mamba_cache_mode 'none'"),
        (config(FullAttentionSpec(), kv_cache_layout="LHBNC"), None, "LHBNC scatters"),
        (config(FullAttentionSpec(), kv_cache_layout="BHLNC"), None, "BHLNC scatters"),
        (config(FullAttentionSpec(24), hash_block_size=16), None, "no multiple"),
        (
            config(FullAttentionSpec(), hash_block_size=16, cache_hit_alignment_tokens=24),
            None,
            "no multiple",
        ),
        (config(FullAttentionSpec()), _host_group, "host memory"),
        (config(FullAttentionSpec()), _host_tensor, "host memory"),
        (config(FullAttentionSpec()), _old_tensor, "does not know"),
        (config(FullAttentionSpec()), _no_layout, "does not name"),
        (config(FullAttentionSpec()), _no_groups, "no KV cache group"),
        (config(FullAttentionSpec()), _mixed, "mixes"),
    ],
)
def test_what_is_not_known_is_refused_in_one_line(made: Any, change: Any, says: str) -> None:
    """An unknown spec, layout or placement raises one line that names it; nothing is guessed."""
    if change is not None:
        change(made)
    with pytest.raises(GeometryError, match=says) as caught:
        from_kv_cache_config(vllm_config(), made)
    assert "\n" not in str(caught.value)


class Speculation:
    """An engine's speculative settings; older ones know the second question only."""

    def __init__(self, *, drops: bool, names: tuple[str, ...]) -> None:
        for name in names:
            setattr(self, name, lambda: drops)


@pytest.mark.parametrize("names", [("use_eagle_block_drop", "use_eagle"), ("use_eagle",)])
@pytest.mark.parametrize(
    ("made", "flagged", "drop"),
    [
        (config(FullAttentionSpec(block_size=32)), None, 32),
        (config(FullAttentionSpec(block_size=16), FullAttentionSpec(block_size=32)), 0, 16),
        (config(FullAttentionSpec(block_size=16), FullAttentionSpec(block_size=32)), None, 32),
        (
            config(
                MambaSpec(block_size=64),
                FullAttentionSpec(block_size=64),
                hash_block_size=16,
                cache_hit_alignment_tokens=16,
            ),
            1,
            16,
        ),
    ],
)
def test_a_draft_heads_drop_is_the_engines(
    names: tuple[str, ...], made: CacheConfig, flagged: int | None, drop: int
) -> None:
    """Hits end a block of the draft's group before the match, or a matching unit; or not at all."""
    for number, one in enumerate(made.kv_cache_groups):
        one.is_eagle_group = number == flagged
    engine = vllm_config()
    assert from_kv_cache_config(engine, made).draft_drop_tokens == 0
    for drops, tokens in ((True, drop), (False, 0)):
        engine.speculative_config = Speculation(drops=drops, names=names)
        assert from_kv_cache_config(engine, made).draft_drop_tokens == tokens
    engine.num_hash_lookahead_tokens = 3
    assert from_kv_cache_config(engine, made).computed_tokens == 3


def test_prefill_context_parallel_is_refused() -> None:
    """Prefill context parallelism is not addressed."""
    with pytest.raises(GeometryError, match="context parallel"):
        from_kv_cache_config(vllm_config(prefill_context_parallel_size=2), config(MambaSpec()))


def test_scales_outside_the_blocks_are_refused() -> None:
    """Quantised KV whose scales are found at run time cannot be restored from blocks alone."""
    engine = vllm_config()
    engine.cache_config.calculate_kv_scales = True
    with pytest.raises(GeometryError, match="scales"):
        from_kv_cache_config(engine, config(FullAttentionSpec()))


def test_layers_are_ordered_as_people_count() -> None:
    """Layer 10 comes after layer 9, whatever order the engine lists them in."""
    names = ["model.layers.10.attn", "model.layers.9.attn", "draft.layers.0.attn", "model.norm"]
    assert sorted(names, key=layer_sort_key) == [names[2], names[1], names[0], names[3]]


# -- engines in which a prompt cannot be begun in its middle -------------------------------------


def engine_with(**parts: dict[str, Any]) -> Any:
    made = vllm_config()
    for name, values in parts.items():
        setattr(
            made, name, SimpleNamespace(**vars(getattr(made, name, SimpleNamespace())), **values)
        )
    return made


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"model_config": {"is_prefix_caching_supported": False}}, "does not reuse prefixes"),
        ({"aux_output_config": {"enabled": True}}, "routed-experts"),
        (
            {
                "cache_config": {"enable_prefix_caching": False},
                "scheduler_config": {"enable_chunked_prefill": False},
            },
            "chunked prefill are both off",
        ),
    ],
)
def test_a_prompt_that_cannot_be_begun_in_its_middle(
    parts: dict[str, dict[str, Any]], why: str
) -> None:
    """Pooling over all tokens, attention that lacks the prefix: nothing is served, in one line."""
    with pytest.raises(GeometryError, match=why) as caught:
        from_kv_cache_config(engine_with(**parts), config(FullAttentionSpec()))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "parts",
    [
        {"cache_config": {"enable_prefix_caching": False}},
        {"scheduler_config": {"enable_chunked_prefill": False}},
        {"model_config": {"is_prefix_caching_supported": True}},
        {"aux_output_config": {"enabled": False}},
    ],
)
def test_either_of_them_will_do(parts: dict[str, dict[str, Any]]) -> None:
    """Whoever turns the device's own cache off, or pieces, is served all the same."""
    assert from_kv_cache_config(engine_with(**parts), config(FullAttentionSpec()))


def test_layers_that_look_ahead_are_refused() -> None:
    """Where attention is not causal, KV depends on tokens that the prefix hash does not cover."""
    spec = FullAttentionSpec(non_causal=True)
    with pytest.raises(GeometryError, match="later tokens"):
        from_kv_cache_config(vllm_config(), config(spec))
