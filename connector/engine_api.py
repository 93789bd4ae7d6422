"""What the engine offers, asked of its objects and never of its version string.

The only module that knows how vLLM's interface differs between versions. Every
function takes vLLM's objects duck-typed and answers with plain data, or says in
one line what it does not recognise. Nothing of vLLM is imported at import time.
"""

from __future__ import annotations

import os
import platform
from enum import Enum
from typing import TYPE_CHECKING, Any

from ..storage.errors import GeometryError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BLOCK_COMPACT_LAYOUTS = frozenset({"LBHNC", "LBNHC", "BLHNC", "BLNHC"})
"""Layouts in which one layer's page of one block is one contiguous run."""

TESTED_VERSIONS = ("0.31", "0.32")
"""Of vLLM; decides about a warning and about nothing else."""

BLOCK_OUTERMOST_LAYOUTS = frozenset({"BLHNC", "BLNHC", "BHLNC"})


class SpecKind(str, Enum):
    """What a KV cache spec of vLLM means for saving and restoring."""

    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    CHUNKED_LOCAL = "chunked_local"
    RECURRENT = "recurrent"
    UNSUPPORTED = "unsupported"


# Exact class names: an unknown subclass may free or fill blocks by other rules.
_KIND_BY_CLASS_NAME = {
    "FullAttentionSpec": SpecKind.FULL,
    "MLAAttentionSpec": SpecKind.FULL,
    "SlidingWindowSpec": SpecKind.SLIDING_WINDOW,
    "SlidingWindowMLASpec": SpecKind.SLIDING_WINDOW,
    "ChunkedLocalAttentionSpec": SpecKind.CHUNKED_LOCAL,
    "MambaSpec": SpecKind.RECURRENT,
}


def layer_specs(group: Any) -> dict[str, Any]:
    """Return the spec of every layer of a KV cache group.

    A group of uniform type holds one spec a layer; the scheduler's copy of the
    configuration has them flattened to one for all (`has_own_specs`).
    """
    spec = group.kv_cache_spec
    nested = getattr(spec, "kv_cache_specs", None)
    if nested is not None:
        return dict(nested)
    return dict.fromkeys(group.layer_names, spec)


def first_spec(group: Any) -> Any:
    """Return one layer's spec of a group; all have the same kind and block size."""
    nested = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return next(iter(nested.values())) if nested else group.kv_cache_spec


def spec_kind(spec: Any) -> SpecKind:
    """Classify one layer's spec by its exact class."""
    return _KIND_BY_CLASS_NAME.get(type(spec).__name__, SpecKind.UNSUPPORTED)


def window_tokens(spec: Any) -> int | None:
    """Return the attention window, trailing tokens kept for speculation included."""
    kind = spec_kind(spec)
    if kind is SpecKind.SLIDING_WINDOW:
        return int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))
    if kind is SpecKind.CHUNKED_LOCAL:
        return int(spec.attention_chunk_size)
    return None


def block_tokens(spec: Any, dcp_size: int) -> int:
    """Return the tokens that one block of this spec spans over all context-parallel ranks."""
    sharded = getattr(spec, "dcp_sharded", spec_kind(spec) is not SpecKind.RECURRENT)
    return int(spec.block_size) * (dcp_size if sharded else 1)


def useful_page_bytes(spec: Any) -> int:
    """Return the bytes of a page that mean something: its size without padding."""
    for name in ("real_page_size_bytes", "unpadded_page_size_bytes", "page_size_bytes"):
        value = getattr(spec, name, None)
        if value is not None:
            return int(value)
    raise GeometryError(f"KV cache spec {type(spec).__name__} does not tell its page size")


def cacheable_group_ids(kv_cache_config: Any) -> tuple[int, ...]:
    """Return the groups whose blocks are addressed by hashes and live on the device."""
    groups = kv_cache_config.kv_cache_groups
    ids = getattr(kv_cache_config, "prefix_cacheable_group_ids", None)
    if ids is None:
        ids = tuple(
            i for i, g in enumerate(groups) if getattr(g.kv_cache_spec, "prefix_cacheable", True)
        )
    return tuple(int(i) for i in ids)


def layout_name(vllm_config: Any, kv_cache_config: Any) -> str:
    """Return the resolved layout's name, in capitals.

    Raises:
        GeometryError: this engine does not say which layout it uses.
    """
    for owner in (kv_cache_config, getattr(vllm_config, "cache_config", None)):
        layout = getattr(owner, "kv_cache_layout", None)
        if layout is not None:
            return str(getattr(layout, "name", layout)).upper()
    raise GeometryError("this vLLM does not name its KV cache layout; no external hits")


def dcp_size(vllm_config: Any) -> int:
    """Return the decode context parallel size."""
    return int(getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1) or 1)


def pcp_size(vllm_config: Any) -> int:
    """Return the prefill context parallel size."""
    return int(getattr(vllm_config.parallel_config, "prefill_context_parallel_size", 1) or 1)


def lookahead_hash_tokens(vllm_config: Any) -> int:
    """Return the tokens after a block that its hash covers (0 before vLLM 0.33)."""
    return int(getattr(vllm_config, "num_hash_lookahead_tokens", 0) or 0)


def drops_draft_block(vllm_config: Any) -> bool:
    """Say whether the engine shortens its own prefix hits for a draft head."""
    speculation = getattr(vllm_config, "speculative_config", None)
    for name in ("use_eagle_block_drop", "use_eagle"):  # the second in older engines
        asked = getattr(speculation, name, None)
        if asked is not None:
            return bool(asked())
    return False


def hash_block_tokens(kv_cache_config: Any) -> int | None:
    """Return the tokens that each of `Request.block_hashes` covers, when the engine says."""
    value = getattr(kv_cache_config, "hash_block_size", None)
    return None if value is None else int(value)


def hit_alignment_tokens(kv_cache_config: Any) -> int | None:
    """Return the granularity of prefix hits, when the engine says."""
    value = getattr(kv_cache_config, "cache_hit_alignment_tokens", None)
    return None if value is None else int(value)


def tensor_layers(tensor: Any) -> list[str]:
    """Return the layer names that a `KVCacheTensor` places, in its order."""
    layers = getattr(tensor, "layers", None)
    if layers is None or not hasattr(tensor, "block_stride"):
        raise GeometryError(
            "this vLLM places KV cache tensors in a way that kvtier does not know "
            "(no layers, layer_stride and block_stride); no external hits"
        )
    return [str(name) for name in layers]


def block_table(scheduler_output: Any, request_id: str) -> tuple[Sequence[int], ...] | None:
    """Return the request's current block ids per group, or None when the engine has none to give.

    Valid only inside `build_connector_meta`.
    """
    state = getattr(scheduler_output, "kv_connector_block_state", None)
    if state is None:
        return None
    ids: tuple[Sequence[int], ...] | None = state.get_block_ids(request_id)
    return ids


def boundary_offloads(scheduler_output: Any) -> Mapping[str, Sequence[tuple[int, int, int]]]:
    """Return the recurrent states handed over this step: request id to (group, block, tokens).

    Valid only inside `build_connector_meta`.
    """
    state = getattr(scheduler_output, "kv_connector_block_state", None)
    offers = getattr(state, "boundary_state_offloads", None)
    if offers is None:
        offers = getattr(scheduler_output, "partial_tail_offloads", None)
    return offers or {}


def check_interface() -> None:
    """Refuse an engine that lacks what a save or a load cannot do without.

    Raises:
        GeometryError: one line that names what it lacks.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1 import base  # noqa: PLC0415 (slow)
        from vllm.v1.core import kv_cache_utils  # noqa: PLC0415 (slow)
        from vllm.v1.core.sched.output import SchedulerOutput  # noqa: PLC0415 (slow)
    except ImportError as err:
        raise GeometryError(
            f"this vLLM is built in a way that kvtier does not know: {err}"
        ) from None
    offers = {
        "to tell which loads failed": hasattr(base, "KVConnectorTransferResults"),
        "block tables": "kv_connector_block_state" in SchedulerOutput.__annotations__,
        "the root of its prefix hashes": "NONE_HASH"
        in {**vars(kv_cache_utils), **kv_cache_utils.__annotations__},
    }
    lacking = [what for what, there in offers.items() if not there]
    if lacking:
        raise GeometryError(f"this vLLM ({engine_version()}) does not offer {', '.join(lacking)}")


def root_hash(vllm_config: Any) -> tuple[str, bytes] | None:
    """Return (hash algorithm, root hash), or None before EngineCore has set it.

    Known only inside EngineCore and only after the scheduler connector's constructor.
    """
    algorithm = str(getattr(vllm_config.cache_config, "prefix_caching_hash_algo", "builtin"))
    try:
        from vllm.v1.core import kv_cache_utils  # noqa: PLC0415 (vLLM is slow to import)
    except ImportError:
        return None
    value = getattr(kv_cache_utils, "NONE_HASH", None)
    if value is None:
        return None
    return algorithm, value if isinstance(value, bytes) else repr(value).encode()


def root_hash_is_random(vllm_config: Any) -> bool:
    """Say whether this engine starts its prefix hashes from a seed that no other process has."""
    if os.getenv("PYTHONHASHSEED") is not None:
        return False
    algorithm = str(getattr(vllm_config.cache_config, "prefix_caching_hash_algo", "builtin"))
    if not algorithm.startswith("sha256"):
        return True
    try:
        from vllm.v1.core import kv_cache_utils  # noqa: PLC0415 (vLLM is slow to import)
    except ImportError:
        return True
    # Older engines draw a random seed for every algorithm.
    return not hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED")


def engine_version() -> str:
    """Return the engine's version as people know it; for the namespace and messages only."""
    try:
        import vllm  # noqa: PLC0415 (vLLM is slow to import)
    except ImportError:
        return "unknown"
    return str(getattr(vllm, "__version__", "unknown"))


def untested_engine() -> str | None:
    """Return one line when this engine is no version that kvtier's tests have run on."""
    version = engine_version()
    known = version.split("+")[0].split(".")[:2] in [one.split(".") for one in TESTED_VERSIONS]
    if known:
        return None
    return (
        f"vLLM {version} is not among the versions that kvtier was tested with "
        f"({', '.join(TESTED_VERSIONS)}); what it does not recognise it refuses"
    )


def device_type(vllm_config: Any) -> str:
    """Return the kind of device that holds the KV cache: cpu, cuda, ..."""
    device = getattr(getattr(vllm_config, "device_config", None), "device_type", None)
    if device is None:
        device = getattr(getattr(vllm_config, "device_config", None), "device", "unknown")
    return str(device)


def cpu_packing(vllm_config: Any, specs: Sequence[Any]) -> list[str] | None:
    """Return how the CPU attention packs each spec's blocks, or None on other devices.

    The packing follows from the instruction set, so that it belongs to the identity
    of the bytes. Every process of a machine computes the same.
    """
    if device_type(vllm_config) != "cpu":
        return None
    try:
        from vllm.v1.attention.backends import cpu_attn  # noqa: PLC0415 (vLLM is slow to import)

        choose = cpu_attn._get_attn_isa  # noqa: SLF001 (vLLM has no public name for it)
    except (ImportError, AttributeError):
        return [f"unknown {platform.machine()}"]
    model = vllm_config.model_config
    cache_dtype = getattr(vllm_config.cache_config, "cache_dtype", None)
    out = []
    for spec in specs:
        if spec_kind(spec) is SpecKind.RECURRENT:
            out.append("none")
            continue
        try:
            out.append(str(choose(model.dtype, spec.block_size, spec.head_size, cache_dtype)))
        except TypeError:  # fewer parameters in older engines
            out.append(str(choose(model.dtype, spec.block_size)))
        except NotImplementedError:  # the engine refuses this cache type itself
            out.append("unsupported")
    return out


def layer_backends(vllm_config: Any) -> dict[str, str]:
    """Return the attention backend of every layer built in this process, by layer name.

    Empty in the scheduler's process, which builds no layers.
    """
    context = getattr(vllm_config.compilation_config, "static_forward_context", None) or {}
    out = {}
    for name, layer in context.items():
        get_backend = getattr(layer, "get_attn_backend", None)
        if get_backend is not None:
            backend = get_backend()
            out[str(name)] = f"{backend.__module__}.{backend.__qualname__}"
    return out


def finished_normally(request: Any) -> bool:
    """Say whether a request ran to its end, so that all of its accepted tokens' KV is valid."""
    name = getattr(request.status, "name", "")
    return name in {"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION"}


def check_settings(vllm_config: Any) -> None:
    """Refuse what would silently replace this connector.

    Raises:
        GeometryError: vLLM's own offloading is configured beside kvtier.
    """
    if getattr(vllm_config.cache_config, "kv_offloading_size", None):
        raise GeometryError(
            "--kv-offloading-size is set beside kvtier; vLLM would use its own connector. Drop one"
        )


def transfer_results(finished: set[str], failed: set[str]) -> Any:
    """Return the engine's envelope for loads that are over."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: PLC0415 (slow)
        KVConnectorTransferResults,
    )

    return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)


def hit_sources(hits: Mapping[str, int], num_hits: int) -> Any | None:
    """Return hits by the engine's kinds of places, in all ``num_hits``; None if it has none."""
    try:
        from vllm.v1.metrics.stats import CacheHitSource  # noqa: PLC0415 (slow)
    except ImportError:
        return None
    kinds = {"ram": "HOST", "disk": "DISK", "redis": "EXTERNAL"}
    if sum(hits.values()) != num_hits:
        return None
    out: dict[Any, int] = {}
    for tier, n in hits.items():
        kind = getattr(CacheHitSource, kinds.get(tier, "EXTERNAL"), None)
        if kind is None:
            return None
        out[kind] = out.get(kind, 0) + n
    return out


def kv_item_bytes(kv_caches: Mapping[str, Any]) -> int:
    """Return the size of one KV value, for codecs on byte planes."""
    sizes = [int(tensor.element_size()) for tensor in kv_caches.values()]
    return max(sizes, default=1) if max(sizes, default=1) in {1, 2, 4} else 1


def identical_ranks(vllm_config: Any, kv_cache_config: Any) -> int:
    """Return how many tensor-parallel ranks in a row hold identical KV (1: none do)."""
    replicas = int(getattr(kv_cache_config, "kv_tp_replicas", 1) or 1)
    tensor = int(vllm_config.parallel_config.tensor_parallel_size)
    return replicas if replicas > 0 and tensor % replicas == 0 else 1


def copies_fall_short(kv_caches: Mapping[str, Any]) -> bool:
    """Say whether this engine's copy-on-write leaves a part of some blocks behind.

    vLLM up to 0.33 copies of views that start at one address only the first, also where a
    later one is longer (groups of recurrent layers and of attention in the same memory).
    """
    sizes: dict[int, set[int]] = {}
    for view in kv_caches.values():
        sizes.setdefault(view.data_ptr(), set()).add(view[0].numel() * view.element_size())
    if all(len(lengths) == 1 for lengths in sizes.values()):
        return False
    import torch  # noqa: PLC0415 (slow)
    from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace as copy  # noqa: PLC0415 (slow)

    memory = torch.zeros(32, dtype=torch.int8)  # two layers' room, so that none is all of it
    short, long = (memory.as_strided((2, 1, 1, n), (8, 8, 8, 1)) for n in (4, 8))
    long[0] = 1
    copy([short, long], 2, [(0, 1)])
    return not bool((long[1] == 1).all())
