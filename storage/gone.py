"""What a catalog no longer has, and why: so that a miss can be told from one that never was."""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum

MAX_KEYS = 1 << 16  # some 10 MB


class Why(str, Enum):
    """Why a chunk is nowhere."""

    EVICTED = "evicted"  # it was somewhere: evicted, deleted, or taken out of use since
    DROPPED = "dropped"  # a save of it, or its write below RAM, found no room


class Gone:
    """Remembers the newest `MAX_KEYS` of them. Belongs to a catalog's thread."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._why: OrderedDict[bytes, Why] = OrderedDict()

    def note(self, key: bytes, why: Why) -> None:
        """A chunk is nowhere now."""
        self._why[key] = why
        self._why.move_to_end(key)
        if len(self._why) > self._max_keys:
            self._why.popitem(last=False)

    def forget(self, key: bytes) -> None:
        """A chunk is back."""
        self._why.pop(key, None)

    def why(self, key: bytes) -> Why | None:
        """Return why a chunk is nowhere, None when that is not known."""
        return self._why.get(key)

    def clear(self) -> None:
        """Forget all: what was cleared is not gone, it never was."""
        self._why.clear()
