"""Reserving room for a record below the capacity."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from .disk_usage import UsageUnknown
from .errors import TierLocked, TierRefused, TierUnavailable

if TYPE_CHECKING:
    from .disk_evict import Evictor
    from .disk_keeper import Keeper
    from .disk_usage import Usage

_TIMEOUT_S = 5.0


class Room:
    """Reserves, and evicts where there is nothing left to reserve. Thread-safe, blocking."""

    def __init__(
        self, root: str, capacity_bytes: int, usage: Usage, evictor: Evictor, keeper: Keeper
    ) -> None:
        """Know the parts; ``root`` is for messages."""
        self._root = root
        self._capacity_bytes = capacity_bytes
        self._usage = usage
        self._evictor = evictor
        self._keeper = keeper

    def reserve(self, total: int) -> None:
        """Reserve ``total`` bytes, evicting what is oldest. Waits a few seconds at most.

        Raises:
            TierRefused: there is no room.
            OSError.
        """
        if total > self._capacity_bytes:
            raise TierRefused(
                f"a record of {total} bytes is larger than the disk tier's"
                f" capacity of {self._capacity_bytes}"
            )
        deadline_s = time.monotonic() + _TIMEOUT_S
        while True:
            try:
                if self._usage.reserve(total, self._capacity_bytes) == 0:
                    return
                # Before the first walk nobody knows what is oldest.
                if self._keeper.walked.wait(max(0.0, deadline_s - time.monotonic())):
                    self.make(total)
            except UsageUnknown:
                if self._keeper.walked.is_set():  # else the first walk is on its way to count
                    self._keeper.want_walk()
                time.sleep(0.005)
            except TierUnavailable as error:
                raise TierLocked(str(error)) from None
            if time.monotonic() > deadline_s:
                raise TierRefused(f"no room below {self._root}: others fill it as fast")

    def make(self, total: int, at_least: int = 0) -> None:
        """Evict until ``total`` bytes fit, and ``at_least`` bytes whatever the counter says.

        Raises:
            TierRefused: nothing is left to evict.
            TierUnavailable, OSError.
        """
        try:
            if not self._evictor.make_room(total, self._capacity_bytes, at_least=at_least):
                raise TierRefused(f"nothing left to evict below {self._root} for {total} bytes")
        except UsageUnknown:
            self._keeper.want_walk()
