"""Folders that may not answer: whoever touches a mount whose server is gone hangs, for good.

An engine's start looks at its folders before it uses them on its own thread. What is done to
them later is done on threads that may hang.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time

from ..storage.errors import KVTierError
from .epoch import in_time

logger = logging.getLogger("kvtier")

WAIT_S = 2.0
ASK_AGAIN_S = 60.0  # one that was silent is not waited for again so soon
_silent: dict[str, float] = {}  # since when


def answers(path: str) -> bool:
    """Whether a folder can be looked at in time, be it that it is not there; one line if not."""
    since_s = _silent.get(path)
    if since_s is not None and time.monotonic() - since_s < ASK_AGAIN_S:
        return False
    try:
        in_time(lambda: _look(path), WAIT_S)
    except KVTierError:
        _silent[path] = time.monotonic()
        logger.warning("kvtier: %s does not answer; the engine starts without a look at it", path)
        return False
    _silent.pop(path, None)
    return True


def _look(path: str) -> bool:
    with contextlib.suppress(OSError, ValueError):
        os.stat(path)
    return True
