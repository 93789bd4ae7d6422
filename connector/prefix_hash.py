"""The hashes that vLLM gives a prompt's blocks, computed without an engine; for tools.

The engine's own function is used where vLLM is installed: its module is loaded alone, which
takes milliseconds where importing the package takes seconds. Elsewhere the formula is spelt out:
SHA-256 of the pickled (parent hash, token ids, extra keys), see `hash_block_tokens` in vLLM's
`v1/core/kv_cache_utils.py`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from ..storage.errors import KVTierError


def hash_function(algorithm: str) -> tuple[Callable[[Any], bytes], str]:
    """Return vLLM's hash function of this name, and whose it is: ``vllm`` or ``kvtier``.

    Raises:
        KVTierError: neither vLLM nor we know it.
    """
    module = _vllm_hashing()
    if module is not None:
        try:
            function: Callable[[Any], bytes] = module.get_hash_fn_by_name(algorithm)
        except (ValueError, ImportError):
            raise KVTierError(f"this vLLM has no hash algorithm {algorithm!r}") from None
        return function, "vllm"
    if algorithm == "sha256":
        return _sha256, "kvtier"
    raise KVTierError(f"hash algorithm {algorithm!r} needs vLLM, which is not installed here")


def _vllm_hashing() -> Any | None:
    try:
        package = importlib.util.find_spec("vllm")
        folders = list(package.submodule_search_locations or ()) if package else []
        for folder in folders:
            path = os.path.join(folder, "utils", "hashing.py")
            spec = importlib.util.spec_from_file_location("kvtier_vllm_hashing", path)
            if os.path.exists(path) and spec is not None and spec.loader is not None:
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                return module if hasattr(module, "get_hash_fn_by_name") else None
    except (ImportError, ValueError, OSError):
        return None
    return None


def _sha256(value: Any) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()


def block_hashes(
    hash_of: Callable[[Any], bytes],
    root_hash: bytes,
    token_ids: Sequence[int],
    block_tokens: int,
    *,
    cache_salt: str | None = None,
    lora: tuple[str, str] | None = None,
) -> list[bytes]:
    """Return the hash at the end of each whole block of a text prompt.

    Args:
        hash_of: from `hash_function`.
        root_hash: what the engine's first block has for a parent (in the namespace).
        token_ids: the prompt.
        block_tokens: tokens of a hash block.
        cache_salt: of the request.
        lora: name and path of the request's adapter.
    """
    out: list[bytes] = []
    parent = root_hash
    for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
        extra: list[tuple[str, ...]] = [("lora", *lora)] if lora else []
        if start == 0 and cache_salt:
            extra.append(("cache_salt", cache_salt))
        tokens = tuple(token_ids[start : start + block_tokens])
        parent = hash_of((parent, tokens, tuple(extra) or None))
        out.append(parent)
    return out
