"""One simulated engine with its workers: random events in, invariants checked after each step."""

from __future__ import annotations

import logging
import pickle
import random
import time
from collections import Counter, deque
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import numpy as np

from kvtier.connector import tier_states as tier_states_module
from kvtier.connector import worker as worker_module
from kvtier.connector.geometry import Geometry, GroupGeometry, GroupKind
from kvtier.connector.plan import NamespaceInfo
from kvtier.connector.scheduler import SchedulerHalf
from kvtier.connector.tracker import SchedulerOptions
from kvtier.connector.worker import ArenaPlan, WorkerHalf
from kvtier.connector.write_back import WritePolicy
from kvtier.storage import device as device_module
from kvtier.storage import link as link_module
from kvtier.storage import transfer as transfer_module
from kvtier.storage.catalog import Catalog
from kvtier.storage.catalog_check import check_catalog
from kvtier.storage.jobs import LoadDone, LoadRetired, SaveCopied, SaveRetired
from kvtier.storage.link import LinkLimits
from kvtier.storage.ram import Arena
from kvtier.storage.staging import Staging
from kvtier.storage.transfer import TransferLimits

from .engine import Request, Scheduler, Status
from .parts import PAGE, Device, FakeTier, Mover, Store, content
from .tasks import Lane, Tasks, Thread

DEADLINE_S = 4.0
LONGEST = 320  # tokens that one request can grow to
LONGEST_PROMPT = 220


class SimStaging(Staging):
    """Waits by giving way, so that the wait is part of the interleaving."""

    sim: World

    def take(self, timeout_s, tier=""):
        until_s = self.sim.clock() + timeout_s
        self.sim.tasks.wait_until(lambda: self._may_take(tier) or self.sim.clock() >= until_s)
        return super().take(0.0, tier)


def random_geometry(rng):
    full = rng.choice([8, 16])
    groups = [(GroupKind.FULL, full, None)]
    choice = [
        GroupKind.SLIDING_WINDOW,
        GroupKind.CHUNKED_LOCAL,
        GroupKind.FULL,
        GroupKind.RECURRENT,
    ]
    if rng.random() < 0.25:
        groups.append((GroupKind.RECURRENT, rng.choice([8, 16]), None))
        choice = [GroupKind.FULL, GroupKind.RECURRENT]
    for _ in range(rng.randrange(3)):
        kind = rng.choice(choice)
        size = rng.choice([8, 16])
        windowed = kind in {GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL}
        groups.append((kind, size, rng.choice([16, 24, 33, 48, 64]) if windowed else None))
    rng.shuffle(groups)
    blocks = [size for _, size, _ in groups]
    kinds = {kind for kind, _, _ in groups}
    # vLLM matches inside blocks only where every group can, and one is recurrent.
    fine = kinds == {GroupKind.FULL, GroupKind.RECURRENT} and rng.random() < 0.7
    unit = rng.choice([2, 4]) if fine else min(blocks)
    return Geometry(
        groups=tuple(GroupGeometry(i, k, size, w, ()) for i, (k, size, w) in enumerate(groups)),
        hash_block_tokens=unit,
        hit_alignment_tokens=unit if fine else max(blocks),
        scheduler_block_tokens=max(blocks),
        chunk_tokens=rng.choice([32, 64]),
        num_blocks=10 + int(rng.uniform(1.05, 1.7) * sum(-(-LONGEST // size) for size in blocks)),
        layout="test",
        n_engine_groups=len(groups),
    )


class World:
    """A simulation; `run` plays it to the end."""

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.now_s = 100.0
        self.tasks = Tasks(rng)
        self.tasks.on_join = lambda: self.advance(0.2)
        self.geometry = random_geometry(rng)
        self.epoch = 0
        self.faults: dict[str, dict] = {}
        self.n_ranks = rng.choice([1, 1, 2])
        self.tier_names = rng.choice([(), ("disk",), ("disk",), ("disk", "redis")])
        self.stores = {name: Store() for name in self.tier_names}
        self.told: Counter = Counter()
        self.opened: dict[int, str] = {}
        self.documents = [
            [rng.randrange(1000) for _ in range(rng.randrange(60, 220))] for _ in range(3)
        ]
        self.n_requests = 0
        self.history: deque[Request] = deque(maxlen=6)
        self.stats: Counter = Counter()
        self.speed = rng.choice([3, 10, 30, 100])  # of the threads, beside the engine's steps
        self._stack = ExitStack()

    def clock(self):
        return self.now_s

    def advance(self, seconds):
        self.now_s += seconds

    # -- building ------------------------------------------------------------

    def _patch(self):
        lane = type("SimLane", (Lane,), {"tasks": self.tasks})
        thread = type("SimThread", (Thread,), {"tasks": self.tasks})
        staging = type("Staging", (SimStaging,), {"sim": self})
        real = transfer_module.threading
        shim = SimpleNamespace(Thread=thread, Condition=real.Condition, Lock=real.Lock)
        quick = SimpleNamespace(sleep=lambda _: self.tasks.pause(), monotonic=time.monotonic)
        for module, name, value in (
            (transfer_module, "Lane", lane),
            (link_module, "Lane", lane),
            (worker_module, "Staging", staging),
            (worker_module, "IDLE_WAIT_S", 0.0),
            (transfer_module, "threading", shim),
            (device_module, "time", quick),
            (tier_states_module, "INDEX_WAIT_S", 3.0),
        ):
            self._stack.enter_context(mock.patch.object(module, name, value))

    def _build(self):
        rng, geometry = self.rng, self.geometry
        has_ram = not self.tier_names or rng.random() < 0.85
        slot = max(geometry.chunk_blocks(g) for g in geometry.groups)
        self.n_slots = rng.randrange(1, 4)
        staging = slot * self.n_slots
        pages = slot * rng.choice([1, 3, 8, 20, 40]) + rng.randrange(slot)
        through = tuple(t for t in self.tier_names if rng.random() < 0.8)
        back = tuple(t for t in self.tier_names if t not in through)
        options = SchedulerOptions(
            promote=rng.random() < 0.8,
            load_policy=rng.choice(["always", "auto"]),
            deadline_s=DEADLINE_S,
            write=WritePolicy(through=through, back=back if has_ram else (), min_uses=1),
        )
        catalog = Catalog(self.tier_names, self.n_ranks, retain_in_ram=has_ram, first_page=staging)
        self.half = SchedulerHalf(
            geometry, catalog, self._namespace, self.clock, n_ranks=self.n_ranks, options=options
        )
        self.engine = Scheduler(geometry, self.half, rng, budget=rng.choice([48, 128, 400]))
        plan = ArenaPlan(PAGE, staging, pages, slot)
        row = max(g.block_tokens for g in geometry.groups)
        limits = TransferLimits(
            hang_s=6.0,
            links={
                name: LinkLimits(
                    load_threads=rng.randrange(1, 4),
                    save_threads=rng.randrange(1, 3),
                    save_queue_bytes=rng.choice([2 * PAGE, 40 * PAGE, 1 << 30]),
                    hang_s=3.0,
                    max_stuck_threads=2,
                )
                for name in self.tier_names
            },
        )
        self.devices, self.workers = [], []
        for rank in range(self.n_ranks):
            arena = Arena(PAGE, plan.n_pages, prefault=False)
            arena.start(background=False)
            device = Device(self, rank, geometry.num_blocks, row)
            mover = Mover(self, device, arena)
            self.devices.append(device)
            self.workers.append(
                WorkerHalf(
                    rank,
                    arena,
                    plan,
                    {g.group_id: PAGE for g in geometry.groups},
                    mover,
                    lambda info, rank=rank: self._open(info, rank),
                    self.clock,
                    limits,
                    flush_s=0.0,
                )
            )

    def _namespace(self, generation):
        return NamespaceInfo(generation.to_bytes(16, "big"), generation, {})

    def _open(self, info, rank):
        if self.rng.random() < self.faults.get("open", {}).get("down", 0.0):
            raise OSError("cannot open")
        return [
            FakeTier(self, name, self.stores[name], info.digest, rank) for name in self.tier_names
        ]

    # -- events --------------------------------------------------------------

    def _arrive(self):
        rng = self.rng
        if self.history and rng.random() < 0.5:  # a session's next turn, or the same once more
            tokens = list(rng.choice(self.history).tokens)
            unit = self.geometry.scheduler_block_tokens
            if rng.random() < 0.3:
                tokens = tokens[: max(unit, len(tokens) // unit * unit)]
        else:
            base = rng.choice(self.documents)
            tokens = base[: rng.randrange(1, len(base) + 1)] if rng.random() < 0.3 else list(base)
        if rng.random() < 0.8:
            tokens += [rng.randrange(1000) for _ in range(rng.randrange(1, 40))]
        used = [r.request_id for r in self.engine.requests.values()]
        name = f"r{rng.randrange(6)}" if rng.random() < 0.2 else f"n{self.n_requests}"
        if name in used:
            return
        self.n_requests += 1
        request = Request(
            name,
            tokens[:LONGEST_PROMPT],
            self.geometry.hash_block_tokens,
            n_output=rng.randrange(1, 16),
            turns=rng.choice([0, 0, 0, 1]),
            skip_reading_prefix_cache=rng.random() < 0.05,
            kv_transfer_params={"kvtier": {"store": False}} if rng.random() < 0.05 else None,
        )
        self.engine.add(request)
        self.history.append(request)

    def _reset(self):
        """Weights change: everything running is preempted, everything cached is void."""
        engine = self.engine
        for request in list(reversed(engine.running)):
            engine.preempt(request)
        for request in list(engine.waiting):
            if request.request_id in engine.received:
                engine.received.discard(request.request_id)
                engine.fail(request)
            elif request.num_computed_tokens and request.status is Status.WAITING:
                engine._free(request)
                request.num_computed_tokens = 0
        engine.pool.forget_all()
        self.epoch += 1
        self.half.reset()
        self.stats["resets"] += 1

    def _weather(self):
        """Change what is broken."""
        rng = self.rng
        for name in self.tier_names:
            self.faults[name] = {}
            if rng.random() < 0.6:
                fault = rng.choice(["hang", "down", "damage", "refuse", "bug"])
                self.faults[name] = {fault: rng.choice([0.1, 0.5, 1.0])}
        self.faults["open"] = {"down": rng.choice([0.0, 0.0, 0.5])}
        for worker in self.workers:
            worker._mover.fail_rate = rng.choice([0.0, 0.0, 0.0, 0.2])

    def _calm(self):
        self.faults = {}
        for worker in self.workers:
            worker._mover.fail_rate = 0.0

    def _random_event(self):
        rng, engine = self.rng, self.engine
        if rng.random() < 0.25 and len(engine.requests) < 7:
            for _ in range(rng.randrange(1, 4)):
                self._arrive()
        if rng.random() < 0.06 and engine.requests:
            living = [
                r for r in engine.requests.values() if r.status is not Status.FINISHED_ABORTED
            ]
            if living:
                engine.abort(rng.choice(living))
        if rng.random() < (0.04 if engine.loading else 0.003):
            self._reset()
        if rng.random() < 0.05:
            self._weather()
        if rng.random() < 0.05:
            for worker in self.workers:
                for link in worker.transfer.links.values():
                    if rng.random() < 0.7:
                        link.tier.lose(rng.randrange(1, 5))
        self.advance(rng.choice([0.001, 0.01, 0.1, 0.1, 0.5, 5.0]) if rng.random() < 0.3 else 0.02)

    # -- a step --------------------------------------------------------------

    def step(self):
        output = self.engine.schedule()
        for device in self.devices:
            device.poison(self.engine.fresh)
            self._copy_blocks(device, output.copies)
        plan = self.half.build_plan(output)
        for job in plan.saves:
            self._note_opened(job.job_id, "save")
        now = {job.job_id for job in plan.saves}
        self.reading = {
            block
            for job_id, save in self.half._ledger._saves.items()
            if save.copies_left and job_id not in now
            for block in save.device_blocks
        }
        for job in plan.loads:
            self._note_opened(job.job_id, "load")
        started = {
            rid: self.engine.requests[rid].num_computed_tokens
            for rid in output.num_scheduled_tokens
        }
        self.engine.advance(output)
        finished: Counter = Counter()
        failed: set[str] = set()
        reports = []
        for worker, device in zip(self.workers, self.devices, strict=True):
            self.tasks.run(self.rng.randrange(self.speed))
            worker.begin(pickle.loads(pickle.dumps(plan)))
            self.tasks.run(self.rng.randrange(self.speed))
            self._forward(device, started, output)
            if self.rng.random() < 0.8 and not plan.idle:
                worker.forward_launched()
            self.tasks.run(self.rng.randrange(self.speed))
            done, bad = worker.collect()
            self._collected(worker.rank, done, bad)
            report = worker.report()
            if report is not None:
                self._note_events(report)
                reports.append(report)
            finished.update(done)
            failed |= bad
        everywhere, broken = self._aggregate(finished, failed)
        self.rng.shuffle(reports)
        self._verify_loaded(everywhere - broken)
        self.engine.results(broken, everywhere, reports)
        self.engine.sample(output, lambda: self.rng.randrange(1000))
        self.check()

    def _copy_blocks(self, device, copies):
        """Copy before anything is written; no load may be on its way into either block."""
        for source, copy in copies:
            for block in (source, copy):
                assert block.block_id not in self.engine.loading, "a copy meets a load"
            device.memory[copy.block_id] = device.memory[source.block_id]
            self.stats["copied_blocks"] += 1

    _arrived: Counter
    _broken: set

    def _aggregate(self, finished, failed):
        """Like vLLM's aggregator: an id counts once every rank has told it."""
        self._arrived.update(finished)
        self._broken |= failed
        everywhere = {r for r, n in self._arrived.items() if n == self.n_ranks}
        for request_id in everywhere:
            del self._arrived[request_id]
        broken = self._broken & everywhere
        self._broken -= everywhere
        return everywhere, broken

    def _collected(self, rank, done, bad):
        assert bad <= done
        for request_id in done:
            assert request_id in self.engine.requests, f"{request_id} told, but nobody waits"

    def _note_opened(self, job_id, kind):
        assert job_id not in self.opened
        self.opened[job_id] = kind

    def _note_events(self, report):
        kinds = {SaveCopied: "copied", SaveRetired: "end", LoadDone: "done", LoadRetired: "end"}
        for event in report.events:
            kind = kinds.get(type(event))
            if kind is not None:
                self.told[event.job_id, report.rank, kind] += 1
                assert self.told[event.job_id, report.rank, kind] == 1, f"{event} told twice"
            if isinstance(event, LoadDone):
                self.stats["loads_ok" if event.ok else "loads_failed"] += 1

    def _forward(self, device, started, output):
        """Write the step's KV, then read all that attention reads, and compare."""
        for request_id, n in output.num_scheduled_tokens.items():
            request, begin = self.engine.requests[request_id], started[request_id]
            self._go_on(device, request, begin, begin + n)
            at = np.arange(begin, begin + n)
            chain = np.array(request.chain[begin : begin + n], np.uint64)
            for group, row in zip(self.geometry.groups, request.table, strict=True):
                size = group.block_tokens
                if group.kind is GroupKind.RECURRENT:
                    continue
                assert all(b.ref_cnt > 0 for b in row[begin // size : (begin + n - 1) // size + 1])
                ids = np.array([b.block_id for b in row])[at // size]
                assert ids.all(), "a forward writes into the null block"
                kv = content(chain, group.group_id, device.rank, self.epoch)
                device.memory[ids, at % size] = kv
        for request_id in output.num_scheduled_tokens:
            request = self.engine.requests[request_id]
            self._verify(device, request, started[request_id], "a forward reads wrong bytes")

    def _state(self, device, request, group, tokens):
        chain = np.array(request.chain[tokens - 1 : tokens], np.uint64)
        return content(chain, group.group_id, device.rank, self.epoch)[0]

    def _go_on(self, device, request, begin, end):
        """Carry recurrent states on, from where the step begins to where it ends."""
        for group, row in zip(self.geometry.groups, request.table, strict=True):
            if group.kind is GroupKind.RECURRENT:
                self._verify_state(device, request, group, begin, "a step goes on from wrong state")
                block = row[(end - 1) // group.block_tokens]
                assert not block.is_null
                assert block.block_id not in self.reading, "a state is overwritten while it is read"
                device.memory[block.block_id] = self._state(device, request, group, end)

    def _verify_state(self, device, request, group, tokens, what):
        if not tokens:
            return
        row = request.table[self.geometry.groups.index(group)]
        block = row[(tokens - 1) // group.block_tokens]
        assert not block.is_null, "a needed state is gone"
        there = device.memory[block.block_id, : group.block_tokens]
        assert (there == self._state(device, request, group, tokens)).all(), (
            f"{what}: {request.request_id} {group} at {tokens}"
        )

    def _verify(self, device, request, tokens, what):
        """Compare all that a hit of ``tokens`` needs with what it must be."""
        for group, row in zip(self.geometry.groups, request.table, strict=True):
            size, first = group.block_tokens, group.first_needed_block(tokens)
            if group.kind is GroupKind.RECURRENT:
                if request.status is Status.WAITING_FOR_REMOTE_KVS:
                    self._verify_state(device, request, group, tokens, what)
                continue
            ids = [b.block_id for b in row[first : -(-tokens // size)]]
            assert 0 not in ids, "a needed block is gone"
            chain = np.array(request.chain[first * size : tokens], np.uint64)
            right = content(chain, group.group_id, device.rank, self.epoch)
            there = device.memory[ids, :size].ravel()[: len(right)]
            wrong = np.flatnonzero(there != right) + first * size
            assert not len(wrong), f"{what}: {request.request_id} {group}, tokens {wrong.tolist()}"

    def _verify_loaded(self, request_ids):
        for request_id in sorted(request_ids):
            request = self.engine.requests[request_id]
            if request.status is Status.WAITING_FOR_REMOTE_KVS:
                self.stats["restored"] += 1
                inside = request.num_computed_tokens % self.geometry.scheduler_block_tokens
                self.stats["restored_inside"] += inside > 0
                for device in self.devices:
                    tokens = request.num_computed_tokens
                    self._verify(device, request, tokens, "a load brought wrong bytes")

    # -- invariants ------------------------------------------------------------

    def check(self):
        catalog, engine = self.half.catalog, self.engine
        check_catalog(catalog)
        held: Counter = Counter()
        for request in engine.requests.values():
            for row in request.table:
                held.update(b.block_id for b in row if not b.is_null)
        ledger = self.half._ledger
        for save in ledger._saves.values():
            if save.copies_left:
                held.update(save.device_blocks)
        for block in engine.pool.blocks[1:]:
            assert block.ref_cnt == held[block.block_id], f"block {block.block_id} leaks a pin"
            assert (block.ref_cnt == 0) == (block.block_id in engine.pool.free)
        assert ledger.pinned_blocks == sum(
            len(s.device_blocks) for s in ledger._saves.values() if s.copies_left
        )

    # -- the whole -------------------------------------------------------------

    def run(self, n_steps=90):
        self._arrived, self._broken = Counter(), set()
        logging.disable(logging.CRITICAL)
        try:
            with self._stack:
                self._patch()
                self._build()
                for _ in range(n_steps):
                    self._random_event()
                    self.step()
                if self.rng.random() < 0.25:
                    self._die()
                else:
                    self._settle()
                    self._finish()
        finally:
            logging.disable(logging.NOTSET)
        self.stats.update(self.half.counts.take())
        return self.stats

    def _settle(self):
        """Faults end, nothing new comes: everything must end by itself."""
        self._calm()
        for _ in range(1500):
            self.advance(0.05)
            self.step()
            self.tasks.run(3)
            if not (self.engine.requests or self.half.pending() or self.half.outstanding):
                return
        stuck = {r.request_id: r.status.name for r in self.engine.requests.values()}
        raise AssertionError(f"never ends: {stuck}, pending {self.half.pending()}")

    def _finish(self):
        assert self.half.catalog.pinned_pages == 0
        assert self.half._ledger.pinned_blocks == 0
        assert not self.half._ledger.outstanding
        assert len(self.engine.pool.free) == self.geometry.num_blocks - 1
        assert not self.engine.loading
        assert not self.half._trackers
        for worker in self.workers:
            assert len(worker.transfer.staging._slots) == self.n_slots, "a staging slot is lost"
        for job_id, kind in self.opened.items():
            for rank in range(self.n_ranks):
                ends = ("copied", "end") if kind == "save" else ("done", "end")
                for end in ends:
                    assert self.told[job_id, rank, end] == 1, f"{kind} {job_id} never told {end}"
        self._shutdown()

    def _shutdown(self):
        for worker in self.workers:
            worker.shutdown()
            worker.shutdown()

    def _die(self):
        """Shut down in the middle of everything: every job reports, hung ones when they return."""
        for worker in self.workers:
            worker.forward_launched()
        self._shutdown()
        self._calm()
        for _ in range(100_000):
            if not self.tasks.step() and not self.tasks.running:
                break
            self.advance(0.01)
        else:
            raise AssertionError(f"threads never end: {[t.name for t in self.tasks.running]}")
        for worker in self.workers:
            for event in worker.transfer.take_events():
                kinds = {
                    SaveCopied: "copied",
                    SaveRetired: "end",
                    LoadDone: "done",
                    LoadRetired: "end",
                }
                kind = kinds.get(type(event))
                if kind is not None:
                    self.told[event.job_id, worker.rank, kind] += 1
        for job_id, kind in self.opened.items():
            for rank in range(self.n_ranks):
                for end in ("copied", "end") if kind == "save" else ("done", "end"):
                    n = self.told[job_id, rank, end]
                    assert n == 1, f"{kind} {job_id} told {end} {n} times at the end"
