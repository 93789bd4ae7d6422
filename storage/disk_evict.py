"""Making room in a store that several engines share.

The cap is of the whole root, so victims come from all namespaces and ranks,
the least recently used first. One process evicts at a time. Its own records it
knows from the index; those of other namespaces and ranks from the last walk of
the directory, which keeps the oldest few thousand of them. Before a file goes,
its modification time is looked at once more: another engine may have used it.
What is pinned stays.
"""

from __future__ import annotations

import heapq
import os
import stat
import time
from typing import TYPE_CHECKING

from .disk_journal import JournalWriter
from .disk_layout import (
    CONTROL,
    QUARANTINE,
    iter_quarantine,
    make_folders,
    place_of,
    rank_folder,
    record_path,
)
from .disk_place import remove_all
from .disk_usage import LockedFile
from .pins import PinnedKeys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .disk_index import Entry, Index
    from .disk_layout import RecordFile
    from .disk_usage import Usage

_KEEP_OTHERS = 4096
_MTIME_SLACK_S = 0.001  # rounding of times on their way through a file system
_MAX_QUARANTINED = 32
_QUARANTINE_SHARE = 16  # of the capacity, at most one part in this
_STALE_S = 1.0
_WALK_SPACING = 20.0


class OldestOthers:
    """The least recently used records of other namespaces and ranks, from one walk."""

    def __init__(self) -> None:
        """Know nothing: a walk is needed before anything is evicted."""
        self._heap: list[tuple[float, str, RecordFile]] = []
        self.all_kept = False
        self.walked_at_s: float | None = None  # monotonic time when the walk began
        self.walk_s = 0.0

    def replace(self, files: Iterable[RecordFile]) -> None:
        """Keep the oldest of ``files``; they are consumed one by one, as the walk finds them."""
        began_s = time.monotonic()
        kept: list[tuple[float, str, RecordFile]] = []
        all_kept = True
        for file in files:
            item = (-file.used_at_s, file.path, file)  # a heap with the newest on top
            if len(kept) < _KEEP_OTHERS:
                heapq.heappush(kept, item)
            else:
                all_kept = False
                heapq.heappushpop(kept, item)
        heap = [(file.used_at_s, path, file) for _, path, file in kept]
        heapq.heapify(heap)
        self._heap, self.all_kept = heap, all_kept
        self.walked_at_s, self.walk_s = began_s, time.monotonic() - began_s

    def oldest(self) -> RecordFile | None:
        """Return the oldest that is left."""
        return self._heap[0][2] if self._heap else None

    def pop(self) -> None:
        """Drop the oldest."""
        heapq.heappop(self._heap)

    def used_later(self, used_at_s: float) -> None:
        """Put the oldest back with the newer time that its file says."""
        _, path, file = self._heap[0]
        heapq.heapreplace(self._heap, (used_at_s, path, file))

    def oldest_used_at_s(self) -> float:
        """Return the last use of the oldest."""
        return self._heap[0][0]


class Evictor:
    """Removes least recently used records of a whole root. Thread-safe, blocking."""

    def __init__(
        self,
        root: str,
        folder: str,
        usage: Usage,
        index: Index,
        journal: JournalWriter,
        walk: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        """Know where to look.

        Args:
            root: the store.
            folder: the rank's folder that ``index`` is about.
            usage: the shared counter.
            index: own records.
            journal: of ``folder``.
            walk: walks the root now, refreshing ``others``.
            clock: Unix time.
        """
        self._root = root
        self._folder = folder
        self._usage = usage
        self._index = index
        self._journal = journal
        self._walk = walk
        self._clock = clock
        self._lock = LockedFile(f"{root}/{CONTROL}/evict.lock")
        self._journals: dict[str, JournalWriter] = {}
        self._namespace, _ = place_of(folder)
        self._began_s = 0.0  # of the eviction that goes on
        self.others = OldestOthers()
        self.pins = PinnedKeys(root, clock)

    def make_room(self, file_bytes: int, capacity_bytes: int, *, at_least: int = 0) -> bool:
        """Evict until ``file_bytes`` fit below the capacity; False when nothing is left to evict.

        Also evicts ``at_least`` bytes whatever the counter says (a full disk).
        Waits for another evictor, a bounded time.

        Raises:
            UsageUnknown, TierUnavailable, OSError.
        """
        with self._lock.locked():
            self.pins.refresh(capacity_bytes)
            self._began_s = self._clock()
            freed = 0
            # A little more than asked, so that not every put becomes an evictor.
            slack = min(capacity_bytes // 64, 8 * file_bytes)
            used = self._usage.used_bytes()
            if used + file_bytes <= capacity_bytes and not at_least:
                return True  # another one made room while we waited
            while used + file_bytes + slack > capacity_bytes or freed < at_least:
                gone = self._drop_quarantined() or self._drop_oldest()
                used = self._usage.used_bytes()  # also when a walk has found less than was counted
                if gone is None:
                    break
                freed += gone
            return used + file_bytes <= capacity_bytes and freed >= at_least

    def _drop_quarantined(self) -> int:
        """Unlink the oldest in quarantine; 0 when it is empty."""
        files = sorted(iter_quarantine(self._root), key=lambda file: file[2])
        return self._unlink(files[0][0]) if files else 0

    def trim_quarantine(self, capacity_bytes: int) -> None:
        """Keep the quarantine small: the oldest go.

        Raises:
            TierUnavailable, OSError.
        """
        files = sorted(iter_quarantine(self._root), key=lambda file: file[2])
        held = sum(file[1] for file in files)
        for path, file_bytes, _ in files:
            if len(files) <= _MAX_QUARANTINED and held <= capacity_bytes // _QUARANTINE_SHARE:
                return
            files = files[1:]
            held -= file_bytes
            self._unlink(path)

    def _drop_oldest(self) -> int | None:
        """Evict one record, or learn that it is not the oldest (0); None when there is none."""
        own, other = self._oldest_own(), self._oldest_other()
        if self._walk_first(own[1].used_at_s if own else None):
            self._walk()
            own, other = self._oldest_own(), self._oldest_other()
        if other is not None and (own is None or self.others.oldest_used_at_s() < own[1].used_at_s):
            return self._drop_other(other)
        if own is None:
            return None
        return self._drop_own(*own)

    def _oldest_own(self) -> tuple[bytes, Entry] | None:
        """Return the oldest own record that is not pinned; pinned ones count as used just now."""
        while (own := self._index.oldest()) is not None and self.pins.holds(
            self._namespace, own[0]
        ):
            if own[1].used_at_s >= self._began_s:
                return None  # nothing older is left but what is pinned
            self._index.used_later(own[0], self._began_s)
        return own

    def _oldest_other(self) -> RecordFile | None:
        while (file := self.others.oldest()) is not None and self.pins.holds(
            file.namespace, file.key
        ):
            self.others.pop()
        return file

    def _walk_first(self, own_oldest_s: float | None) -> bool:
        """Whether what is known of the others cannot tell who is the oldest.

        What they wrote since the last walk is unknown, and may be older than all that is left
        here; but walks cost, so they are spaced by many times what the last one took.
        """
        others = self.others
        if others.oldest() is not None:
            return False
        if others.walked_at_s is None or not others.all_kept or own_oldest_s is None:
            return True
        age_s = time.monotonic() - others.walked_at_s
        since_s = self._clock() - age_s
        return own_oldest_s > since_s and age_s > max(_STALE_S, _WALK_SPACING * others.walk_s)

    def _drop_own(self, key: bytes, known: Entry) -> int:
        path = record_path(self._folder, key)
        status = _look(path)
        if status is None:
            self._index.discard(key)
            return 0
        if status.st_mtime > known.used_at_s + _MTIME_SLACK_S:
            self._index.used_later(key, status.st_mtime)
            return 0
        freed = self._unlink(path, known.file_bytes)
        self._index.discard(key)
        self._journal.append(key)
        return freed

    def _drop_other(self, file: RecordFile) -> int:
        status = _look(file.path)
        if status is not None and status.st_mtime > self.others.oldest_used_at_s() + _MTIME_SLACK_S:
            self.others.used_later(status.st_mtime)
            return 0
        self.others.pop()
        if status is None:
            return 0
        freed = self._unlink(file.path, file.file_bytes)
        self._journal_of(rank_folder(self._root, file.namespace, file.rank)).append(file.key)
        return freed

    def _journal_of(self, folder: str) -> JournalWriter:
        if len(self._journals) >= 64:
            self._close_journals()
        return self._journals.setdefault(folder, JournalWriter(folder))

    def _unlink(self, path: str, counted_bytes: int | None = None) -> int:
        """Unlink a victim; return the bytes freed, 0 when somebody else was quicker."""
        try:
            return self._usage.unlink(path, counted_bytes)
        except FileNotFoundError:
            return 0
        except IsADirectoryError:
            remove_all(path)
            return 0

    def quarantine(self, path: str, name: str, counted_bytes: int | None) -> bool:
        """Move a damaged record out of sight, or remove what is none; return whether it was one.

        Args:
            path: where it lies.
            name: file name in quarantine.
            counted_bytes: what the counter was told of it, or None.

        Raises:
            TierUnavailable, OSError: it is still there.
        """
        status = _look(path)
        if status is None:
            return True
        if not stat.S_ISREG(status.st_mode):
            remove_all(path)
            return False
        if counted_bytes is not None and status.st_size > counted_bytes:
            self._unlink(path, counted_bytes)  # grown behind our back: no room is reserved for it
            return True
        folder = f"{self._root}/{QUARANTINE}"
        make_folders(folder)
        os.rename(path, f"{folder}/{name}")
        return status.st_size == counted_bytes

    def _close_journals(self) -> None:
        for journal in self._journals.values():
            journal.close()
        self._journals.clear()

    def close(self) -> None:
        """Close descriptors. Idempotent."""
        self._lock.close()
        self._close_journals()


def _look(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
