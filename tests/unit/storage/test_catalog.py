"""The catalog's promises, one by one; the property test has the interleavings."""

from __future__ import annotations

import pytest

from kvtier.storage.ages import Ages
from kvtier.storage.catalog import RAM, Catalog
from kvtier.storage.catalog_check import check_catalog
from kvtier.storage.entry import RamState


def key(n, group=0):
    return n.to_bytes(8, "big") + bytes((group,))


def catalog_of(n_pages, **options):
    catalog = Catalog(("disk",), **options)
    catalog.add_pages(catalog._free.all_pages.start + n_pages)
    return catalog


def store(catalog, *keys, used=None):
    """Save chunks of one page each, copies done, jobs over."""
    for number, k in enumerate(keys):
        entry = catalog.begin_save(k, 1, None if used is None else used - number)
        catalog.filled(entry, ok=True)
        catalog.unpin(entry)


def in_ram(catalog, keys):
    return [k for k in keys if catalog.source(k) == RAM]


def test_a_group_is_followed_through_its_life():
    """The prefix hashes of one group: those that were there, come and go."""
    catalog = catalog_of(2)
    store(catalog, key(1, 5), key(2, 6))
    hashes = catalog.follow(5)
    assert hashes == {key(1)[:-1]}
    catalog.tier_added("disk", key(3, 5), 0)
    assert hashes == {key(1)[:-1], key(3)[:-1]}
    store(catalog, key(4, 6))  # pushes the oldest out
    catalog.drop(key(3, 5))
    assert hashes == set() == catalog.follow(5)


def test_tail_goes_before_head():
    """RAM gives up a prefix from its end, though its chunks were saved from the start."""
    catalog = catalog_of(4)
    prefix = [key(n) for n in range(4)]
    store(catalog, *prefix, used=catalog.age())
    for n, left in ((10, 3), (11, 2), (12, 1)):
        store(catalog, key(n))
        assert in_ram(catalog, prefix) == prefix[:left]
        catalog.touch([key(n)])


def test_tail_goes_before_head_when_its_save_ended_last():
    """A job that ends late makes its chunk no younger than the touch of its prefix."""
    catalog = catalog_of(3)
    head, tail, other = key(1), key(2), key(3)
    late = catalog.begin_save(tail, 1)
    store(catalog, head, other)
    catalog.touch([tail, head])
    catalog.filled(late, ok=True)
    catalog.unpin(late)
    catalog.touch([other])
    store(catalog, key(4))
    assert in_ram(catalog, [head, tail, other]) == [head, other]


def test_writing_below_keeps_the_order():
    """Which chunk is older does not depend on when its record was written."""
    catalog = catalog_of(3)
    keys = [key(1), key(2), key(3)]
    store(catalog, *keys)
    for k in reversed(keys):
        catalog.tier_added("disk", k, 0)
    for n in range(3):
        entry = catalog.begin_save(key(10 + n), 1)
        assert entry is not None
        assert in_ram(catalog, keys) == keys[n + 1 :]


def test_a_load_pushes_out_only_what_a_lower_tier_holds():
    """A load never costs the only copy of a chunk; a save may."""
    catalog = catalog_of(2)
    store(catalog, key(1), key(2))
    catalog.tier_added("disk", key(3), 0)
    assert catalog.begin_promote(key(3), 1) is None
    catalog.tier_added("disk", key(2), 0)
    entry = catalog.begin_promote(key(3), 1)
    assert entry is not None
    assert catalog.source(key(1)) == RAM
    assert catalog.source(key(2)) == "disk"
    assert catalog.begin_save(key(4), 1) is not None
    assert catalog.source(key(1)) is None
    assert catalog.counts.ram_evicted_lost_chunks == 1


def test_pinned_pages_stay():
    """With every page pinned there is none to give, and it is counted."""
    catalog = catalog_of(1)
    store(catalog, key(1))
    entry = catalog.get(key(1))
    catalog.pin(entry)
    assert catalog.begin_save(key(2), 1) is None
    assert catalog.counts.no_page_chunks == 1
    catalog.unpin(entry)
    assert catalog.begin_save(key(2), 1) is not None


@pytest.mark.parametrize("forget", ["drop", "clear"])
def test_forgotten_while_pinned(forget):
    """A chunk dropped under a job keeps its pages until the job ends, and is found no more."""
    catalog = catalog_of(2)
    store(catalog, key(1))
    entry = catalog.get(key(1))
    catalog.pin(entry)
    if forget == "drop":
        catalog.drop(key(1))
    else:
        assert catalog.clear() == 1
    check_catalog(catalog)
    assert catalog.source(key(1)) is None
    assert catalog.free_pages == 1
    catalog.unpin(entry)
    check_catalog(catalog)
    assert catalog.free_pages == 2


def test_forgotten_and_stored_again_before_the_old_job_ends():
    """The end of a job on a dropped chunk takes nothing from the chunk saved anew under its key."""
    catalog = catalog_of(2)
    store(catalog, key(1))
    old = catalog.get(key(1))
    catalog.pin(old)
    catalog.clear()
    store(catalog, key(1))
    catalog.unpin(old)
    check_catalog(catalog)
    assert catalog.source(key(1)) == RAM
    entries = [catalog.begin_save(key(n), 1) for n in (2, 3)]
    assert None not in entries
    check_catalog(catalog)


def test_forgotten_while_filling_is_never_ready():
    """A copy that ends after its chunk was dropped makes nothing servable."""
    catalog = catalog_of(1)
    entry = catalog.begin_save(key(1), 1)
    catalog.drop(key(1))
    catalog.filled(entry, ok=True)
    catalog.unpin(entry)
    assert catalog.source(key(1)) is None
    assert entry.ram is RamState.ABSENT
    assert len(catalog) == 0
    check_catalog(catalog)


def test_a_chunk_counts_when_every_rank_has_it():
    """A record on some ranks only is not served, and does not make room."""
    catalog = catalog_of(1, n_holders=2)
    store(catalog, key(1))
    catalog.tier_added("disk", key(2), 0)
    catalog.tier_added("disk", key(1), 1)
    assert catalog.source(key(2)) is None
    assert catalog.begin_promote(key(2), 1) is None
    catalog.tier_added("disk", key(2), 1)
    assert catalog.source(key(2)) == "disk"
    catalog.tier_removed("disk", key(2), 1)
    assert catalog.source(key(2)) is None


def test_an_offline_tier_serves_nothing_and_forgets_nothing():
    """What a tier holds is known again when it comes back."""
    catalog = catalog_of(1)
    catalog.tier_added("disk", key(1), 0)
    catalog.set_offline("disk", offline=True)
    assert catalog.source(key(1)) is None
    catalog.set_offline("disk", offline=False)
    assert catalog.source(key(1)) == "disk"


def test_staging_only():
    """Without a RAM tier, pages are free again as soon as the last job is over."""
    catalog = catalog_of(1, retain_in_ram=False)
    entry = catalog.begin_save(key(1), 1)
    catalog.filled(entry, ok=True)
    assert catalog.source(key(1)) is None
    catalog.unpin(entry)
    assert catalog.free_pages == 1
    catalog.tier_added("disk", key(1), 0)
    assert catalog.begin_promote(key(1), 1) is None
    check_catalog(catalog)


def test_a_tier_that_starts_anew():
    """After a reset of a tier nothing known of it before is served."""
    catalog = catalog_of(1, n_holders=2)
    for rank in (0, 1):
        catalog.tier_added("disk", key(1), rank)
    catalog.forget_tier("disk", 1)
    assert catalog.source(key(1)) is None
    catalog.forget_tier("disk", 0)
    assert len(catalog) == 0


def test_ages_stay_small():
    """The order's bookkeeping does not grow with uses."""

    class Thing:
        n_blocks = 1
        used = 0

    ages = Ages()
    things = [Thing() for _ in range(10)]
    for n in range(20_000):
        thing = things[n % 10]
        ages.discard(thing)
        thing.used = n
        ages.add(thing)
    assert len(ages._heap) < 3_000
    assert ages.pages == 10
    assert ages.oldest_many(3) == things[:3]
