"""The fields of a namespace, read from vLLM's configuration.

Plain words and plain data: what is here decides whether two engines may share
KV. Every function takes vLLM's objects duck-typed and tolerates missing
attributes, which then read as None.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from enum import Enum
from typing import TYPE_CHECKING, Any

from ..storage.key import NAMESPACE_BYTES
from . import engine_api, weights

if TYPE_CHECKING:
    from .geometry import Geometry

_RULED_OUT = ("transformers_version", "_name_or_path", "torch_dtype", "dtype")
_PLAIN_ROPE = ("default", "linear", "llama3", None)


def model_fields(vllm_config: Any, cache: weights.WeightsCache | None) -> dict[str, Any]:
    """Return which model, which weights, and all that changes what it computes."""
    model = vllm_config.model_config
    load = getattr(vllm_config, "load_config", None)
    name = str(model.model)
    fields = {
        "path": os.path.abspath(name) if os.path.exists(name) else name,
        "revision": plain(getattr(model, "revision", None)),
        "code_revision": plain(getattr(model, "code_revision", None)),
        "weights": _weights(model, load, cache),
        "config": _config_digest(model),
        "overrides": plain(getattr(model, "hf_overrides", None)),
        "dtype": str(getattr(model, "dtype", None)),
        "quantization": plain(getattr(model, "quantization", None)),
        "quantization_config": plain(getattr(model, "quantization_config", None)),
        "implementation": plain(getattr(model, "model_impl", None)),
        "classes": plain(getattr(model, "model_class_overrides", None)),
        "sliding_window_off": bool(getattr(model, "disable_sliding_window", False)),
        "rope": _rope(model),
    }
    media = getattr(model, "multimodal_config", None)
    if media is not None:
        fields["media"] = {
            key: plain(getattr(media, key, None))
            for key in ("mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate")
        }
    return fields


def _rope(model: Any) -> dict[str, Any] | None:
    """Return the rotary settings; with the context length where it changes the keys."""
    text = getattr(model, "hf_text_config", None) or getattr(model, "hf_config", None)
    found = {
        key: plain(getattr(text, key))
        for key in ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
        if getattr(text, key, None) is not None
    }
    scaling = found.get("rope_scaling") or found.get("rope_parameters") or {}
    if _rope_types(scaling) - set(_PLAIN_ROPE):
        found["max_model_len"] = int(model.max_model_len)
    return found or None


def _rope_types(scaling: Any) -> set[Any]:
    if not isinstance(scaling, dict):
        return {None}
    kinds = {scaling.get("rope_type", scaling.get("type"))}
    for value in scaling.values():
        if isinstance(value, dict):
            kinds |= _rope_types(value)
    return kinds


def _weights(model: Any, load: Any, cache: weights.WeightsCache | None) -> str:
    if str(getattr(load, "load_format", "auto")) == "dummy":
        return weights.dummy_fingerprint(_config_digest(model), getattr(model, "seed", None))
    remote = str(getattr(model, "model_weights", "") or "")
    path = weights.local_model_path(
        remote or str(model.model),
        getattr(model, "revision", None),
        getattr(load, "download_dir", None),
    )
    return weights.weights_fingerprint(path, cache)


def _config_digest(model: Any) -> str:
    """Digest the model's configuration after all overrides."""
    config = getattr(model, "hf_config", None)
    to_dict = getattr(config, "to_dict", None)
    raw = to_dict() if to_dict is not None else plain(config)
    if isinstance(raw, dict):
        raw = {key: value for key, value in raw.items() if key not in _RULED_OUT}
    return short_digest(json.dumps(plain(raw), sort_keys=True))


def cache_fields(vllm_config: Any, geometry: Geometry) -> dict[str, Any]:
    """Return the types and sizes of the cache."""
    cache = vllm_config.cache_config
    names = (
        "cache_dtype",
        "kv_cache_dtype_skip_layers",
        "mamba_cache_dtype",
        "mamba_ssm_cache_dtype",
        "mamba_cache_mode",
        "calculate_kv_scales",
        "kv_sharing_fast_prefill",
    )
    return {
        **{name: plain(getattr(cache, name, None)) for name in names},
        "layout": geometry.layout,
        "block_tokens": plain(getattr(cache, "block_size", None)),
        "hash_block_tokens": geometry.hash_block_tokens,
        "chunk_tokens": geometry.chunk_tokens,
        "conv_state_layout": os.getenv("VLLM_SSM_CONV_STATE_LAYOUT"),
    }


def group_fields(kv_cache_config: Any, geometry: Geometry) -> list[dict[str, Any]]:
    """Return kind, sizes and spec of every group."""
    out = []
    for group in geometry.groups:
        spec = engine_api.first_spec(kv_cache_config.kv_cache_groups[group.group_id])
        described = {"class": type(spec).__name__}
        if dataclasses.is_dataclass(spec):
            described.update(
                {f.name: plain(getattr(spec, f.name)) for f in dataclasses.fields(spec)}
            )
        out.append(
            {
                "group": group.group_id,
                "kind": group.kind.value,
                "block_tokens": group.block_tokens,
                "window_tokens": group.window_tokens,
                "page_bytes": list(group.page_bytes),
                "draft": group.is_draft,
                "spec": described,
            }
        )
    return out


def parallel_fields(vllm_config: Any, kv_cache_config: Any) -> dict[str, Any]:
    """Return how the model is spread over ranks, and how many in a row hold the same KV."""
    parallel = vllm_config.parallel_config
    names = (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
        "cp_kv_cache_interleave_size",
        "dcp_kv_cache_interleave_size",
    )
    return {
        **{name: int(getattr(parallel, name, 1) or 1) for name in names},
        "kv_replicas": engine_api.identical_ranks(vllm_config, kv_cache_config),
        "layer_partition": os.getenv("VLLM_PP_LAYER_PARTITION"),
    }


def attention_fields(vllm_config: Any, kv_cache_config: Any, geometry: Geometry) -> dict[str, Any]:
    """Return what lays bytes out inside a block."""
    attention = getattr(vllm_config, "attention_config", None)
    backend = getattr(attention, "backend", None)
    return {
        "asked_backend": plain(getattr(backend, "name", backend)),
        "asked_by_kind": plain(getattr(attention, "backend_per_kind", None)),
        "device": engine_api.device_type(vllm_config),
        "cpu_packing": engine_api.cpu_packing(
            vllm_config,
            [
                engine_api.first_spec(kv_cache_config.kv_cache_groups[group.group_id])
                for group in geometry.groups
            ],
        ),
    }


def speculation_fields(
    vllm_config: Any, cache: weights.WeightsCache | None
) -> dict[str, Any] | None:
    """Return the draft model and method, whose layers are in the groups; None without."""
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None:
        return None
    names = (
        "method",
        "model",
        "revision",
        "num_speculative_tokens",
        "quantization",
        "kv_cache_dtype",
        "draft_tensor_parallel_size",
        "disable_eagle_block_drop",
        "parallel_drafting",
    )
    fields = {name: plain(getattr(speculative, name, None)) for name in names}
    draft = getattr(speculative, "draft_model_config", None)
    # Methods like ngram have no model of their own; vLLM then names the target again.
    if draft is not None and str(draft.model) != str(vllm_config.model_config.model):
        load = getattr(speculative, "draft_load_config", None) or getattr(
            vllm_config, "load_config", None
        )
        fields["weights"] = _weights(draft, load, cache)
        fields["config"] = _config_digest(draft)
        fields["dtype"] = str(getattr(draft, "dtype", None))
    return fields


def adapter_fields(vllm_config: Any) -> dict[str, Any] | None:
    """Return how adapters are applied; which one is in the prefix hash."""
    lora = getattr(vllm_config, "lora_config", None)
    if lora is None:
        return None
    return {"dtype": str(getattr(lora, "lora_dtype", None))}


def short_digest(text: str) -> str:
    """Return 32 hex digits that stand for ``text``."""
    return hashlib.blake2b(text.encode(), digest_size=NAMESPACE_BYTES).hexdigest()


def plain(value: Any) -> Any:
    """Return ``value`` as JSON can hold it, the same in every process."""
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(plain(inner)) for inner in value)
    return _plain_object(value)


def _plain_object(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '?')}"
    text = str(value)
    # An address would make a new namespace at every start; the class is all that is known.
    return type(value).__name__ if " at 0x" in text else text
