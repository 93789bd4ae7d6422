"""The device copies and the pages as a transfer sees them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

logger = logging.getLogger("kvtier.transfer")

COPY_TIMEOUT_S = 120.0  # a copy that takes longer has failed

Ids = npt.NDArray[np.int64]


class CopyTicket(Protocol):
    """A copy under way."""

    def wait(self, timeout_s: float) -> None:
        """Block until the copy is complete; raises when it failed."""

    def fenced(self) -> bool:
        """Whether no byte of the copy can move any more; never blocks."""


class BlockMover(Protocol):
    """Copies whole blocks between the device and RAM pages; see `kvtier.connector.mover`."""

    def save(self, group: int, block_ids: Ids, page_ids: Ids, after: Any = None) -> CopyTicket:
        """Device blocks to RAM pages."""

    def load(self, group: int, block_ids: Ids, page_ids: Ids, after: Any = None) -> CopyTicket:
        """RAM pages to device blocks."""


class Pages(Protocol):
    """RAM pages; see `kvtier.storage.ram`."""

    def buffers(self, page_ids: Any, used_bytes: int) -> list[memoryview]:
        """The first ``used_bytes`` of each page, adjacent pages merged."""


def wait_fenced(tickets: Sequence[CopyTicket]) -> None:
    """Return once no byte of these copies can move any more.

    Without a bound: until then their blocks and pages belong to nobody else.
    """
    while not all(ticket.fenced() for ticket in tickets):
        time.sleep(0.01)


class CopyHealth:
    """Says when copies of one direction begin to fail, and when they work again; no more.

    Args:
        way: "to" or "from" the device.
        then: what becomes of what was to be copied.
    """

    def __init__(self, way: str, then: str) -> None:
        self._way = way
        self._then = then
        self._failing = False

    def failed(self, error: Exception) -> None:
        """A copy has failed."""
        if not self._failing:
            self._failing = True
            logger.error(
                "kvtier: a copy %s the device failed; %s (said once, until one succeeds)",
                self._way,
                self._then,
                exc_info=error,
            )

    def worked(self) -> None:
        """A copy has ended well."""
        if self._failing:
            self._failing = False
            logger.warning("kvtier: copies %s the device work again", self._way)
