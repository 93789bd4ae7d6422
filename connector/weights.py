"""A fingerprint of a model's weights that costs little to take.

Small checkpoints are hashed whole. Of large ones: file names and sizes, the
configuration files and safetensors headers whole, and samples of content: the
beginning, middle and end of every shard, and 4 KiB out of every tensor (of as
many as the budget allows, spread evenly, when there are more). Offsets follow
from names and sizes, so copies of a checkpoint agree wherever they lie.
A file that is a link into a Hugging Face cache is named by the hash of its
content there, which then stands for all of it.

What it cannot see: a change of a large checkpoint that leaves the sampled bytes
as they were, such as one edited row. So the fingerprint remembers, in memory and
in a file if one is given, what each path looked like (sizes, times, inode
numbers). When that changed while the sampled content did not, the two states get
different fingerprints: never shared wrongly, at the price that a checkpoint which
was only touched starts anew. A copy edited in such a way before any kvtier saw it
is the risk that remains.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import struct
import tempfile
from dataclasses import dataclass
from typing import Any

from ..storage.errors import KVTierError

WHOLE_BYTES = 512 << 20  # checkpoints up to this size are read whole
SAMPLE_BYTES = 4096
EDGE_BYTES = 64 << 10
BUDGET_SAMPLES = 2048  # 8 MiB in all: under 2 s even at 1 ms a read
MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit
FINGERPRINT_BYTES = 16
MAX_SEEN_CONTENTS = 1000  # that one path is remembered to have had before

_SHARD_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt", ".tensors", ".npz")
_CONFIG_FILES = re.compile(
    r"config\.json|params\.json|adapter_config\.json|.*quant.*\.json|.*\.index\.json|.*\.py"
)
_SHA256_NAME = re.compile(r"[0-9a-f]{64}")
_BUFFER_BYTES = 4 << 20

Signature = tuple[tuple[str, int, int, int], ...]
"""(name, size, mtime in ns, inode) of every file that counts."""


class WeightsError(KVTierError):
    """The weights cannot be found or read, so nothing may be shared for them."""


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    path: str
    size_bytes: int
    blob: str | None  # content hash by which a Hugging Face cache names it


class WeightsCache:
    """Remembers fingerprints by path, size, time and inode.

    Args:
        path: JSON file that outlives the process; None: memory only. A file that is
            missing, damaged or not writable costs the memory, never the fingerprint.
    """

    def __init__(self, path: str | None = None) -> None:
        self._path = path
        self._entries: dict[str, dict[str, Any]] = {}
        if path is not None:
            with contextlib.suppress(OSError, ValueError), open(path, "rb") as file:
                loaded = json.load(file)
                if isinstance(loaded, dict):
                    self._entries = {k: v for k, v in loaded.items() if isinstance(v, dict)}

    def lookup(self, path: str, signature: Signature) -> str | None:
        """Return the fingerprint of ``path`` if its files look as they did."""
        entry = self._entries.get(path, {})
        if entry.get("signature") == _plain(signature) and isinstance(entry.get("value"), str):
            return str(entry["value"])
        return None

    def settle(self, path: str, signature: Signature, content: str, *, whole: bool) -> str:
        """Return the fingerprint for a content just taken, and remember it."""
        entry = self._entries.get(path, {})
        seen = [c for c in (*_list(entry.get("seen")), entry.get("content")) if c is not None]
        value = content
        if not whole and content in seen:
            # Other files, same samples: cannot be told apart, so they must not share.
            value = _digest(content, json.dumps(_plain(signature)))
        seen = [c for c in dict.fromkeys(seen) if c != content]
        self._entries[path] = {
            "signature": _plain(signature),
            "content": content,
            "value": value,
            "seen": seen[-MAX_SEEN_CONTENTS:],
        }
        self._save()
        return value

    def _save(self) -> None:
        if self._path is None:
            return
        folder = os.path.dirname(self._path) or "."
        with contextlib.suppress(OSError):
            os.makedirs(folder, mode=0o700, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=folder, prefix=".weights-", suffix=".tmp")
            try:
                with os.fdopen(handle, "w") as file:
                    json.dump(self._entries, file)
                os.replace(temporary, self._path)
            except OSError:
                os.unlink(temporary)


_MEMORY = WeightsCache()


def weights_fingerprint(path: str, cache: WeightsCache | None = None) -> str:
    """Return the fingerprint of a checkpoint: a folder, or one file; 32 hex digits.

    Blocking file reads; call it at start, not in a step.

    Args:
        path: local folder or file (`local_model_path` finds that of a hub id).
        cache: where fingerprints are remembered; None: this process's memory.

    Raises:
        WeightsError: no such path, no weights in it, or not readable.
    """
    cache = _MEMORY if cache is None else cache
    path = os.path.abspath(path)
    try:
        files, signature = _list_files(path)
        known = cache.lookup(path, signature)
        if known is not None:
            return known
        content, whole = _content_digest(files)
    except OSError as error:
        raise WeightsError(f"weights in {path!r} cannot be read: {error.strerror}") from None
    return cache.settle(path, signature, content, whole=whole)


def lora_fingerprint(path: str, cache: WeightsCache | None = None) -> str:
    """Return the fingerprint of a LoRA adapter's folder.

    The engine's prefix hash covers an adapter's name and path, not its content, so
    an adapter replaced in place needs this in its keys. Cheap when nothing changed:
    one directory listing.

    Raises:
        WeightsError: as `weights_fingerprint`.
    """
    return weights_fingerprint(path, cache)


def dummy_fingerprint(config_text: str, seed: int | None) -> str:
    """Return the fingerprint of weights that the engine makes up (`load_format` dummy)."""
    return _digest("dummy", config_text, str(seed))


def local_model_path(model: str, revision: str | None, cache_dir: str | None = None) -> str:
    """Return where a model lies on this machine: a path as it is, or a hub id's snapshot.

    Asks no network.

    Raises:
        WeightsError: not on this machine.
    """
    if os.path.exists(model):
        return model
    try:
        from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 (comes with vLLM)
    except ImportError:
        raise WeightsError(f"model {model!r} is no local path") from None
    for name in ("config.json", "params.json"):
        try:
            found = try_to_load_from_cache(model, name, cache_dir=cache_dir, revision=revision)
        except ValueError:  # not a repository id
            break
        if isinstance(found, str):
            return os.path.dirname(found)
    raise WeightsError(f"model {model!r} has no snapshot in the local Hugging Face cache")


def _list_files(path: str) -> tuple[list[_File], Signature]:
    if os.path.isdir(path):
        names = [
            name
            for name in sorted(os.listdir(path))
            if name.endswith(_SHARD_SUFFIXES) or _CONFIG_FILES.fullmatch(name)
        ]
        paths = [(name, os.path.join(path, name)) for name in names]
    else:
        paths = [(os.path.basename(path), path)]
    files, signature = [], []
    for name, full in paths:
        stat = os.stat(full)
        target = os.path.basename(os.path.realpath(full)) if os.path.islink(full) else ""
        blob = target if _SHA256_NAME.fullmatch(target) else None
        files.append(_File(name, full, stat.st_size, blob))
        signature.append((name, stat.st_size, stat.st_mtime_ns, stat.st_ino))
    if os.path.isdir(path) and not any(f.name.endswith(_SHARD_SUFFIXES) for f in files):
        raise WeightsError(f"no weights in {path!r}")
    return files, tuple(signature)


def _content_digest(files: list[_File]) -> tuple[str, bool]:
    """Return the digest over all files, and whether every byte of them is in it."""
    opaque = [f for f in files if f.blob is None]
    shards = [f for f in opaque if f.name.endswith(_SHARD_SUFFIXES)]
    shard_bytes = sum(f.size_bytes for f in shards)
    whole = shard_bytes <= WHOLE_BYTES
    total = hashlib.blake2b(digest_size=FINGERPRINT_BYTES)
    for file in files:
        _feed(total, file.name.encode(), str(file.size_bytes).encode())
        if file.blob is not None:
            _feed(total, b"blob", file.blob.encode())
        elif whole or file not in shards:
            _feed(total, b"whole", _hash_whole(file))
        else:
            share = max(16, BUDGET_SAMPLES * file.size_bytes // shard_bytes)
            _feed(total, b"samples", _hash_samples(file, share))
    return total.hexdigest(), whole


def _hash_whole(file: _File) -> bytes:
    digest = hashlib.blake2b()
    with open(file.path, "rb", buffering=0) as handle:
        while data := handle.read(_BUFFER_BYTES):
            digest.update(data)
    return digest.digest()


def _hash_samples(file: _File, budget: int) -> bytes:
    digest = hashlib.blake2b()
    with open(file.path, "rb", buffering=0) as handle:
        fd = handle.fileno()
        header = _read_header(fd, file)
        digest.update(header)
        ranges = _edges(file.size_bytes) + _sample_ranges(file, header, budget)
        # Ask for all at once, so that slow storage works on them in parallel.
        if hasattr(os, "posix_fadvise"):
            for offset, length in ranges:
                os.posix_fadvise(fd, offset, length, os.POSIX_FADV_WILLNEED)
        for offset, length in ranges:
            _feed(digest, struct.pack("<QQ", offset, length), os.pread(fd, length, offset))
    return digest.digest()


def _read_header(fd: int, file: _File) -> bytes:
    """Return a safetensors header, or nothing."""
    if not file.name.endswith(".safetensors") or file.size_bytes < 8:
        return b""
    (length,) = struct.unpack("<Q", os.pread(fd, 8, 0))
    if length > min(MAX_HEADER_BYTES, file.size_bytes - 8):
        return b""
    return os.pread(fd, length, 8)


def _edges(size_bytes: int) -> list[tuple[int, int]]:
    middle = max(0, size_bytes // 2 - EDGE_BYTES // 2)
    last = max(0, size_bytes - EDGE_BYTES)
    return [(0, EDGE_BYTES), (middle, EDGE_BYTES), (last, EDGE_BYTES)]


def _sample_ranges(file: _File, header: bytes, budget: int) -> list[tuple[int, int]]:
    spans = _tensor_spans(header) or [("", 0, file.size_bytes)] * budget
    if len(spans) > budget:
        spans = [spans[i * len(spans) // budget] for i in range(budget)]
    ranges = []
    for number, (name, start, end) in enumerate(spans):
        room = max(0, end - start - SAMPLE_BYTES)
        seed = _digest(file.name, str(file.size_bytes), name, str(number))
        ranges.append((start + int(seed, 16) % (room + 1), min(SAMPLE_BYTES, end - start)))
    return ranges


def _tensor_spans(header: bytes) -> list[tuple[str, int, int]]:
    """Return (name, first byte, end) of every tensor in a safetensors file, by place."""
    if not header:
        return []
    spans = []
    try:
        for name, entry in json.loads(header).items():
            if name != "__metadata__":
                first, end = entry["data_offsets"]
                if end > first:
                    spans.append((name, len(header) + 8 + int(first), len(header) + 8 + int(end)))
    except (ValueError, TypeError, KeyError, AttributeError):
        return []  # not understood: sampled like any other file
    return sorted(spans, key=lambda span: span[1])


def _feed(digest: Any, *parts: bytes) -> None:
    """Add parts with their lengths, so that no two lists of parts run into one."""
    for part in parts:
        digest.update(struct.pack("<Q", len(part)))
        digest.update(part)


def _digest(*parts: str) -> str:
    digest = hashlib.blake2b(digest_size=FINGERPRINT_BYTES)
    _feed(digest, *(part.encode() for part in parts))
    return digest.hexdigest()


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _plain(signature: Signature) -> list[list[Any]]:
    return [list(row) for row in signature]
