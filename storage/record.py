"""The record: what a tier below RAM keeps for one chunk of one rank.

A record is a header of `HEADER_BYTES` followed by the stored payload. The
header is little-endian and fixed::

    offset  bytes  field
         0      8  magic
         8      2  format version
        10      2  header length
        12      4  flags: 1 when the payload is sealed (`kvtier.storage.seal`)
        16     16  namespace
        32      1  key length
        33     65  key, zero padded (prefix hash, then the group)
        98      2  group, again, for readers that do not know keys
       100      4  rank
       104      8  start_tokens
       112      8  end_tokens
       120      1  codec
       121      1  codec item bytes
       122      1  payload checksum algorithm
       123      1  reserved, zero
       124      4  encryption key id, 0 when not sealed
       128      8  raw payload length
       136      8  stored payload length
       144      8  creation time, microseconds of Unix time
       152     16  payload checksum, over the stored bytes
       168     32  salt of the seal, zero when not sealed
       200    296  reserved, zero
       496     16  XXH3-128 of all bytes before

Every read checks all of it before a byte of payload is used, and lengths
before anything is allocated. On disk the header is padded with zeros to
`DISK_HEADER_BYTES`, so that the payload starts where O_DIRECT can read it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import xxhash

from .errors import DamageReason, RecordDamaged
from .key import MAX_HASH_BYTES, MIN_HASH_BYTES, NAMESPACE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .tier import RecordSpec

MAGIC = b"KVTREC\r\n"
FORMAT_VERSION = 1
HEADER_BYTES = 512
DISK_HEADER_BYTES = 4096
MAX_RAW_BYTES = 1 << 40  # no chunk comes near; a larger number is damage
MAX_TOKENS = 1 << 40

SEALED = 1  # flag
SALT_BYTES = 32
SEGMENT_BYTES = 1 << 20  # of what is sealed at once
TAG_BYTES = 16  # behind each segment

_FIELDS = struct.Struct("<8sHHI16sB65sHIQQBBBBIQQQ16s32s296s")
_CHECKSUM_BYTES = 16
_CHECKED_BYTES = HEADER_BYTES - _CHECKSUM_BYTES
assert _FIELDS.size == _CHECKED_BYTES
_ZEROS = bytes(296)
_NO_SALT = bytes(SALT_BYTES)


class CodecId(IntEnum):
    """How a payload is stored."""

    RAW = 0
    LZ4 = 1
    ZSTD = 2


class ChecksumId(IntEnum):
    """Algorithm of the payload checksum."""

    XXH3_128 = 1


@dataclass(frozen=True, slots=True)
class Header:
    """What a record says about itself.

    Attributes:
        namespace: 16 bytes, the fingerprint of everything that changes the bytes.
        key: chunk key; its last byte is the group.
        rank: the rank whose bytes these are.
        start_tokens: first token position covered.
        end_tokens: one past the last.
        codec: how the payload is stored.
        item_bytes: bytes of one value, which the codec splits into planes.
        raw_bytes: length of the decoded payload.
        stored_bytes: length of the payload as stored.
        payload_checksum: of the stored bytes.
        created_us: Unix time in microseconds.
        key_id: which key sealed the payload; 0 when none did.
        salt: what was drawn for the seal; zeros when there is none.
    """

    namespace: bytes
    key: bytes
    rank: int
    start_tokens: int
    end_tokens: int
    codec: CodecId
    item_bytes: int
    raw_bytes: int
    stored_bytes: int
    payload_checksum: bytes
    created_us: int
    checksum: ChecksumId = ChecksumId.XXH3_128
    key_id: int = 0
    salt: bytes = _NO_SALT

    @property
    def group(self) -> int:
        """KV cache group, the key's last byte."""
        return self.key[-1]

    @property
    def sealed(self) -> bool:
        """Whether the payload is encrypted."""
        return self.key_id != 0

    @property
    def encoded_bytes(self) -> int:
        """Length of the payload as the codec made it, before it was sealed."""
        return opened_bytes(self.stored_bytes) if self.sealed else self.stored_bytes

    def pack(self) -> bytes:
        """Return the header as `HEADER_BYTES` bytes."""
        checked = self._pack_fields(self.payload_checksum)
        return checked + xxhash.xxh3_128_digest(checked)

    def bound_bytes(self) -> bytes:
        """Return what a seal binds its payload to: every field but the two checksums."""
        return self._pack_fields(bytes(_CHECKSUM_BYTES))

    def _pack_fields(self, payload_checksum: bytes) -> bytes:
        return _FIELDS.pack(
            MAGIC,
            FORMAT_VERSION,
            HEADER_BYTES,
            SEALED if self.sealed else 0,
            self.namespace,
            len(self.key),
            self.key,
            self.group,
            self.rank,
            self.start_tokens,
            self.end_tokens,
            self.codec,
            self.item_bytes,
            self.checksum,
            0,
            self.key_id,
            self.raw_bytes,
            self.stored_bytes,
            self.created_us,
            payload_checksum,
            self.salt,
            _ZEROS,
        )


def sealed_bytes(encoded_bytes: int) -> int:
    """Return the length of a payload of that length once it is sealed."""
    return encoded_bytes + TAG_BYTES * -(-encoded_bytes // SEGMENT_BYTES)


def opened_bytes(stored_bytes: int) -> int:
    """Inverse of `sealed_bytes`; for a length that no seal has, one that does not fit it."""
    return stored_bytes - TAG_BYTES * -(-stored_bytes // (SEGMENT_BYTES + TAG_BYTES))


def payload_checksum(parts: Iterable[bytes | memoryview]) -> bytes:
    """Return the XXH3-128 of the parts, as if they were one run of bytes.

    Releases the interpreter lock for parts larger than a few hundred bytes.
    """
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return bytes(digest.digest())


def parse_header(data: bytes | bytearray | memoryview) -> Header:
    """Return the header at the start of ``data``.

    Allocates nothing that depends on the bytes.

    Raises:
        RecordDamaged: anything is wrong with it; no other exception, for any bytes.
    """
    if len(data) < HEADER_BYTES:
        raise RecordDamaged(
            DamageReason.TRUNCATED, f"{len(data)} bytes, a header has {HEADER_BYTES}"
        )
    raw = bytes(data[:HEADER_BYTES])
    if raw[: len(MAGIC)] != MAGIC:
        raise RecordDamaged(DamageReason.MAGIC, "not a record")
    version = int.from_bytes(raw[8:10], "little")
    if version != FORMAT_VERSION:
        raise RecordDamaged(
            DamageReason.FORMAT, f"format {version}, this build reads {FORMAT_VERSION}"
        )
    if xxhash.xxh3_128_digest(raw[:_CHECKED_BYTES]) != raw[_CHECKED_BYTES:]:
        raise RecordDamaged(DamageReason.HEADER, "header checksum differs")
    return _from_fields(_FIELDS.unpack(raw[:_CHECKED_BYTES]))


def _from_fields(fields: tuple[Any, ...]) -> Header:
    """Turn unpacked fields whose checksum agreed into a header, or refuse them."""
    (_, _, length, flags, namespace, key_length, key, group, rank, start, end) = fields[:11]
    (codec, item, checksum, spare, key_id, raw, stored, created, digest, salt, zeros) = fields[11:]
    plain = flags == 0 and key_id == 0 and salt == _NO_SALT
    sealed = flags == SEALED and key_id != 0
    if length != HEADER_BYTES or spare or zeros != _ZEROS or not (plain or sealed):
        raise RecordDamaged(DamageReason.FORMAT, "uses a feature that this build does not know")
    try:
        checksum_id, codec_id = ChecksumId(checksum), CodecId(codec)
    except ValueError:
        raise RecordDamaged(
            DamageReason.FORMAT, f"codec {codec} or checksum algorithm {checksum} is not known"
        ) from None
    if (
        not MIN_HASH_BYTES < key_length <= MAX_HASH_BYTES + 1
        or key[key_length:].strip(b"\0")
        or key[key_length - 1] != group
    ):
        raise RecordDamaged(DamageReason.IDENTITY, "its key is not a chunk key")
    header = Header(
        namespace=namespace,
        key=key[:key_length],
        rank=rank,
        start_tokens=start,
        end_tokens=end,
        codec=codec_id,
        item_bytes=item,
        raw_bytes=raw,
        stored_bytes=stored,
        payload_checksum=digest,
        created_us=created,
        checksum=checksum_id,
        key_id=key_id,
        salt=salt,
    )
    _check_lengths(header)
    return header


def _check_lengths(header: Header) -> None:
    """Refuse lengths that no writer of this format produces."""
    if not header.start_tokens < header.end_tokens <= MAX_TOKENS:
        raise RecordDamaged(
            DamageReason.LENGTH, f"token range {header.start_tokens} to {header.end_tokens}"
        )
    encoded = header.encoded_bytes
    if header.codec is CodecId.RAW:
        fits = encoded == header.raw_bytes
    else:
        fits = encoded < header.raw_bytes and header.item_bytes in (1, 2, 4)
    if header.sealed:
        fits = fits and sealed_bytes(encoded) == header.stored_bytes
    if not fits or not 0 < header.raw_bytes <= MAX_RAW_BYTES:
        raise RecordDamaged(
            DamageReason.LENGTH,
            f"{header.codec.name} payload of {header.stored_bytes} bytes for {header.raw_bytes}",
        )


def check(header: Header, spec: RecordSpec, namespace: bytes, rank: int) -> None:
    """Check that a parsed header is the record that ``spec`` asks for.

    Raises:
        RecordDamaged: NAMESPACE, IDENTITY or LENGTH, in this order.
    """
    assert len(namespace) == NAMESPACE_BYTES
    if header.namespace != namespace:
        raise RecordDamaged(
            DamageReason.NAMESPACE, f"{header.namespace.hex()}, wanted {namespace.hex()}"
        )
    if (header.key, header.rank) != (spec.key, rank):
        raise RecordDamaged(
            DamageReason.IDENTITY,
            f"holds {header.key.hex()} of rank {header.rank}, wanted {spec.key.hex()} of {rank}",
        )
    if (header.start_tokens, header.end_tokens) != (spec.start_tokens, spec.end_tokens):
        raise RecordDamaged(
            DamageReason.IDENTITY,
            f"covers tokens {header.start_tokens} to {header.end_tokens},"
            f" wanted {spec.start_tokens} to {spec.end_tokens}",
        )
    if header.raw_bytes != spec.raw_bytes:
        raise RecordDamaged(
            DamageReason.LENGTH, f"{header.raw_bytes} raw bytes, wanted {spec.raw_bytes}"
        )
