"""Names of things that are kept.

A chunk key is the prefix hash at the chunk's end followed by one byte for the
KV cache group: the hash covers every token before it, so hash and group name
exactly one run of blocks inside a namespace. Keys are plain ``bytes``
(NumPy's ``S32`` would drop trailing zero bytes).
"""

from __future__ import annotations

from .errors import KVTierError

MIN_HASH_BYTES = 8
MAX_HASH_BYTES = 64
NAMESPACE_BYTES = 16


def chunk_key(prefix_hash: bytes, group: int) -> bytes:
    """Return the key of the chunk of ``group`` that ends at ``prefix_hash``."""
    return prefix_hash + bytes((group,))


def split_key(key: bytes) -> tuple[bytes, int]:
    """Return (prefix hash, group) of a chunk key."""
    return key[:-1], key[-1]


def key_name(key: bytes) -> str:
    """Return the key as people, file names and Redis keys spell it: ``HASH-gN``."""
    return f"{key[:-1].hex()}-g{key[-1]}"


def parse_key_name(name: str) -> bytes:
    """Inverse of `key_name`.

    Raises:
        KVTierError: not a key name.
    """
    text, sep, group = name.partition("-g")
    try:
        prefix_hash = bytes.fromhex(text)
        number = int(group)
    except ValueError:
        sep = ""
    if (
        not sep
        or not MIN_HASH_BYTES <= len(prefix_hash) <= MAX_HASH_BYTES
        or not 0 <= number <= 255
        or key_name(prefix_hash + bytes((number,))) != name
    ):
        raise KVTierError(f"{name!r} is no chunk key; expected HEX-gN, as `kvtier ls` prints it")
    return chunk_key(prefix_hash, number)
