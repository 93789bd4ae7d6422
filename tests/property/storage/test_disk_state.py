"""The disk tier against a dict: any order of calls, restarts and damage."""

import os
import shutil
import tempfile

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.storage.disk import DiskTier
from kvtier.storage.errors import RecordDamaged, RecordMissing
from kvtier.storage.testing import NAMESPACE, joined, key_of, payload_of, read_back, spec_of
from kvtier.storage.tier import PutResult

NUMBERS = st.integers(0, 5)
FILE_BYTES = 4096 + 4 * 4096


class DiskAgainstDict(RuleBasedStateMachine):
    """The model: record number to the number of the bytes it holds, or None for damaged."""

    @initialize(codec=st.sampled_from(["raw", "zstd"]))
    def open(self, codec):
        self.root = tempfile.mkdtemp(prefix="kvtier-state-")
        self.codec = codec
        self.model = {}
        self.reported = set()
        self.reopen()

    def reopen(self):
        self.tier = DiskTier(
            self.root, NAMESPACE, 0, 1000 * FILE_BYTES, codec=self.codec, poll_s=0.02
        )
        self.reported = set()

    def teardown(self):
        if hasattr(self, "tier"):
            self.tier.close()
            shutil.rmtree(self.root)

    def path(self, number):
        name = key_of(number)[:-1].hex() + "-g0"
        return f"{self.root}/{NAMESPACE.hex()}/r0/{name[:2]}/{name[2:4]}/{name}.kvt"

    @rule(number=NUMBERS, content=st.integers(0, 9), replace=st.booleans())
    def put(self, number, content, replace):
        result = self.tier.put(spec_of(number), payload_of(content), replace=replace)
        if replace or number not in self.model:
            assert result is PutResult.STORED
            self.model[number] = content
        else:
            assert result is PutResult.EXISTS

    @rule(number=NUMBERS)
    def get(self, number):
        try:
            content = read_back(self.tier, number)
        except RecordMissing:
            assert number not in self.model
        except RecordDamaged as damage:
            assert self.model[number] is None
            self.tier.quarantine(key_of(number), damage.reason.value)
            del self.model[number]
        else:
            assert content == joined(payload_of(self.model[number]))

    @rule(numbers=st.lists(NUMBERS, max_size=4, unique=True))
    def delete(self, numbers):
        there = [number for number in numbers if number in self.model]
        assert self.tier.delete([key_of(number) for number in numbers]) == len(there)
        for number in there:
            del self.model[number]

    @rule(numbers=st.lists(NUMBERS, max_size=4))
    def touch(self, numbers):
        self.tier.touch([key_of(number) for number in numbers])

    @rule(number=NUMBERS, where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
    def damage(self, number, where, bit):
        if self.model.get(number) is None:
            return
        path = self.path(number)
        position = int(where * os.path.getsize(path))
        with open(path, "r+b") as file:
            file.seek(position)
            old = file.read(1)[0]
            file.seek(position)
            file.write(bytes([old ^ 1 << bit]))
        self.model[number] = None

    @rule()
    def restart(self):
        self.tier.close()
        self.reopen()

    @rule()
    def crash(self):
        """A restart that leaves half a file of a dead process behind."""
        self.tier.close()
        folder = f"{self.root}/{NAMESPACE.hex()}/r0/tmp"
        os.makedirs(folder, exist_ok=True)
        with open(f"{folder}/1-deadbeef-1.tmp", "wb") as file:
            file.write(b"half")
        self.reopen()
        assert self.tier.wait_complete(20)
        assert os.listdir(folder) == []

    @rule()
    def clear(self):
        self.tier.clear()
        self.model.clear()

    @rule()
    def changes_add_up(self):
        """What changes() told since the start is what is there."""
        assert self.tier.wait_complete(20)
        changes = self.tier.changes()
        self.reported |= set(changes.added)
        self.reported -= set(changes.removed)
        assert self.reported == {key_of(number) for number in self.model}

    @invariant()
    def agrees(self):
        if not hasattr(self, "tier"):
            return
        numbers = list(range(6))
        there = self.tier.contains_many([key_of(number) for number in numbers])
        assert there == [number in self.model for number in numbers]
        assert {info.key for info in self.tier.scan()} == {key_of(n) for n in self.model}


TestDiskAgainstDict = DiskAgainstDict.TestCase
TestDiskAgainstDict.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
