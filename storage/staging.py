"""Slots of pages for loads that got no pages of their own."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence

import numpy as np

from .device import Ids


class Staging:
    """Slots of pages for loads that got no pages of their own.

    Tiers share them: reads that hang keep theirs, so that none may hold the last ones.
    """

    def __init__(self, page_ids: Sequence[int], pages_per_slot: int) -> None:
        self._slots: deque[Ids] = deque(
            np.asarray(page_ids[i : i + pages_per_slot], dtype=np.int64)
            for i in range(0, len(page_ids) - pages_per_slot + 1, pages_per_slot)
        )
        if not self._slots:
            raise ValueError(f"staging of {len(page_ids)} pages holds no slot of {pages_per_slot}")
        self._cond = threading.Condition()
        self._most = self._n_slots = len(self._slots)
        self._held: Counter[str] = Counter()

    def share_among(self, n_tiers: int) -> None:
        """Let so many tiers leave each other a slot, where there are enough."""
        self._most = max(1, self._n_slots - max(0, n_tiers - 1))

    def take(self, timeout_s: float, tier: str = "") -> Ids | None:
        """Return a slot for a read of ``tier``, or None after ``timeout_s``."""
        with self._cond:
            if not self._cond.wait_for(lambda: self._may_take(tier), max(0.0, timeout_s)):
                return None
            self._held[tier] += 1
            return self._slots.popleft()

    def _may_take(self, tier: str) -> bool:
        return bool(self._slots) and self._held[tier] < self._most

    def give(self, slot: Ids, tier: str = "") -> None:
        """Give a slot of ``tier`` back."""
        with self._cond:
            self._held[tier] -= 1
            self._slots.append(slot)
            self._cond.notify_all()
