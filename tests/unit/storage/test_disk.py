"""The disk tier beyond the contract: capacity, restart, other engines, a disk that gives way."""

import os
import shutil
import stat
import subprocess
import sys
import threading
import time

import pytest

from kvtier.storage import disk as disk_module
from kvtier.storage import disk_tidy
from kvtier.storage.disk import DiskTier
from kvtier.storage.disk_index import MAX_CHANGES, Index
from kvtier.storage.errors import KVTierError, RecordError, RecordMissing, TierError, TierRefused
from kvtier.storage.testing import (
    NAMESPACE,
    OTHER_NAMESPACE,
    joined,
    key_of,
    payload_of,
    read_back,
    spec_of,
)
from kvtier.storage.tier import RecordSpec

from .disk_helpers import eventually, file_of, files_ending, held_bytes

RECORD = 4096 + 4 * 4096  # a test record's file


class Clock:
    """Time that passes when told."""

    def __init__(self):
        self.now_s = 1_700_000_000.0

    def __call__(self):
        return self.now_s


def open_tier(root, capacity=1 << 26, namespace=NAMESPACE, rank=0, **options):
    options.setdefault("poll_s", 0.05)
    return DiskTier(str(root), namespace, rank, capacity, **options)


def fill(tier, numbers):
    for number in numbers:
        tier.put(spec_of(number), payload_of(number))


def there(tier, numbers):
    return [
        n
        for n, found in zip(numbers, tier.contains_many([key_of(n) for n in numbers]), strict=True)
        if found
    ]


def test_files_are_the_owners_only(tmp_path):
    """Folders are 0700 and files 0600, whatever the umask."""
    before = os.umask(0)
    try:
        tier = open_tier(tmp_path / "a" / "store")
        fill(tier, range(3))
        tier.quarantine(key_of(0), "x")
        tier.close()
    finally:
        os.umask(before)
    for folder, folders, files in os.walk(tmp_path / "a"):
        for name in folders:
            assert stat.S_IMODE(os.stat(f"{folder}/{name}").st_mode) == 0o700
        for name in files:
            assert stat.S_IMODE(os.stat(f"{folder}/{name}").st_mode) == 0o600


def test_layout(tmp_path):
    """Records lie where people are told they lie, next to what describes them; nothing is left."""
    tier = open_tier(tmp_path, description={"model": "m", "dtype": "bfloat16"})
    fill(tier, [258])
    assert os.path.getsize(file_of(tmp_path, 258)) == RECORD
    with open(tmp_path / NAMESPACE.hex() / "namespace.json", encoding="utf-8") as file:
        assert '"model": "m"' in file.read()
    tier.close()
    assert files_ending(tmp_path, ".tmp") == []
    assert os.listdir(tmp_path / ".kvtier" / "owners") == []


def test_cap_holds_and_oldest_go(tmp_path):
    """The directory never holds more than the cap, and what was not used longest goes first."""
    clock = Clock()
    tier = open_tier(tmp_path, 10 * RECORD, clock=clock)
    for number in range(30):
        clock.now_s += 1000
        tier.put(spec_of(number), payload_of(number))
        tier.touch([key_of(0)])
        assert held_bytes(tmp_path) <= 10 * RECORD
    left = there(tier, range(30))
    assert 0 in left
    assert left[1:] == list(range(30 - len(left) + 1, 30))
    assert len(left) >= 8
    tier.close()


def test_tail_goes_before_head(tmp_path):
    """A prefix that was written head first, chunk after chunk, loses its tail first."""
    clock = Clock()
    tier = open_tier(tmp_path, 10 * RECORD, clock=clock)
    for number in range(10):
        clock.now_s += 0.025
        fill(tier, [number])
    clock.now_s += 1
    tier.put(RecordSpec(key_of(999), 0, 256, 4 * 4096), payload_of(99))
    left = there(tier, range(10))
    assert left == list(range(len(left)))
    assert len(left) < 10
    tier.close()


def test_touch_reaches_the_files(tmp_path):
    """Last use is in the files' times, so the next start knows it."""
    clock = Clock()
    tier = open_tier(tmp_path, clock=clock)
    fill(tier, range(3))
    clock.now_s += 5000
    tier.touch([key_of(2), key_of(1), key_of(0)])
    tier.close()
    times = [os.stat(file_of(tmp_path, number)).st_mtime for number in range(3)]
    assert times[0] > times[1] > times[2] >= clock.now_s
    again = open_tier(tmp_path, 3 * RECORD, clock=clock)
    again.put(spec_of(7), payload_of(7))
    assert there(again, [0, 1, 2]) in ([0, 1], [0])
    again.close()


def test_restart_counts_what_is_there(tmp_path):
    """A new start knows every record and holds the cap, also a smaller one."""
    tier = open_tier(tmp_path, 40 * RECORD)
    fill(tier, range(20))
    tier.close()
    again = open_tier(tmp_path, 40 * RECORD)
    assert again.wait_complete(10)
    changes = again.changes()
    assert sorted(changes.added) == [key_of(n) for n in range(20)]
    assert changes.complete
    assert again.stat().records == 20
    assert again.used_bytes == 20 * RECORD
    again.close()
    small = open_tier(tmp_path, 5 * RECORD)
    assert eventually(lambda: held_bytes(tmp_path) <= 5 * RECORD)
    assert eventually(lambda: small.stat().records == len(files_ending(tmp_path, ".kvt")) > 2)
    small.close()


@pytest.mark.parametrize("content", [None, b"", b"rubbish" * 10])
def test_counter_lost(tmp_path, content):
    """Without a counter, or with a damaged one, the directory is counted before it is filled."""
    tier = open_tier(tmp_path, 10 * RECORD)
    fill(tier, range(9))
    tier.close()
    usage = tmp_path / ".kvtier" / "usage"
    usage.unlink() if content is None else usage.write_bytes(content)
    clock = Clock()
    clock.now_s = time.time()
    again = open_tier(tmp_path, 10 * RECORD, clock=clock)
    for number in range(20, 26):
        clock.now_s += 10
        fill(again, [number])
    assert held_bytes(tmp_path) <= 10 * RECORD
    assert there(again, range(20, 26)) == list(range(20, 26))
    again.close()


def test_cap_is_of_all_namespaces_and_ranks(tmp_path):
    """One cap for the whole root: a new namespace pushes out the oldest of the others."""
    clock = Clock()
    old = open_tier(tmp_path, 10 * RECORD, clock=clock)
    assert old.wait_complete(20)
    fill(old, range(10))
    clock.now_s += 100
    new = open_tier(tmp_path, 10 * RECORD, namespace=OTHER_NAMESPACE, rank=3, clock=clock)
    assert new.wait_complete(20)
    for number in range(8):
        clock.now_s += 1
        new.put(spec_of(number), payload_of(number))
        assert held_bytes(tmp_path) <= 10 * RECORD
    assert there(new, range(8)) == list(range(8))
    assert eventually(lambda: old.stat().records <= 2)
    new.close()
    old.close()


def test_used_by_another_engine(tmp_path):
    """What another engine used is not the oldest any more."""
    clock = Clock()
    one = open_tier(tmp_path, 10 * RECORD, clock=clock)
    fill(one, range(10))
    other = open_tier(tmp_path, 10 * RECORD, clock=clock)
    assert other.wait_complete(10)
    clock.now_s += 1000
    one.touch([key_of(9)])  # by its place the next to go
    assert eventually(lambda: os.stat(file_of(tmp_path, 9)).st_mtime > clock.now_s - 1)
    other.put(spec_of(20), payload_of(20))
    assert os.path.exists(file_of(tmp_path, 9))
    one.close()
    other.close()


def test_larger_than_the_tier(tmp_path):
    """A record larger than the cap is refused, and pushes nothing out."""
    tier = open_tier(tmp_path, 3 * RECORD)
    fill(tier, range(3))
    with pytest.raises(TierRefused, match="larger"):
        tier.put(spec_of(9, 16 * 4096), payload_of(9, 16 * 4096))
    assert there(tier, range(3)) == [0, 1, 2]
    tier.close()


def test_others_are_heard_of(tmp_path):
    """What another engine saves, deletes or clears is in changes() soon, and readable at once."""
    one, two = open_tier(tmp_path), open_tier(tmp_path)
    assert two.wait_complete(10)
    two.changes()
    fill(one, range(5))
    assert read_back(two, 3) == joined(payload_of(3))
    assert there(two, range(5)) == list(range(5))
    seen, gone = set(), set()

    def heard():
        changes = two.changes()
        seen.update(changes.added)
        gone.update(changes.removed)

    assert eventually(lambda: heard() or len(seen) == 5, 5)
    assert seen == {key_of(n) for n in range(5)}
    one.delete([key_of(2)])
    assert eventually(lambda: heard() or gone == {key_of(2)}, 5)
    one.clear()
    assert eventually(lambda: heard() or len(gone) == 5, 5)
    one.close()
    two.close()


def test_changes_of_its_own(tmp_path):
    """A tier reports its own puts and evictions too, and nothing that came and went between."""
    tier = open_tier(tmp_path, 3 * RECORD)
    assert tier.wait_complete(10)
    fill(tier, [0])
    assert tier.changes().added == (key_of(0),)
    fill(tier, [1])
    tier.delete([key_of(1), key_of(0)])
    changes = tier.changes()
    assert (changes.added, changes.removed) == ((), (key_of(0),))
    fill(tier, range(10, 14))
    changes = tier.changes()
    assert set(changes.added) == {key_of(n) for n in range(10, 14) if there(tier, [n])}
    assert changes.removed == ()
    assert tier.changes().added == ()
    tier.close()


def test_news_come_in_pieces_once_the_first_index_is_told():
    """A store that is deleted, or comes back, under a running engine costs no step much."""
    index = Index()
    keys = [key_of(n) for n in range(3 * MAX_CHANGES)]
    for key in keys:
        index.add(key, RECORD, 0.0, fresh=False)
    index.set_complete()
    first = index.changes()
    assert (len(first.added), first.complete) == (len(keys), True)
    for key in keys:
        index.discard(key)
    pieces = []
    while not pieces or not pieces[-1].complete:
        pieces.append(index.changes())
    assert [len(piece.removed) for piece in pieces] == [MAX_CHANGES] * 3
    assert [key for piece in pieces for key in piece.removed] == keys


def test_journal_is_replaced_before_it_grows(tmp_path, monkeypatch):
    """The journal stays small, and readers lose nothing when it is replaced."""
    from kvtier.storage import disk_journal

    monkeypatch.setattr(disk_journal, "_ROTATE_BYTES", 500)
    one, two = open_tier(tmp_path), open_tier(tmp_path)
    assert two.wait_complete(10)
    seen = set()
    for number in range(60):
        one.put(spec_of(number), payload_of(number))
        seen.update(two.changes().added)
    assert eventually(lambda: seen.update(two.changes().added) or len(seen) == 60, 5)
    assert os.path.getsize(tmp_path / NAMESPACE.hex() / "r0" / "journal") < 700
    one.close()
    two.close()


def test_vanished_behind_our_back(tmp_path):
    """A file that somebody removed is a miss once, and out of the index."""
    tier = open_tier(tmp_path)
    fill(tier, [1])
    tier.changes()
    os.unlink(file_of(tmp_path, 1))
    with pytest.raises(RecordMissing):
        read_back(tier, 1)
    assert there(tier, [1]) == []
    assert tier.changes().removed == (key_of(1),)
    tier.close()


def test_root_removed_while_running(tmp_path):
    """A directory removed under a running tier: misses, then it works again by itself."""
    root = tmp_path / "store"
    tier = open_tier(root)
    fill(tier, range(4))
    tier.changes()
    os.rename(root, tmp_path / "gone")
    with pytest.raises(RecordMissing):
        read_back(tier, 1)
    shutil.rmtree(tmp_path / "gone")
    tier.put(spec_of(9), payload_of(9))
    assert read_back(tier, 9) == joined(payload_of(9))
    assert eventually(lambda: tier.stat().records == 1)
    assert eventually(lambda: tier.used_bytes == RECORD)
    assert os.path.exists(root / NAMESPACE.hex() / "namespace.json")
    tier.close()


def test_root_that_cannot_be(tmp_path):
    """A root that is no directory: every call says so in our own words, and it comes back."""
    root = tmp_path / "store"
    root.write_text("in the way")
    tier = open_tier(root)
    with pytest.raises(TierError):
        tier.put(spec_of(1), payload_of(1))
    with pytest.raises(KVTierError):
        read_back(tier, 1)
    assert there(tier, [1]) == []
    assert list(tier.scan()) == []
    root.unlink()
    tier.put(spec_of(1), payload_of(1))
    assert read_back(tier, 1) == joined(payload_of(1))
    tier.close()


def test_leftovers_are_swept(tmp_path):
    """Half-written files of the dead go at the next start; those of the living stay."""
    living = open_tier(tmp_path)
    fill(living, [1])
    (mark,) = os.listdir(tmp_path / ".kvtier" / "owners")
    folder = tmp_path / NAMESPACE.hex() / "r0" / "tmp"
    alive, dead, forged = f"{mark}-77.tmp", f"{os.getpid()}-00000000-1.tmp", "rubbish"
    for name in (alive, dead, forged):
        (folder / name).write_bytes(b"half")
    (tmp_path / ".kvtier" / "owners" / f"{os.getpid()}-00000000").write_bytes(b"")
    tier = open_tier(tmp_path)
    assert tier.wait_complete(10)
    assert sorted(os.listdir(folder)) == [alive]
    assert f"{os.getpid()}-00000000" not in os.listdir(tmp_path / ".kvtier" / "owners")
    os.unlink(folder / alive)
    tier.close()
    living.close()


def test_every_small_temporary_file_has_a_sweeper(tmp_path):
    """Whatever a killed process was about to rename goes; what somebody may still write stays."""
    tier = open_tier(tmp_path)
    fill(tier, [1])
    tier.close()
    dead = f"{os.getpid()}-00000000"
    named = [tmp_path / ".kvtier" / f"{dead}-1.tmp"]
    named.append(tmp_path / NAMESPACE.hex() / "r0" / "tmp" / "journal-4711.tmp")
    nameless = [tmp_path / ".weights-abc.tmp", tmp_path / "pins" / ".0011.tmp"]
    nameless.append(tmp_path / "epochs" / f".{'ab' * 16}.tmp")
    young = [path.with_name(path.name.replace(".tmp", "-young.tmp")) for path in nameless]
    for path in named + nameless + young:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"half")
    for path in nameless:
        os.utime(path, (time.time() - 3600, time.time() - 3600))
    again = open_tier(tmp_path)
    assert again.wait_complete(10)
    assert sorted(files_ending(tmp_path, ".tmp")) == sorted(map(str, young))
    again.close()


KILLED = """
import os, sys
from kvtier.storage import disk_journal, disk_place
from kvtier.storage.disk import DiskTier
from kvtier.storage.disk_index import MAX_CHANGES, Index
from kvtier.storage.testing import *

class Deadly:
    def __getattr__(self, name):
        return getattr(os, name)

    def rename(self, *args):
        os._exit(7)

disk_journal._ROTATE_BYTES = 200
{"journal": disk_journal, "place": disk_place}[sys.argv[2]].os = Deadly()
tier = DiskTier(sys.argv[1], NAMESPACE, 0, 1 << 30, poll_s=0.01)
for number in range(60):
    tier.put(spec_of(number), payload_of(number))
"""


@pytest.mark.parametrize("where", ["journal", "place"])
def test_killed_between_writing_and_renaming(tmp_path, where):
    """A small file whose writer was killed before it had its name is gone at the next start."""
    tier = open_tier(tmp_path)
    fill(tier, range(100, 103))
    tier.close()
    known = {".kvt", ".json", ""}
    child = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), where], check=False)
    assert child.returncode == 7
    again = open_tier(tmp_path)
    assert again.wait_complete(10)
    left = [name for _, _, names in os.walk(tmp_path) for name in names]
    assert [name for name in left if os.path.splitext(name)[1] not in known] == []
    again.close()


def test_its_own_records_are_known_before_the_others(tmp_path, monkeypatch):
    """Who waits for the index does not wait until all other namespaces have been walked."""
    from kvtier.storage.disk_keeper import Keeper

    other = open_tier(tmp_path, namespace=OTHER_NAMESPACE)
    fill(other, range(20))
    other.close()
    ours = open_tier(tmp_path)
    fill(ours, range(5))
    ours.close()
    go, real = threading.Event(), Keeper._foreign

    def late(self, count):
        assert go.wait(20)
        return real(self, count)

    monkeypatch.setattr(Keeper, "_foreign", late)
    again = open_tier(tmp_path)
    seen = []
    assert eventually(lambda: seen.append(again.changes()) or seen[-1].complete)
    assert {key for news in seen for key in news.added} == {key_of(n) for n in range(5)}
    assert not again.wait_complete(0)
    go.set()
    assert again.wait_complete(10)
    assert eventually(lambda: again.used_bytes == held_bytes(tmp_path))
    again.close()


def test_a_disk_that_hangs_does_not_hold_up_the_constructor(tmp_path, monkeypatch):
    """The engine's thread makes tiers: not one call to the file system is its own."""
    go, made = threading.Event(), []
    for name in ("make_folders", "write_small"):
        monkeypatch.setattr(disk_module, name, lambda *_: go.wait(20))
    thread = threading.Thread(target=lambda: made.append(open_tier(tmp_path)))
    thread.start()
    thread.join(10)
    assert made
    go.set()
    made[0].close()


def test_rubbish_in_the_directory(tmp_path):
    """Foreign files and folders are neither touched nor tripped over."""
    keep = [
        "notes.txt",
        "quarantine.txt",
        f"{NAMESPACE.hex()}/r0/zz/file",
        f"{NAMESPACE.hex()}/r0/aa/bb/not a record.kvt",
        f"{NAMESPACE.hex()}/r0/aa/bb/{'cd' * 32}-g0.kvt",
        f"{NAMESPACE.hex()}/rx/file",
        f"{'f' * 31}/file",
    ]
    for name in keep:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 100)
    (tmp_path / OTHER_NAMESPACE.hex()).write_text("a file")
    tier = open_tier(tmp_path, 4 * RECORD)
    fill(tier, range(8))
    assert tier.wait_complete(10)
    assert there(tier, range(8))
    assert all((tmp_path / name).exists() for name in keep)
    tier.close()


def test_constructor_does_not_wait(tmp_path):
    """A large store does not hold up the start; get finds everything meanwhile."""
    tier = open_tier(tmp_path)
    fill(tier, range(300))
    tier.close()
    started = time.monotonic()
    again = open_tier(tmp_path)
    assert time.monotonic() - started < 5
    assert read_back(again, 299) == joined(payload_of(299))
    assert there(again, [0, 299, 300]) == [0, 299]
    assert again.wait_complete(20)
    again.close()


def test_closed_tier_leaves_nothing(tmp_path):
    """Many opens and closes leave no descriptors, threads or files behind."""

    def cycle():
        tier = open_tier(tmp_path)
        fill(tier, range(3))
        read_back(tier, 1)
        tier.close()

    cycle()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(20):
        cycle()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_misses_leak_no_descriptors(tmp_path):
    """Misses and damage close what they opened."""
    tier = open_tier(tmp_path)
    fill(tier, [1])
    os.truncate(file_of(tmp_path, 1), 5000)
    assert tier.wait_complete(10)
    before = len(os.listdir("/proc/self/fd"))
    for number in (1, 2) * 50:
        with pytest.raises(RecordError):
            read_back(tier, number)
    assert len(os.listdir("/proc/self/fd")) < before + 5  # the thread opens and closes some
    tier.close()


CHILD = """
import os, sys, random
from kvtier.storage.disk import DiskTier
from kvtier.storage.disk_index import MAX_CHANGES, Index
from kvtier.storage.errors import TierRefused
from kvtier.storage.testing import *
root, seed, cap = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rng = random.Random(seed)
tier = DiskTier(root, NAMESPACE if seed % 2 else OTHER_NAMESPACE, seed // 2 % 2, cap, poll_s=0.05)
for step in range(150):
    number = rng.randrange(200)
    tier.put(spec_of(number), payload_of(number))
    tier.touch([key_of(rng.randrange(200))])
tier.close()
"""


def test_cap_holds_for_all_processes_together(tmp_path):
    """Four engines on one directory, all evicting: the cap holds at every moment."""
    cap = 30 * RECORD
    children = [
        subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path), str(seed), str(cap)])
        for seed in range(4)
    ]
    worst = 0
    while any(child.poll() is None for child in children):
        worst = max(worst, held_bytes(tmp_path))
        time.sleep(0.01)
    assert [child.returncode for child in children] == [0, 0, 0, 0]
    assert worst <= cap + 4 * RECORD  # the walk that measures is not one moment
    assert cap // 2 < held_bytes(tmp_path) <= cap
    tier = open_tier(tmp_path, cap)
    assert tier.wait_complete(10)
    assert tier.used_bytes == held_bytes(tmp_path)
    tier.close()


def age(root, seconds):
    """Let everything below have been left alone for so long."""
    then_s = time.time() - seconds
    for folder, _, files in os.walk(root, topdown=False):
        for name in files:
            os.utime(f"{folder}/{name}", (then_s, then_s))
        os.utime(folder, (then_s, then_s))


def test_folders_of_records_that_are_gone_go_too(tmp_path):
    """A thousand clears leave no thousand trees of empty folders; what is in use stays."""
    for number in range(8):
        tier = open_tier(tmp_path, namespace=bytes([number]) * 16)
        fill(tier, range(5))
        if number:
            tier.clear()
        tier.close()
    kept = tmp_path / (b"\1" * 16).hex() / "r0" / "notes.txt"
    kept.write_text("somebody's")
    age(tmp_path, 90_000)
    young = open_tier(tmp_path, namespace=b"\7" * 16)
    assert young.wait_complete(10)
    fill(young, [9])
    young.clear()
    young.close()
    tier = open_tier(tmp_path)
    fill(tier, range(5))
    assert tier.wait_complete(10)

    def left():
        return {name for name in os.listdir(tmp_path) if len(name) == 32}

    gone = [tmp_path / (bytes([n]) * 16).hex() for n in range(2, 7)]
    assert eventually(lambda: all(set(os.listdir(d / "r0")) <= {"tmp", "journal"} for d in gone))
    tier.close()
    for folder in gone:
        age(folder, 90_000)  # nobody came for a day
    tier = open_tier(tmp_path)
    wanted = {bytes([n]) * 16 for n in (0, 1, 7)} | {NAMESPACE}
    assert eventually(lambda: left() == {namespace.hex() for namespace in wanted})
    assert kept.exists()
    assert there(tier, range(5)) == list(range(5))
    first = open_tier(tmp_path, namespace=bytes(16))
    assert there(first, range(5)) == list(range(5))
    fill(young := open_tier(tmp_path, namespace=b"\7" * 16), [11])
    fill(again := open_tier(tmp_path, namespace=b"\3" * 16), [12])
    assert (there(young, [11]), there(again, [12])) == ([11], [12])
    for one in (tier, first, young, again):
        one.close()


@pytest.mark.parametrize("kind", ["record", "half of one", "own"])
def test_a_namespace_in_use_is_never_taken_apart(tmp_path, kind):
    """One record, one half-written file or one engine keep all of it, its description too."""
    tier = open_tier(tmp_path)
    fill(tier, [1])
    tier.close()
    folder = tmp_path / NAMESPACE.hex()
    (record,) = folder.rglob("*.kvt")
    if kind != "record":
        record.unlink()
        for level in list(record.relative_to(folder / "r0").parents)[:-1]:
            (folder / "r0" / level).rmdir()
    if kind == "half of one":
        (folder / "r0" / "tmp" / "1-00000000-1.tmp").write_bytes(b"half")
    age(tmp_path, 90_000)
    before = sorted(folder.rglob("*"))
    if kind == "own":
        disk_tidy.remove_empty(str(tmp_path), [], without=NAMESPACE)
    else:
        disk_tidy.remove_namespace(str(tmp_path), NAMESPACE)
    assert sorted(folder.rglob("*")) == before
    if kind == "own":  # nobody's it goes
        disk_tidy.remove_empty(str(tmp_path), [], without=bytes(16))
        assert not folder.exists()


def test_folders_vanish_under_every_write(tmp_path, monkeypatch):
    """Somebody tidies up between making a folder and using it: it is stored all the same."""
    from kvtier.storage import disk_place

    real, times = disk_place.make_folders, []

    def undone(path):
        real(path)
        if len(times) < 2:
            times.append(path)
            os.rmdir(path)

    tier = open_tier(tmp_path)
    fill(tier, [1])
    monkeypatch.setattr(disk_place, "make_folders", undone)
    fill(tier, [2])
    assert len(times) == 2
    assert there(tier, [1, 2]) == [1, 2]
    tier.close()


def test_records_removed_behind_our_back_are_counted_off(tmp_path):
    """Somebody removes all files of a full store: the next save finds the room that is there."""
    tier = open_tier(tmp_path, capacity=4 * RECORD)
    assert tier.wait_complete(10)
    fill(tier, range(4))
    for path in files_ending(tmp_path, ".kvt"):
        os.unlink(path)
    fill(tier, [9])
    fill(tier, range(10, 13))
    assert there(tier, [9, 10, 11, 12]) == [9, 10, 11, 12]
    assert held_bytes(tmp_path) == 4 * RECORD
    tier.close()
