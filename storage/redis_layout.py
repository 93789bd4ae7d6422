"""How a record lies in Redis: names of keys, and what stands before the payload.

A record is cut into stripes. The first stripe lies behind the header in one
value, the *head*; the others are values of their own::

    PREFIX:<namespace hex>:r<rank>:{<hash hex>}-g<group>:h            head
    PREFIX:<namespace hex>:r<rank>:{<hash hex>}-g<group>:<generation hex>:<i>
    PREFIX:ns:<namespace hex>                                         which model, in words

The braces are the cluster hash tag: all of a chunk lies on one node, and
chunks spread over all.

The head is written last and names the generation of its stripes, a random
number drawn by each write. So stripes never change once written, two writers
of one key cannot mix, and a record is there whole or not at all. A record of
one stripe is one value and one round trip.

Head, little-endian::

    offset  bytes  field
         0    512  record header (`kvtier.storage.record`)
       512      8  generation
       520      8  stripe_bytes: payload bytes of each stripe but the last
       528     16  XXH3-128 of the 528 bytes before
       544      -  first stripe
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

import xxhash

from .errors import DamageReason, KVTierError, RecordDamaged
from .key import key_name, parse_key_name
from .record import HEADER_BYTES, Header, parse_header

GENERATION_BYTES = 8
_EXTENT = struct.Struct("<8sQ")
_CHECKED_BYTES = HEADER_BYTES + _EXTENT.size
HEAD_BYTES = _CHECKED_BYTES + 16
_MAX_STRIPES = 1 << 16


@dataclass(frozen=True)
class Head:
    """What stands before the first stripe."""

    header: Header
    generation: bytes
    stripe_bytes: int

    @property
    def stripes(self) -> int:
        """Number of stripes, the first included."""
        return -(-self.header.stored_bytes // self.stripe_bytes)

    def bytes_of(self, stripe: int) -> int:
        """Payload bytes of one stripe."""
        return min(self.stripe_bytes, self.header.stored_bytes - stripe * self.stripe_bytes)

    def pack(self) -> bytes:
        """Return the head as `HEAD_BYTES` bytes."""
        checked = self.header.pack() + _EXTENT.pack(self.generation, self.stripe_bytes)
        return checked + xxhash.xxh3_128_digest(checked)


def parse_head(data: bytes | bytearray) -> Head:
    """Return the head at the start of ``data``.

    Raises:
        RecordDamaged: anything is wrong with it; no other exception, for any bytes.
    """
    header = parse_header(data)
    if len(data) < HEAD_BYTES:
        raise RecordDamaged(DamageReason.TRUNCATED, f"{len(data)} bytes of a head")
    if xxhash.xxh3_128_digest(data[:_CHECKED_BYTES]) != bytes(data[_CHECKED_BYTES:HEAD_BYTES]):
        raise RecordDamaged(DamageReason.HEADER, "checksum of the head differs")
    generation, stripe_bytes = _EXTENT.unpack(data[HEADER_BYTES:_CHECKED_BYTES])
    if stripe_bytes < 1 or header.stored_bytes > stripe_bytes * _MAX_STRIPES:
        raise RecordDamaged(DamageReason.LENGTH, f"stripes of {stripe_bytes} bytes")
    return Head(header, generation, stripe_bytes)


def head_of(answer: object) -> Head | None:
    """Return the head at the start of a server's answer; None when it is none."""
    if not isinstance(answer, bytes):
        return None
    try:
        return parse_head(answer)
    except RecordDamaged:
        return None


class Names:
    """Key names of one namespace and rank."""

    def __init__(self, prefix: str, namespace: bytes, rank: int) -> None:
        self._base = f"{prefix}:{namespace.hex()}:r{rank}:".encode()
        self.description = f"{prefix}:ns:{namespace.hex()}".encode()
        escaped = escape_glob(self._base)
        self.all_pattern = escaped + b"*"
        self.heads_pattern = escaped + b"{*}-g*:h"

    def _chunk(self, key: bytes) -> bytes:
        prefix_hash, _, group = key_name(key).partition("-")
        return self._base + b"{%b}-%b" % (prefix_hash.encode(), group.encode())

    def head(self, key: bytes) -> bytes:
        """Return the name of a chunk's head."""
        return self._chunk(key) + b":h"

    def stripe(self, key: bytes, generation: bytes, stripe: int) -> bytes:
        """Return the name of one further stripe, counted from 1."""
        return b"%b:%b:%d" % (self._chunk(key), generation.hex().encode(), stripe)

    def stripes(self, key: bytes, head: Head) -> list[bytes]:
        """Return the names of all further stripes of ``head``."""
        return [self.stripe(key, head.generation, i) for i in range(1, head.stripes)]

    def key_of(self, head_name: bytes) -> bytes | None:
        """Return the chunk key of a head's name; None when it is no such name."""
        match = re.fullmatch(rb"\{([0-9a-f]+)\}-(g\d+):h", head_name[len(self._base) :])
        if not head_name.startswith(self._base) or match is None:
            return None
        try:
            return parse_key_name(f"{match[1].decode()}-{match[2].decode()}")
        except KVTierError:
            return None


def escape_glob(text: bytes) -> bytes:
    """Return a SCAN pattern that matches exactly ``text``."""
    return re.sub(rb"([\\*?\[\]^])", rb"\\\1", text)
