"""The cache epoch kept on a shared tier, as the scheduler half sees it.

A thread asks and raises; the engine's thread only looks, but for a bounded wait
in `raise_epoch`. Until the tier has answered the epoch is not known, and what
lies there is neither read nor written: after a clear that did not reach the
tier, that is how long it is left alone.

Now and then it is asked for again: a number that has gone back (a key that the
server evicted, an old snapshot) is put where it was, so that what a clear took
away does not come back. Another engine's clear is not followed: it may have new
weights that this one lacks, and nothing here would tell their KV apart.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial

from ..storage.errors import KVTierError

logger = logging.getLogger("kvtier.namespace")

MIN_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0
ASK_AGAIN_S = 30.0


class SharedEpoch:
    """One number on one tier.

    Args:
        read: returns it; blocks, raises `KVTierError`.
        raise_by: adds to it and returns the new one; likewise.
    """

    def __init__(self, read: Callable[[], int], raise_by: Callable[[int], int]) -> None:
        self._read = read
        self._raise_by = raise_by
        self._cond = threading.Condition()
        self._value: int | None = None
        self._highest = 0  # that was ever seen, also of other engines; the thread's own
        self._told = 0  # another engine's that was logged; the thread's own
        self._clears = 0  # asked for so far
        self._raised = 0  # of these, those that reached the tier
        self._closed = False
        threading.Thread(target=self._run, name="kvtier-epoch", daemon=True).start()

    @property
    def value(self) -> int | None:
        """The epoch; None while it is not known. Never blocks."""
        return self._value

    def raise_epoch(self, wait_s: float) -> bool:
        """Have it raised; True when it was, within ``wait_s``. Else it is tried again and again."""
        with self._cond:
            self._clears += 1
            wanted = self._clears
            self._value = None
            self._cond.notify_all()
            return self._cond.wait_for(lambda: self._raised >= wanted, wait_s)

    def _run(self) -> None:
        backoff_s = MIN_BACKOFF_S
        while True:
            with self._cond:
                self._cond.wait_for(lambda: self._closed or self._value is None, ASK_AGAIN_S)
                if self._closed:
                    return
                clears, owed = self._clears, self._clears > self._raised
            try:
                value = self._raise_by(1) if owed else self._read()
                least = self._highest + owed
                if value < least:
                    logger.warning(
                        "kvtier: the shared epoch went back from %d to %d; it is put right",
                        self._highest,
                        value - owed,
                    )
                    value = self._raise_by(least - value)
                self._highest = value
            except KVTierError as err:
                logger.debug("kvtier: the shared epoch is not known: %s", err)
            except Exception:
                logger.exception("kvtier: asking for the shared epoch failed unexpectedly")
            else:
                backoff_s = MIN_BACKOFF_S
                with self._cond:
                    self._raised = clears
                    if clears == self._clears and self._value is None:
                        self._value = value
                    self._cond.notify_all()
                    passed_by = self._value is not None and self._value < value != self._told
                if passed_by:
                    self._told = value
                    logger.warning(
                        "kvtier: another engine has cleared the shared tier (epoch %d, here %s) "
                        "and may have new weights; restart this one to share with those to come",
                        value,
                        self._value,
                    )
                continue
            with self._cond:
                # a new clear is tried at once: somebody waits for it
                self._cond.wait_for(partial(self._stirred, clears), backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _stirred(self, clears: int) -> bool:
        return self._closed or self._clears > clears

    def close(self) -> None:
        """Stop the thread; does not wait for a call under way."""
        with self._cond:
            self._closed = True
            self._cond.notify_all()
