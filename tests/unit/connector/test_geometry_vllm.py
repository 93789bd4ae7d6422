"""Addresses on memory that the installed vLLM allocates itself, in every layout it has."""

from __future__ import annotations

import ctypes
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.connector.geometry import from_kv_cache_config
from kvtier.connector.regions import build_region_tables
from kvtier.connector.token_database import ChunkedTokenDatabase
from kvtier.storage.errors import GeometryError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

COMPACT = ["LBHNC", "LBNHC", "BLHNC", "BLNHC"]
BLOCKS = 11


def full(**changes: Any) -> Any:
    return interface.FullAttentionSpec(
        **{"block_size": 32, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32, **changes}
    )


def window(**changes: Any) -> Any:
    return interface.SlidingWindowSpec(
        block_size=32,
        num_kv_heads=2,
        head_size=8,
        dtype=torch.float32,
        sliding_window=64,
        **changes,
    )


def mamba(page: int) -> Any:
    return interface.MambaSpec(
        block_size=32,
        shapes=((3, 5), (7,)),
        dtypes=(torch.float32, torch.bfloat16),
        page_size_padded=page,
        mamba_cache_mode="align",
    )


def allocate(layout: str, groups: list[Any], kernel: list[int] | None = None) -> tuple[Any, ...]:
    """Let vLLM place and allocate the groups' layers; return (configs, tensors by layer)."""
    resolved = KVCacheLayout[layout]
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: resolved,
            num_gpu_blocks_override=BLOCKS,
            prefix_cache_retention_interval=None,
            prefix_match_unit=None,
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
    )
    made = kv_cache_utils.get_kv_cache_config_from_groups(vllm_config, groups, 1 << 24)
    made.kv_cache_layout = layout
    return vllm_config, made, allocate_kv_cache(made, torch.device("cpu"), resolved, kernel)


def group(spec: Any, *names: str) -> Any:
    return interface.KVCacheGroupSpec(list(names), spec)


def read_bytes(database: ChunkedTokenDatabase, group_id: int, block: int) -> bytes:
    """Return a block's bytes by its raw addresses."""
    plan = database.plan_blocks(group_id, [block])
    pairs = zip(database.addresses(plan)[0].tolist(), database.lengths(plan).tolist(), strict=True)
    return b"".join(ctypes.string_at(address, length) for address, length in pairs)


def view_bytes(tensors: dict[str, Any], names: tuple[str, ...], block: int, layout: str) -> bytes:
    """Return a block's bytes through vLLM's own views, layer after layer, in memory order."""
    out = b""
    for name in names:
        view = tensors[name][block]  # [H, N, C]
        if layout.endswith("NHC"):
            view = view.transpose(0, 1)
        out += view.contiguous().view(torch.uint8).numpy().tobytes()
    return out


def fill(tensors: dict[str, Any], seed: int) -> None:
    storage = next(iter(tensors.values())).untyped_storage()
    raw = torch.tensor([], dtype=torch.uint8).set_(storage)
    generator = torch.Generator().manual_seed(seed)
    raw.copy_(torch.randint(0, 256, raw.shape, generator=generator).to(torch.uint8))


@pytest.mark.parametrize("layout", COMPACT)
@pytest.mark.parametrize("mix", ["one", "two", "states"])
def test_addresses_are_where_vllm_put_the_blocks(layout: str, mix: str) -> None:
    """Every block of every group, read by address, is what vLLM's own views show."""
    spec = full()
    groups = {
        "one": [group(spec, "l.0", "l.1", "l.2")],
        "two": [group(spec, "l.1", "l.3"), group(window(), "l.0", "l.2")],
        "states": [group(mamba(spec.page_size_bytes), "l.0", "l.1"), group(spec, "l.2", "l.3")],
    }[mix]
    vllm_config, made, tensors = allocate(layout, groups)
    geometry = from_kv_cache_config(vllm_config, made)
    database = ChunkedTokenDatabase(geometry, build_region_tables(made, geometry, tensors))
    fill(tensors, 5)
    for one in geometry.groups:
        for block in range(1, BLOCKS):
            got = read_bytes(database, one.group_id, block)
            assert got == view_bytes(tensors, one.layer_names, block, layout)
            assert len(got) == one.block_bytes


def test_block_outermost_layouts_merge_to_one_range() -> None:
    """Where all layers of a block touch, a block is one range; else one a layer."""
    for layout, ranges in (("BLHNC", 1), ("LBHNC", 3)):
        vllm_config, made, tensors = allocate(layout, [group(full(), "l.0", "l.1", "l.2")])
        geometry = from_kv_cache_config(vllm_config, made)
        table = build_region_tables(made, geometry, tensors)[0]
        assert table.n_ranges == ranges


def test_kernel_blocks_smaller_than_blocks_agree() -> None:
    """A backend that splits blocks into kernel blocks changes nothing about a block's bytes."""
    vllm_config, made, tensors = allocate("LBHNC", [group(full(), "l.0", "l.1")], kernel=[16])
    assert tensors["l.0"].shape[0] == 2 * BLOCKS
    geometry = from_kv_cache_config(vllm_config, made)
    database = ChunkedTokenDatabase(geometry, build_region_tables(made, geometry, tensors))
    fill(tensors, 6)
    for block in range(1, BLOCKS):
        want = b"".join(
            tensors[name][2 * block + half].contiguous().view(torch.uint8).numpy().tobytes()
            for name in ("l.0", "l.1")
            for half in (0, 1)
        )
        assert read_bytes(database, 0, block) == want


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
def test_uniform_groups_of_unequal_pages(layout: str) -> None:
    """Layers of different page sizes in one group: workers and scheduler read the same."""
    specs = {"l.0": full(), "l.1": full(head_size=16), "l.2": full()}
    uniform = interface.UniformTypeKVCacheSpecs.from_specs(specs)
    vllm_config, made, tensors = allocate(layout, [group(uniform, *specs)])
    geometry = from_kv_cache_config(vllm_config, made)
    database = ChunkedTokenDatabase(geometry, build_region_tables(made, geometry, tensors))
    fill(tensors, 7)
    for block in range(1, BLOCKS):
        assert read_bytes(database, 0, block) == view_bytes(
            tensors, geometry.groups[0].layer_names, block, layout
        )
    flat = kv_cache_utils.generate_scheduler_kv_cache_config([made])
    assert from_kv_cache_config(vllm_config, flat) == geometry


@pytest.mark.parametrize("layout", ["LHBNC", "BHLNC"])
def test_scattered_layouts_are_refused(layout: str) -> None:
    """Layouts that split a block over its heads raise."""
    vllm_config, made, _ = allocate(layout, [group(full(), "l.0")])
    with pytest.raises(GeometryError, match=layout):
        from_kv_cache_config(vllm_config, made)


def damage(kind: str, tensors: dict[str, Any]) -> dict[str, Any]:
    one = tensors["l.1"]
    changed = {
        "moved": one[1:],
        "elsewhere": one.clone(),
        "strided": one[:, :, ::2],
        "transposed": one.transpose(0, 1),
        "smaller": one[:-1],
        "narrow": one[..., :4],
        "raw": [one],
        "gone": None,
        "other layer": tensors["l.0"],
    }[kind]
    return {**tensors, "l.1": changed}


@pytest.mark.parametrize(
    "kind",
    [
        "moved", "elsewhere", "strided", "transposed", "smaller", "narrow", "raw", "gone",
        "other layer",
    ],
)  # fmt: skip
def test_tensors_that_disagree_with_the_configuration_are_refused(kind: str) -> None:
    """A tensor that is not where, or not shaped as, the configuration says raises."""
    vllm_config, made, tensors = allocate("LBHNC", [group(full(), "l.0", "l.1")])
    geometry = from_kv_cache_config(vllm_config, made)
    build_region_tables(made, geometry, tensors)
    with pytest.raises(GeometryError):
        build_region_tables(made, geometry, damage(kind, tensors))


@pytest.mark.parametrize(
    "spec",
    [
        lambda: interface.SinkFullAttentionSpec(
            block_size=32, num_kv_heads=2, head_size=8, dtype=torch.float32, sink_len=4
        ),
        lambda: interface.RSWASpec(
            block_size=32, num_kv_heads=2, head_size=8, dtype=torch.float32, rswa_window=64
        ),
    ],
)
def test_kinds_with_rules_of_their_own_are_refused(spec: Any) -> None:
    """Subclasses of known specs that free blocks by other rules are not taken for their base."""
    vllm_config, made, _ = allocate("LBHNC", [group(spec(), "l.0")])
    with pytest.raises(GeometryError, match="does not know"):
        from_kv_cache_config(vllm_config, made)


def test_the_region_of_mla_is_addressed_like_any() -> None:
    """Multi-head latent attention: one latent vector a token, the same arithmetic."""
    spec = interface.MLAAttentionSpec(
        block_size=32, num_kv_heads=1, head_size=24, dtype=torch.bfloat16
    )
    vllm_config, made, tensors = allocate("LBHNC", [group(spec, "l.0", "l.1")])
    geometry = from_kv_cache_config(vllm_config, made)
    database = ChunkedTokenDatabase(geometry, build_region_tables(made, geometry, tensors))
    fill(tensors, 8)
    assert geometry.groups[0].block_bytes == 2 * 32 * 24 * 2
    assert read_bytes(database, 0, 3) == view_bytes(tensors, ("l.0", "l.1"), 3, "LBHNC")
