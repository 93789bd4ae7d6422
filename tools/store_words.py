"""Namespaces in plain words, and where two of them differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT_FIELDS = ("hash_algorithm", "root_hash", "hash_lookahead_tokens", "cache_epoch", "cleared_by")


def words(description: Mapping[str, Any] | None) -> dict[str, str]:
    """Return what a person wants to know of a namespace: which model, types, layout, groups."""
    said = description or {}
    model, cache = part(said, "model"), part(said, "cache")
    parallel, speculation = part(said, "parallel"), part(said, "speculation")
    found = {
        "model": _text(model.get("path") or model.get("name")),
        "revision": _text(model.get("revision")),
        "weights": _text(model.get("weights")),
        "dtype": _text(model.get("dtype")).removeprefix("torch."),
        "kv dtype": _text(cache.get("cache_dtype")),
        "layout": _text(cache.get("layout")),
        "tokens": _tokens(cache),
        "groups": _groups(said),
        "ranks": _ranks(parallel),
        "device": _text(part(said, "attention").get("device")),
        "speculation": _text(speculation.get("method")),
        "hashes": _text(said.get("hash_algorithm")),
        "epoch": _text(said.get("cache_epoch")),
        "engine": _text(said.get("engine")),
    }
    return {name: text for name, text in found.items() if text}


def part(said: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the fields below ``name``; none where there is something else."""
    found = said.get(name)
    return found if isinstance(found, dict) else {}


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _tokens(cache: Mapping[str, Any]) -> str:
    block, chunk = cache.get("block_tokens"), cache.get("chunk_tokens")
    return f"{block} a block, {chunk} a chunk" if block and chunk else ""


def _groups(said: Mapping[str, Any]) -> str:
    groups = said.get("groups")
    texts = []
    for group in groups if isinstance(groups, list) else []:
        if isinstance(group, dict):
            window = group.get("window_tokens")
            text = f"{group.get('group')}: {_text(group.get('kind')).replace('_', ' ')}"
            texts.append(text + (f" of {window} tokens" if window else ""))
    return ", ".join(texts)


def _ranks(parallel: Mapping[str, Any]) -> str:
    tensor = parallel.get("tensor_parallel_size")
    pipeline = parallel.get("pipeline_parallel_size")
    return f"tensor parallel {tensor}, pipeline parallel {pipeline}" if tensor else ""


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every field of a description as (dotted name, plain value)."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            yield from flat({str(i): item for i, item in enumerate(value)}, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the fields in which two descriptions differ: name to (one's, the other's)."""
    left, right = dict(flat(one)), dict(flat(other))
    return {
        name: (left.get(name), right.get(name))
        for name in [*left, *(name for name in right if name not in left)]
        if name != "namespace" and left.get(name) != right.get(name)
    }


def base_digest(description: Mapping[str, Any]) -> str | None:
    """Return what an engine keeps its epoch under; None for no description of an engine."""
    from ..connector.namespace import digest_of

    if "cache_epoch" not in description or "fields_format" not in description:
        return None
    fields = {k: v for k, v in description.items() if k not in {*ROOT_FIELDS, "namespace"}}
    return digest_of(fields).hex()
