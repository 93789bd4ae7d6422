"""What the simulated workers touch: memory that knows its bytes, and a tier that misbehaves."""

from __future__ import annotations

import numpy as np

from kvtier.storage.errors import (
    DamageReason,
    RecordDamaged,
    RecordMissing,
    TierRefused,
    TierUnavailable,
)
from kvtier.storage.tier import PutResult, Tier, TierCapabilities, TierChanges, TierStat

PAGE = 4096
MASK = (1 << 64) - 1


def content(chain, group_id, rank, epoch):
    """The KV of tokens, from numbers that each stand for a whole prefix: uint64 (n,)."""
    salt = (group_id + 1) * 0x9E3779B97F4A7C15 + (rank + 1) * 0xBF58476D1CE4E5B9 + epoch * 977
    x = chain ^ np.uint64(salt & MASK)
    x = (x ^ (x >> np.uint64(31))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(29))


class Device:
    """One rank's KV memory: a row of 64-bit numbers a block, one number a token."""

    def __init__(self, sim, rank, n_blocks, row):
        self.sim, self.rank = sim, rank
        self.memory = np.zeros((n_blocks, row), np.uint64)

    def poison(self, blocks):
        for block in blocks:
            self.memory[block.block_id] = 0xDEADBEEF00000000 + block.block_id


class Ticket:
    def __init__(self, sim, moving, error):
        self._sim, self._moving, self._error = sim, moving, error

    def wait(self, timeout_s):
        try:
            for _ in self._moving:
                self._sim.tasks.pause()
                if self._error is not None:
                    raise self._error
        finally:
            if self._error is None:
                self._moving = iter(())

    def fenced(self):
        """A failed copy goes on moving for a while: the engine of a device does, too."""
        return next(self._moving, None) is None


class Mover:
    """Copies in two halves with a pause between them, and checks whose blocks it touches."""

    def __init__(self, sim, device, arena):
        self._sim, self._device, self._arena = sim, device, arena
        self.fail_rate = 0.0

    def fence(self):
        return None

    def close(self):
        pass

    def _page(self, page, group):
        row = self._sim.geometry.group(group).block_tokens
        view = self._arena.buffers([int(page)], PAGE)[0]
        return np.frombuffer(view, np.uint64)[:row]

    def _start(self, moving):
        failing = self._sim.rng.random() < self.fail_rate
        return Ticket(self._sim, moving, RuntimeError("copy failed") if failing else None)

    def save(self, group, block_ids, page_ids, after=None):
        return self._start(self._move(group, block_ids, page_ids, to_page=True))

    def load(self, group, block_ids, page_ids, after=None):
        assert len(block_ids) == len(page_ids)
        return self._start(self._move(group, block_ids, page_ids, to_page=False))

    def _move(self, group, block_ids, page_ids, *, to_page):
        row = self._sim.geometry.group(group).block_tokens
        half = len(block_ids) // 2
        for part in (slice(0, half), slice(half, None)):
            self._check(block_ids, to_page=to_page)
            for block, page in zip(block_ids[part].tolist(), page_ids[part].tolist(), strict=True):
                here, there = self._page(page, group), self._device.memory[block][:row]
                if to_page:
                    here[:] = there
                else:
                    there[:] = here
            yield True

    def _check(self, block_ids, *, to_page):
        pool, loading = self._sim.engine.pool, self._sim.engine.loading
        for block in block_ids.tolist():
            assert block != 0, "the null block is touched"
            if to_page:
                assert pool.blocks[block].ref_cnt > 0, f"block {block} is read without a pin"
            else:
                assert block in loading, f"block {block} is written after it was given away"


class Store:
    """What outlives a tier object: records by rank and namespace."""

    def __init__(self):
        self.records: dict[tuple[bytes, int], dict[bytes, tuple[object, bytes]]] = {}


class FakeTier(Tier):
    """Pauses in every call, and fails as its settings and the seed say."""

    capabilities = TierCapabilities(persistent=True, shared=True, evicts=True)

    def __init__(self, sim, name, store, namespace, rank):
        self.sim, self.name, self.rank = sim, name, rank
        self.records = store.records.setdefault((namespace, rank), {})
        self.added, self.removed = set(self.records), set()
        self.polls = sim.rng.randrange(4)
        self.closed = False

    @property
    def fault(self):
        return self.sim.faults.get(self.name, {})

    def _trouble(self, verb):
        self.sim.tasks.pause(self.sim.rng.randrange(4))
        self.sim.tasks.wait_until(lambda: self.closed or not self.fault.get("hang"))
        if self.sim.rng.random() < self.fault.get("down", 0.0):
            raise TierUnavailable(f"{self.name} does not answer")
        if self.sim.rng.random() < self.fault.get("bug", 0.0):
            raise RuntimeError(f"a bug in {self.name}.{verb}")

    def put(self, spec, payload, *, replace=False):
        data = b"".join(payload)
        assert len(data) == spec.raw_bytes
        self._trouble("put")
        assert b"".join(payload) == data, "pages changed under a write"
        if self.sim.rng.random() < self.fault.get("refuse", 0.0):
            raise TierRefused(f"{self.name} is full")
        if spec.key in self.records and not replace:
            return PutResult.EXISTS
        self.records[spec.key] = (spec, data)
        self._note(spec.key, self.added, self.removed)
        return PutResult.STORED

    def get(self, spec, into):
        for view in into:
            view[:8] = b"garbage!"
        self._trouble("get")
        found = self.records.get(spec.key)
        if found is None:
            raise RecordMissing("nothing there")
        known, data = found
        if known != spec:
            raise RecordDamaged(DamageReason.IDENTITY, f"{known} is not {spec}")
        if self.sim.rng.random() < self.fault.get("damage", 0.0):
            raise RecordDamaged(DamageReason.PAYLOAD, "a bit flipped")
        assert sum(map(len, into)) == len(data)
        at = 0
        for view in into:
            view[:] = data[at : at + len(view)]
            at += len(view)
        self.sim.tasks.pause(self.sim.rng.randrange(3))
        return len(data)

    def _note(self, key, to, out_of):
        out_of.discard(key)
        to.add(key)

    def lose(self, n):
        """Evict, as a tier does by itself."""
        for key in self.sim.rng.sample(sorted(self.records), min(n, len(self.records))):
            del self.records[key]
            self._note(key, self.removed, self.added)

    def contains_many(self, keys):
        self._trouble("contains_many")
        return [key in self.records for key in keys]

    def delete(self, keys):
        gone = [key for key in keys if self.records.pop(key, None) is not None]
        for key in gone:
            self._note(key, self.removed, self.added)
        return len(gone)

    def scan(self):
        return iter(())

    def touch(self, keys):
        self._trouble("touch")

    def changes(self):
        if self.sim.rng.random() < self.fault.get("bug", 0.0):
            raise RuntimeError("a bug in changes")
        if self.polls:
            self.polls -= 1
            return TierChanges(complete=False)
        added, removed = tuple(sorted(self.added)), tuple(sorted(self.removed))
        self.added, self.removed = set(), set()
        return TierChanges(added, removed)

    def stat(self):
        return TierStat(len(self.records), 0, None)

    def clear(self):
        self.records.clear()

    def close(self):
        self.closed = True
