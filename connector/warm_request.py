"""A wish to have records in RAM, from whoever asks to the scheduler thread that plans it.

Shared by two threads: the control thread makes and watches it, the scheduler thread works on it.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

MAX_KEYS = 16_384


@dataclass(slots=True)
class WarmRequest:
    """Records of one tier to bring up into RAM, the most wanted first.

    Attributes:
        tier: where they are: ``disk`` or ``redis``.
        namespace: 16 bytes; an engine of another one leaves the request alone.
        keys: chunk key, and the token count at which its record ends.
    """

    tier: str
    namespace: bytes
    keys: tuple[tuple[bytes, int], ...]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _outcome: Counter[str] = field(default_factory=Counter)
    _state: str = "waiting"
    _cancelled: bool = False

    # -- scheduler thread --------------------------------------------------

    def begin(self) -> None:
        """Say that the scheduler has seen it."""
        with self._lock:
            if self._state == "waiting":
                self._state = "running"

    def count(self, what: str, n: int = 1) -> None:
        """Count chunks by what became of them."""
        with self._lock:
            self._outcome[what] += n

    def end(self, state: str) -> None:
        """Say that nothing more will happen: ``done``, ``cancelled`` or ``other_namespace``."""
        with self._lock:
            self._state = state

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for it any more."""
        return self._cancelled

    # -- control thread ----------------------------------------------------

    def cancel(self) -> None:
        """Nobody waits any more: nothing new is begun."""
        self._cancelled = True

    def as_dict(self) -> dict[str, Any]:
        """Return how far it is."""
        with self._lock:
            outcome = dict(sorted(self._outcome.items()))
            return {
                "state": self._state,
                "chunks": len(self.keys),
                "loaded": outcome.pop("loaded", 0),
                "in_ram": outcome.pop("in_ram", 0),
                "skipped": outcome,
            }

    @property
    def over(self) -> bool:
        """Whether `end` was called."""
        with self._lock:
            return self._state not in {"waiting", "running"}
