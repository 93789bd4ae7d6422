"""The catalog against a plain model that shares no code with it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.storage.catalog import Catalog
from kvtier.storage.catalog_check import check_catalog

TIERS = ("disk", "redis")
KEYS = [bytes([n]) * 9 for n in range(5)]
FOLLOWED = 2  # the group of one of them


@dataclass
class Chunk:
    """What the model knows of a chunk: plain facts, no clever structures."""

    key: bytes
    n_pages: int = 0
    ram: str = "absent"
    pins: int = 0
    ranks: dict[str, set[int]] = field(default_factory=lambda: {t: set() for t in TIERS})
    forgotten: bool = False


class CatalogMachine(RuleBasedStateMachine):
    """Rules mirror what the scheduler half does; the model predicts every answer."""

    @initialize(n_pages=st.integers(1, 9), n_ranks=st.integers(1, 2), first=st.sampled_from([0, 3]))
    def start(self, n_pages, n_ranks, first):
        self.n_ranks, self.first, self.n_pages = n_ranks, first, n_pages
        self.catalog = Catalog(TIERS, n_ranks, first_page=first)
        self.catalog.follow(FOLLOWED)  # `check` compares it with all entries
        self.catalog.add_pages(first + n_pages)
        self.chunks: dict[bytes, Chunk] = {}
        self.order: list[Chunk] = []  # oldest use first
        self.jobs: list[tuple[Chunk, object, str]] = []  # (chunk, catalog's entry, kind)
        self.ghosts: list[Chunk] = []  # forgotten while a job used them
        self.offline: set[str] = set()

    # -- the model ---------------------------------------------------------

    def _full(self, chunk, tier):
        return len(chunk.ranks[tier]) == self.n_ranks

    def _held_below(self, chunk):
        return any(self._full(chunk, tier) for tier in TIERS)

    def _source(self, key):
        chunk = self.chunks.get(key)
        if chunk is None:
            return None
        if chunk.ram == "ready":
            return "ram"
        return next((t for t in TIERS if self._full(chunk, t) and t not in self.offline), None)

    def _used_pages(self):
        live = [c for c in self.chunks.values() if c.ram != "absent"]
        return sum(c.n_pages for c in live + self.ghosts)

    def _touch(self, chunk):
        if chunk in self.order:
            self.order.remove(chunk)
        self.order.append(chunk)

    def _chunk(self, key):
        if key not in self.chunks:
            self.chunks[key] = Chunk(key)
            self._touch(self.chunks[key])
        return self.chunks[key]

    def _tidy(self, chunk):
        nowhere = chunk.ram == "absent" and not any(chunk.ranks.values())
        if nowhere and self.chunks.get(chunk.key) is chunk:
            del self.chunks[chunk.key]
            self.order.remove(chunk)

    def _make_room(self, n_pages, may_lose):
        """Evict by the rule; False when there is no room, and then nothing is evicted."""
        can_go = [
            c
            for c in self.order
            if c.ram == "ready" and c.pins == 0 and (may_lose or self._held_below(c))
        ]
        free = self.n_pages - self._used_pages()
        if free + sum(c.n_pages for c in can_go) < n_pages:
            return False
        while free < n_pages:
            victim = can_go.pop(0)
            free += victim.n_pages
            victim.ram = "absent"
            self._tidy(victim)
        return True

    # -- rules -------------------------------------------------------------

    @rule(key=st.sampled_from(KEYS), n=st.integers(1, 3))
    def save(self, key, n):
        chunk = self.chunks.get(key)
        if chunk is not None and chunk.ram != "absent":
            return
        got = self.catalog.begin_save(key, n)
        fits = self._make_room(n, may_lose=True)
        assert (got is not None) == fits
        if fits:
            chunk = self._chunk(key)
            chunk.n_pages, chunk.ram, chunk.pins = n, "filling", 1
            self.jobs.append((chunk, got, "fill"))

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4), n=st.integers(1, 2))
    def store(self, keys, n):
        """Save and finish at once: the usual way, and what fills the RAM quickly."""
        for key in keys:
            before = len(self.jobs)
            self.save(key, n)
            if len(self.jobs) > before:
                self._end(before, ok=True)

    @rule(key=st.sampled_from(KEYS), n=st.integers(1, 3))
    def promote(self, key, n):
        got = self.catalog.begin_promote(key, n)
        chunk = self.chunks.get(key)
        fits = chunk is not None and chunk.ram == "absent" and self._make_room(n, may_lose=False)
        assert (got is not None) == fits
        if fits:
            chunk.n_pages, chunk.ram, chunk.pins = n, "filling", 1
            self.jobs.append((chunk, got, "fill"))

    @rule(key=st.sampled_from(KEYS))
    def load(self, key):
        chunk = self.chunks.get(key)
        if chunk is not None and chunk.ram == "ready":
            entry = self.catalog.get(key)
            self.catalog.pin(entry)
            chunk.pins += 1
            self.jobs.append((chunk, entry, "read"))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), ok=st.booleans())
    def end_job(self, data, ok):
        self._end(data.draw(st.integers(0, len(self.jobs) - 1)), ok)

    def _end(self, at, ok):
        chunk, entry, kind = self.jobs.pop(at)
        if kind == "fill":
            self.catalog.filled(entry, ok)
            if ok and not chunk.forgotten:
                chunk.ram = "ready"
        self.catalog.unpin(entry)
        chunk.pins -= 1
        if chunk.pins == 0:
            if chunk.forgotten:
                self.ghosts.remove(chunk)
            elif chunk.ram != "ready":
                chunk.ram = "absent"
                self._tidy(chunk)

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4))
    def touch(self, keys):
        self.catalog.touch(keys)
        for key in keys:
            if key in self.chunks:
                self._touch(self.chunks[key])

    @rule(key=st.sampled_from(KEYS), tier=st.sampled_from(TIERS), rank=st.integers(0, 1))
    def tier_added(self, key, tier, rank):
        rank %= self.n_ranks
        self.catalog.tier_added(tier, key, rank)
        self._chunk(key).ranks[tier].add(rank)

    @rule(
        key=st.sampled_from(KEYS),
        tier=st.sampled_from(TIERS),
        rank=st.sampled_from([None, 0, 1]),
    )
    def tier_removed(self, key, tier, rank):
        self.catalog.tier_removed(tier, key, rank)
        chunk = self.chunks.get(key)
        if chunk is not None:
            chunk.ranks[tier] -= {0, 1} if rank is None else {rank}
            self._tidy(chunk)

    @rule(tier=st.sampled_from(TIERS), off=st.booleans())
    def set_offline(self, tier, off):
        self.catalog.set_offline(tier, off)
        (self.offline.add if off else self.offline.discard)(tier)

    def _forget(self, key):
        chunk = self.chunks.pop(key, None)
        if chunk is None:
            return False
        self.order.remove(chunk)
        chunk.forgotten = True
        if chunk.pins:
            self.ghosts.append(chunk)
        return chunk.pins > 0

    @rule(key=st.sampled_from(KEYS))
    def drop(self, key):
        self.catalog.drop(key)
        self._forget(key)

    @rule(really=st.integers(0, 5))
    def clear(self, really):
        if really:
            return
        held = self.catalog.clear()
        assert held == sum(self._forget(key) for key in list(self.chunks))

    @rule(tier=st.sampled_from(TIERS), rank=st.integers(0, 1))
    def forget_tier(self, tier, rank):
        self.catalog.forget_tier(tier, rank)
        for chunk in list(self.chunks.values()):
            chunk.ranks[tier].discard(rank)
            self._tidy(chunk)

    @rule(n=st.integers(0, 2))
    def grow(self, n):
        self.n_pages += n
        self.catalog.add_pages(self.first + self.n_pages)

    # -- what must always be so ----------------------------------------------

    @invariant()
    def agrees(self):
        catalog = self.catalog
        check_catalog(catalog)
        assert {k: catalog.source(k) for k in KEYS} == {k: self._source(k) for k in KEYS}
        assert len(catalog) == len(self.chunks)
        assert catalog.free_pages == self.n_pages - self._used_pages()
        pinned = [c for c in self.chunks.values() if c.pins] + self.ghosts
        assert catalog.pinned_pages == sum(c.n_pages for c in pinned)
        assert catalog.resident() == {
            "ram": sum(c.ram == "ready" for c in self.chunks.values()),
            **{t: sum(self._full(c, t) for c in self.chunks.values()) for t in TIERS},
        }
        run = 0
        while run < len(KEYS) and self._source(KEYS[run]) is not None:
            run += 1
        assert catalog.run_length(KEYS) == run
        lonely = [
            c.key
            for c in self.order
            if c.ram == "ready" and c.pins == 0 and not self._held_below(c)
        ]
        assert [e.key for e in catalog.oldest_only(3)] == lonely[:3]
        in_use = [p for _, entry, _ in self.jobs for p in entry.pages.tolist()]
        entries = {id(entry): entry for _, entry, _ in self.jobs}
        assert len(set(in_use)) == sum(len(e.pages) for e in entries.values())


@pytest.mark.filterwarnings("ignore::hypothesis.errors.NonInteractiveExampleWarning")
class TestCatalog(CatalogMachine.TestCase):
    """The catalog does what the model says, whatever the order of events."""

    settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
