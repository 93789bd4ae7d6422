"""What the scheduler half can say of itself: counters that the catalog keeps, gauges."""

from __future__ import annotations

from ..storage.catalog import Catalog
from ..storage.counts import Counts
from .audit import Auditor
from .ledger import Ledger

_EVICTIONS = ("ram_evicted_chunks", "ram_evicted_lost_chunks")


class Standing:
    """Reads counters and gauges. Scheduler thread only.

    Args:
        catalog, ledger, auditor: are asked.
        page_bytes: of a RAM page, all ranks together.
    """

    def __init__(self, catalog: Catalog, ledger: Ledger, auditor: Auditor, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._catalog = catalog
        self._ledger = ledger
        self._auditor = auditor
        self._told: dict[str, int] = {}

    def add_evictions(self, counts: Counts) -> None:
        """Add what RAM has evicted since the last call."""
        for name in _EVICTIONS:
            total = getattr(self._catalog.counts, name)
            grown = total - self._told.get(name, 0)
            if grown:
                self._told[name] = total
                counts.add(name, grown)

    def gauges(self) -> dict[str, float]:
        """Return what is where now."""
        catalog = self._catalog
        values = {f"resident_chunks.{tier}": float(n) for tier, n in catalog.resident().items()}
        values["ram_pages.free"] = catalog.free_pages
        values["ram_pages.pinned"] = catalog.pinned_pages
        values["ram_pages.held"] = catalog.held_pages
        values["ram_pages.all"] = catalog.n_pages
        in_use = catalog.n_pages - catalog.free_pages if catalog.retain_in_ram else 0
        values["resident_bytes.ram"] = float(in_use * self._page_bytes)
        values["pinned_device_blocks"] = self._ledger.pinned_blocks
        if self._auditor.worst_mean:
            values["audit_worst_mean"] = self._auditor.worst_mean
        return values
