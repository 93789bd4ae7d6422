"""Names of things that are kept.

A chunk key is the prefix hash at the chunk's end followed by one byte for the
KV cache group: the hash covers every token before it, so hash and group name
exactly one run of blocks inside a namespace. Keys are plain ``bytes``
(NumPy's ``S32`` would drop trailing zero bytes).
"""

from __future__ import annotations

import re

from .errors import KVTierError

MIN_HASH_BYTES = 8
MAX_HASH_BYTES = 64
NAMESPACE_BYTES = 16
_NAME = re.compile(
    rf"((?:[0-9a-f]{{2}}){{{MIN_HASH_BYTES},{MAX_HASH_BYTES}}})-g(0|[1-9][0-9]{{0,2}})"
)


def chunk_key(prefix_hash: bytes, group: int) -> bytes:
    """Return the key of the chunk of ``group`` that ends at ``prefix_hash``."""
    return prefix_hash + bytes((group,))


def key_name(key: bytes) -> str:
    """Return the key as people, file names and Redis keys spell it: ``HASH-gN``."""
    return f"{key[:-1].hex()}-g{key[-1]}"


def parse_key_name(name: str) -> bytes:
    """Inverse of `key_name`.

    Raises:
        KVTierError: not a key name.
    """
    match = _NAME.fullmatch(name)  # quick: whoever walks a store comes by for every record
    if match is None or (number := int(match[2])) > 255:
        raise KVTierError(f"{name!r} is no chunk key; expected HEX-gN, as `kvtier ls` prints it")
    return chunk_key(bytes.fromhex(match[1]), number)
