"""Slots of pages for loads that got no pages of their own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import numpy as np

from .device import Ids


class Staging:
    """Slots of pages for loads that got no pages of their own."""

    def __init__(self, page_ids: Sequence[int], pages_per_slot: int) -> None:
        self._slots: deque[Ids] = deque(
            np.asarray(page_ids[i : i + pages_per_slot], dtype=np.int64)
            for i in range(0, len(page_ids) - pages_per_slot + 1, pages_per_slot)
        )
        if not self._slots:
            raise ValueError(f"staging of {len(page_ids)} pages holds no slot of {pages_per_slot}")
        self._cond = threading.Condition()

    def take(self, timeout_s: float) -> Ids | None:
        """Return a slot, or None after ``timeout_s``."""
        with self._cond:
            if not self._cond.wait_for(lambda: bool(self._slots), max(0.0, timeout_s)):
                return None
            return self._slots.popleft()

    def give(self, slot: Ids) -> None:
        """Give a slot back."""
        with self._cond:
            self._slots.append(slot)
            self._cond.notify()
