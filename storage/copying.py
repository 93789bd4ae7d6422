"""Copying records from tier to tier: other place, other codec, other encryption key.

Each tier reads and writes with what it was opened with, so a change of key is a
copy from a tier that has the old key to one that seals with the new: of the
same store, with ``replace``, where the ring of the reading one holds both.
"""

from __future__ import annotations

import mmap

from .errors import DamageReason, RecordDamaged
from .record import Header
from .tier import PutResult, RecordSpec, Tier

MAX_RECORD_BYTES = 4 << 30


def spec_of(header: Header) -> RecordSpec:
    """Return the spec that asks for the record of this header."""
    return RecordSpec(header.key, header.start_tokens, header.end_tokens, header.raw_bytes)


def copy_record(
    source: Tier,
    target: Tier,
    header: Header,
    *,
    replace: bool = False,
    max_bytes: int = MAX_RECORD_BYTES,
) -> PutResult:
    """Read one record, verified, and write it to another tier. Blocks on both.

    Args:
        source: has a key that opens it.
        target: writes it with its own codec and key.
        header: the record's, as found on the source.
        replace: take the place of a record that is there; needed inside one store.
        max_bytes: allocate no more than this for it.

    Raises:
        RecordMissing, RecordDamaged: as `Tier.get`; LENGTH for one that is too large.
        TierRefused, TierUnavailable: as `Tier.get` and `Tier.put`.
    """
    if header.raw_bytes > max_bytes:
        raise RecordDamaged(
            DamageReason.LENGTH, f"{header.raw_bytes} raw bytes; at most {max_bytes} are copied"
        )
    spec = spec_of(header)
    with mmap.mmap(-1, header.raw_bytes) as room, memoryview(room) as buffer:
        source.get(spec, [buffer])
        return target.put(spec, [buffer], replace=replace)
