"""Thousands of requests through both halves and a real disk: memory and descriptors stay flat.

No engine and no forward: device blocks are filled with what their prefix hashes stand for, so
every restored byte is checked. Prompts come and come again, are given up in the middle, meet
records that were cut short or removed, and now and then everything is cleared.
`KVTIER_CYCLES` sets the length of the long form.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import sys
import threading
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from kvtier.connector.mover import HostMover
from kvtier.connector.plan import NamespaceInfo
from kvtier.connector.regions import region_table
from kvtier.connector.scheduler import SchedulerHalf
from kvtier.connector.tracker import SchedulerOptions
from kvtier.connector.worker import ArenaPlan, WorkerHalf
from kvtier.connector.write_back import WritePolicy
from kvtier.storage.catalog import Catalog
from kvtier.storage.catalog_check import check_catalog
from kvtier.storage.disk import DiskTier
from kvtier.storage.ram import Arena
from kvtier.storage.transfer import TransferLimits

from .halves import BLOCK, CHUNK, Pool, geometry_of

PAGE = 4096
N_BLOCKS = 64
SLOT = CHUNK // BLOCK
RAM_PAGES = 8 * SLOT  # of the hundred or so that the prompts have
RECORD = 4096 + SLOT * PAGE
CAPACITY = 20 * RECORD
PROMPTS = 24
RESET_EVERY = 150
WARM_UP, SUITE, LONG = 500, 2000, int(os.environ.get("KVTIER_CYCLES", "30000"))


class Cycles:
    """Both halves of one rank over a folder, and the requests that they see."""

    def __init__(self, root, seed):
        print("seed", seed)
        self.root, self.rng = root, random.Random(seed)
        self.memory = np.zeros(N_BLOCKS * PAGE, np.uint8)
        self.device = self.memory.reshape(N_BLOCKS, PAGE)
        tables = {0: region_table(0, [(self.memory.ctypes.data, PAGE, PAGE)], N_BLOCKS)}
        arena = Arena(PAGE, 4 * SLOT + RAM_PAGES, prefault=False)
        arena.start(background=False)
        geometry = geometry_of(num_blocks=N_BLOCKS)
        self.half = SchedulerHalf(
            geometry,
            Catalog(("disk",), 1, first_page=4 * SLOT),
            lambda generation: NamespaceInfo(generation.to_bytes(16, "big"), generation, {}),
            time.monotonic,
            options=SchedulerOptions(load_policy="always", write=WritePolicy(through=("disk",))),
        )
        self.pool = Pool(N_BLOCKS)
        self.half.bind_block_pool(self.pool)
        self.worker = WorkerHalf(
            0,
            arena,
            ArenaPlan(PAGE, 4 * SLOT, RAM_PAGES, SLOT),
            {0: PAGE},
            HostMover(tables, arena),
            lambda info: [DiskTier(str(root), info.digest, 0, CAPACITY, poll_s=0.02)],
            time.monotonic,
            TransferLimits(),
            flush_s=1.0,
        )
        self.half.pages_ready(0, self.worker.first_pages())
        self.tables, self.finished, self.failed = {}, set(), set()
        self.counts, self.n = Counter(), 0

    # -- requests --------------------------------------------------------------

    def request(self):
        prompt = self.rng.randrange(PROMPTS)
        n_tokens = BLOCK * (3 + prompt % 17) + 5
        n = n_tokens // BLOCK
        self.n += 1
        return SimpleNamespace(
            request_id=f"r{self.n}",
            num_tokens=n_tokens,
            num_prompt_tokens=n_tokens,
            num_computed_tokens=0,
            block_hashes=[bytes([prompt, i]) * 16 for i in range(n)],
            status=SimpleNamespace(name="RUNNING"),
        )

    def bytes_of(self, block_hash):
        """What a block of this prefix holds, in this generation."""
        return block_hash[0] * 7 + block_hash[1] + 31 * self.half._generation & 0xFF

    def cycle(self):
        request = self.request()
        n = len(request.block_hashes)
        self.half.on_new_request(request)
        held = [block for block in range(1, N_BLOCKS) if not self.pool.blocks[block].ref_cnt][:n]
        assert len(held) == n, "device blocks are held"
        self.tables[request.request_id] = (held,)
        restored = self.restore(request, held)
        if restored is not None:
            self.compute(request, held, restored)
        del self.tables[request.request_id]
        end_s = time.monotonic() + 20
        while self.half.pending():
            assert time.monotonic() < end_s, "it never comes to rest"
            self.step()
        assert not self.pool.pinned
        assert self.half.catalog.pinned_pages == 0
        assert not self.half._trackers
        self.pool.freed.clear()
        self.disturb()

    def restore(self, request, held):
        """Load what is promised; None for a request that was given up meanwhile."""
        for _ in range(3):
            extra = None
            while extra is None:
                extra, _ = self.half.lookup(request, 0)
                if extra is None:
                    self.step()
            blocks = SimpleNamespace(blocks=(tuple(self.pool.blocks[b] for b in held),))
            self.device[held] = 0
            self.half.admitted(request, blocks, extra)
            if not extra:
                return 0
            if self.rng.random() < 0.1:
                self.counts["given up"] += 1
                self.step() if self.rng.random() < 0.5 else None
                request.status.name = "FINISHED_ABORTED"
                self.half.finished(request, (held,))
                return None
            while request.request_id not in self.finished:
                self.step()
            self.finished.clear()
            if request.request_id not in self.failed:
                n = extra // BLOCK
                want = [self.bytes_of(h) for h in request.block_hashes[:n]]
                assert (self.device[held[:n]] == np.array(want, np.uint8)[:, None]).all()
                self.counts["restored"] += 1
                return extra
            self.failed.clear()
            self.counts["failed"] += 1
        raise AssertionError("a request was promised something three times in vain")

    def compute(self, request, held, restored):
        first = restored // BLOCK
        request.num_computed_tokens = restored
        for block, block_hash in zip(held[first:], request.block_hashes[first:], strict=True):
            self.device[block] = self.bytes_of(block_hash)
        self.step(**{request.request_id: request.num_tokens - restored})
        request.num_computed_tokens = request.num_tokens
        request.status.name = "FINISHED_STOPPED"
        self.half.finished(request, (held,))

    def step(self, **scheduled):
        state = SimpleNamespace(get_block_ids=self.tables.get, boundary_state_offloads={})
        plan = self.half.build_plan(
            SimpleNamespace(
                num_scheduled_tokens=scheduled,
                total_num_scheduled_tokens=sum(scheduled.values()),
                kv_connector_block_state=state,
            )
        )
        self.worker.begin(plan)
        self.worker.forward_launched()
        if not scheduled:
            self.worker.transfer.wait(0.002)
        finished, failed = self.worker.collect()
        self.finished |= finished
        self.failed |= failed
        report = self.worker.report()
        if report is not None:
            self.half.settle([report])

    # -- what else happens -------------------------------------------------------

    def disturb(self):
        rng = self.rng
        if rng.random() < 0.1:
            files = [file for file in self.files() if file.endswith(".kvt")]
            for path in rng.sample(files, min(2, len(files))):
                with contextlib.suppress(FileNotFoundError):
                    os.truncate(path, 100) if rng.random() < 0.5 else os.unlink(path)
                    self.counts["damaged"] += 1
        if self.n % RESET_EVERY == 0:
            self.half.reset()
            self.counts["resets"] += 1

    def files(self):
        return [
            f"{folder}/{name}"
            for folder, _, names in os.walk(self.root)
            for name in names
            if "quarantine" not in folder
        ]

    def footprint(self):
        """Python's memory blocks, resident MiB, descriptors, threads: all at rest."""
        names = {"kvtier-close"}
        end_s = time.monotonic() + 20
        while names & {thread.name for thread in threading.enumerate()}:
            assert time.monotonic() < end_s, "a tier of before a reset never closes"
            time.sleep(0.01)
        for counts in (self.half.take_counts(), self.worker.take_counts()):
            self.counts.update({name: n for name, n in counts.items() if "evicted" in name})
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[1])
        mib = pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
        descriptors = len(os.listdir("/proc/self/fd"))
        return sys.getallocatedblocks(), mib, descriptors, threading.active_count()

    def close(self):
        self.half.shutdown()
        self.worker.shutdown()


def flat(root, cycles):
    seed = int(os.environ.get("KVTIER_SEED", random.SystemRandom().randrange(1 << 30)))
    run = Cycles(root, seed)
    try:
        while run.n < WARM_UP:
            run.cycle()
        run.footprint()  # its own imports and caches
        before = run.footprint()
        while run.n < WARM_UP + cycles:
            run.cycle()
        after = run.footprint()
        check_catalog(run.half.catalog)
        stored = sum(os.path.getsize(path) for path in run.files() if path.endswith(".kvt"))
    finally:
        run.close()
    print(run.counts, before, after)
    objects, mib, descriptors, threads = (b - a for a, b in zip(before, after, strict=True))
    assert descriptors <= 0
    assert threads <= 0
    assert stored <= CAPACITY
    # What is kept by design is bounded, and full after the warm-up, give or take a state.
    assert objects < 8000
    assert mib < 8
    assert min(run.counts[name] for name in ("restored", "given up", "failed", "resets")) > 0
    return run


def test_thousands_of_cycles_leave_memory_and_descriptors_flat(tmp_path):
    """Not one object, byte or descriptor is kept of a request that is over."""
    flat(tmp_path, SUITE)


@pytest.mark.torture
def test_tens_of_thousands_of_cycles(tmp_path):
    """The same, for long: the bound does not grow with the number of cycles."""
    flat(tmp_path, LONG)
