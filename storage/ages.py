"""Least recently used, with uses that cost one store."""

from __future__ import annotations

import heapq
from typing import Generic, Protocol, TypeVar


class Aged(Protocol):
    """What can be kept by age; hashed by identity."""

    used: int  # age of the last use; never falls
    n_blocks: int


E = TypeVar("E", bound=Aged)


class Ages(Generic[E]):
    """A set of entries that knows its oldest.

    A heap, corrected lazily: an item whose entry was used since is put back with
    its newer age when it comes to the top. So a use is one store into the entry,
    and finding the oldest costs a few steps, amortised over the uses.
    """

    def __init__(self) -> None:
        self.pages = 0
        self._members: dict[E, None] = {}  # by identity: keys can come back
        self._heap: list[tuple[int, int, E]] = []
        self._pushed = 0

    def __contains__(self, entry: E) -> bool:
        return entry in self._members

    def __len__(self) -> int:
        return len(self._members)

    def add(self, entry: E) -> None:
        """Take an entry in, at its own age."""
        self._members[entry] = None
        self.pages += entry.n_blocks
        self._push(entry)
        if len(self._heap) > 2 * len(self._members) + 1024:
            members, self._heap = self._members, []
            for member in members:
                self._heap.append((member.used, self._pushed, member))
                self._pushed += 1
            heapq.heapify(self._heap)

    def _push(self, entry: E) -> None:
        self._pushed += 1  # breaks ties, so that entries are never compared
        heapq.heappush(self._heap, (entry.used, self._pushed, entry))

    def discard(self, entry: E) -> bool:
        """Let an entry go; False when it was not here."""
        if entry not in self._members:
            return False
        del self._members[entry]
        self.pages -= entry.n_blocks
        return True

    def oldest(self) -> E | None:
        """Return the entry used longest ago."""
        while self._heap:
            used, _, entry = self._heap[0]
            if entry not in self._members:
                heapq.heappop(self._heap)
            elif entry.used != used:
                heapq.heappop(self._heap)
                self._push(entry)
            else:
                return entry
        return None

    def oldest_many(self, limit: int) -> list[E]:
        """Return up to ``limit`` entries, those used longest ago first."""
        found: list[E] = []
        while len(found) < limit:
            entry = self.oldest()
            if entry is None:
                break
            heapq.heappop(self._heap)
            if entry not in found:
                found.append(entry)
        for entry in found:
            self._push(entry)
        return found
