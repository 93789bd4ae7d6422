"""Sealed payloads: golden bytes, tampering anywhere, other keys, rotation."""

import hashlib
import hmac
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvtier.storage.disk import DiskTier
from kvtier.storage.disk_layout import iter_record_files
from kvtier.storage.disk_verify import read_header, read_stored, verify_file
from kvtier.storage.errors import DamageReason, RecordDamaged
from kvtier.storage.keyring import Key, KeyRing
from kvtier.storage.payload import PayloadFormat
from kvtier.storage.record import (
    HEADER_BYTES,
    MAX_RAW_BYTES,
    CodecId,
    check,
    opened_bytes,
    parse_header,
    payload_checksum,
    sealed_bytes,
)
from kvtier.storage.reseal import can_open, check_size, has_current_seal, resealed
from kvtier.storage.testing import (
    NAMESPACE,
    TierContract,
    aligned,
    joined,
    payload_of,
    spec_of,
)
from kvtier.storage.tier import PutResult

SECRET = bytes(range(32))
SALT = bytes(range(64, 96))
OLD, NEW = KeyRing([Key(SECRET)]), KeyRing([Key(bytes(32)), Key(SECRET)])
MIB = 1 << 20


def form(codec=CodecId.RAW, keys=OLD):
    return PayloadFormat(codec, 2, keys, lambda n: SALT[:n])


def packed(codec=CodecId.RAW, raw_bytes=16384, payload=None, keys=OLD):
    """Header and stored bytes of test record 1."""
    got = form(codec, keys).pack(
        spec_of(1, raw_bytes), NAMESPACE, 3, 1_700_000_000.5, payload or payload_of(1, raw_bytes)
    )
    return got.checked_header(), b"".join(got.parts)


def opened(header, stored, keys=OLD):
    """The payload of a record, after all the checks that a tier makes."""
    check(header, spec_of(1, header.raw_bytes), NAMESPACE, 3)
    form(keys=keys).admit(header)
    into = [aligned(4096) for _ in range(header.raw_bytes // 4096)]
    form(keys=keys).unpack(header, memoryview(stored), into)
    return joined(into)


def refused(act, *args, **more):
    with pytest.raises(RecordDamaged) as caught:
        act(*args, **more)
    return caught.value.reason


def zeros(raw_bytes):
    return [aligned(raw_bytes)]


@pytest.mark.parametrize("codec", list(CodecId))
@pytest.mark.parametrize("raw_bytes", [4096, MIB - 4096, MIB, MIB + 4096, 3 * MIB + 8192])
def test_round_trip(codec, raw_bytes):
    """What was sealed opens to the same bytes, compressed or not, in any number of segments."""
    payload = payload_of(7, raw_bytes, pieces=5)
    values = memoryview(payload[0])
    values[1::2] = bytes(len(values[1::2]))  # half of it shrinks
    header, stored = packed(codec, raw_bytes, payload)
    assert header.sealed
    assert len(stored) == header.stored_bytes == sealed_bytes(header.encoded_bytes)
    assert parse_header(header.pack()) == header
    assert opened(header, stored) == joined(payload)
    assert bytes(payload[0][:64]) not in stored


def test_golden_bytes():
    """A sealed record is this, byte for byte: an oracle of its own computes the ciphertext."""
    header, stored = packed(raw_bytes=MIB + 4096)
    head = header.pack()
    key_id = hmac.new(SECRET, b"kvtier key id", hashlib.sha256).digest()[:4]
    assert head[12:16] == b"\x01\0\0\0"
    assert head[124:128] == key_id
    assert head[136:144] == (MIB + 4096 + 32).to_bytes(8, "little")
    assert head[168:200] == SALT
    bound = head[:152] + bytes(16) + head[168:496]
    gcm = AESGCM(hmac.new(SECRET, b"kvtier record" + SALT, hashlib.sha256).digest())
    plain = joined(payload_of(1, MIB + 4096))
    expected = b"".join(
        gcm.encrypt(i.to_bytes(12, "little"), plain[i * MIB : (i + 1) * MIB], bound)
        for i in range(2)
    )
    assert stored == expected
    assert hashlib.sha256(head + stored).hexdigest() == (
        "ebac4e205b2e0f1b714e43f52319557259a58ea65f670aeeadc8d8e0eef122b2"
    )


def test_every_header_byte_is_authenticated():
    """A header changed anywhere, its checksum made to agree, never serves the payload."""
    header, stored = packed()
    head = header.pack()
    for at in range(HEADER_BYTES - 16):
        forged = bytearray(head)
        forged[at] ^= 0x01
        forged[-16:] = xxhash.xxh3_128_digest(bytes(forged[:-16]))
        if 152 <= at < 168:  # the payload's checksum: the tier compares it
            assert parse_header(forged).payload_checksum != header.payload_checksum
            continue
        with pytest.raises(RecordDamaged):
            opened(parse_header(forged), stored)


def test_what_parses_but_was_not_sealed_so():
    """Fields that a spec does not ask for are authenticated all the same."""
    header, stored = packed()
    for forged in (
        replace(header, created_us=header.created_us + 1),
        replace(header, item_bytes=2),
        replace(header, salt=SALT[::-1]),
        replace(header, codec=CodecId.LZ4, raw_bytes=header.raw_bytes + 4096),
    ):
        into = zeros(forged.raw_bytes)
        assert refused(form().unpack, forged, memoryview(stored), into) is DamageReason.SEAL


@pytest.mark.parametrize("codec", [CodecId.RAW, CodecId.ZSTD])
def test_payload_bytes(codec):
    """A payload byte changed anywhere, or segments swapped, does not authenticate."""
    header, stored = packed(codec, 2 * MIB, zeros(2 * MIB) if codec else None)
    for at in {0, 1, len(stored) // 2, *range(len(stored) - 40, len(stored))}:
        forged = bytearray(stored)
        forged[at] ^= 0x80
        assert refused(opened, header, forged) is DamageReason.SEAL
    if codec is CodecId.RAW:
        half = len(stored) // 2
        assert refused(opened, header, stored[half:] + stored[:half]) is DamageReason.SEAL


def test_another_key():
    """A key that is not ours is told apart from damage, and so is a record without a seal."""
    header, stored = packed()
    other = KeyRing([Key(bytes(32))])
    for keys in (None, other):
        assert refused(opened, header, stored, keys=keys) is DamageReason.KEY
    plain, bare = packed(keys=None)
    assert refused(opened, plain, bare) is DamageReason.KEY
    tool = KeyRing([Key(SECRET)], reads_plain=True)
    assert opened(plain, bare, keys=tool) == joined(payload_of(1))
    same_id = replace(header, key_id=other.writer.key_id)
    assert refused(opened, same_id, stored, keys=other) is DamageReason.SEAL


def test_no_two_records_share_a_key():
    """The same bytes sealed twice have other salts and other ciphertext."""
    free = PayloadFormat(CodecId.RAW, 2, OLD)
    got = [free.pack(spec_of(1), NAMESPACE, 0, 0.0, payload_of(1)) for _ in range(3)]
    assert len({bytes(one.header.salt) for one in got}) == 3
    assert len({b"".join(one.parts) for one in got}) == 3


def test_lengths():
    """Lengths with and without the seal convert into each other, and nothing else parses."""
    for n in (1, 15, 16, 17, 4096, MIB - 1, MIB, MIB + 1, MIB + 16, 5 * MIB, MAX_RAW_BYTES):
        assert opened_bytes(sealed_bytes(n)) == n
    header, _ = packed()
    for stored_bytes in (1, 16, 16384, header.stored_bytes + 1, MIB + 20):
        forged = replace(header, stored_bytes=stored_bytes)
        assert refused(parse_header, forged.pack()) is DamageReason.LENGTH


class TestSealedDiskContract(TierContract):
    """The disk tier keeps every promise with encryption on."""

    @pytest.fixture(params=["raw", "zstd"])
    def open_tier(self, request, tmp_path):
        return lambda namespace=NAMESPACE, rank=0: DiskTier(
            str(tmp_path), namespace, rank, 1 << 30, codec=request.param, keys=OLD, poll_s=0.05
        )


def disk(root, keys):
    return DiskTier(str(root), NAMESPACE, 0, 1 << 30, keys=keys, poll_s=0.05)


def test_nothing_of_the_payload_is_on_the_disk(tmp_path):
    """No 16 bytes of a payload lie in any file of an encrypted store."""
    tier = disk(tmp_path, OLD)
    tier.put(spec_of(1), payload_of(1))
    tier.close()
    data = joined(payload_of(1))
    for file in tmp_path.rglob("*"):
        if file.is_file():
            found = file.read_bytes()
            assert not any(data[i : i + 16] in found for i in range(0, len(data), 16))


def test_files_are_checked_without_the_key(tmp_path):
    """Whoever has no key can still tell an intact file from a damaged one."""
    tier = disk(tmp_path, OLD)
    tier.put(spec_of(1), payload_of(1))
    tier.close()
    (file,) = iter_record_files(str(tmp_path), NAMESPACE, 0)
    assert verify_file(file.path, file).ok
    path = Path(file.path)
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    assert verify_file(file.path, file).reason is DamageReason.PAYLOAD


def test_a_second_put_seals_nothing(tmp_path):
    """A record that is there is seen by its length alone, sealed or not."""
    tier = disk(tmp_path, OLD)
    tier.put(spec_of(1), payload_of(1))
    object.__setattr__(tier._format, "draw", lambda n: pytest.fail("sealed again"))
    assert tier.put(spec_of(1), payload_of(1)) is PutResult.EXISTS
    tier.close()


def test_sealed_anew():
    """Another key, or a first one, around the same encoded bytes; the old key opens it no more."""
    for codec in (CodecId.RAW, CodecId.ZSTD):
        payload = zeros(MIB + 4096) if codec is CodecId.ZSTD else payload_of(1)
        for keys in (OLD, None):
            header, stored = packed(codec, sum(map(len, payload)), payload, keys=keys)
            assert can_open(header, NEW)
            assert not has_current_seal(header, NEW)
            fresh, anew = resealed(header, memoryview(stored), NEW)
            assert has_current_seal(fresh, NEW)
            assert fresh.key_id == NEW.writer.key_id
            assert fresh.salt != header.salt
            assert parse_header(fresh.pack()) == fresh
            assert fresh.payload_checksum == payload_checksum([anew])
            only = KeyRing([Key(bytes(32))])
            assert opened(fresh, anew, keys=only) == joined(payload)
            assert refused(opened, fresh, anew, keys=OLD) is DamageReason.KEY


def test_sealing_anew_checks_the_seal():
    """What no holder of the old key wrote does not get a seal of the new one."""
    header, stored = packed()
    forged = bytearray(stored)
    forged[5] ^= 1
    assert refused(resealed, header, memoryview(forged), NEW) is DamageReason.SEAL
    assert not can_open(header, KeyRing([Key(bytes(32))]))


def test_large_records_are_refused_by_their_headers():
    """A header that claims too much is refused before anything is allocated."""
    header, _ = packed()
    check_size(header)
    for more in ({"raw_bytes": 5 << 30}, {"stored_bytes": 5 << 30}):
        assert refused(check_size, replace(header, **more)) is DamageReason.LENGTH


def test_a_sparse_file_of_a_huge_record_is_not_read(tmp_path):
    """A tool allocates nothing for a file that says it is a terabyte and is, on paper."""
    tier = disk(tmp_path, None)
    tier.put(spec_of(1), payload_of(1))
    tier.close()
    (file,) = iter_record_files(str(tmp_path), NAMESPACE, 0)
    header = replace(read_header(file.path), raw_bytes=1 << 40, stored_bytes=1 << 40)
    with open(file.path, "r+b") as opened_file:
        opened_file.write(header.pack())
        opened_file.truncate(4096 + (1 << 40))
    assert refused(read_stored, file.path, file) is DamageReason.LENGTH
