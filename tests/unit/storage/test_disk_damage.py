"""Whatever happens to a record's file: a miss with its reason, never wrong bytes, and it heals."""

import os
import random
import shutil
import socket
import stat

import pytest

from kvtier.storage.disk import DiskTier
from kvtier.storage.disk_layout import iter_record_files
from kvtier.storage.disk_verify import read_header, verify_file
from kvtier.storage.errors import DamageReason, RecordDamaged, RecordMissing
from kvtier.storage.testing import (
    NAMESPACE,
    OTHER_NAMESPACE,
    aligned,
    joined,
    key_of,
    payload_of,
    read_back,
    spec_of,
)

from .disk_helpers import file_of, held_bytes

CODECS = ["raw", "zstd"]
RAW_BYTES = 64 << 10


def open_tier(root, codec="raw", namespace=NAMESPACE, rank=0):
    return DiskTier(str(root), namespace, rank, 1 << 26, codec=codec, poll_s=0.05)


def payload(number):
    """Half noise, half zeros: shrinks, and has bytes worth damaging."""
    parts = payload_of(number, RAW_BYTES, pieces=2)
    parts[1][:] = bytes(len(parts[1]))
    return parts


@pytest.fixture(params=CODECS)
def tier(request, tmp_path):
    tier = open_tier(tmp_path, request.param)
    tier.put(spec_of(1, RAW_BYTES), payload(1))
    tier.put(spec_of(2, RAW_BYTES), payload(2))
    assert tier.wait_complete(30)  # a walk that meets the damage half-way counts it half
    yield tier
    tier.close()


def damage_of(tier, number=1):
    with pytest.raises(RecordDamaged) as caught:
        read_back(tier, number, RAW_BYTES)
    return caught.value.reason


def edit(path, offset, data):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def truncate(root, path, length):
    os.truncate(path, length)


def replaced_by(make):
    def damage(root, path):
        os.unlink(path)
        make(path)

    return damage


def zeroed(root, path):
    edit(path, 0, bytes(os.path.getsize(path)))


def lengthened(root, path):
    with open(path, "ab") as file:
        file.write(bytes(4096))


def full_folder(path):
    os.makedirs(path + "/sub")
    with open(path + "/sub/file", "w", encoding="ascii") as file:
        file.write("x")


def make_socket(path):
    here = os.getcwd()
    os.chdir(os.path.dirname(path))  # socket paths are short
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(os.path.basename(path))
    finally:
        os.chdir(here)


DAMAGES = {
    "empty": (lambda r, p: truncate(r, p, 0), DamageReason.TRUNCATED),
    "half a header": (lambda r, p: truncate(r, p, 300), DamageReason.TRUNCATED),
    "header only": (lambda r, p: truncate(r, p, 4096), DamageReason.TRUNCATED),
    "one byte short": (lambda r, p: truncate(r, p, os.path.getsize(p) - 1), DamageReason.TRUNCATED),
    "one page short": (
        lambda r, p: truncate(r, p, os.path.getsize(p) - 4096),
        DamageReason.TRUNCATED,
    ),
    "longer": (lengthened, DamageReason.LENGTHENED),
    "zeros": (zeroed, DamageReason.MAGIC),
    "another record": (
        lambda r, p: shutil.copyfile(file_of(r, 2), p),
        DamageReason.IDENTITY,
    ),
    "old format": (lambda r, p: edit(p, 8, b"\0"), DamageReason.FORMAT),
    "header bit": (lambda r, p: edit(p, 105, b"\xaa"), DamageReason.HEADER),
    "after header": (lambda r, p: edit(p, 2000, b"\x01"), DamageReason.HEADER),
    "first payload byte": (lambda r, p: edit(p, 4096, b"\x5a\xa5"), DamageReason.PAYLOAD),
    "payload zeroed": (
        lambda r, p: edit(p, 4096, bytes(os.path.getsize(p) - 4096)),
        DamageReason.PAYLOAD,
    ),
    "folder": (replaced_by(os.mkdir), DamageReason.NOT_A_FILE),
    "full folder": (replaced_by(full_folder), DamageReason.NOT_A_FILE),
    "fifo": (replaced_by(os.mkfifo), DamageReason.NOT_A_FILE),
    "socket": (replaced_by(make_socket), DamageReason.NOT_A_FILE),
    "link": (replaced_by(lambda p: os.symlink("/etc/passwd", p)), DamageReason.NOT_A_FILE),
    "device": (
        replaced_by(lambda p: os.mknod(p, 0o600 | stat.S_IFCHR, os.makedev(1, 5))),
        DamageReason.NOT_A_FILE,
    ),
    "file for a folder": (
        lambda r, p: (
            shutil.rmtree(os.path.dirname(p)),
            open(os.path.dirname(p), "wb").close(),
        ),
        DamageReason.NOT_A_FILE,
    ),
}


@pytest.mark.parametrize("how", ["quarantine", "replace"])
@pytest.mark.parametrize("kind", DAMAGES)
def test_damage(tier, tmp_path, kind, how):
    """Each kind of damage has its reason, costs only that record, and heals with the next save."""
    damage, reason = DAMAGES[kind]
    path = file_of(tmp_path, 1)
    if kind == "device" and os.geteuid() != 0:
        pytest.skip("device nodes need root")
    damage(tmp_path, path)
    assert damage_of(tier) is reason
    assert read_back(tier, 2, RAW_BYTES) == joined(payload(2)) or kind == "file for a folder"
    if how == "quarantine":
        tier.quarantine(key_of(1), reason.value)
        with pytest.raises(RecordMissing):
            read_back(tier, 1, RAW_BYTES)
    tier.put(spec_of(1, RAW_BYTES), payload(1), replace=how == "replace")
    assert read_back(tier, 1, RAW_BYTES) == joined(payload(1))
    assert tier.used_bytes >= held_bytes(tmp_path)


def test_every_region_of_the_file(tier, tmp_path):
    """A flipped bit anywhere in the file is noticed: seeded positions, header to padding."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    path = file_of(tmp_path, 1)
    with open(path, "rb") as file:
        good = file.read()
    positions = [0, 511, 512, 4095, 4096, len(good) - 1]
    positions += [rng.randrange(len(good)) for _ in range(200)]
    for position in positions:
        edit(path, position, bytes([good[position] ^ 1 << rng.randrange(8)]))
        damage_of(tier)
        assert not verify_file(path).ok
        edit(path, position, good[position : position + 1])
    assert read_back(tier, 1, RAW_BYTES) == joined(payload(1))


def test_moved_between_namespaces_and_ranks(tmp_path):
    """A file moved to another namespace or rank is refused there."""
    first = open_tier(tmp_path)
    first.put(spec_of(1, RAW_BYTES), payload(1))
    for namespace, rank, reason in [
        (OTHER_NAMESPACE, 0, DamageReason.NAMESPACE),
        (NAMESPACE, 1, DamageReason.IDENTITY),
    ]:
        other = open_tier(tmp_path, namespace=namespace, rank=rank)
        target = file_of(tmp_path, 1, namespace, rank)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        shutil.copyfile(file_of(tmp_path, 1), target)
        assert damage_of(other) is reason
        found = next(f for f in iter_record_files(str(tmp_path), namespace, rank))
        assert verify_file(found.path).ok
        assert verify_file(found.path, found).reason is reason
        other.close()
    first.close()


def test_zero_filled_payload_of_zeros(tmp_path):
    """A record of zeros is a record; a file of zeros is not."""
    tier = open_tier(tmp_path)
    tier.put(spec_of(1), [aligned(4 * 4096)])
    assert read_back(tier, 1) == bytes(4 * 4096)
    assert verify_file(file_of(tmp_path, 1)).ok
    assert read_header(file_of(tmp_path, 1)).key == key_of(1)
    tier.close()


def test_put_over_a_torn_file(tier, tmp_path):
    """A file that cannot be whole is written again without being asked to replace."""
    os.truncate(file_of(tmp_path, 1), 5000)
    tier.put(spec_of(1, RAW_BYTES), payload(1))
    assert read_back(tier, 1, RAW_BYTES) == joined(payload(1))


def test_quarantine_is_bounded(tmp_path):
    """Quarantine keeps a bounded number, counts against the cap, and what is in it goes first."""
    tier = DiskTier(str(tmp_path), NAMESPACE, 0, 200 * 8192, poll_s=0.05)
    for number in range(60):
        tier.put(spec_of(number, 4096), payload_of(number, 4096, 1))
        tier.quarantine(key_of(number), "payload_checksum")
    kept = os.listdir(tmp_path / "quarantine")
    assert 0 < len(kept) <= 32
    assert len(kept) * 8192 <= 200 * 8192 // 16 + 8192
    assert all("payload_checksum" in name for name in kept)
    assert tier.used_bytes >= held_bytes(tmp_path)
    for number in range(100, 300):
        tier.put(spec_of(number, 4096), payload_of(number, 4096, 1))
    assert os.listdir(tmp_path / "quarantine") == []
    assert held_bytes(tmp_path) <= 200 * 8192
    tier.close()


def test_reasons_make_no_paths(tier, tmp_path):
    """A reason never becomes a path."""
    tier.quarantine(key_of(1), "../../evil\n/x")
    assert len(os.listdir(tmp_path / "quarantine")) == 1
