"""A transfer with real lanes and arena, over a tier and a mover that tests hold and let go."""

from __future__ import annotations

import threading

import numpy as np

from kvtier.storage.errors import RecordMissing
from kvtier.storage.jobs import (
    LoadChunk,
    LoadDone,
    LoadJob,
    LoadRetired,
    SaveChunk,
    SaveCopied,
    SaveJob,
    SaveRetired,
    TierNews,
)
from kvtier.storage.link import LinkLimits
from kvtier.storage.ram import Arena
from kvtier.storage.staging import Staging
from kvtier.storage.tier import PutResult, Tier, TierCapabilities, TierChanges, TierStat
from kvtier.storage.transfer import Transfer, TransferLimits

from .clock import FakeClock

PAGE = 4096
WAIT_S = 20.0  # a bound, never waited for when all is well


class Gate:
    """Stops whoever passes while shut; counts who has come."""

    def __init__(self):
        self._cond = threading.Condition()
        self._shut = False
        self.came = 0

    def shut(self):
        self._shut = True

    def open(self):
        with self._cond:
            self._shut = False
            self._cond.notify_all()

    def wait_came(self, n):
        with self._cond:
            assert self._cond.wait_for(lambda: self.came >= n, WAIT_S), f"{self.came} of {n} came"

    def __call__(self):
        with self._cond:
            self.came += 1
            self._cond.notify_all()
            assert self._cond.wait_for(lambda: not self._shut, WAIT_S)


class HeldTier(Tier):
    """Records in a dict; every verb passes a gate and may raise what the test says."""

    capabilities = TierCapabilities(persistent=False, shared=False, evicts=False)

    def __init__(self, name="disk"):
        self.name = name
        self.records = {}
        self.gates = {verb: Gate() for verb in ("get", "put", "contains_many", "touch")}
        self.errors = {}
        self.quarantined, self.touched, self.replaced = [], [], []
        self.news = TierChanges()
        self.closed = False

    def _pass(self, verb):
        if verb in self.gates:
            self.gates[verb]()
        error = self.errors.get(verb)
        if error is not None:
            raise error

    def put(self, spec, payload, *, replace=False):
        self._pass("put")
        self.replaced += [spec.key] if replace else []
        self.records[spec.key] = b"".join(payload)
        return PutResult.STORED

    def get(self, spec, into):
        self._pass("get")
        data = self.records.get(spec.key)
        if data is None:
            raise RecordMissing("nothing there")
        at = 0
        for view in into:
            view[:] = data[at : at + len(view)]
            at += len(view)
        assert at == spec.raw_bytes
        return len(data)

    def contains_many(self, keys):
        self._pass("contains_many")
        return [key in self.records for key in keys]

    def delete(self, keys):
        return sum(self.records.pop(key, None) is not None for key in keys)

    def quarantine(self, key, reason):
        self.quarantined.append((key, reason))
        self._pass("quarantine")
        self.records.pop(key, None)

    def scan(self):
        return iter(())

    def touch(self, keys):
        self._pass("touch")
        self.touched += keys

    def changes(self):
        self._pass("changes")
        news, self.news = self.news, TierChanges(complete=self.news.complete)
        return news

    def stat(self):
        self._pass("stat")
        return TierStat(len(self.records), sum(map(len, self.records.values())), None)

    def clear(self):
        self.records.clear()

    def close(self):
        self.closed = True


class Ticket:
    def __init__(self, error, fenced):
        self._error, self._fenced = error, fenced

    def wait(self, timeout_s):
        if self._error is not None:
            raise self._error

    def fenced(self):
        return self._fenced()


class HeldMover:
    """Device blocks are numbers in a dict; copies pass a gate."""

    def __init__(self, arena):
        self.arena = arena
        self.blocks = {}
        self.save_gate, self.load_gate = Gate(), Gate()
        self.error = None
        self.fenced = lambda: True

    def _view(self, page):
        return self.arena.buffers([int(page)], PAGE)[0]

    def save(self, group, block_ids, page_ids, after=None):
        self.save_gate()
        for block, page in zip(block_ids.tolist(), page_ids.tolist(), strict=True):
            self._view(page)[:] = bytes([self.blocks.get((group, block), 0)]) * PAGE
        return Ticket(self.error, self.fenced)

    def load(self, group, block_ids, page_ids, after=None):
        self.load_gate()
        if self.error is None:
            for block, page in zip(block_ids.tolist(), page_ids.tolist(), strict=True):
                self.blocks[group, block] = self._view(page)[0]
        return Ticket(self.error, self.fenced)


def ids(*numbers):
    return np.array(numbers, np.int64)


def key(n, group=0):
    return n.to_bytes(8, "big") + bytes((group,))


def save_chunk(n, blocks, pages, tiers=("disk",), group=0):
    return SaveChunk(key(n, group), group, 0, 16, ids(*blocks), ids(*pages), tuple(tiers))


def load_chunk(n, blocks, pages, source="disk", group=0, n_blocks=None, offset=0):
    n_blocks = n_blocks or len(blocks)
    own = None if pages is None else ids(*pages)
    return LoadChunk(key(n, group), group, 0, 16, source, n_blocks, offset, ids(*blocks), own)


class Bench:
    """A transfer and everything around it."""

    def __init__(self, *, staging_pages=2, slot_pages=2, generation=0, tiers=None, **limits):
        self.clock = FakeClock()
        self.arena = Arena(PAGE, 40, prefault=False)
        self.arena.start(background=False)
        self.mover = HeldMover(self.arena)
        self.tiers = [HeldTier()] if tiers is None else tiers
        link = LinkLimits(**limits)
        self.transfer = Transfer(
            self.arena,
            {0: PAGE, 1: PAGE},
            Staging(range(staging_pages), slot_pages),
            self.mover,
            self.clock,
            TransferLimits(links={tier.name: link for tier in self.tiers}),
        )
        self.transfer.set_tiers(self.tiers, generation)
        self.events = []
        self._jobs = 0

    @property
    def tier(self):
        return self.tiers[0]

    def load(self, *chunks, deadline_s=10.0, generation=0, doomed=False):
        self._jobs += 1
        job = LoadJob(self._jobs, generation, f"r{self._jobs}", deadline_s, chunks, doomed)
        self.transfer.submit_load(job)
        return job

    def save(self, *chunks, generation=0):
        self._jobs += 1
        job = SaveJob(self._jobs, generation, chunks)
        self.transfer.submit_save(job)
        return job

    def take(self):
        self.events += self.transfer.take_events()

    def of(self, job, kind):
        self.take()
        return [e for e in self.events if type(e) is kind and e.job_id == job.job_id]

    def wait(self, job, kind):
        """Return the one event of this kind, waiting for it."""
        for _ in range(int(WAIT_S / 0.01)):
            found = self.of(job, kind)
            if found:
                assert len(found) == 1
                return found[0]
            self.transfer.wait(0.01)
        raise AssertionError(f"no {kind.__name__} of job {job.job_id}: {self.events}")

    def ended(self, job):
        """Wait for both ends of a job and return them."""
        pair = (SaveCopied, SaveRetired) if isinstance(job, SaveJob) else (LoadDone, LoadRetired)
        return tuple(self.wait(job, kind) for kind in pair)

    def news(self):
        self.take()
        return [e for e in self.events if isinstance(e, TierNews)]

    def page(self, page):
        return self.arena.buffers([page], PAGE)[0]

    def counts(self):
        return self.transfer.counts.take()

    def open_gates(self):
        self.mover.save_gate.open()
        self.mover.load_gate.open()
        for tier in self.tiers:
            for gate in getattr(tier, "gates", {}).values():
                gate.open()

    def close(self):
        self.open_gates()
        self.transfer.close(0.0)
        self.arena.close()
