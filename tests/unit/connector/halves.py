"""A scheduler half with hand-made parts: geometry, block pool, requests, reports."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

from kvtier.connector.geometry import Geometry, GroupGeometry, GroupKind, Region
from kvtier.connector.plan import NamespaceInfo, RankReport
from kvtier.connector.scheduler import SchedulerHalf
from kvtier.connector.tracker import SchedulerOptions
from kvtier.connector.write_back import WritePolicy
from kvtier.storage.catalog import Catalog
from kvtier.storage.catalog_check import check_catalog
from kvtier.storage.jobs import (
    ChunkStatus,
    LoadDone,
    LoadRetired,
    SaveCopied,
    SaveRetired,
    TierNews,
)

BLOCK = 16
CHUNK = 64
OK = ChunkStatus.OK


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s

    def advance(self, seconds):
        self.now_s += seconds


class Block:
    def __init__(self, block_id):
        self.block_id, self.ref_cnt, self.block_hash = block_id, 0, None
        self.is_null = block_id == 0


class Pool:
    """vLLM's block pool as far as pins go."""

    def __init__(self, n):
        self.blocks = [Block(i) for i in range(n)]
        self.freed = []

    def touch(self, blocks):
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks):
        for block in blocks:
            assert block.ref_cnt > 0
            block.ref_cnt -= 1
            self.freed.append(block.block_id)

    @property
    def pinned(self):
        return sorted(b.block_id for b in self.blocks if b.ref_cnt)


def group(group_id=0, kind=GroupKind.FULL, block=BLOCK, window=None):
    region = Region("layer", 0, 4096, 4096)
    return GroupGeometry(group_id, kind, block, window, (region,))


def geometry_of(
    *groups, unit=None, align=None, chunk=CHUNK, num_blocks=1000, draft_drop=0, computed=1
):
    groups = groups or (group(),)
    sizes = [g.block_tokens for g in groups]
    unit = unit or min(sizes)
    return Geometry(
        groups,
        unit,
        align or max(sizes),
        max(sizes),
        chunk,
        num_blocks,
        "x",
        len(groups),
        draft_drop,
        computed,
    )


def request_of(name, n_tokens, n_computed=0, *, seed=0, unit=BLOCK, n_prompt=None, **more):
    """A request whose tokens are told by ``seed``; equal seeds share prefixes."""
    hashes = [bytes([seed, i // 256, i % 256]) * 8 for i in range(n_tokens // unit)]
    return SimpleNamespace(
        request_id=name,
        num_tokens=n_tokens,
        num_prompt_tokens=n_tokens if n_prompt is None else n_prompt,
        num_computed_tokens=n_computed,
        block_hashes=hashes,
        status=SimpleNamespace(name="RUNNING"),
        **more,
    )


class Half:
    """The scheduler half and everything around it."""

    def __init__(self, geometry=None, *, pages=100, tiers=("disk",), n_ranks=1, **options):
        self.clock = Clock()
        self.geometry = geometry or geometry_of()
        self.catalog = Catalog(tiers, n_ranks)
        options.setdefault("load_policy", "always")
        options.setdefault("write", WritePolicy(through=tiers))
        self.half = SchedulerHalf(
            self.geometry,
            self.catalog,
            lambda generation: NamespaceInfo(bytes(16), generation, {}),
            self.clock,
            n_ranks=n_ranks,
            options=SchedulerOptions(**options),
        )
        self.pool = Pool(self.geometry.num_blocks)
        self.half.bind_block_pool(self.pool)
        self.n_ranks, self.pages = n_ranks, pages
        self._blocks = itertools.count(1)
        self.tables = {}
        for rank in range(n_ranks):
            self.tell(*(TierNews(tier) for tier in tiers), rank=rank)

    def tell(self, *events, rank=0):
        self.half.settle([RankReport(rank, self.pages, tuple(events), rank)])

    def tell_all(self, *events):
        for rank in range(self.n_ranks):
            self.tell(*events, rank=rank)

    def on_tier(self, request, tokens, group_id=0, tier="disk"):
        """Let every rank hold the record that ends at ``tokens``."""
        key = self.key(request, tokens, group_id)
        for rank in range(self.n_ranks):
            self.catalog.tier_added(tier, key, rank)
        return key

    def key(self, request, tokens, group_id=0):
        unit = self.geometry.hash_block_tokens
        return request.block_hashes[tokens // unit - 1] + bytes((group_id,))

    def table(self, request, n_tokens):
        """Fresh device blocks for so many tokens, in every group."""
        rows = tuple(
            [next(self._blocks) for _ in range(-(-n_tokens // g.block_tokens))]
            for g in self.geometry.groups
        )
        self.tables[request.request_id] = rows
        return rows

    def kv_blocks(self, rows):
        blocks = tuple(tuple(self.pool.blocks[b] for b in row) for row in rows)
        return SimpleNamespace(blocks=blocks)

    def admit(self, request, tokens, local=0):
        """Grant a load of what was promised."""
        rows = self.table(request, local + tokens)
        self.half.admitted(request, self.kv_blocks(rows), tokens)

    def plan(self, offers=None, **scheduled):
        """One step in which these requests compute so many tokens."""
        state = SimpleNamespace(get_block_ids=self.tables.get, boundary_state_offloads=offers or {})
        return self.half.build_plan(
            SimpleNamespace(
                num_scheduled_tokens=scheduled,
                total_num_scheduled_tokens=sum(scheduled.values()),
                kv_connector_block_state=state,
            )
        )

    def step(self, **scheduled):
        """One step, from its plan to its end."""
        plan = self.plan(**scheduled)
        self.half.take_counts()
        return plan

    def save_ends(self, job, *, ok=True, written=("disk",)):
        status = OK if ok else ChunkStatus.COPY_FAILED
        pairs = tuple((i, tier) for i in range(len(job.chunks)) for tier in written)
        self.tell_all(SaveCopied(job.job_id, bytes([status] * len(job.chunks))))
        self.tell_all(SaveRetired(job.job_id, pairs if ok else ()))

    def load_ends(self, job, *statuses):
        statuses = bytes(statuses or [OK] * len(job.chunks))
        ok = all(s == OK for s in statuses)
        self.tell_all(LoadDone(job.job_id, job.request_id, statuses, ok))
        self.tell_all(LoadRetired(job.job_id, bytes([s == OK for s in statuses])))

    def at_rest(self):
        """Whether nothing is held any more."""
        check_catalog(self.catalog)
        return not self.half.pending() and not self.pool.pinned and self.catalog.pinned_pages == 0
