"""One chunk as the catalog knows it, and the RAM pages that nobody uses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

PageIds = npt.NDArray[np.int64]


class RamState(Enum):
    """What an entry's RAM pages hold."""

    ABSENT = 0
    FILLING = 1  # pages reserved, bytes on their way
    READY = 2


@dataclass(slots=True, eq=False)
class Entry:
    """One chunk: key, size and where it is.

    Attributes:
        key: chunk key.
        n_blocks: blocks stored, which is also the number of RAM pages.
        ram: state of the RAM copy.
        pages: RAM page ids (n_blocks,) int64 while not ABSENT.
        masks: for each lower tier, a bit for every rank that holds its record.
        pins: jobs that use the RAM pages now.
        writes: jobs that write this chunk to a lower tier now.
        loads: jobs that fill the pages from a lower tier, while a request waits for them.
        span: token range [start, end), once it has been in RAM.
        used: age of the last use; larger is younger.
        dropped: a write of it to a lower tier found no room.
        dead: dropped from the catalog; pages go back with the last pin.
    """

    key: bytes
    n_blocks: int = 0
    ram: RamState = RamState.ABSENT
    pages: PageIds | None = None
    masks: list[int] = field(default_factory=list)
    pins: int = 0
    writes: int = 0
    loads: int = 0
    span: tuple[int, int] | None = None
    used: int = 0
    uses: int = 0
    dropped: bool = False
    dead: bool = False


@dataclass(slots=True)
class CatalogCounts:
    """Counters and gauges; counters only grow."""

    ram_evicted_chunks: int = 0
    ram_evicted_lost_chunks: int = 0  # evicted and on no lower tier
    no_page_chunks: int = 0  # a save found no page


class FreePages:
    """RAM pages that hold nothing; the lowest numbers are given out first at the start.

    Args:
        first_page: pages below this one belong to somebody else.
    """

    def __init__(self, first_page: int) -> None:
        self._first_page = first_page
        self._end_page = first_page
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._free)

    def __iter__(self) -> Iterator[int]:
        return iter(self._free)

    @property
    def all_pages(self) -> range:
        """Every page there is, used or not."""
        return range(self._first_page, self._end_page)

    def begin_at(self, first_page: int) -> bool:
        """Leave all pages below ``first_page`` to somebody else; False when it is too late."""
        if first_page != self._first_page:
            if self._end_page != self._first_page:
                return False
            self._first_page = self._end_page = first_page
        return True

    def grow(self, end_page: int) -> None:
        """Add all pages below ``end_page`` (the arena has grown so far)."""
        if end_page > self._end_page:
            self._free.extend(range(end_page - 1, self._end_page - 1, -1))
            self._end_page = end_page

    def take(self, n_pages: int) -> PageIds:
        """Return page ids (n_pages,); so many must be free."""
        taken = self._free[-n_pages:]
        assert len(taken) == n_pages
        del self._free[-n_pages:]
        taken.reverse()
        return np.array(taken, dtype=np.int64)

    def give(self, pages: PageIds) -> None:
        """Take pages back."""
        self._free.extend(pages.tolist()[::-1])
