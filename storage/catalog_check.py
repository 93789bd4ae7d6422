"""What must always be so inside a catalog; for tests and soaks."""

# ruff: noqa: SLF001 - it looks inside on purpose
from __future__ import annotations

from typing import TYPE_CHECKING

from .entry import RamState

if TYPE_CHECKING:
    from .catalog import Catalog


def check_catalog(catalog: Catalog) -> None:
    """Assert every invariant. Walks everything.

    Raises:
        AssertionError: the catalog contradicts itself.
    """
    ready = [e for e in catalog._entries.values() if e.ram is RamState.READY]
    assert catalog._ram_chunks == len(ready)
    pages = list(catalog._free)
    for entry in catalog._entries.values():
        assert not entry.dead
        assert (entry.pages is None) == (entry.ram is RamState.ABSENT)
        assert entry.pages is None or len(entry.pages) == entry.n_blocks
        assert entry.pins == 0 or entry.pages is not None
        in_lru = (entry in catalog._spare) + (entry in catalog._only)
        assert in_lru == int(entry.ram is RamState.READY and entry.pins == 0)
        if entry.pages is not None:
            pages.extend(entry.pages.tolist())
    for entry in catalog._orphans:
        assert entry.dead
        assert entry.pins > 0
        assert entry.pages is not None
        pages.extend(entry.pages.tolist())
    for group_id, hashes in catalog._followed.items():
        assert hashes == {key[:-1] for key in catalog._entries if key[-1] == group_id}
    # Every page is in exactly one place.
    assert sorted(pages) == list(catalog._free.all_pages)
    spare = [e for e in catalog._entries.values() if e in catalog._spare]
    only = [e for e in catalog._entries.values() if e in catalog._only]
    assert (len(spare), len(only)) == (len(catalog._spare), len(catalog._only))
    assert catalog._spare.pages == sum(e.n_blocks for e in spare)
    assert catalog._only.pages == sum(e.n_blocks for e in only)
    for i in range(len(catalog.tiers)):
        n = sum(e.masks[i] == catalog._all_ranks for e in catalog._entries.values())
        assert n == catalog._on_tier[i]
