"""The cache epoch of a namespace: a number in the store, raised by each clear.

It is part of the namespace's digest, so that raising it makes everything
stored before unreachable at once, on this engine and after any restart.
"""

from __future__ import annotations

import contextlib
import os
import tempfile

from ..storage.errors import TierUnavailable

FOLDER = "epochs"


def read_epoch(root: str, name: str) -> int:
    """Return the epoch kept in ``root`` for the base digest ``name``; 0 when there is none.

    A file that is no number counts as an epoch that no clear has ever reached,
    made from its content: what was stored under a lost epoch is not served again.
    """
    try:
        with open(os.path.join(root, FOLDER, name), "rb") as file:
            data = file.read(64)
    except OSError:
        return 0
    text = data.strip()
    return int(text) if text.isdigit() and len(text) < 19 else 1 << 60 | len(data)


def raise_epoch(root: str, name: str) -> int:
    """Raise the epoch durably and return the new one.

    Raises:
        TierUnavailable: it could not be written; the message says why.
    """
    epoch = read_epoch(root, name) + 1
    folder = os.path.join(root, FOLDER)
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        fd, temporary = tempfile.mkstemp(dir=folder)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(b"%d\n" % epoch)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, os.path.join(folder, name))
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as err:
        raise TierUnavailable(f"cannot raise the cache epoch in {folder}: {err.strerror}") from err
    return epoch
