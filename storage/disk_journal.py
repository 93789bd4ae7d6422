"""How engines on one directory hear of each other's records.

Each namespace and rank has a journal: one line for each key whose file came or
went, appended with a single O_APPEND write. A line only says "look at this
file again"; the reader looks at the file itself, so lines that are late,
doubled or out of order do no harm. A line that is lost costs time: the next
walk of the directory finds the change.

A journal that grew is replaced by an empty one of the next generation. Who
still writes to the old file sees that it lost its name and writes again; who
reads it reads it to its end before turning to the new one.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from dataclasses import dataclass

from .disk_layout import FILE_MODE, TMP_FOLDER, TMP_SUFFIX, make_folders
from .disk_usage import is_at
from .errors import KVTierError
from .key import key_name, parse_key_name

JOURNAL = "journal"
_ROTATE_BYTES = 256 << 10
_READ_BYTES = 64 << 10
_MAX_KEYS = 20_000  # in one read; more means a walk is cheaper
_LOOK_AT_ALL = b"*"
_GENERATION = re.compile(rb"#([0-9]{1,18})")
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class News:
    """Keys to look at; ``all`` when only a walk of the directory will do."""

    keys: frozenset[bytes]
    all: bool


def mentions(folder: str, key: bytes) -> bool:
    """Return whether the journal of a rank's folder tells of a key; old lines are forgotten."""
    try:
        fd = os.open(f"{folder}/{JOURNAL}", os.O_RDONLY | _FLAGS)
    except OSError:
        return False
    try:
        with os.fdopen(fd, "rb") as file:
            return key_name(key).encode() in file.read(2 * _ROTATE_BYTES).split(b"\n")
    except OSError:
        return False


class JournalWriter:
    """Appends to one journal. Thread-safe, never raises: a lost line only costs time."""

    def __init__(self, folder: str) -> None:
        """Open nothing yet; ``folder`` is a rank's folder."""
        self._path = f"{folder}/{JOURNAL}"
        self._fd = -1
        self._lock = threading.Lock()

    def append(self, key: bytes) -> None:
        """Say that a key's file came or went."""
        self._append(key_name(key).encode() + b"\n")

    def append_all(self) -> None:
        """Say that many came or went."""
        self._append(_LOOK_AT_ALL + b"\n")

    def _append(self, line: bytes) -> None:
        with self._lock, contextlib.suppress(OSError):
            for _ in range(3):
                if self._fd < 0:
                    self._fd = _open_append(self._path)
                os.write(self._fd, line)
                if is_at(self._fd, self._path):
                    if os.fstat(self._fd).st_size > _ROTATE_BYTES:
                        self._rotate()
                    return
                self._drop()

    def _rotate(self) -> None:
        """Put an empty journal of the next generation in the place of this one."""
        # Nobody's mark is in the name: who sweeps may take it away, and the next turn tries again.
        folder = f"{os.path.dirname(self._path)}/{TMP_FOLDER}"
        fresh = f"{folder}/{JOURNAL}-{os.getpid()}{TMP_SUFFIX}"
        generation = _generation_at(self._path) + 1
        make_folders(folder)
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _FLAGS, FILE_MODE)
        try:
            os.write(fd, b"#%d\n" % generation)
        finally:
            os.close(fd)
        os.rename(fresh, self._path)
        self._drop()

    def _drop(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        with self._lock:
            self._drop()


def _open_append(path: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | _FLAGS
    try:
        return os.open(path, flags, FILE_MODE)
    except FileNotFoundError:
        make_folders(os.path.dirname(path))
        return os.open(path, flags, FILE_MODE)


def _generation_at(path: str) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | _FLAGS)
    except OSError:
        return 0
    try:
        return _generation_of(os.pread(fd, 32, 0))
    finally:
        os.close(fd)


def _generation_of(head: bytes) -> int:
    match = _GENERATION.match(head)
    return int(match[1]) if match else 0


class JournalReader:
    """Follows one journal. One thread only; never raises."""

    def __init__(self, folder: str) -> None:
        """Start at the journal's present end: what is there already, a walk will find."""
        self._path = f"{folder}/{JOURNAL}"
        self._fd = -1
        self._offset = 0
        self._rest = b""
        self._generation = 0
        self._open()
        if self._fd >= 0:
            self._offset = os.fstat(self._fd).st_size

    def _open(self) -> None:
        self._offset, self._rest = 0, b""
        try:
            self._fd = os.open(self._path, os.O_RDONLY | _FLAGS)
            self._generation = _generation_of(os.pread(self._fd, 32, 0))
        except OSError:
            self.close()

    def news(self) -> News:
        """Return what was written since the last call."""
        keys: set[bytes] = set()
        everything = False
        if self._fd >= 0:
            replaced = not is_at(self._fd, self._path)
            everything = self._read(keys)
            if not replaced:
                return News(frozenset(keys), everything)
            before = self._generation
            self.close()
            self._open()
            # One generation on is the usual turn; anything else means lines we never saw.
            everything = everything or self._generation != before + 1
        else:
            self._open()
            everything = self._fd >= 0 and self._generation > 0  # it lost lines before we looked
        if self._fd >= 0:
            everything = self._read(keys) or everything
        return News(frozenset(keys), everything)

    def _read(self, keys: set[bytes]) -> bool:
        """Add the keys up to the file's end; return whether a walk is needed."""
        everything = False
        while True:
            try:
                data = os.pread(self._fd, _READ_BYTES, self._offset)
            except OSError:
                return True
            if not data:
                return everything
            self._offset += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._rest = self._rest[-256:]
            for line in lines:
                everything = _take_line(line, keys) or everything
            if len(keys) > _MAX_KEYS:
                keys.clear()
                everything = True

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _take_line(line: bytes, keys: set[bytes]) -> bool:
    """Add a line's key; return whether it says to look at everything."""
    if line == _LOOK_AT_ALL:
        return True
    with contextlib.suppress(KVTierError, UnicodeDecodeError):
        keys.add(parse_key_name(line.decode()))
    return False
