"""What makes KV bytes what they are, in plain words, and the digest of it.

Two engines share records only when every field agrees. The scheduler computes
the namespace at its first use (the root hash is known only then, and only in
EngineCore) and ships the digest to the workers inside the plan. What only a
worker can see (the attention backend that was chosen, its layers) it tells the
scheduler in its handshake: `worker_facts`. A rank's number is not in the digest:
ranks are folders below one namespace.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..storage.key import NAMESPACE_BYTES
from ..storage.record import FORMAT_VERSION as RECORD_FORMAT
from . import engine_api, identity, weights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .geometry import Geometry

FIELDS_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Namespace:
    """A digest and the fields that it stands for.

    Attributes:
        digest: 16 bytes; names the store's folder and is in every record's header.
        fields: what went in, as JSON can hold it; secrets only as digests.
        root_is_random: prefix hashes start from a seed that no other process has:
            nothing can be shared or survive a restart.
    """

    digest: bytes
    fields: Mapping[str, Any]
    root_is_random: bool = False

    def describe(self) -> dict[str, Any]:
        """Return the content of `namespace.json`: the digest and the fields in plain words."""
        return {"namespace": self.digest.hex(), **self.fields}


def namespace_of(fields: Mapping[str, Any], *, root_is_random: bool = False) -> Namespace:
    """Return the namespace of complete fields (`static_fields` and the rest, merged)."""
    return Namespace(digest_of(fields), dict(fields), root_is_random)


def digest_of(fields: Mapping[str, Any]) -> bytes:
    """Return the digest over the canonical JSON of ``fields``.

    Raises:
        TypeError: a value is not plain data.
    """
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=NAMESPACE_BYTES, person=b"kvtier-ns").digest()


def root_fields(vllm_config: Any, epoch: int = 0) -> dict[str, Any] | None:
    """Return how prefix hashes start, or None before EngineCore knows.

    Args:
        vllm_config: vLLM's `VllmConfig`.
        epoch: raised by a reset of the cache (weights changed in place).
    """
    root = engine_api.root_hash(vllm_config)
    if root is None:
        return None
    algorithm, value = root
    return {
        "hash_algorithm": algorithm,
        "root_hash": value.hex(),
        "hash_lookahead_tokens": engine_api.lookahead_hash_tokens(vllm_config),
        "cache_epoch": epoch,
    }


def static_fields(
    vllm_config: Any,
    kv_cache_config: Any,
    geometry: Geometry,
    *,
    weights_cache: weights.WeightsCache | None = None,
    tenant: str | None = None,
) -> dict[str, Any]:
    """Return every field that the configuration alone decides; blocking file reads.

    Args:
        vllm_config: vLLM's `VllmConfig`.
        kv_cache_config: the scheduler's `KVCacheConfig`.
        geometry: read from the same.
        weights_cache: where weights fingerprints are remembered.
        tenant: a word that keeps engines apart; only its digest is kept.

    Raises:
        WeightsError: the model's weights are not on this machine.
    """
    return {
        "fields_format": FIELDS_FORMAT,
        "record_format": RECORD_FORMAT,
        "engine": "vllm " + ".".join(engine_api.engine_version().split(".")[:2]),
        "model": identity.model_fields(vllm_config, weights_cache),
        "cache": identity.cache_fields(vllm_config, geometry),
        "groups": identity.group_fields(kv_cache_config, geometry),
        "parallel": identity.parallel_fields(vllm_config, kv_cache_config),
        "attention": identity.attention_fields(vllm_config, kv_cache_config, geometry),
        "speculation": identity.speculation_fields(vllm_config, weights_cache),
        "adapters": identity.adapter_fields(vllm_config),
        "tenant": None if tenant is None else identity.short_digest(tenant),
    }


def worker_facts(vllm_config: Any, geometry: Geometry) -> dict[str, Any]:
    """Return what only this rank knows: its layers, their pages and attention backends.

    Plain data for the handshake; the scheduler puts it under ``ranks``, by rank.
    """
    return {
        "layers": {
            str(group.group_id): identity.short_digest(
                json.dumps([(r.layer, r.length_bytes) for r in group.regions])
            )
            for group in geometry.groups
        },
        "backends": engine_api.layer_backends(vllm_config),
    }
