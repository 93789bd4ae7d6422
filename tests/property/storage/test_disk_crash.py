"""Kill -9 at any moment: what was acknowledged and not evicted is there, and verifies."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from kvtier.storage.disk import DiskTier
from kvtier.storage.disk_layout import iter_record_files
from kvtier.storage.disk_verify import verify_file
from kvtier.storage.errors import RecordMissing
from kvtier.storage.testing import NAMESPACE, joined, key_of, payload_of, read_back, spec_of

RECORD = 4096 + 16 * 4096
RAW_BYTES = 16 * 4096

CHILD = """
import random, sys
from kvtier.storage.disk import DiskTier
from kvtier.storage.testing import *
root, seed, cap = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rng = random.Random(seed)
tier = DiskTier(root, NAMESPACE, 0, cap, poll_s=0.01)
print("ready", flush=True)
while True:
    number = rng.randrange(60)
    act = rng.choice(("put", "put", "put", "replace", "delete", "quarantine"))
    print("begin", act, number, flush=True)
    if act == "delete":
        tier.delete([key_of(number)])
    elif act == "quarantine":
        tier.quarantine(key_of(number), "test")
    else:
        tier.put(spec_of(number, 16 * 4096), payload_of(number, 16 * 4096),
                 replace=act == "replace")
    print("end", act, number, flush=True)
"""


def held_bytes(root):
    return sum(
        os.path.getsize(f"{folder}/{name}")
        for folder, _, files in os.walk(root)
        for name in files
        if name.endswith((".kvt", ".tmp"))
    )


def run_and_kill(root, seed, cap, after_s, engines):
    """Run children, kill them all, return what each said."""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(root), str(seed * 10 + engine), str(cap)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for engine in range(engines)
    ]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    time.sleep(after_s)
    said = []
    for child in children:
        child.send_signal(signal.SIGKILL)
    for child in children:
        whole, _, _ = child.stdout.read().rpartition("\n")  # the last line may be cut short
        said.append(whole.splitlines())
        child.wait()
        child.stdout.close()
    return said


def survivors(lines):
    """Records that must be there: last acknowledged act stored, no act begun since."""
    state = {}
    for line in lines:
        word, act, number = line.split()
        stored = word == "end" and act in ("put", "replace")
        state[int(number)] = "there" if stored else "open" if word == "begin" else "gone"
    return {number for number, what in state.items() if what == "there"}


def served(tier, number):
    """What the tier gives for a record; None when it just went: eviction may be under way."""
    try:
        return read_back(tier, number, RAW_BYTES)
    except RecordMissing:
        assert not tier.contains_many([key_of(number)])[0]
        return None


def check_store(root, cap):
    """Everything that can be served verifies, the cap holds, no leftovers. Return the keys."""
    tier = DiskTier(str(root), NAMESPACE, 0, cap, poll_s=0.01)
    try:
        tier.put(spec_of(99, RAW_BYTES), payload_of(99, RAW_BYTES))  # works at once
        assert tier.wait_complete(30)
        deadline_s = time.monotonic() + 20  # the cap may be smaller than before: shrinks at once
        while held_bytes(root) > cap and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert [name for _, _, names in os.walk(root) for name in names if ".tmp" in name] == []
        assert held_bytes(root) <= cap
        assert tier.used_bytes >= held_bytes(root)
        for file in iter_record_files(str(root)):
            assert verify_file(file.path, file).ok
        for number in range(60):
            if tier.contains_many([key_of(number)])[0]:
                assert served(tier, number) in (joined(payload_of(number, RAW_BYTES)), None)
        return {file.key for file in iter_record_files(str(root))}
    finally:
        tier.close()


def torture(root, seed, kills):
    print("seed", seed)
    rng = random.Random(seed)
    for kill in range(kills):
        engines = rng.choice((1, 1, 2))
        roomy = rng.random() < 0.5
        cap = (200 if roomy else 20) * RECORD
        (said, *others) = run_and_kill(
            root, rng.randrange(1 << 20), cap, rng.random() * 0.3, engines
        )
        keys = check_store(root, cap)
        if roomy and not others:
            lost = {n for n in survivors(said) if key_of(n) not in keys}
            assert lost == set(), f"kill {kill}"


def test_kill_at_any_moment(tmp_path):
    """Fifty kills, one or two engines, with and without eviction under way."""
    torture(tmp_path, int(os.environ.get("KVTIER_SEED", random.randrange(1 << 30))), 50)


@pytest.mark.torture
def test_kill_at_any_moment_long(tmp_path):
    """The same, five hundred times."""
    torture(tmp_path, int(os.environ.get("KVTIER_SEED", random.randrange(1 << 30))), 500)
