"""The tiers of a replay: kvtier's own catalog and disk index, with simulated time and no bytes.

RAM pages, ages and eviction are `storage.catalog.Catalog`, the disk's order of eviction is
`storage.disk_index.Index`; both are driven in the order in which the scheduler half and the disk
tier drive them. What is modelled is only what would move bytes: how long loads and writes take,
and the bounded queue of writes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from ..connector.save_planner import MAX_SEEN
from ..connector.write_back import WRITE_BACK_CHUNKS, WRITE_BACK_SHARE
from ..storage.catalog import Catalog
from ..storage.disk_index import Index
from ..storage.disk_layout import TOKEN_AGE_S
from ..storage.entry import Entry, RamState
from ..storage.record import DISK_HEADER_BYTES

DISK = "disk"
STEP_S = 0.02  # of the engine while it decodes
STEP_TOKENS = 8192  # of the engine while it computes prompts


@dataclass(frozen=True, slots=True)
class Policy:
    """How a store decides.

    Attributes:
        name: for people.
        doc: one line.
        lru: a use makes a chunk young; else only being brought in does (first in, first out).
        write: to disk with every save ("through"), or only before RAM evicts ("back").
        min_uses: how often a chunk must have been met before it is saved.
        bound: not a policy but the clairvoyant optimum.
    """

    name: str
    doc: str
    lru: bool = True
    write: str = "through"
    min_uses: int = 1
    bound: bool = False


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("lru", "kvtier's own: least recently used, a prefix from its end, write-through"),
        Policy("fifo", "first in, first out: uses do not count", lru=False),
        Policy("back", "lru, but written to disk only before RAM evicts", write="back"),
        Policy("twice", "lru, but saved only when met for the second time", min_uses=2),
        Policy("optimum", "the clairvoyant optimum: an upper bound for all", bound=True),
    )
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the tiers, in bytes, all ranks together."""

    ram_bytes: int
    disk_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Speeds:
    """Simulated speeds.

    Attributes:
        ram_bytes_per_s: from RAM to the device.
        disk_read_bytes_per_s, disk_write_bytes_per_s: of the disk.
        latency_s: of every load, whatever its size.
        prefill_tokens_per_s: of the engine.
        queue_bytes: writes that may wait; more are dropped.
    """

    ram_bytes_per_s: float = 20e9
    disk_read_bytes_per_s: float = 5e9
    disk_write_bytes_per_s: float = 2e9
    latency_s: float = 0.005
    prefill_tokens_per_s: float = 8000.0
    queue_bytes: int = 1 << 30


@dataclass(slots=True)
class Moved:
    """What went where so far."""

    disk_written_bytes: int = 0
    saved_chunks: int = 0
    skipped_chunks: int = 0
    dropped_writes: int = 0
    disk_evicted_chunks: int = 0


class SimulatedTiers:
    """RAM and disk of one engine.

    Args:
        sizes: of the tiers.
        policy: what to do.
        page_bytes: of a RAM page.
        block_tokens: of a RAM page.
        speeds: of the disk's writes.
        merge: chunks that are one record here.
        staging_pages: room for the largest record, where there is no RAM tier.
    """

    def __init__(
        self,
        sizes: Sizes,
        policy: Policy,
        page_bytes: int,
        block_tokens: int,
        speeds: Speeds,
        merge: int = 1,
        staging_pages: int = 1024,
    ) -> None:
        tiers = (DISK,) if sizes.disk_bytes else ()
        self.catalog = Catalog(tiers, retain_in_ram=sizes.ram_bytes > 0)
        # Without a RAM tier the pages are staging: they come back once written.
        self.catalog.add_pages(sizes.ram_bytes // page_bytes or staging_pages)
        self.index = Index()
        self.moved = Moved()
        self._disk_bytes = sizes.disk_bytes
        self.policy = policy
        self._page_bytes = page_bytes
        self._block_tokens = block_tokens
        self._speeds = speeds
        self._seen: OrderedDict[bytes, int] = OrderedDict()
        self._backlog_bytes = 0.0
        self._drained_at_s = 0.0
        self._through = policy.write == "through" and bool(tiers)
        self._step_pages = 0
        self._write_back_chunks = max(1, WRITE_BACK_CHUNKS // merge)

    # -- loading -----------------------------------------------------------------

    def take(self, entries: Sequence[Entry], *, young: bool) -> list[Entry]:
        """Bring entries to the device; return those that came from disk.

        What RAM holds gives no room to what is promoted, as in a load job, which pins it.

        Args:
            entries: in token order.
            young: they have just become the youngest of all.
        """
        catalog = self.catalog
        ready = RamState.READY if catalog.retain_in_ram else None
        below = [entry for entry in entries if entry.ram is not ready]
        if not below:
            return below
        held = [entry for entry in entries if entry.ram is ready]
        if young and self._room_besides(held, below):
            held = []  # the youngest go last, and there is room without them: no need to pin
        for entry in held:
            catalog.pin(entry)
        filling = []
        for entry in below:
            if catalog.begin_promote(entry.key, entry.n_blocks) is not None:
                filling.append(entry)
            else:
                break  # no room for this one, none for the rest: they stream through staging
        for entry in filling:
            catalog.filled(entry, ok=True)
            catalog.unpin(entry)
        for entry in held:
            catalog.unpin(entry)
        return below

    def _room_besides(self, held: Sequence[Entry], below: Sequence[Entry]) -> bool:
        catalog = self.catalog
        room = round(catalog.room_without_loss() * catalog.n_pages)
        return room >= sum([entry.n_blocks for entry in (*held, *below)])

    def brought_in(self, entries: Sequence[Entry]) -> None:
        """Count entries as new in RAM (first in, first out); give them in token order."""
        age = self.catalog.age()
        for number, entry in enumerate(entries):
            entry.used = age - number

    def used_on_disk(self, keys: Sequence[bytes], now_s: float) -> None:
        """Tell the disk's index of a load, from the prefix's end to its start."""
        if self._disk_bytes:
            self.index.touch(keys, now_s)

    # -- saving ------------------------------------------------------------------

    def save(
        self, key: bytes, n_pages: int, span: tuple[int, int], used: int, now_s: float
    ) -> None:
        """Save a chunk that is nowhere yet; ``span`` in blocks, ``used`` its age."""
        if self.policy.min_uses > 1 and not self._seen_enough(key):
            self.moved.skipped_chunks += 1
            return
        entry = self.catalog.begin_save(key, n_pages, used)
        if entry is None:
            return
        entry.span = span
        self.moved.saved_chunks += 1
        self.catalog.filled(entry, ok=True)
        if self._through:
            self._write(entry, now_s)
        self.catalog.unpin(entry)
        self._prefill_step(n_pages, now_s)

    def _prefill_step(self, n_pages: int, now_s: float) -> None:
        """Let a step of the engine pass with every so many tokens that are saved."""
        self._step_pages += n_pages
        if self._step_pages * self._block_tokens >= STEP_TOKENS:
            self._step_pages = 0
            self._write_back(now_s)

    def decode(self, now_s: float, n_steps: int) -> None:
        """Let the engine decode; each step may write back a few chunks that only RAM holds."""
        until_s = now_s + n_steps * STEP_S
        while now_s <= until_s:
            n_bytes = self._write_back(now_s)
            if not n_bytes:
                return
            now_s += max(STEP_S, n_bytes / self._speeds.disk_write_bytes_per_s)

    def _write_back(self, now_s: float) -> int:
        """Write the oldest chunks that only RAM holds, if it is time; return their bytes."""
        catalog = self.catalog
        if not self._disk_bytes or catalog.room_without_loss() >= WRITE_BACK_SHARE:
            return 0
        chunks = catalog.oldest_only(self._write_back_chunks)
        for entry in chunks:
            catalog.pin(entry)
            self._write(entry, now_s)
            catalog.unpin(entry)
        return sum(entry.n_blocks for entry in chunks) * self._page_bytes

    def _seen_enough(self, key: bytes) -> bool:
        n = self._seen.pop(key, 0) + 1
        if n >= self.policy.min_uses:
            return True
        self._seen[key] = n
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        return False

    def _write(self, entry: Entry, now_s: float) -> None:
        """Write a chunk behind, unless too much waits already."""
        assert entry.span is not None
        n_bytes = entry.n_blocks * self._page_bytes
        gone_s = now_s - self._drained_at_s
        if gone_s > 0:
            drained = gone_s * self._speeds.disk_write_bytes_per_s
            self._backlog_bytes = max(0.0, self._backlog_bytes - drained)
            self._drained_at_s = now_s
        if self._backlog_bytes + n_bytes > self._speeds.queue_bytes:
            self.moved.dropped_writes += 1
            return
        file_bytes = n_bytes + DISK_HEADER_BYTES
        if not self._make_room(file_bytes):
            return
        self._backlog_bytes += n_bytes
        self.moved.disk_written_bytes += n_bytes
        used_at_s = now_s - entry.span[0] * self._block_tokens * TOKEN_AGE_S
        self.index.add(entry.key, file_bytes, used_at_s, fresh=True)
        self.catalog.tier_added(DISK, entry.key, 0, entry.n_blocks)

    def _make_room(self, file_bytes: int) -> bool:
        """Evict from the disk as `storage.disk_evict.Evictor.make_room` does."""
        index, capacity = self.index, self._disk_bytes
        if index.stored_bytes + file_bytes <= capacity:
            return True
        slack = min(capacity // 64, 8 * file_bytes)
        while index.stored_bytes + file_bytes + slack > capacity:
            oldest = index.oldest()
            if oldest is None:
                break
            index.discard(oldest[0])
            self.catalog.tier_removed(DISK, oldest[0], 0)
            self.moved.disk_evicted_chunks += 1
        index.changes()  # taken as the scheduler does, so that they do not pile up
        return index.stored_bytes + file_bytes <= capacity
