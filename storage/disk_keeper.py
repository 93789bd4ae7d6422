"""The disk tier's background thread.

Walks the directory at the start and every few minutes after, which rebuilds
the index, recounts the shared usage counter, sweeps what crashes left behind
and finds the oldest records of others; between walks it follows the journal,
writes last uses to the files, and holds the capacity.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from typing import TYPE_CHECKING

from .disk_journal import JournalReader
from .disk_layout import (
    CONTROL,
    WITHOUT_CAP_BYTES,
    iter_nameless_tmp_files,
    iter_quarantine,
    iter_record_files,
    iter_tmp_files,
    place_of,
    record_path,
)
from .disk_place import write_capacity
from .disk_tidy import remove_empty
from .disk_usage import UsageUnknown
from .errors import KVTierError, TierUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .disk_evict import Evictor
    from .disk_index import Index
    from .disk_layout import RecordFile
    from .disk_usage import Owner, Usage

_LOG = logging.getLogger("kvtier.disk")
_WALK_EVERY_S = 300.0
_WALK_SPACING = 50.0  # of what a walk takes, between walks that only make the counter exact
_TOUCHES_A_POLL = 2000
_BREATHE_FILES = 512  # the walk lets other threads run this often
_EMPTY_FOLDERS = 20_000  # removed after one walk at most
_FORGOTTEN_S = 600.0  # a small file that is half-written for so long has no writer any more


class Keeper:
    """Keeps index, counter and directory in step. `walk` is thread-safe."""

    def __init__(
        self,
        root: str,
        folder: str,
        index: Index,
        usage: Usage,
        owner: Owner,
    ) -> None:
        """Start nothing yet; ``folder`` is the rank's folder that ``index`` is about."""
        self._root = root
        self._folder = folder
        self._own = place_of(folder)
        self._index = index
        self._usage = usage
        self._owner = owner
        self._walking = threading.Lock()
        self._walks = 0
        self._wanted = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.evictor: Evictor  # set by the tier: the two need each other
        self.walked = threading.Event()  # the first walk is done
        self._problem = ""
        self._exact = True  # the last recount was not disturbed by writes

    def start(
        self, capacity_bytes: int, poll_s: float, prepare: Callable[[], None] = lambda: None
    ) -> None:
        """Start the thread; it calls ``prepare`` first, which may raise `OSError`."""
        self._thread = threading.Thread(
            target=self._run,
            args=(capacity_bytes, poll_s, prepare),
            name="kvtier-disk",
            daemon=True,
        )
        self._thread.start()

    def want_walk(self) -> None:
        """Ask for a walk soon."""
        self._wanted.set()

    def close(self, timeout_s: float) -> None:
        """Stop the thread; wait a bounded time for it. Idempotent."""
        self._stop.set()
        self._wanted.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self, capacity_bytes: int, poll_s: float, prepare: Callable[[], None]) -> None:
        with contextlib.suppress(OSError):
            prepare()
        reader = JournalReader(self._folder)  # before the walk: nothing falls in between
        self._tell_capacity(capacity_bytes)
        next_walk_s = time.monotonic()
        while not self._stop.is_set():
            due = time.monotonic() >= next_walk_s or self._wanted.is_set()
            with self._reported():
                if due:
                    self._wanted.clear()
                    next_walk_s = time.monotonic() + _WALK_EVERY_S
                    self.walk()
                    if not self._exact and self._usage.last_used_bytes > 0.9 * capacity_bytes:
                        # What is counted too much would be evicted for nothing.
                        next_walk_s = time.monotonic() + max(
                            2.0, _WALK_SPACING * self.evictor.others.walk_s
                        )
                self._follow(reader)
                self._write_touches()
                self._hold_capacity(capacity_bytes)
            if self._problem:
                next_walk_s = 0.0  # tried again at the next poll: it comes back by itself
            self._wanted.wait(poll_s)
        with self._reported():
            self._write_touches()
        reader.close()

    def _tell_capacity(self, capacity_bytes: int) -> None:
        """Say in the store how much engines may put there, for commands."""
        if capacity_bytes < WITHOUT_CAP_BYTES:
            with contextlib.suppress(OSError):
                write_capacity(self._root, capacity_bytes, f"{self._owner.tmp_name()}.tmp")

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        """Keep the thread alive; one line for each change of state."""
        problem = ""
        try:
            yield
        except UsageUnknown:
            self._wanted.set()
            self._stop.wait(0.05)
        except (OSError, KVTierError) as error:
            problem = str(error)
        if problem != self._problem:
            self._problem = problem
            _LOG.warning("disk tier %s: %s", self._root, problem or "works again")

    def walk(self) -> None:
        """Walk the whole root; blocks while another thread's walk runs, and then takes its result.

        Raises:
            TierUnavailable, OSError.
        """
        before = self._walks
        with self._walking:
            if self._walks > before or self._stop.is_set():
                return  # one ended while this thread waited
            self._index.begin_walk()
            count = _Count()
            try:
                mark = self._usage.begin_recount()
                self._sweep()
            except (OSError, TierUnavailable) as error:
                mark, count.problem = -1, error  # a read-only disk can be read all the same
            self._see_own(count)
            if not self._stop.is_set():
                self._drop_unseen()
                self._index.set_complete()  # whoever waits for it does not wait for the others'
            self.evictor.others.replace(self._foreign(count))
            if self._stop.is_set():
                return
            try:
                if count.problem is not None:
                    raise count.problem
                quarantined = sum(file_bytes for _, file_bytes, _ in iter_quarantine(self._root))
                self._exact = self._usage.finish_recount(mark, count.total_bytes + quarantined)
            finally:
                self._walks += 1
                self.walked.set()
            remove_empty(self._root, count.empty, without=self._own[0])

    def _see_own(self, count: _Count) -> None:
        """Put own records into the index."""
        namespace, rank = self._own
        files = iter_record_files(self._root, namespace, rank, on_empty=count.note_empty)
        for file in self._counted(files, count):
            self._index.add(file.key, file.file_bytes, file.used_at_s, fresh=False)

    def _foreign(self, count: _Count) -> Iterator[RecordFile]:
        """Yield the others' records, but what is pinned."""
        others = iter_record_files(self._root, without=self._own, on_empty=count.note_empty)
        for file in self._counted(others, count):
            if not self.evictor.pins.holds(file.namespace, file.key):
                yield file

    def _counted(self, files: Iterator[RecordFile], count: _Count) -> Iterator[RecordFile]:
        for number, file in enumerate(files):
            if self._stop.is_set():
                return
            if number % _BREATHE_FILES == _BREATHE_FILES - 1:
                time.sleep(0.0005)
            count.total_bytes += file.file_bytes
            yield file

    def _drop_unseen(self) -> None:
        for key, entry in self._index.unseen():
            if not os.path.lexists(record_path(self._folder, key)):
                self._index.discard(key, entry)

    def _sweep(self) -> None:
        """Remove temporary files whose writers are dead."""
        files = list(iter_tmp_files(self._root))  # before the owners: the living come first
        living, _ = self._owner.others()
        for path, name, _ in files:
            if name.rpartition("-")[0] not in living:
                with contextlib.suppress(OSError):
                    os.unlink(path)
        for path, written_at_s in iter_nameless_tmp_files(self._root):
            if time.time() - written_at_s > _FORGOTTEN_S:
                with contextlib.suppress(OSError):
                    os.unlink(path)

    def _follow(self, reader: JournalReader) -> None:
        news = reader.news()
        for key in news.keys:
            self.look(key)
        if news.all or (len(self._index) and not os.path.isdir(f"{self._root}/{CONTROL}")):
            self._wanted.set()

    def look(self, key: bytes) -> bool:
        """Make the index say of one key what the directory says; return whether it is there."""
        seen = self._index.get(key)
        try:
            status = os.lstat(record_path(self._folder, key))
        except (FileNotFoundError, NotADirectoryError):
            if seen is not None:
                self._index.discard(key, seen)
            return False
        except OSError:
            return seen is not None
        self._index.add(key, status.st_size, status.st_mtime, fresh=False)
        return True

    def _write_touches(self) -> None:
        for key, used_at_s in self._index.take_touched(_TOUCHES_A_POLL):
            with contextlib.suppress(FileNotFoundError):
                os.utime(
                    record_path(self._folder, key), (used_at_s, used_at_s), follow_symlinks=False
                )

    def _hold_capacity(self, capacity_bytes: int) -> None:
        """Evict what is too much: the capacity may be smaller than at the last start."""
        if self._usage.used_bytes() > capacity_bytes:
            self.evictor.make_room(0, capacity_bytes)


class _Count:
    """Sum of a walk."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self.problem: Exception | None = None
        self.empty: list[str] = []  # folders in which nothing lies, a bounded number

    def note_empty(self, folder: str) -> None:
        if len(self.empty) < _EMPTY_FOLDERS:
            self.empty.append(folder)
