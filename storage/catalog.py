"""What is where: metadata of chunks over the RAM tier and the tiers below it.

Owned by the scheduler half and used on its one thread: no I/O, no locks,
nothing that grows with the store except memory. Jobs hold `Entry` objects, so
that an entry dropped or cleared while a job runs stays valid for that job and
is forgotten when the job lets go.

Eviction from RAM is least recently used. Inside a prefix the head counts as
used after the tail (`Catalog.age`, `Catalog.touch`), so its tail goes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from .ages import Ages
from .entry import CatalogCounts, Entry, FreePages, PageIds, RamState
from .gone import Gone, Why

RAM = "ram"

_AGE_STEP = 1 << 32  # more than any prefix has tokens


class Catalog:
    """Chunk key to places, RAM page allocation and eviction.

    Args:
        tiers: names of the tiers below RAM, fastest first.
        n_holders: ranks (those with identical bytes are one) that must hold a record
            before it counts.
        retain_in_ram: False when RAM is only a staging area: pages go back as
            soon as the lower tiers have been written.
        first_page: pages below this one are not the catalog's.
    """

    def __init__(
        self,
        tiers: Sequence[str],
        n_holders: int = 1,
        *,
        retain_in_ram: bool = True,
        first_page: int = 0,
    ) -> None:
        self.tiers = tuple(tiers)
        self.n_holders = n_holders
        self.retain_in_ram = retain_in_ram
        self.counts = CatalogCounts()
        self.gone = Gone()
        self.version = 0  # changes whenever an answer of `source` may change
        self._all_ranks = (1 << n_holders) - 1
        self._entries: dict[bytes, Entry] = {}
        self._followed: dict[int, set[bytes]] = {}
        self._free = FreePages(first_page)
        # READY and unpinned; apart, because a load may only push out what a lower
        # tier still holds.
        self._spare = Ages[Entry]()
        self._only = Ages[Entry]()
        self._orphans: dict[Entry, None] = {}  # dropped, their pages still in use
        self._banned: set[bytes] = set()
        self._tick = 0
        self._on_tier = [0] * len(self.tiers)
        self._offline = [False] * len(self.tiers)
        self._ram_chunks = 0

    # -- size ------------------------------------------------------------

    def begin_at(self, first_page: int) -> bool:
        """Use no page below ``first_page``; False when pages are usable already."""
        return self._free.begin_at(first_page)

    def add_pages(self, end_page: int) -> None:
        """Make all pages below ``end_page`` usable (the arena has grown so far)."""
        self._free.grow(end_page)

    @property
    def n_pages(self) -> int:
        """Usable RAM pages."""
        return len(self._free.all_pages)

    @property
    def free_pages(self) -> int:
        """RAM pages that hold nothing."""
        return len(self._free)

    @property
    def pinned_pages(self) -> int:
        """RAM pages that a job uses now."""
        return self.n_pages - len(self._free) - self.held_pages

    @property
    def held_pages(self) -> int:
        """RAM pages of chunks that no job uses now."""
        return self._spare.pages + self._only.pages

    def resident(self) -> dict[str, int]:
        """Return the number of chunks on each tier, RAM included."""
        counts = dict(zip(self.tiers, self._on_tier, strict=True))
        return {RAM: self._ram_chunks, **counts}

    def __len__(self) -> int:
        return len(self._entries)

    # -- lookup ----------------------------------------------------------

    def get(self, key: bytes) -> Entry | None:
        """Return the entry of ``key``, wherever it is."""
        return self._entries.get(key)

    def source(self, key: bytes) -> str | None:
        """Return the fastest place that can serve ``key`` now, or None."""
        entry = self._entries.get(key)
        return None if entry is None else self.source_of(entry)

    def source_of(self, entry: Entry) -> str | None:
        """Return the fastest place that can serve ``entry`` now, or None."""
        if entry.ram is RamState.READY and self.retain_in_ram:
            return RAM
        if not entry.dead:
            for i, mask in enumerate(entry.masks):
                if mask == self._all_ranks and not self._offline[i]:
                    return self.tiers[i]
        return None

    def follow(self, group_id: int) -> AbstractSet[bytes]:
        """Return the prefix hashes at which a group has entries, as a set that stays current.

        For groups whose few entries are looked for among many prefix hashes.
        """
        found = self._followed.get(group_id)
        if found is None:
            found = {key[:-1] for key in self._entries if key[-1] == group_id}
            self._followed[group_id] = found
        return found

    def run_length(self, keys: Iterable[bytes]) -> int:
        """Return how many leading ``keys`` can be served."""
        n = 0
        entries, all_ranks = self._entries, self._all_ranks
        ready = RamState.READY if self.retain_in_ram else None
        online = [i for i, off in enumerate(self._offline) if not off]
        for key in keys:
            entry = entries.get(key)
            if entry is None:
                break
            if entry.ram is not ready:  # the loop is inlined: this is the lookup's cost
                masks = entry.masks
                for i in online:
                    if masks[i] == all_ranks:
                        break
                else:
                    break
            n += 1
        return n

    def age(self) -> int:
        """Return the age of a use now: younger than every one before.

        What ends at token n of one prefix counts as used at ``age - n``.
        """
        self._tick += _AGE_STEP
        return self._tick

    def touch(self, keys: Iterable[bytes]) -> None:
        """Mark chunks as just used; give a prefix from its end to its start."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None:
                self._tick += 1
                entry.used = self._tick
                entry.uses += 1

    def set_offline(self, tier: str, offline: bool) -> None:
        """Take a lower tier out of (or back into) lookups; what it holds stays known."""
        i = self.tiers.index(tier)
        if self._offline[i] != offline:
            self._offline[i] = offline
            self.version += 1

    def is_offline(self, tier: str) -> bool:
        """Whether a lower tier is out of lookups now."""
        return self._offline[self.tiers.index(tier)]

    # -- pages -----------------------------------------------------------

    def begin_save(self, key: bytes, n_blocks: int, used: int | None = None) -> Entry | None:
        """Reserve pages for a chunk that is not in RAM; the entry comes pinned.

        Args:
            key: of the chunk.
            n_blocks: pages that it takes.
            used: its age, see `age`; None: now.

        Returns None when no page can be had (everything is pinned); counted.
        """
        entry = self._reserve(key, n_blocks, may_lose=True)
        if entry is None:
            self.counts.no_page_chunks += 1
        elif used is not None:
            entry.used = used
        return entry

    def has_room(self, n_pages: int) -> bool:
        """Whether a save of so many pages would find room now."""
        room = len(self._free) + self._spare.pages + self._only.pages
        return bool(room >= n_pages)

    def begin_promote(self, key: bytes, n_blocks: int) -> Entry | None:
        """Reserve pages to load a chunk of a lower tier into; the entry comes pinned.

        Only free pages and chunks that a lower tier also holds give way.
        Returns None when there are none: the load streams through staging.
        """
        entry = self._entries.get(key)
        if entry is None or entry.ram is not RamState.ABSENT or not self.retain_in_ram:
            return None
        return self._reserve(key, n_blocks, may_lose=False)

    def _reserve(self, key: bytes, n_blocks: int, *, may_lose: bool) -> Entry | None:
        if n_blocks < 1:
            raise ValueError(f"a chunk has at least one block, not {n_blocks}")
        pages = self._take(n_blocks, may_lose=may_lose)
        if pages is None:
            return None
        entry = self._entries.get(key)
        if entry is None:
            entry = self._new_entry(key)
        assert entry.ram is RamState.ABSENT
        assert entry.pages is None
        entry.n_blocks = n_blocks
        entry.pages = pages
        entry.ram = RamState.FILLING
        entry.pins += 1
        return entry

    def _new_entry(self, key: bytes) -> Entry:
        entry = Entry(key, masks=[0] * len(self.tiers))
        self._tick += 1
        entry.used = self._tick
        self._entries[key] = entry
        self.gone.forget(key)
        followed = self._followed.get(key[-1])
        if followed is not None:
            followed.add(key[:-1])
        return entry

    def _unfollow(self, key: bytes) -> None:
        followed = self._followed.get(key[-1])
        if followed is not None:
            followed.discard(key[:-1])

    def _take(self, n_pages: int, *, may_lose: bool) -> PageIds | None:
        room = len(self._free) + self._spare.pages + (self._only.pages if may_lose else 0)
        if room < n_pages:
            return None
        while len(self._free) < n_pages:
            self._evict_one(may_lose=may_lose)
        return self._free.take(n_pages)

    def _evict_one(self, *, may_lose: bool) -> None:
        spare = self._spare.oldest()
        only = self._only.oldest() if may_lose else None
        if spare is None or (only is not None and only.used < spare.used):
            assert only is not None
            self.counts.ram_evicted_lost_chunks += 1
            victim = only
        else:
            victim = spare
        self.counts.ram_evicted_chunks += 1
        self._release(victim)

    def _release(self, entry: Entry) -> None:
        """Give an unpinned entry's pages back."""
        assert entry.pins == 0
        assert entry.pages is not None
        self._leave_lru(entry)
        if entry.ram is RamState.READY:
            self._ram_chunks -= 1
        self._free.give(entry.pages)
        self._orphans.pop(entry, None)
        entry.pages = None
        entry.ram = RamState.ABSENT
        self.version += 1
        self._forget_if_nowhere(entry)

    def _forget_if_nowhere(self, entry: Entry, why: Why | None = Why.EVICTED) -> None:
        if entry.pages is None and not any(entry.masks) and entry.pins == 0 and entry.writes == 0:
            if self._entries.get(entry.key) is entry:
                del self._entries[entry.key]
                self._unfollow(entry.key)
                if why is not None:
                    self.gone.note(entry.key, Why.DROPPED if entry.dropped else why)

    def room_without_loss(self) -> float:
        """Return the share of RAM that is free or also on a lower tier and unpinned."""
        return (len(self._free) + self._spare.pages) / max(1, self.n_pages)

    def held_below(self, entry: Entry) -> bool:
        """Whether a lower tier holds a chunk on every rank."""
        return any(mask == self._all_ranks for mask in entry.masks)

    def oldest_only(self, limit: int) -> list[Entry]:
        """Return up to ``limit`` unpinned chunks that only RAM holds, oldest first."""
        return self._only.oldest_many(limit)

    # -- pins ------------------------------------------------------------

    def pin(self, entry: Entry) -> None:
        """Keep the RAM pages of an entry in place."""
        assert entry.pages is not None
        if entry.pins == 0:
            self._leave_lru(entry)
        entry.pins += 1

    def unpin(self, entry: Entry) -> None:
        """Let go of one pin."""
        assert entry.pins > 0
        entry.pins -= 1
        if entry.pins:
            return
        if entry.pages is None:
            self._forget_if_nowhere(entry)
        elif entry.dead or entry.ram is not RamState.READY or not self.retain_in_ram:
            self._release(entry)
        else:
            self._join_lru(entry)

    def filled(self, entry: Entry, ok: bool) -> None:
        """Record that a FILLING entry's pages hold its bytes now (or never will)."""
        assert entry.pins > 0
        assert entry.ram is RamState.FILLING
        if ok and not entry.dead:
            entry.ram = RamState.READY
            self._ram_chunks += 1
            self.version += 1

    def _join_lru(self, entry: Entry) -> None:
        (self._spare if self.held_below(entry) else self._only).add(entry)

    def _leave_lru(self, entry: Entry) -> bool:
        return self._spare.discard(entry) or self._only.discard(entry)

    # -- lower tiers -----------------------------------------------------

    def tier_added(self, tier: str, key: bytes, rank: int, n_blocks: int = 0) -> None:
        """Rank ``rank`` holds a record of ``key`` on ``tier``; nothing happens for a banned one."""
        if key in self._banned:
            return
        i = self.tiers.index(tier)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._new_entry(key)
        if n_blocks and not entry.n_blocks:
            entry.n_blocks = n_blocks
        self._set_mask(entry, i, entry.masks[i] | (1 << rank))

    def tier_removed(
        self, tier: str, key: bytes, rank: int | None = None, why: Why | None = Why.EVICTED
    ) -> None:
        """Rank ``rank`` (None: every rank) no longer serves ``key`` from ``tier``."""
        i = self.tiers.index(tier)
        entry = self._entries.get(key)
        if entry is not None:
            self._set_mask(entry, i, 0 if rank is None else entry.masks[i] & ~(1 << rank))
            self._forget_if_nowhere(entry, why)

    def forget_tier(self, tier: str, rank: int) -> None:
        """Rank ``rank`` starts anew on ``tier``: what was known of it is void. Walks everything."""
        for key in list(self._entries):
            self.tier_removed(tier, key, rank, None)  # it may be found there again

    def _set_mask(self, entry: Entry, i: int, mask: int) -> None:
        before, entry.masks[i] = entry.masks[i], mask
        if (before == self._all_ranks) == (mask == self._all_ranks):
            return
        self._on_tier[i] += 1 if mask == self._all_ranks else -1
        self.version += 1
        if self._leave_lru(entry):
            self._join_lru(entry)  # the other one, at its age

    def drop(self, key: bytes) -> None:
        """Forget a chunk everywhere; running jobs keep their pages until they end."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self._unfollow(key)
        for i in range(len(self.tiers)):
            self._set_mask(entry, i, 0)
        if entry.ram is RamState.READY and entry.pins:
            self._ram_chunks -= 1
            entry.ram = RamState.FILLING
        entry.dead = True
        self.version += 1
        if entry.pages is not None:
            self._orphans[entry] = None
            if entry.pins == 0:
                self._release(entry)

    def ban(self, key: bytes, banned: bool) -> None:
        """Let no record below RAM count for ``key``, whoever tells of one; or let it again."""
        (self._banned.add if banned else self._banned.discard)(key)

    def clear(self) -> int:
        """Forget everything; return how many chunks running jobs still hold."""
        held = 0
        for key in list(self._entries):
            entry = self._entries[key]
            held += entry.pins > 0
            self.drop(key)
        self._banned.clear()
        self.gone.clear()
        return held
