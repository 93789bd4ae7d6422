"""Record headers: golden bytes, and every kind of damage."""

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.storage.errors import DamageReason, RecordDamaged
from kvtier.storage.record import (
    HEADER_BYTES,
    CodecId,
    Header,
    check,
    parse_header,
    payload_checksum,
)
from kvtier.storage.tier import RecordSpec

HEADER = Header(
    namespace=bytes(range(16)),
    key=bytes(range(100, 132)) + b"\x03",
    rank=7,
    start_tokens=512,
    end_tokens=768,
    codec=CodecId.ZSTD,
    item_bytes=2,
    raw_bytes=65536,
    stored_bytes=40001,
    payload_checksum=bytes(range(200, 216)),
    created_us=1_700_000_000_123_456,
)

GOLDEN_START = bytes.fromhex(
    "4b56545245430d0a"  # magic KVTREC\r\n
    "0100" "0002" "00000000"  # format 1, 512 bytes, no flags
    "000102030405060708090a0b0c0d0e0f"  # namespace
    "21"  # key of 33 bytes
    "6465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f80818283" "03"
    + "00" * 32 +  # room for longer hashes
    "0300" "07000000"  # group 3, rank 7
    "0002000000000000" "0003000000000000"  # tokens 512 to 768
    "02" "02" "01" "00" "00000000"  # zstd, 2-byte values, XXH3-128, not sealed
    "0000010000000000" "419c000000000000"  # 65536 raw, 40001 stored
    "40222018240a0600"  # created
    "c8c9cacbcccdcecfd0d1d2d3d4d5d6d7"  # payload checksum
)  # fmt: skip


def refused(data):
    with pytest.raises(RecordDamaged) as caught:
        parse_header(data)
    return caught.value.reason


def resealed(offset, new):
    """The golden header with other bytes at an offset, and a checksum that agrees."""
    import xxhash

    data = bytearray(HEADER.pack())
    data[offset : offset + len(new)] = new
    data[-16:] = xxhash.xxh3_128_digest(bytes(data[:-16]))
    return bytes(data)


def test_golden_bytes():
    """The format on disk is exactly this, byte for byte."""
    data = HEADER.pack()
    assert data[:168] == GOLDEN_START
    assert data[168:496] == bytes(328)
    assert hashlib.sha256(data).hexdigest() == (
        "ad127312bbaa61d3524f9d4d6787273839c3012ba9c2b9d8d3a24b579947529f"
    )


def test_round_trip():
    """What is packed parses to the same."""
    assert parse_header(HEADER.pack()) == HEADER
    assert HEADER.group == 3


def test_every_bit_counts():
    """No single flipped bit of a header goes unnoticed."""
    data = HEADER.pack()
    for bit in range(8 * HEADER_BYTES):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        reason = refused(bytes(damaged))
        if bit < 64:
            assert reason is DamageReason.MAGIC
        elif bit < 80:
            assert reason is DamageReason.FORMAT
        else:
            assert reason is DamageReason.HEADER


@pytest.mark.parametrize("length", [0, 1, 8, 511])
def test_truncated(length):
    """A short header is truncated, whatever is left of it."""
    assert refused(HEADER.pack()[:length]) is DamageReason.TRUNCATED


@pytest.mark.parametrize(
    ("offset", "new", "reason"),
    [
        (8, b"\x02\x00", DamageReason.FORMAT),
        (10, b"\x00\x04", DamageReason.FORMAT),
        (12, b"\x01", DamageReason.FORMAT),
        (32, b"\x00", DamageReason.IDENTITY),
        (32, b"\x08", DamageReason.IDENTITY),
        (32, b"\xff", DamageReason.IDENTITY),
        (97, b"\x01", DamageReason.IDENTITY),
        (98, b"\x04", DamageReason.IDENTITY),
        (104, bytes(7) + b"\xff", DamageReason.LENGTH),
        (112, bytes(8), DamageReason.LENGTH),
        (120, b"\x09", DamageReason.FORMAT),
        (120, b"\x00", DamageReason.LENGTH),  # raw, but stored is not raw
        (121, b"\x03", DamageReason.LENGTH),
        (122, b"\x00", DamageReason.FORMAT),
        (124, b"\x01", DamageReason.FORMAT),
        (128, bytes(8), DamageReason.LENGTH),
        (128, b"\xff" * 8, DamageReason.LENGTH),
        (136, b"\xff" * 8, DamageReason.LENGTH),
        (300, b"\x01", DamageReason.FORMAT),
    ],
)
def test_fields_that_cannot_be(offset, new, reason):
    """A header that checks out and says what no writer writes is refused all the same."""
    assert refused(resealed(offset, new)) is reason


@given(st.binary(max_size=600))
@settings(max_examples=300)
def test_any_bytes(data):
    """Any bytes are a RecordDamaged, nothing else."""
    refused(data)


@given(st.integers(8, 495), st.binary(min_size=1, max_size=24))
@settings(max_examples=500)
def test_any_sealed_bytes(offset, new):
    """Any field values under a right checksum parse, or are a RecordDamaged."""
    data = resealed(offset, new[: 496 - offset])
    try:
        header = parse_header(data)
    except RecordDamaged:
        return
    assert header.pack() == data
    assert header.stored_bytes <= header.raw_bytes


def test_check():
    """A header serves exactly the record it was written for."""
    spec = RecordSpec(HEADER.key, 512, 768, 65536)
    check(HEADER, spec, HEADER.namespace, 7)
    for other, namespace, rank, reason in [
        (spec, bytes(16), 7, DamageReason.NAMESPACE),
        (spec, HEADER.namespace, 6, DamageReason.IDENTITY),
        (RecordSpec(bytes(33), 512, 768, 65536), HEADER.namespace, 7, DamageReason.IDENTITY),
        (RecordSpec(HEADER.key, 256, 768, 65536), HEADER.namespace, 7, DamageReason.IDENTITY),
        (RecordSpec(HEADER.key, 512, 767, 65536), HEADER.namespace, 7, DamageReason.IDENTITY),
        (RecordSpec(HEADER.key, 512, 768, 69632), HEADER.namespace, 7, DamageReason.LENGTH),
    ]:
        with pytest.raises(RecordDamaged) as caught:
            check(HEADER, other, namespace, rank)
        assert caught.value.reason is reason


def test_payload_checksum_is_of_the_run():
    """The checksum does not depend on how the payload is cut."""
    data = bytes(range(256)) * 40
    whole = payload_checksum([data])
    assert payload_checksum([data[:1000], memoryview(data)[1000:]]) == whole
    assert payload_checksum([data[:-1]]) != whole
    assert whole.hex() == "1cb22534d0d96975c03d2231ab9348f3"
