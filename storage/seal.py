"""Sealing a record's payload: AES-256-GCM, segment by segment.

Each record has a key of its own, derived from the ring's key and a random salt
in the header, so the nonce need only differ inside the record: it is the
number of the segment. A sealed payload is::

    (ciphertext of SEGMENT_BYTES, tag of TAG_BYTES) ...   the last one may be shorter

Every segment is bound to the header (all fields but the checksums), and so to
namespace, key, rank, tokens, codec, lengths and salt: no segment of another
record, and no segment of this one at another place, authenticates.

The package `cryptography` is imported with the first use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .errors import DamageReason, RecordDamaged
from .pieces import cut
from .record import SEGMENT_BYTES, TAG_BYTES, Header

if TYPE_CHECKING:
    from .keyring import Key
    from .tier import Buffers


def seal(key: Key, header: Header, parts: Sequence[bytes | memoryview]) -> Iterator[memoryview]:
    """Yield ``parts`` encrypted, one segment with its tag at a time.

    Lets go of the interpreter lock while it works. Allocates what it yields.

    Args:
        key: whose id the header has.
        header: the record's, with the lengths that the sealed payload will have.
        parts: the encoded payload.
    """
    assert header.key_id == key.key_id
    record_key, bound = key.record_key(header.salt), header.bound_bytes()
    for number, views in enumerate(cut(parts, SEGMENT_BYTES)):
        work = _cipher(record_key, number).encryptor()
        work.authenticate_additional_data(bound)
        length = sum(len(view) for view in views)
        segment = memoryview(bytearray(length + TAG_BYTES))
        at = 0
        for view in views:
            work.update_into(view, segment[at : at + len(view)])
            at += len(view)
        work.finalize()
        segment[length:] = work.tag
        yield segment


def unseal(key: Key, header: Header, stored: memoryview, into: Buffers) -> None:
    """Decrypt ``stored`` into ``into``, which its opened length fills exactly.

    Lets go of the interpreter lock while it works; allocates nothing of the payload's size.

    Raises:
        RecordDamaged: SEAL; ``into`` is then undefined.
    """
    from cryptography.exceptions import InvalidTag  # noqa: PLC0415 - an optional package

    assert header.key_id == key.key_id
    assert sum(len(part) for part in into) == header.encoded_bytes
    record_key, bound = key.record_key(header.salt), header.bound_bytes()
    at = 0
    for number, views in enumerate(cut(into, SEGMENT_BYTES)):
        work = _cipher(record_key, number).decryptor()
        work.authenticate_additional_data(bound)
        for view in views:
            work.update_into(stored[at : at + len(view)], view)
            at += len(view)
        try:
            work.finalize_with_tag(bytes(stored[at : at + TAG_BYTES]))
        except InvalidTag:
            raise RecordDamaged(
                DamageReason.SEAL, f"segment {number} is not what key {key.key_id:08x} sealed"
            ) from None
        at += TAG_BYTES


def _cipher(record_key: bytes, number: int) -> Any:
    from cryptography.hazmat.primitives.ciphers import (  # noqa: PLC0415 - an optional package
        Cipher,
        algorithms,
        modes,
    )

    return Cipher(algorithms.AES(record_key), modes.GCM(number.to_bytes(12, "little")))
