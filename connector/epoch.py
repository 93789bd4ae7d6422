"""The cache epoch of a namespace: a number in the store, raised by each clear.

It is part of the namespace's digest, so that raising it makes everything
stored before unreachable at once, on this engine and after any restart.
"""

from __future__ import annotations

import os
import secrets
import stat
import threading
from collections.abc import Callable
from typing import TypeVar

from ..storage.disk_layout import CONTROL, FILE_MODE, make_folders
from ..storage.disk_usage import LockedFile
from ..storage.errors import KVTierError, TierUnavailable

FOLDER = "epochs"
_NO_NUMBER = 1 << 60  # what is in the file counts as an epoch that no clear ever reaches
_LOCK_S = 1.0
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

T = TypeVar("T")


def read_epoch(root: str, name: str) -> int:
    """Return the epoch kept in ``root`` for the base digest ``name``; 0 when there is none.

    A file that is no number counts as an epoch that no clear has ever reached,
    made from its content: what was stored under a lost epoch is not served again.

    Raises:
        TierUnavailable: it cannot be told now; what lies in ``root`` may have been cleared.
    """
    try:
        fd = os.open(os.path.join(root, FOLDER, name), _READ)
        try:
            data = os.read(fd, 64) if stat.S_ISREG(os.fstat(fd).st_mode) else b"no file"
        finally:
            os.close(fd)
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except OSError as err:
        raise TierUnavailable(f"cannot read the cache epoch in {root}: {err.strerror}") from err
    text = data.strip()
    return int(text) if text.isdigit() and len(text) < 19 else _NO_NUMBER | len(data)


def raise_epoch(root: str, name: str) -> int:
    """Raise the epoch durably and return the new one, which no other clear of the folder gets.

    Raises:
        TierUnavailable: it could not be written; the message says why.
    """
    folder = os.path.join(root, FOLDER)
    lock = LockedFile(os.path.join(root, CONTROL, "epochs.lock"))
    try:
        with lock.locked(_LOCK_S):
            epoch = read_epoch(root, name) + 1
            make_folders(folder)
            _write_durably(folder, name, b"%d\n" % epoch)
    except OSError as err:
        raise TierUnavailable(f"cannot raise the cache epoch in {folder}: {err.strerror}") from err
    finally:
        lock.close()
    return epoch


def _write_durably(folder: str, name: str, data: bytes) -> None:
    # One name for all: under the lock nobody else writes, and who was killed leaves one at most.
    temporary = os.path.join(folder, f".{name}.tmp")
    fd = os.open(temporary, _WRITE, FILE_MODE)
    try:
        os.write(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(temporary, os.path.join(folder, name))
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def epoch_apart() -> int:
    """Return an epoch that nobody else has or ever will, for a run whose own is not known.

    Below nought, so that what is stored under it counts as cleared once the run is over.
    """
    return -1 - secrets.randbits(60)


def in_time(call: Callable[[], T], wait_s: float) -> T:
    """Return what ``call`` returns, on a thread of its own that is left behind when it hangs.

    Raises:
        TierUnavailable: not within ``wait_s``; or whatever of ours ``call`` raises.
    """
    results: list[T] = []
    problems: list[KVTierError] = []
    over = threading.Event()

    def run() -> None:
        try:
            results.append(call())
        except KVTierError as err:
            problems.append(err)
        finally:
            over.set()

    try:
        threading.Thread(target=run, name="kvtier-epoch-file", daemon=True).start()
    except RuntimeError as err:
        raise TierUnavailable(f"no thread for the cache epoch: {err}") from None
    if not over.wait(wait_s):
        raise TierUnavailable("the folder of the cache epoch does not answer")
    if problems:
        raise problems[0]
    if not results:
        raise TierUnavailable("the cache epoch could not be had")
    return results[0]
