"""The rest of the storage half in a storage soak: catalog, arena, transfer and device copies.

One thread plays the scheduler half. It saves chunks out of device blocks and brings them back,
gives loads up, drops chunks and lets some go into RAM alone, with far fewer RAM pages and device
blocks than chunks. What a chunk holds follows from its key: every block that a load says it has
filled is compared, and blocks are used again as soon as a job says that it is done with them.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..connector.ledger import Ledger as Jobs
from ..connector.mover import HostMover
from ..connector.regions import region_table
from ..storage.catalog import RAM, Catalog
from ..storage.catalog_check import check_catalog
from ..storage.entry import Entry, RamState
from ..storage.jobs import (
    ChunkStatus,
    Event,
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
from ..storage.ram import Arena
from ..storage.staging import Staging
from ..storage.tier import Tier
from ..storage.transfer import Transfer
from .soak_chunks import (
    BLOCK_TOKENS,
    MOST_BLOCKS,
    N_CHUNKS,
    PAGE_BYTES,
    Content,
    Wrong,
    blocks_of,
    key_of,
)

N_PAGES, STAGING_PAGES, N_BLOCKS = 160, 8, 64
UNDER_WAY = 6
REST_EVERY_S = 1.0
REST_S = 60.0
FLUSH_S = 0.5
SAVE_SHARE, GIVE_UP_SHARE, DROP_SHARE, SHORT_SHARE = 0.45, 0.05, 0.02, 0.05
DEADLINE_S, SHORT_S = 30.0, 0.001
_NO_BLOCKS = np.empty(0, dtype=np.int64)
_GIVEN_UP = frozenset({ChunkStatus.CANCELLED, ChunkStatus.DEADLINE, ChunkStatus.NOT_ATTEMPTED})


class JobPlayer:
    """A scheduler half without an engine, over one tier. One thread: `run`.

    Args:
        tier: given over; the transfer closes it.
        seed: what chunks are called and hold.
        life: of this process; makes its own random numbers.
        lossless: whether nothing is evicted from the tier, so that nothing may be missing.
        count: told of each record written, ``save``, and of each load job, ``load``.
    """

    def __init__(
        self,
        tier: Tier,
        seed: int,
        life: int,
        count: Callable[[str], None],
        *,
        lossless: bool,
    ) -> None:
        self._tier = tier.name
        self._lossless = lossless
        self._count = count
        self._rng = random.Random(f"{seed}/{life}/jobs")  # noqa: S311
        self._content = Content(seed)
        self._keys = [key_of(i, seed) for i in range(N_CHUNKS)]
        self._numbers = {key: i for i, key in enumerate(self._keys)}
        self._device = np.zeros((N_BLOCKS, PAGE_BYTES), dtype=np.uint8)
        self._blocks = [row.data for row in self._device]
        self._free = list(range(1, N_BLOCKS))  # block 0 is nobody's, as in an engine
        self._arena = Arena(PAGE_BYTES, N_PAGES)
        self._arena.start(background=False)
        base = self._device.ctypes.data
        tables = {g: region_table(g, [(base, PAGE_BYTES, PAGE_BYTES)], N_BLOCKS) for g in (0, 1)}
        self._catalog = Catalog([tier.name], first_page=STAGING_PAGES)
        self._catalog.add_pages(N_PAGES)
        self._jobs = Jobs(self._catalog, 1, lambda _: None, self._free.extend, time.monotonic)
        self._transfer = Transfer(
            self._arena,
            dict.fromkeys(tables, PAGE_BYTES),
            Staging(range(STAGING_PAGES), MOST_BLOCKS),
            HostMover(tables, self._arena),
            time.monotonic,
        )
        self._transfer.set_tiers([tier])
        self._loads: dict[int, LoadJob] = {}
        self._given_up: set[int] = set()
        # A load given too little time may count against the tier twice, as late and as slow.
        # So there is one at a time, and the tier answers in between: it would go off, rightly.
        self._short_job: int | None = None
        self._answer_after: int | None = None
        self._last_job = 0
        self._closing = False

    def run(self, stopped: threading.Event) -> None:
        """Work until told to stop; then close everything.

        Raises:
            Wrong: what was found must never be.
        """
        rest_at_s = time.monotonic() + REST_EVERY_S
        try:
            while not stopped.is_set():
                self._settle_all()
                if len(self._loads) >= UNDER_WAY or not self._do_something():
                    self._transfer.wait(0.01)
                if time.monotonic() >= rest_at_s:
                    self._rest()
                    rest_at_s = time.monotonic() + REST_EVERY_S
        finally:
            self._closing = True
            self._transfer.close(FLUSH_S)
        self._wait_for_all()  # a write that had begun may take longer than the close
        self._check_rest("after the end")

    # -- what is wished ------------------------------------------------------

    def _do_something(self) -> bool:
        """Begin a job; False where there is nothing to do with the chunks that were chosen.

        Give-ups and drops go with jobs: alone, while nothing else can be done, they would
        empty the catalog and leave no load to its end.
        """
        chosen = self._rng.sample(range(N_CHUNKS), self._rng.randint(1, 3))
        if not (self._save(chosen) if self._rng.random() < SAVE_SHARE else self._load(chosen)):
            return False
        if self._loads and self._rng.random() < GIVE_UP_SHARE:
            job_id = self._rng.choice(list(self._loads))
            self._given_up.add(job_id)
            self._transfer.cancel_load(job_id)
        if self._rng.random() < DROP_SHARE:
            self._catalog.drop(self._keys[chosen[0]])
        return True

    def _next_job(self) -> int:
        self._last_job += 1
        return self._last_job

    def _take_blocks(self, n: int) -> Any:
        taken = self._rng.sample(self._free, n)
        for block in taken:
            self._free.remove(block)
        return np.array(taken, dtype=np.int64)

    def _save(self, numbers: Sequence[int]) -> bool:
        chunks, entries = [], []
        for number in numbers:
            key, n = self._keys[number], blocks_of(number)
            known = self._catalog.get(key)
            if (known is not None and known.ram is not RamState.ABSENT) or len(self._free) < n:
                continue
            entry = self._catalog.begin_save(key, n)
            if entry is None:
                continue
            assert entry.pages is not None
            blocks = self._take_blocks(n)
            for i, block in enumerate(blocks):
                self._content.fill(self._blocks[block], number, i)
            tiers = () if self._catalog.held_below(entry) else (self._tier,)
            tokens = n * BLOCK_TOKENS
            chunks.append(SaveChunk(key, key[-1], 0, tokens, blocks, entry.pages, tiers))
            entries.append(entry)
        if chunks:
            job = SaveJob(self._next_job(), 0, tuple(chunks))
            self._jobs.open_save(job, entries)
            self._transfer.submit_save(job)
        return bool(chunks)

    def _load(self, numbers: Sequence[int]) -> bool:
        chunks: list[LoadChunk] = []
        entries: list[Entry] = []
        filling: list[bool] = []
        warm = self._rng.random() < 0.1
        may_be_short = self._short_job is None and self._answer_after is None
        short = self._rng.random() < SHORT_SHARE and may_be_short
        if short:
            numbers = numbers[:1]
        for number in numbers:
            n = blocks_of(number)
            entry = self._catalog.get(self._keys[number])
            source = None if entry is None else self._catalog.source_of(entry)
            if entry is None or source is None or len(self._free) < n:
                continue
            promoted = None
            if source == RAM:
                self._catalog.pin(entry)
            else:
                promoted = self._catalog.begin_promote(entry.key, n)
            if warm and promoted is None:
                if source == RAM:
                    self._catalog.unpin(entry)
                continue
            offset = 0 if warm else self._rng.choice((0, 0, n - 1))
            blocks = _NO_BLOCKS if warm else self._take_blocks(n - offset)
            self._device[blocks] = 0xEE
            pages = entry.pages if source == RAM or promoted is not None else None
            chunks.append(
                LoadChunk(entry.key, entry.key[-1], 0, n * BLOCK_TOKENS, source, n, offset, blocks,
                          pages)
            )  # fmt: skip
            entries.append(entry)
            filling.append(promoted is not None)
        if not chunks:
            return False
        job_id = self._next_job()
        job = LoadJob(
            job_id, 0, "" if warm else f"r{job_id}", SHORT_S if short else DEADLINE_S, tuple(chunks)
        )
        if short:
            self._given_up.add(job_id)
            self._short_job = job_id
        self._jobs.open_load(job, entries, filling)
        self._loads[job_id] = job
        self._transfer.submit_load(job)
        self._count("load")
        return True

    # -- what is told --------------------------------------------------------

    def _settle_all(self) -> None:
        if not self._closing:
            self._transfer.poll()
        for event in self._transfer.take_events():
            try:
                self._settle(event)
            except (KeyError, AssertionError) as error:
                raise Wrong(f"{event} cannot be, or came twice: {error!r}") from None

    def _settle(self, event: Event) -> None:
        if isinstance(event, SaveCopied):
            if any(s != ChunkStatus.OK for s in event.statuses) and not self._closing:
                raise Wrong(f"a copy out of the device failed: {event}")
            self._jobs.save_copied(event)
        elif isinstance(event, SaveRetired):
            self._jobs.save_retired(event, 0)
            for _ in event.written:
                self._count("save")
        elif isinstance(event, LoadDone):
            self._loaded(event)
        elif isinstance(event, LoadRetired):
            if event.job_id == self._short_job:
                self._short_job, self._answer_after = None, self._last_job
            for chunk in self._jobs.load_retired(event).lost:
                self._lost(chunk)
        elif isinstance(event, TierNews):
            self._news(event)

    def _news(self, news: TierNews) -> None:
        if news.reset:
            self._catalog.forget_tier(news.tier, 0)
        for key in news.added:
            if key not in self._numbers:
                raise Wrong(f"the tier tells of a chunk that was never written: {key.hex()}")
            self._catalog.tier_added(news.tier, key, 0)
        for key in news.removed:
            self._catalog.tier_removed(news.tier, key, 0)
        self._catalog.set_offline(news.tier, not news.online)

    def _loaded(self, event: LoadDone) -> None:
        outcome = self._jobs.load_done(event)
        job = self._loads.pop(event.job_id)
        given_up = event.job_id in self._given_up or self._closing
        self._given_up.discard(event.job_id)
        assert outcome is not None
        assert outcome.ok == all(status is ChunkStatus.OK for status in outcome.statuses)
        allowed = set(_GIVEN_UP) if given_up else set()
        if self._closing:
            allowed.add(ChunkStatus.TIER_DOWN)
        for chunk, status in zip(job.chunks, outcome.statuses, strict=True):
            number = self._numbers[chunk.key]
            if status is ChunkStatus.OK:
                self._compare(chunk, number)
                after = self._answer_after
                if after is not None and event.job_id > after and chunk.source == self._tier:
                    self._answer_after = None
            elif status is ChunkStatus.MISSING:
                self._lost(chunk)
                allowed |= _GIVEN_UP  # what comes after it is not waited for
            elif status not in allowed:
                raise Wrong(f"chunk {number} from {chunk.source}: {status.name}, by no fault")
            self._free += chunk.blocks.tolist()

    def _compare(self, chunk: LoadChunk, number: int) -> None:
        for i, block in enumerate(chunk.blocks, chunk.offset_blocks):
            if not self._content.holds(self._blocks[block], number, i):
                raise Wrong(
                    f"block {i} of chunk {number} was loaded from {chunk.source} and holds other "
                    "bytes than were saved"
                )

    def _lost(self, chunk: LoadChunk) -> None:
        if self._lossless:
            raise Wrong(f"chunk {self._numbers[chunk.key]} was on {chunk.source} and is lost")
        self._catalog.tier_removed(chunk.source, chunk.key)

    # -- at rest -------------------------------------------------------------

    def _rest(self) -> None:
        """Let everything end, and look whether nothing is held.

        Raises:
            Wrong: something is, or a job never reports.
        """
        self._wait_for_all()
        self._check_rest("at rest")

    def _wait_for_all(self) -> None:
        end_s = time.monotonic() + REST_S
        while self._jobs.outstanding or self._transfer.busy:
            if time.monotonic() > end_s:
                raise Wrong(f"jobs have not reported for {REST_S:.0f} s: {list(self._loads)}")
            self._transfer.wait(0.01)
            self._settle_all()

    def _check_rest(self, when: str) -> None:
        if self._jobs.outstanding:
            raise Wrong(f"{when} a job has not reported")
        if sorted(self._free) != list(range(1, N_BLOCKS)):
            raise Wrong(f"{when} {N_BLOCKS - 1 - len(self._free)} device blocks are held")
        if self._catalog.pinned_pages:
            raise Wrong(f"{when} {self._catalog.pinned_pages} RAM pages are pinned by no job")
        try:
            check_catalog(self._catalog)
        except AssertionError as error:
            raise Wrong(f"{when} the catalog contradicts itself: {error!r}") from None
