"""A small model of vLLM's scheduler and block pool: what a connector sees of them.

Only the rules that the connector's contract names: prefix cache of the device by
block hash, one pool for all groups, window blocks given back, chunked prefill,
preemption, loads that hold a request, abort in every state, streaming sessions,
recurrent states that are handed over at block boundaries, and with a matching unit
below the block inside them too (`partial`), where hits are copied before they are written.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace

from kvtier.connector.geometry import GroupKind

from .partial import PartialTails

MASK = (1 << 64) - 1


class Status(Enum):
    WAITING = 0
    WAITING_FOR_REMOTE_KVS = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED_STOPPED = 4
    FINISHED_ABORTED = 5


class Block:
    def __init__(self, block_id):
        self.block_id, self.ref_cnt, self.block_hash = block_id, 0, None
        self.is_null = block_id == 0
        self.tails = []  # names under which a part of it is cached


class Pool:
    """Blocks of all groups; a freed block keeps its content until it is needed."""

    def __init__(self, n):
        self.blocks = [Block(i) for i in range(n)]
        self.blocks[0].ref_cnt = 1
        self.free = OrderedDict((b.block_id, b) for b in self.blocks[1:])
        self.cached = {}
        self.tails = {}  # (group, hash inside a block) -> block with all up to there

    def touch(self, blocks):
        for block in blocks:
            assert not block.is_null
            if block.ref_cnt == 0:
                del self.free[block.block_id]
            block.ref_cnt += 1

    def free_blocks(self, blocks):
        for block in blocks:
            assert block.ref_cnt > 0, f"block {block.block_id} freed twice"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self.free[block.block_id] = block

    def take(self, n):
        assert n <= len(self.free)
        out = []
        for _ in range(n):
            _, block = self.free.popitem(last=False)
            self.forget(block)
            block.ref_cnt = 1
            out.append(block)
        return out

    def forget(self, block):
        if block.block_hash is not None and self.cached.get(block.block_hash) is block:
            del self.cached[block.block_hash]
        block.block_hash = None
        for name in block.tails:
            if self.tails.get(name) is block:
                del self.tails[name]
        block.tails = []

    def cache(self, block, name):
        if block.block_hash is None:
            block.block_hash = name
            self.cached.setdefault(name, block)

    def cache_tail(self, block, name):
        if self.tails.setdefault(name, block) is block:
            block.tails.append(name)

    def forget_all(self):
        for block in self.blocks[1:]:
            self.forget(block)


@dataclass(eq=False)
class Request:
    request_id: str
    tokens: list[int]
    unit: int
    n_output: int
    turns: int = 0
    skip_reading_prefix_cache: bool = False
    kv_transfer_params: dict | None = None
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    status: Status = Status.WAITING
    table: list[list[Block]] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    chain: list[int] = field(default_factory=list)  # one number a token: its whole prefix
    failed: int = 0
    snapshot_at: int = 0  # where its state was last copied aside

    def __post_init__(self):
        self.num_prompt_tokens = len(self.tokens)
        self.update()

    @property
    def num_tokens(self):
        return len(self.tokens)

    def update(self):
        """Hash what is new."""
        del self.chain[self.num_tokens :]
        h = self.chain[-1] if self.chain else 7
        for token in self.tokens[len(self.chain) :]:
            h = (h * 6364136223846793005 + token * 1442695040888963407 + 11) & MASK
            self.chain.append(h)
        n = self.num_tokens // self.unit
        del self.block_hashes[n:]
        while len(self.block_hashes) < n:
            last = self.chain[(len(self.block_hashes) + 1) * self.unit - 1]
            self.block_hashes.append(hashlib.blake2b(last.to_bytes(8, "big")).digest()[:32])

    def extend(self, token):
        self.tokens.append(token)
        self.update()

    def next_turn(self, more):
        """A streaming session: the last sampled token goes, new input comes."""
        del self.tokens[self.num_computed_tokens :]
        self.update()
        self.tokens += more
        self.num_prompt_tokens = self.num_tokens
        self.update()
        self.turns -= 1


class Scheduler(PartialTails):
    """One engine; `half` is the subject's scheduler half."""

    def __init__(self, geometry, half, rng, budget):
        self.geometry, self.half, self.rng, self.budget = geometry, half, rng, budget
        self.pool = Pool(geometry.num_blocks)
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.received: set[str] = set()
        self.loading: dict[int, str] = {}  # device block -> request that it is loaded for
        self.fresh: list[Block] = []
        self.copies: list[tuple[Block, Block]] = []  # of this step, before its forward
        self.held: list[Block] = []  # until this step's plan is made
        self.half.bind_block_pool(self.pool)

    # -- requests ------------------------------------------------------------

    def add(self, request):
        assert request.request_id not in self.requests
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self.half.on_new_request(request)

    def abort(self, request):
        held = request.status is Status.WAITING_FOR_REMOTE_KVS
        ready = request.request_id in self.received
        request.status = Status.FINISHED_ABORTED
        self._leave(request)
        self.half.finished(request, self._ids(request))
        if held and not ready:
            return  # the blocks stay until the load has reported
        self.received.discard(request.request_id)
        self._free(request)
        del self.requests[request.request_id]

    def _leave(self, request):
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)

    def _finish(self, request):
        request.status = Status.FINISHED_STOPPED
        self._leave(request)
        self._offer_at_finish(request)
        self.half.finished(request, self._ids(request))
        self._free(request)
        del self.requests[request.request_id]

    def _ids(self, request):
        ids = []
        for group, row in zip(self.geometry.groups, request.table, strict=False):
            n = -(-request.num_computed_tokens // group.block_tokens)
            ids.append([b.block_id for b in row[:n]])
        return tuple(ids) or tuple([] for _ in self.geometry.groups)

    def _free(self, request):
        for row in request.table:
            for block in reversed(row):
                self.loading.pop(block.block_id, None)
                if not block.is_null:
                    self.pool.free_blocks([block])
        request.table = []

    # -- blocks --------------------------------------------------------------

    def _name(self, request, group, i):
        per = group.block_tokens // self.geometry.hash_block_tokens
        return (group.group_id, request.block_hashes[(i + 1) * per - 1])

    def _local_hit(self, request):
        """Longest boundary that every group's cached blocks serve, and those blocks."""
        step = self.geometry.scheduler_block_tokens
        if request.skip_reading_prefix_cache:
            return 0, None
        for tokens in range((request.num_tokens - 1) // step * step, 0, -step):
            rows = []
            for group in self.geometry.groups:
                end, first = tokens // group.block_tokens, group.first_needed_block(tokens)
                row = [self.pool.blocks[0]] * min(first, end)
                for i in range(first, end):
                    block = self.pool.cached.get(self._name(request, group, i))
                    if block is None:
                        break
                    row.append(block)
                if len(row) < end:
                    break
                rows.append(row)
            else:
                return tokens, rows
        return 0, None

    def _allocate(self, request, rows, computed, total, tails=None):
        """Extend the table to ``total`` tokens; False (and nothing changed) without room.

        With ``tails`` each group's first new block is a copy of a cached one.
        """
        tails = tails or {}
        reused = [b for row in rows or () for b in row if not b.is_null] + list(tails.values())
        table = [list(row) for row in (rows or request.table)] or [[] for _ in self.geometry.groups]
        need = []
        for group, row in zip(self.geometry.groups, table, strict=True):
            if group.group_id in tails:
                row.append(None)
            end, first = -(-total // group.block_tokens), group.first_needed_block(computed)
            nulls = max(0, min(first, end) - len(row))
            if group.kind is GroupKind.RECURRENT:  # one state, of the step's last token
                nulls = max(0, end - 1 - len(row))
            need.append((nulls, max(0, end - len(row) - nulls)))
        idle = len({b.block_id for b in reused if b.ref_cnt == 0})
        if len(tails) + sum(n for _, n in need) > len(self.pool.free) - idle:
            return False
        self.pool.touch(reused)
        self.held += tails.values()
        for group_id, source in tails.items():
            table[group_id][-1] = self._copy_of(source)
        for row, (nulls, n) in zip(table, need, strict=True):
            new = self.pool.take(n)
            self.fresh += new
            row.extend([self.pool.blocks[0]] * nulls + new)
        request.table = table
        return True

    def _drop_window(self, request):
        for group, row in zip(self.geometry.groups, request.table, strict=True):
            for i in range(min(len(row), group.first_needed_block(request.num_computed_tokens))):
                if not row[i].is_null:
                    self.pool.free_blocks([row[i]])
                    row[i] = self.pool.blocks[0]

    def _cache(self, request, tokens):
        for group, row in zip(self.geometry.groups, request.table, strict=True):
            whole, rest = divmod(min(tokens, request.num_tokens), group.block_tokens)
            if group.kind is GroupKind.RECURRENT:  # only the state that is exact
                span = range(whole - 1, whole) if whole and not rest else ()
            else:
                span = range(whole)
            for i in span:
                if not row[i].is_null:
                    self.pool.cache(row[i], self._name(request, group, i))

    # -- a step --------------------------------------------------------------

    def schedule(self):
        """Decide; returns what vLLM's `SchedulerOutput` tells a connector."""
        self.fresh, scheduled, budget, preempted = [], {}, self.budget, False
        self.copies = []
        for request in list(self.running):
            if request not in self.running or budget <= 0:
                continue
            n = min(request.num_tokens - request.num_computed_tokens, budget)
            n = self._to_boundary(request, request.num_computed_tokens, n)
            total = request.num_computed_tokens + n
            self._drop_window(request)
            while not self._allocate(request, None, request.num_computed_tokens, total):
                if self.half.frees_soon():
                    n = 0
                    break
                victim = self.running[-1]
                budget += scheduled.pop(victim.request_id, 0)
                self.preempt(victim)
                preempted = True
                if victim is request:
                    n = 0
                    break
            if n:
                scheduled[request.request_id] = n
                budget -= n
                self._cache(request, total)
        for request in list(self.waiting) if not preempted else ():
            if budget <= 0:
                break
            n = self._admit(request, budget)
            if n is None:
                break
            if n:
                scheduled[request.request_id] = n
                budget -= n
        if not scheduled:
            self._break_deadlock()
        offers = self._hand_overs(scheduled)
        tables = {r: self._all_ids(self.requests[r]) for r in scheduled}
        return SimpleNamespace(
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=tables.get, boundary_state_offloads=offers
            ),
            copies=self.copies,
        )

    def _to_boundary(self, request, computed, n):
        """Cut a step that crosses boundaries of recurrent blocks to end at the last of them.

        Or at the prompt's last hash, if that is inside a block and hits may end there.
        """
        for group in self.geometry.groups:
            if group.kind is GroupKind.RECURRENT:
                end = (computed + n) // group.block_tokens * group.block_tokens
                n = end - computed if end > computed else n
        inside = self._tail_of(request)
        return inside - computed if computed < inside < computed + n else n

    def _hand_overs(self, scheduled):
        """States that are exact at a boundary once this step's forward has run."""
        offers = {}
        for request_id, n in scheduled.items():
            request = self.requests[request_id]
            end = request.num_computed_tokens + n
            for group, row in zip(self.geometry.groups, request.table, strict=True):
                at_boundary = end % group.block_tokens == 0
                if group.kind is GroupKind.RECURRENT and at_boundary and self.rng.random() < 0.8:
                    block = row[end // group.block_tokens - 1].block_id
                    offers.setdefault(request_id, []).append((group.group_id, block, end))
            offers.setdefault(request_id, []).extend(self._snapshot(request))
        return {request_id: states for request_id, states in offers.items() if states}

    def _break_deadlock(self):
        """Nothing runs: of those that wait with blocks, the last gives them up (vLLM reserves)."""
        for request in self.waiting:
            held = request.status is Status.WAITING_FOR_REMOTE_KVS
            if held and request.request_id not in self.received:
                return  # its load will end
        for request in reversed(self.waiting[1:]):
            if any(request.table):
                self.received.discard(request.request_id)
                self.fail(request)
                return

    def _all_ids(self, request):
        return tuple([b.block_id for b in row] for row in request.table)

    def preempt(self, request):
        self.running.remove(request)
        self._free(request)
        request.num_computed_tokens = 0
        request.status = Status.PREEMPTED
        self.waiting.insert(0, request)

    def _admit(self, request, budget):
        """Return tokens scheduled, 0 when it is put aside, None when there is no room."""
        if request.status is Status.WAITING_FOR_REMOTE_KVS:
            if request.request_id not in self.received:
                return 0
            self.received.remove(request.request_id)
            self._promote(request)
        rows, external, local, tails = None, 0, 0, {}
        if request.num_computed_tokens == 0:
            local, rows, tails, floor, floor_rows = self._longest_local_hit(request)
            external, asynchronous = self.half.lookup(request, floor)
            if external is None:
                return 0
            if tails and external and floor + external > local:
                local, rows, tails = floor, floor_rows, {}
            elif tails and external:
                external = 0  # the device's own hit is as long
                asynchronous = False
            assert asynchronous == (external > 0)
            assert not (external and request.skip_reading_prefix_cache)
            assert local + external < request.num_tokens
            assert (local + external) % self.geometry.hit_alignment_tokens == 0
        computed = request.num_computed_tokens or local + external
        n = self._to_boundary(request, computed, min(request.num_tokens - computed, budget))
        total = computed if external else computed + n
        if not self._allocate(request, rows, computed, total, tails):
            return None
        blocks = SimpleNamespace(blocks=tuple(tuple(row) for row in request.table))
        request.num_computed_tokens = computed
        if external:
            request.status = Status.WAITING_FOR_REMOTE_KVS
            for row in request.table:
                for block in row:
                    if not block.is_null and block.block_hash is None:
                        self.loading[block.block_id] = request.request_id
            self.half.admitted(request, blocks, external)
            return 0
        self.half.admitted(request, blocks, 0)
        self.waiting.remove(request)
        self.running.append(request)
        request.status = Status.RUNNING
        self._cache(request, total)
        return n

    def _promote(self, request):
        request.status = Status.WAITING
        for row in request.table:
            for block in row:
                self.loading.pop(block.block_id, None)
        self._cache(request, request.num_computed_tokens)

    def advance(self, output):
        self.pool.free_blocks(self.held)
        self.held = []
        for request_id, n in output.num_scheduled_tokens.items():
            self.requests[request_id].num_computed_tokens += n

    def results(self, failed, finished, reports):
        """VLLM's order: failures, then the connector's own results, then what has arrived."""
        for request_id in failed:
            request = self.requests[request_id]
            if request.status is Status.WAITING_FOR_REMOTE_KVS:
                self.fail(request)
        self.half.settle(reports)
        for request_id in finished:
            request = self.requests[request_id]
            if request.status is Status.FINISHED_ABORTED:
                self._free(request)
                del self.requests[request_id]
            elif request_id not in failed:
                assert request.status is Status.WAITING_FOR_REMOTE_KVS
                self.received.add(request_id)

    def fail(self, request):
        self._free(request)
        request.num_computed_tokens = 0
        request.failed += 1
        request.status = Status.WAITING

    def sample(self, output, next_token):
        for request_id in output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None or request.num_computed_tokens < request.num_tokens:
                continue
            request.extend(next_token())
            if request.num_tokens - request.num_prompt_tokens < request.n_output:
                continue
            if request.turns:
                self.running.remove(request)
                request.next_turn([next_token() for _ in range(self.rng.randrange(1, 40))])
                request.status = Status.WAITING
                self.waiting.append(request)
            else:
                self._finish(request)
