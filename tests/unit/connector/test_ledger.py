"""Jobs that are out: what they hold is let go exactly once, with the last rank's answer."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.connector.ledger import Ledger
from kvtier.storage.catalog import RAM, Catalog
from kvtier.storage.catalog_check import check_catalog
from kvtier.storage.jobs import (
    ChunkStatus,
    LoadChunk,
    LoadDone,
    LoadJob,
    LoadRetired,
    SaveChunk,
    SaveCopied,
    SaveJob,
    SaveRetired,
)

from .halves import Clock, Pool

OK, BAD, MISSING = ChunkStatus.OK, ChunkStatus.COPY_FAILED, ChunkStatus.MISSING


def key(n):
    return n.to_bytes(8, "big") + b"\0"


@pytest.fixture(params=[1, 2, 3])
def n_ranks(request):
    return request.param


@pytest.fixture
def catalog(n_ranks):
    catalog = Catalog(("disk",), n_ranks)
    catalog.add_pages(20)
    return catalog


@pytest.fixture
def pool():
    return Pool(50)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def ledger(catalog, n_ranks, pool, clock):
    return Ledger(
        catalog,
        n_ranks,
        lambda ids: pool.touch([pool.blocks[i] for i in ids]),
        lambda ids: pool.free_blocks([pool.blocks[i] for i in ids]),
        clock,
    )


def open_save(ledger, catalog, *numbers, blocks=True):
    chunks, entries = [], []
    for n in numbers:
        entry = catalog.begin_save(key(n), 2)
        ids = np.array([2 * n, 2 * n + 1] if blocks else [], np.int64)
        chunks.append(SaveChunk(key(n), 0, 0, 32, ids, entry.pages, ("disk",)))
        entries.append(entry)
    job = SaveJob(1, 0, tuple(chunks))
    ledger.open_save(job, entries)
    return entries


def test_save(ledger, catalog, pool, n_ranks):
    """Device blocks go back with the last copy, pages and tier bits with the last end."""
    open_save(ledger, catalog, 1, 2)
    assert pool.pinned == [2, 3, 4, 5]
    assert ledger.pinned_blocks == 4
    for rank in range(n_ranks):
        assert pool.pinned
        assert catalog.source(key(1)) is None
        ledger.save_copied(SaveCopied(1, bytes([OK, OK])))
        if rank < n_ranks - 1:
            ledger.save_retired(SaveRetired(1, ((0, "disk"),)), rank)
    assert pool.pinned == []
    assert ledger.pinned_blocks == 0
    assert catalog.source(key(1)) == RAM
    assert ledger.outstanding
    assert catalog.pinned_pages == 4
    ledger.save_retired(SaveRetired(1, ((0, "disk"),)), n_ranks - 1)
    assert not ledger.outstanding
    assert catalog.pinned_pages == 0
    assert catalog.resident() == {RAM: 2, "disk": 1}
    check_catalog(catalog)


def test_save_that_fails_on_the_last_rank(ledger, catalog, pool, n_ranks):
    """A chunk that one rank could not copy is kept nowhere; its neighbours are."""
    open_save(ledger, catalog, 1, 2)
    for rank in range(n_ranks):
        last = rank == n_ranks - 1
        ledger.save_copied(SaveCopied(1, bytes([OK, BAD if last else OK])))
        ledger.save_retired(SaveRetired(1, ((0, "disk"),) if last else ((0, "disk"), (1, "disk"))),
                            rank)  # fmt: skip
    assert catalog.source(key(1)) == RAM
    assert catalog.source(key(2)) is None
    assert pool.pinned == []
    assert catalog.pinned_pages == 0
    check_catalog(catalog)


def test_save_of_a_chunk_that_was_dropped_meanwhile(ledger, catalog, pool, n_ranks):
    """After a reset nothing of a save under way is served, and everything goes back."""
    open_save(ledger, catalog, 1)
    catalog.clear()
    for rank in range(n_ranks):
        ledger.save_copied(SaveCopied(1, bytes([OK])))
        ledger.save_retired(SaveRetired(1, ((0, "disk"),)), rank)
    assert catalog.source(key(1)) is None
    assert len(catalog) == 0
    assert catalog.free_pages == 20
    assert pool.pinned == []
    check_catalog(catalog)


def open_load(ledger, catalog, n_ranks):
    """Chunk 1 from RAM, chunk 2 into pages of its own, chunk 3 through staging."""
    first = catalog.begin_save(key(1), 1)
    catalog.filled(first, ok=True)
    catalog.unpin(first)
    for n in (2, 3):
        for rank in range(n_ranks):
            catalog.tier_added("disk", key(n), rank)
    catalog.pin(first)
    second, third = catalog.begin_promote(key(2), 1), catalog.get(key(3))
    one = np.array([1], np.int64)
    chunks = tuple(
        LoadChunk(entry.key, 0, 0, 16, source, 1, 0, one, entry.pages)
        for entry, source in ((first, RAM), (second, "disk"), (third, "disk"))
    )
    ledger.open_load(LoadJob(7, 0, "r", 1.0, chunks), [first, second, third], [False, True, False])
    return second


def test_load(ledger, catalog, n_ranks):
    """A load is over when every rank says so; pages that all ranks filled are RAM chunks now."""
    filling = open_load(ledger, catalog, n_ranks)
    for rank in range(n_ranks):
        assert filling.loads == 1
        outcome = ledger.load_done(LoadDone(7, "r", bytes([OK] * 3), ok=True))
        assert (outcome is not None) == (rank == n_ranks - 1)
    assert outcome.ok
    assert outcome.statuses == (OK, OK, OK)
    assert filling.loads == 0
    assert catalog.pinned_pages == 2
    for _ in range(n_ranks):
        assert catalog.source(key(2)) == "disk"
        ledger.load_retired(LoadRetired(7, bytes([0, 1, 0])))
    assert catalog.source(key(2)) == RAM
    assert catalog.source(key(3)) == "disk"
    assert catalog.pinned_pages == 0
    assert not ledger.outstanding
    check_catalog(catalog)


def test_load_that_fails_on_one_rank(ledger, catalog, n_ranks):
    """The worst status of each chunk counts, and pages that one rank lacks are not kept."""
    open_load(ledger, catalog, n_ranks)
    for rank in range(n_ranks):
        bad = rank == 0
        event = LoadDone(7, "r", bytes([OK, MISSING if bad else OK, OK]), ok=not bad)
        outcome = ledger.load_done(event)
        ledger.load_retired(LoadRetired(7, bytes([0, not bad, 0])))
    assert not outcome.ok
    assert outcome.statuses == (OK, MISSING, OK)
    assert catalog.source(key(2)) == "disk"
    assert catalog.pinned_pages == 0
    check_catalog(catalog)


def test_retired_before_another_rank_is_done(ledger, catalog, n_ranks):
    """Ranks need not keep step: one may have let go of its pages before another has loaded."""
    open_load(ledger, catalog, n_ranks)
    ledger.load_done(LoadDone(7, "r", bytes([OK] * 3), ok=True))
    ledger.load_retired(LoadRetired(7, bytes([0, 1, 0])))
    for _ in range(n_ranks - 1):
        assert catalog.pinned_pages == 2
        ledger.load_done(LoadDone(7, "r", bytes([OK] * 3), ok=True))
        ledger.load_retired(LoadRetired(7, bytes([0, 1, 0])))
    assert catalog.pinned_pages == 0


def test_pinning_is_hopeful_for_a_while_only(ledger, catalog, clock, n_ranks):
    """Blocks of a save that takes long are no reason to hold off a preemption."""
    assert not ledger.pinning(1.0)
    open_save(ledger, catalog, 1)
    assert ledger.pinning(1.0)
    clock.advance(2.0)
    assert not ledger.pinning(1.0)
    for _ in range(n_ranks):
        ledger.save_copied(SaveCopied(1, bytes([OK])))
    assert not ledger.pinning(100.0)


def test_a_job_is_stepped_for_while_somebody_waits_or_it_is_young(ledger, catalog, clock, n_ranks):
    """Device blocks and requests are waited for; what hangs behind them is not, after a while."""
    assert not ledger.urgent(5.0)
    open_save(ledger, catalog, 5)
    open_load(ledger, catalog, n_ranks)
    clock.advance(100.0)
    assert ledger.urgent(5.0)
    for _ in range(n_ranks):
        ledger.save_copied(SaveCopied(1, bytes([OK])))
    assert ledger.urgent(5.0), "a request waits"
    assert ledger.urgent(200.0)
    for _ in range(n_ranks):
        ledger.load_done(LoadDone(7, "r", bytes([OK] * 3), ok=True))
    assert not ledger.urgent(5.0), "a write and a read hang"
    assert ledger.urgent(200.0)
    assert ledger.outstanding


def test_a_write_back_that_reached_not_every_rank(ledger, catalog, clock, n_ranks):
    """Nothing held below RAM after a write-back is noted; something held is not."""
    entries = open_save(ledger, catalog, 1, blocks=False)
    for rank in range(n_ranks):
        ledger.save_copied(SaveCopied(1, bytes([OK])))
        written = ((0, "disk"),) if rank < n_ranks - 1 else ()
        ledger.save_retired(SaveRetired(1, written), rank)
    assert ledger.unwritten_at_s == clock()
    ledger.unwritten_at_s = 0.0
    assert entries[0].writes == 0
    open_save(ledger, catalog, 2, blocks=False)
    for rank in range(n_ranks):
        ledger.save_copied(SaveCopied(1, bytes([OK])))
        ledger.save_retired(SaveRetired(1, ((0, "disk"),)), rank)
    assert ledger.unwritten_at_s == 0.0
