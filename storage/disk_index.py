"""What this process knows of one namespace and rank: keys, lengths, last use, changes.

Memory only. The directory is the truth and the index a hint that is corrected
by whoever finds it wrong.
"""

from __future__ import annotations

import heapq
import threading
from itertools import islice
from typing import TYPE_CHECKING

from .tier import TierChanges

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# Given out at once, so that the taker's step stays short: a change costs it microseconds.
MAX_CHANGES = 5_000
_MAX_FIRST = 50_000  # while the first index is taken in, for which requests wait


class Entry:
    """One record; replaced, never reused, when its file is written anew."""

    __slots__ = ("file_bytes", "used_at_s", "walk")

    def __init__(self, file_bytes: int, used_at_s: float, walk: int) -> None:
        """Remember what the file's inode said, and the walk that was going on."""
        self.file_bytes = file_bytes
        self.used_at_s = used_at_s
        self.walk = walk


class Index:
    """Thread-safe; no call does I/O.

    Last use is kept in a heap that is corrected lazily: an item whose key was used since is put
    back with the newer time when it comes to the top. So a touch is one store, and finding the
    oldest costs a few steps.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._lock = threading.Lock()
        self._entries: dict[bytes, Entry] = {}
        self._heap: list[tuple[float, bytes]] = []
        self._pending: dict[bytes, bool] = {}  # True: added, False: removed
        self._touched: dict[bytes, float] = {}
        self._walk = 0
        self._complete = False
        self._told = False  # that it is complete
        self.stored_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def get(self, key: bytes) -> Entry | None:
        """Return what is known of a key."""
        return self._entries.get(key)

    def add(self, key: bytes, file_bytes: int, used_at_s: float, *, fresh: bool) -> None:
        """Know a record; ``fresh`` when its file was just written by this process."""
        with self._lock:
            known = self._entries.get(key)
            if known is not None and not fresh:
                known.walk = self._walk
                known.used_at_s = max(known.used_at_s, used_at_s)
                self.stored_bytes += file_bytes - known.file_bytes
                known.file_bytes = file_bytes
                return
            if known is None:
                self._note(key, added=True)
            else:
                self.stored_bytes -= known.file_bytes
            self._entries[key] = Entry(file_bytes, used_at_s, self._walk)
            self.stored_bytes += file_bytes
            heapq.heappush(self._heap, (used_at_s, key))
            if len(self._heap) > 2 * len(self._entries) + 1024:
                self._heap = [(entry.used_at_s, name) for name, entry in self._entries.items()]
                heapq.heapify(self._heap)

    def discard(self, key: bytes, seen: Entry | None = None) -> Entry | None:
        """Forget a record; with ``seen`` only if nothing replaced that entry. Return what went."""
        with self._lock:
            known = self._entries.get(key)
            if known is None or (seen is not None and known is not seen):
                return None
            del self._entries[key]
            self._touched.pop(key, None)
            self.stored_bytes -= known.file_bytes
            self._note(key, added=False)
            return known

    def _note(self, key: bytes, *, added: bool) -> None:
        if self._pending.get(key, added) is not added:
            del self._pending[key]  # went and came back (or the other way): no news
        else:
            self._pending[key] = added

    def touch(self, keys: Iterable[bytes], now_s: float) -> None:
        """Mark records as used at ``now_s``, the later in the order the more recent."""
        with self._lock:
            for number, key in enumerate(keys):
                entry = self._entries.get(key)
                if entry is not None:
                    entry.used_at_s = max(entry.used_at_s, now_s + number * 1e-6)
                    self._touched[key] = entry.used_at_s

    def used_later(self, key: bytes, used_at_s: float) -> None:
        """Learn that another process used a record."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                entry.used_at_s = max(entry.used_at_s, used_at_s)

    def take_touched(self, limit: int) -> list[tuple[bytes, float]]:
        """Return and forget up to ``limit`` last uses that the files do not say yet."""
        with self._lock:
            keys = list(self._touched)[:limit]
            return [(key, self._touched.pop(key)) for key in keys]

    def oldest(self) -> tuple[bytes, Entry] | None:
        """Return the least recently used record."""
        with self._lock:
            while self._heap:
                used_at_s, key = self._heap[0]
                entry = self._entries.get(key)
                if entry is None:
                    heapq.heappop(self._heap)
                elif entry.used_at_s > used_at_s:
                    heapq.heapreplace(self._heap, (entry.used_at_s, key))
                else:
                    return key, entry
            return None

    def begin_walk(self) -> None:
        """Say that the directory is being walked: what is added from now on was seen."""
        with self._lock:
            self._walk += 1

    def unseen(self) -> list[tuple[bytes, Entry]]:
        """Return what the walk has not seen."""
        with self._lock:
            return [(key, entry) for key, entry in self._entries.items() if entry.walk < self._walk]

    def set_complete(self) -> None:
        """Say that the first walk is done."""
        self._complete = True

    @property
    def complete(self) -> bool:
        """Whether the first walk is done."""
        return self._complete

    def changes(self) -> TierChanges:
        """Return and forget what came and went, a bounded number at once."""
        with self._lock:
            limit = MAX_CHANGES if self._told else _MAX_FIRST
            if len(self._pending) <= limit:
                taken, self._pending = self._pending, {}
            else:
                keys = list(islice(self._pending, limit))
                taken = {key: self._pending.pop(key) for key in keys}
            complete = self._complete and not self._pending
            self._told |= complete
        return TierChanges(
            added=tuple(key for key, added in taken.items() if added),
            removed=tuple(key for key, added in taken.items() if not added),
            complete=complete,
        )

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which keys are known."""
        entries = self._entries
        return [key in entries for key in keys]
