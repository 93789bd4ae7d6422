"""A disk that gives way: every error is one of ours, nothing is left behind, it comes back."""

import errno
import os
import subprocess

import pytest

from kvtier.storage import disk_file
from kvtier.storage.disk import DiskTier
from kvtier.storage.errors import (
    DamageReason,
    RecordDamaged,
    TierRefused,
    TierUnavailable,
)
from kvtier.storage.testing import (
    NAMESPACE,
    joined,
    key_of,
    payload_of,
    read_back,
    spec_of,
)

from .disk_helpers import eventually, file_of, files_ending, held_bytes

RECORD = 4096 + 4 * 4096


def open_tier(root, capacity=1 << 26, **options):
    return DiskTier(str(root), NAMESPACE, 0, capacity, poll_s=0.05, **options)


def fill(tier, numbers):
    for number in numbers:
        tier.put(spec_of(number), payload_of(number))


@pytest.fixture
def mounted(tmp_path):
    """Give a function that mounts a file system of its own; unmounted at the end."""
    points = []

    def mount(kind, options):
        point = tmp_path / f"mount{len(points)}"
        point.mkdir()
        done = subprocess.run(
            ["mount", "-t", kind, "-o", options, "none", str(point)],
            check=False,
            capture_output=True,
        )
        if done.returncode:
            pytest.skip(f"cannot mount {kind} here")
        points.append(point)
        return point

    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    yield mount
    for point in points:
        subprocess.run(["umount", "-l", str(point)], check=True)


class Failing:
    """Makes one system call of the file room fail or fall short a number of times."""

    def __init__(self, monkeypatch, name, code=None, times=1, most=None):
        real = getattr(os, name)
        self.calls = 0

        def call(*args, **kwargs):
            self.calls += 1
            if code is not None and self.calls <= times:
                raise OSError(code, os.strerror(code))
            if most is not None:
                fd, buffers, offset = args
                return real(fd, [memoryview(buffers[0])[:most]], offset)
            return real(*args, **kwargs)

        monkeypatch.setattr(disk_file.os, name, call)


def fill_up(path):
    """Write until the disk is full."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        while True:
            os.write(fd, bytes(4096))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
    finally:
        os.close(fd)


def test_full_disk(mounted):
    """A disk that is full before the cap: evicts once, refuses in words, reads on, comes back."""
    root = mounted("tmpfs", "size=200k")
    tier = open_tier(root)
    fill(tier, range(20))
    held = len(files_ending(root, ".kvt"))
    assert 3 < held < 10
    assert files_ending(root, ".tmp") == []
    assert read_back(tier, 19) == joined(payload_of(19))
    fill_up(root / "other")
    tier.delete([key_of(number) for number in range(20)])
    fill_up(root / "other")  # somebody else takes the room of our records too
    with pytest.raises(TierRefused, match=r"space|nothing left"):
        fill(tier, [50])
    assert files_ending(root, ".tmp") == []
    os.unlink(root / "other")
    fill(tier, [50])
    assert read_back(tier, 50) == joined(payload_of(50))
    assert tier.wait_complete(10)
    tier.close()


def test_read_only_file_system(mounted):
    """On a read-only file system writes are refused and reads go on; both once it is not."""
    root = mounted("tmpfs", "size=4m")
    tier = open_tier(root)
    fill(tier, range(3))
    tier.close()
    subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
    tier = open_tier(root)
    with pytest.raises(TierRefused):
        fill(tier, [7])
    assert tier.wait_complete(10)
    assert set(tier.changes().added) == {key_of(number) for number in range(3)}
    assert read_back(tier, 1) == joined(payload_of(1))
    subprocess.run(["mount", "-o", "remount,rw", str(root)], check=True)
    fill(tier, [7])
    assert read_back(tier, 7) == joined(payload_of(7))
    tier.close()


def test_overlay(mounted, tmp_path):
    """An overlay works, with O_DIRECT or without."""
    for name in ("lower", "upper", "work"):
        (tmp_path / name).mkdir()
    root = mounted(
        "overlay",
        f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work",
    )
    tier = open_tier(root, 5 * RECORD)
    fill(tier, range(10))
    assert read_back(tier, 9) == joined(payload_of(9))
    assert held_bytes(root) <= 5 * RECORD
    tier.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOTCONN, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("call", ["preadv", "open"])
def test_read_errors(tmp_path, monkeypatch, call, code):
    """A read error is the tier's, not the record's: nothing is thrown away for it."""
    tier = open_tier(tmp_path)
    fill(tier, [1])
    assert tier.wait_complete(10)
    with monkeypatch.context() as patch:
        Failing(patch, call, code, times=1000)
        with pytest.raises(TierUnavailable):
            read_back(tier, 1)
    assert read_back(tier, 1) == joined(payload_of(1))
    tier.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_write_refused(tmp_path, monkeypatch, code):
    """Refused writes say so, leave nothing, and give their room back."""
    tier = open_tier(tmp_path)
    fill(tier, range(3))
    assert tier.wait_complete(10)
    before = tier.used_bytes
    with monkeypatch.context() as patch:
        Failing(patch, "pwritev", code, times=1000)
        with pytest.raises(TierRefused):
            fill(tier, [7])
    assert files_ending(tmp_path, ".tmp") == []
    assert tier.used_bytes <= before
    assert tier.used_bytes == held_bytes(tmp_path)
    fill(tier, [7])
    tier.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOTCONN, errno.EMFILE])
def test_write_fails(tmp_path, monkeypatch, code):
    """A disk that does not answer writes is unavailable; nothing is left."""
    tier = open_tier(tmp_path)
    assert tier.wait_complete(10)
    with monkeypatch.context() as patch:
        Failing(patch, "pwritev", code, times=1000)
        with pytest.raises(TierUnavailable):
            fill(tier, [7])
    assert files_ending(tmp_path, ".kvt") + files_ending(tmp_path, ".tmp") == []
    tier.close()


def test_full_once(tmp_path, monkeypatch):
    """When evicting makes the room that the disk lacked, the save succeeds."""
    tier = open_tier(tmp_path)
    fill(tier, range(5))
    assert tier.wait_complete(10)
    Failing(monkeypatch, "pwritev", errno.ENOSPC, times=1)
    fill(tier, [7])
    assert read_back(tier, 7) == joined(payload_of(7))
    assert len(files_ending(tmp_path, ".kvt")) == 5
    tier.close()


@pytest.mark.parametrize("most", [4096, 5000, 100])
def test_short_reads_and_writes(tmp_path, monkeypatch, most):
    """Calls that do less than asked are carried on where they stopped."""
    tier = open_tier(tmp_path)
    Failing(monkeypatch, "pwritev", most=most)
    fill(tier, [1])
    Failing(monkeypatch, "preadv", most=most)
    assert read_back(tier, 1) == joined(payload_of(1))
    tier.close()


def test_write_that_writes_nothing(tmp_path, monkeypatch):
    """A write of zero bytes is an error, not an endless loop."""
    tier = open_tier(tmp_path)
    monkeypatch.setattr(disk_file.os, "pwritev", lambda *_: 0)
    with pytest.raises(TierUnavailable):
        fill(tier, [1])
    tier.close()


@pytest.mark.parametrize("call", ["open", "pwritev", "preadv"])
def test_without_direct_io(tmp_path, monkeypatch, call):
    """A file system that refuses O_DIRECT, at open or at the first read or write, works."""
    real = getattr(os, call)
    refused = []

    def refuse(first, *args, **kwargs):
        import fcntl

        flags = args[0] if call == "open" else fcntl.fcntl(first, fcntl.F_GETFL)
        if flags & os.O_DIRECT:
            refused.append(1)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(first, *args, **kwargs)

    monkeypatch.setattr(disk_file.os, call, refuse)
    tier = open_tier(tmp_path)
    fill(tier, range(3))
    for number in range(3):
        assert read_back(tier, number) == joined(payload_of(number))
    assert len(refused) == (1 if call == "open" else 3)
    tier.close()


def test_unaligned_buffers(tmp_path):
    """Buffers that O_DIRECT does not take cost speed, not the record."""
    tier = open_tier(tmp_path)
    fill(tier, [1])
    room = memoryview(bytearray(4 * 4096 + 1))[1:]
    tier.get(spec_of(1), [room])
    assert bytes(room) == joined(payload_of(1))
    assert tier.put(spec_of(2), [room])
    assert read_back(tier, 2) == joined(payload_of(1))
    tier.close()


def test_too_many_open_files(tmp_path):
    """Out of descriptors: unavailable, and well again when there are some."""
    import resource

    tier = open_tier(tmp_path)
    fill(tier, [1])
    assert tier.wait_complete(10)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(TierUnavailable):
            read_back(tier, 1)
        with pytest.raises(TierUnavailable):
            fill(tier, [2])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    fill(tier, [2])
    assert read_back(tier, 1) == joined(payload_of(1))
    assert eventually(lambda: tier.used_bytes == held_bytes(tmp_path))
    tier.close()


def test_ends_while_it_is_read(tmp_path, monkeypatch):
    """A file cut short between looking at its length and reading it is truncated."""
    tier = open_tier(tmp_path)
    fill(tier, [1])
    real = os.fstat

    def late(fd):
        status = real(fd)
        if status.st_size == RECORD:
            os.truncate(file_of(tmp_path, 1), 3 * 4096)
        return status

    monkeypatch.setattr(disk_file.os, "fstat", late)
    with pytest.raises(RecordDamaged) as caught:
        read_back(tier, 1)
    assert caught.value.reason is DamageReason.TRUNCATED
    monkeypatch.undo()
    tier.close()


@pytest.mark.parametrize("piece", [4096, 3 * 4096, 4 * 4096, 1 << 20])
def test_records_are_read_in_pieces(tmp_path, monkeypatch, piece):
    """However a record is cut for reading: its bytes, and damage or an end in every piece."""
    monkeypatch.setattr(disk_file, "PIECE_BYTES", piece)
    tier = open_tier(tmp_path)
    for page in range(4):
        fill(tier, [1])
        assert read_back(tier, 1) == joined(payload_of(1))
        with open(file_of(tmp_path, 1), "r+b") as file:
            file.seek(4096 + page * 4096 + 77)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
        with pytest.raises(RecordDamaged) as caught:
            read_back(tier, 1)
        assert caught.value.reason is DamageReason.PAYLOAD
        tier.delete([key_of(1)])
    fill(tier, [1])
    real = os.fstat

    def late(fd):
        status = real(fd)
        if status.st_size == RECORD:
            os.truncate(file_of(tmp_path, 1), RECORD - 100)
        return status

    monkeypatch.setattr(disk_file.os, "fstat", late)
    with pytest.raises(RecordDamaged) as caught:
        read_back(tier, 1)
    assert caught.value.reason is DamageReason.TRUNCATED
    monkeypatch.undo()
    tier.close()


def test_probe(tmp_path, monkeypatch):
    """A probe fails as a read would: no descriptors, no root, a disk that gives errors."""
    import resource

    tier = open_tier(tmp_path / "store")
    tier.probe()  # nothing there yet
    fill(tier, [1, 2])
    tier.probe()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(TierUnavailable):
            tier.probe()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with monkeypatch.context() as patch:
        Failing(patch, "preadv", errno.EIO, times=1000)
        with pytest.raises(TierUnavailable):
            tier.probe()
    for number in (1, 2):  # damage is the record's, not the tier's
        os.truncate(file_of(tmp_path / "store", number), 100)
    tier.probe()
    os.rename(tmp_path / "store", tmp_path / "away")
    tier.probe()
    (tmp_path / "store").write_bytes(b"a file")
    with pytest.raises(TierUnavailable):
        tier.probe()
    tier.close()
