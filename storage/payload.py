"""What a tier does with a payload on its way: compress, seal, and back.

All tiers share it, so that a tier only says "pack these buffers" and "unpack
into these buffers".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from . import codec as codecs
from .errors import DamageReason, RecordDamaged
from .keyring import KeyRing
from .record import SALT_BYTES, CodecId, Header, payload_checksum, sealed_bytes
from .seal import seal, unseal
from .tier import Buffers, RecordSpec

NO_CHECKSUM = bytes(16)


@dataclass(frozen=True, slots=True)
class Packed:
    """A record ready to be written.

    Attributes:
        header: all of it but the payload's checksum, which is zero.
        parts: the stored payload, in order; views of the caller's buffers where they
            are stored as they are.
    """

    header: Header
    parts: Sequence[bytes | memoryview]

    def checked_header(self) -> Header:
        """Return the header with the payload's checksum."""
        return replace(self.header, payload_checksum=payload_checksum(self.parts))


@dataclass(frozen=True, slots=True)
class PayloadFormat:
    """How one tier stores payloads.

    Attributes:
        codec: what to try on them.
        item_bytes: bytes of one value, for the codec.
        keys: seal with their first, open with all; None: neither.
        draw: returns so many random bytes.
    """

    codec: CodecId
    item_bytes: int
    keys: KeyRing | None = None
    draw: Callable[[int], bytes] = os.urandom

    def pack(
        self, spec: RecordSpec, namespace: bytes, rank: int, created_s: float, payload: Buffers
    ) -> Packed:
        """Encode and seal ``payload`` as the record of ``spec``.

        Allocates at most one sealed record; nothing where neither codec nor seal is used.
        """
        assert sum(len(part) for part in payload) == spec.raw_bytes
        encoded = codecs.encode(self.codec, self.item_bytes, payload)
        header = Header(
            namespace=namespace,
            key=spec.key,
            rank=rank,
            start_tokens=spec.start_tokens,
            end_tokens=spec.end_tokens,
            codec=encoded.codec,
            item_bytes=self.item_bytes if encoded.codec is not CodecId.RAW else 1,
            raw_bytes=spec.raw_bytes,
            stored_bytes=encoded.stored_bytes,
            payload_checksum=NO_CHECKSUM,
            created_us=max(0, int(created_s * 1e6)),
        )
        if self.keys is None:
            return Packed(header, encoded.parts)
        key = self.keys.writer
        header = replace(
            header,
            stored_bytes=sealed_bytes(encoded.stored_bytes),
            key_id=key.key_id,
            salt=self.draw(SALT_BYTES),
        )
        return Packed(header, list(seal(key, header, encoded.parts)))

    def admit(self, header: Header) -> None:
        """Refuse a record that this tier's keys say nothing about, before its payload is read.

        Raises:
            RecordDamaged: KEY: sealed with a key that is not ours, or not sealed where we seal.
        """
        if header.sealed:
            if self.keys is None or self.keys.get(header.key_id) is None:
                raise RecordDamaged(
                    DamageReason.KEY, f"sealed with key {header.key_id:08x}, which is not given"
                )
        elif self.keys is not None and not self.keys.reads_plain:
            raise RecordDamaged(DamageReason.KEY, "not sealed")

    @staticmethod
    def as_is(header: Header) -> bool:
        """Whether the stored bytes are the payload's own, so that they may be read in place."""
        return header.codec is CodecId.RAW and not header.sealed

    def unpack(self, header: Header, stored: memoryview, into: Buffers) -> None:
        """Open and decode ``stored``, whose checksum agreed, into ``into``.

        Args:
            header: checked against what ``into`` is for, and admitted.
            stored: ``header.stored_bytes`` bytes.
            into: ``header.raw_bytes`` in all.

        Raises:
            RecordDamaged: SEAL or CODEC; ``into`` is then undefined.
        """
        if header.sealed:
            key = self.keys.get(header.key_id) if self.keys is not None else None
            assert key is not None, "not admitted"
            if header.codec is CodecId.RAW:
                unseal(key, header, stored, into)
                return
            encoded = memoryview(bytearray(header.encoded_bytes))
            unseal(key, header, stored, [encoded])
            stored = encoded
        codecs.decode(header.codec, header.item_bytes, stored, into)


@dataclass(frozen=True, slots=True)
class Verbatim(PayloadFormat):
    """Moves stored payloads as they are, so that a copy needs neither codec nor keys.

    Buffers hold ``header.stored_bytes``; the caller says by `expect` what a payload that it
    is about to put is the payload of.
    """

    codec: CodecId = CodecId.RAW
    item_bytes: int = 1
    expected: dict[bytes, Header] = field(default_factory=dict)

    def expect(self, header: Header) -> None:
        """Take the next `pack` of this header's key for that record."""
        self.expected[header.key] = header

    def pack(
        self,
        spec: RecordSpec,
        namespace: bytes,
        rank: int,
        created_s: float,  # noqa: ARG002 - the header knows when it was made
        payload: Buffers,
    ) -> Packed:
        """Return the record that was expected, with ``payload`` as its stored bytes."""
        header = self.expected.pop(spec.key)
        assert (header.namespace, header.rank) == (namespace, rank)
        assert sum(len(part) for part in payload) == header.stored_bytes
        return Packed(replace(header, payload_checksum=NO_CHECKSUM), payload)

    def admit(self, header: Header) -> None:
        """Refuse nothing: what is sealed stays sealed."""

    def unpack(self, header: Header, stored: memoryview, into: Buffers) -> None:  # noqa: ARG002
        """Copy ``stored`` into ``into``."""
        at = 0
        for part in into:
            part[:] = stored[at : at + len(part)]
            at += len(part)
