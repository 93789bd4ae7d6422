"""Sealing a record anew: another encryption key, or one where there was none.

Codec and content stay: what the seal is around is the encoded payload, so no codec is needed.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import replace

from .errors import DamageReason, RecordDamaged
from .keyring import KeyRing
from .record import (
    SALT_BYTES,
    Header,
    payload_checksum,
    sealed_bytes,
)
from .seal import seal, unseal

MAX_RECORD_BYTES = 4 << 30  # of one record, where its own header is all that is known of it


def check_size(header: Header) -> None:
    """Refuse a record that is too large to be held in memory, before anything is allocated.

    Raises:
        RecordDamaged: LENGTH.
    """
    if max(header.stored_bytes, header.raw_bytes) > MAX_RECORD_BYTES:
        raise RecordDamaged(
            DamageReason.LENGTH,
            f"{header.stored_bytes} bytes stored of {header.raw_bytes}; at most "
            f"{MAX_RECORD_BYTES} are handled",
        )


def has_current_seal(header: Header, keys: KeyRing) -> bool:
    """Whether a record is sealed with the ring's first key."""
    return header.sealed and header.key_id == keys.writer.key_id


def can_open(header: Header, keys: KeyRing) -> bool:
    """Whether the ring has what a record was sealed with; one without a seal needs nothing."""
    return not header.sealed or keys.get(header.key_id) is not None


def resealed(
    header: Header,
    stored: memoryview,
    keys: KeyRing,
    draw: Callable[[int], bytes] = os.urandom,
) -> tuple[Header, memoryview]:
    """Return a record as the ring's first key seals it. Allocates it twice.

    Args:
        header: of a record that `can_open` and `check_size` let pass.
        stored: its payload as stored, whose checksum agreed.
        keys: the first one seals.
        draw: returns so many random bytes.

    Returns:
        Header and payload; the latter begins at a page boundary.

    Raises:
        RecordDamaged: SEAL: it is not what a holder of its key wrote.
    """
    encoded = stored
    if header.sealed:
        key = keys.get(header.key_id)
        assert key is not None, "not ours to open"
        encoded = memoryview(bytearray(header.encoded_bytes))
        unseal(key, header, stored, [encoded])
    fresh = replace(
        header,
        stored_bytes=sealed_bytes(len(encoded)),
        key_id=keys.writer.key_id,
        salt=draw(SALT_BYTES),
    )
    room = memoryview(mmap.mmap(-1, fresh.stored_bytes))
    at = 0
    for segment in seal(keys.writer, fresh, [encoded]):
        room[at : at + len(segment)] = segment
        at += len(segment)
    assert at == fresh.stored_bytes
    return replace(fresh, payload_checksum=payload_checksum([room])), room
