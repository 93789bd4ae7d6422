"""A tier with everything around it: breakers, queues, counts, log lines.

Guarantees: no exception of a tier gets past a link; one log line for each
change of state; while the tier is off, loads fail at once and saves are
dropped and counted; a probe brings it back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from .breaker import Breaker, BreakerState
from .counts import Counts
from .errors import (
    DamageReason,
    RecordDamaged,
    RecordMissing,
    RecordRefused,
    TierRefused,
    TierUnavailable,
)
from .jobs import ChunkStatus
from .lanes import Lane
from .tier import Buffers, RecordSpec, Tier, TierChanges

logger = logging.getLogger("kvtier.tier")

CLOSE_S = 6.0  # for a tier to give everything back
_MAX_DISTRUSTED = 1 << 16


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Bounds of one tier's link."""

    load_threads: int = 4
    save_threads: int = 2
    save_queue_bytes: int = 1 << 30
    failures_to_open: int = 3
    min_backoff_s: float = 1.0
    max_backoff_s: float = 30.0
    hang_s: float = 20.0
    max_stuck_threads: int = 4


class TierLink:
    """One lower tier as the transfer uses it.

    Args:
        tier: the tier itself; the link closes it.
        counts: where to count.
        clock: monotonic seconds.
    """

    def __init__(
        self, tier: Tier, counts: Counts, clock: Callable[[], float], limits: LinkLimits
    ) -> None:
        self.tier = tier
        self.name = tier.name
        self._counts = counts
        self._clock = clock
        self._closing = False
        self._distrust_lock = threading.Lock()
        # Records that are there and must not count as such: the next save replaces them.
        # True: their bytes are wrong although they read well, so they are not read.
        self._distrusted: dict[bytes, bool] = {}
        backoff = {"min_backoff_s": limits.min_backoff_s, "max_backoff_s": limits.max_backoff_s}
        self.breaker = Breaker(clock, self._on_outage, threshold=limits.failures_to_open, **backoff)
        self.write_breaker = Breaker(clock, self._on_refusal, threshold=1, **backoff)
        self.load_lane = Lane(
            f"{self.name}-load",
            limits.load_threads,
            clock,
            hang_s=limits.hang_s,
            max_stuck=limits.max_stuck_threads,
        )
        self.save_lane = Lane(
            f"{self.name}-save",
            limits.save_threads,
            clock,
            max_bytes=limits.save_queue_bytes,
            hang_s=limits.hang_s,
            max_stuck=limits.max_stuck_threads,
        )

    @property
    def online(self) -> bool:
        """Whether loads are worth trying."""
        return self.breaker.closed and not self._closing

    @property
    def writable(self) -> bool:
        """Whether saves are worth trying; after a refusal, whether one may try again."""
        return self.online and self.write_breaker.state is not BreakerState.OPEN

    def _on_outage(self, is_open: bool, reason: str) -> None:
        self._counts.add(
            f"breaker_opened.{self.name}" if is_open else f"breaker_closed.{self.name}"
        )
        if is_open:
            logger.warning(
                "kvtier: tier %s is off: %s; it is tried again by itself", self.name, reason
            )
        else:
            logger.warning("kvtier: tier %s %s", self.name, reason)

    def _on_refusal(self, is_open: bool, reason: str) -> None:
        self._counts.add(f"refusal_began.{self.name}" if is_open else f"refusal_ended.{self.name}")
        if is_open:
            logger.warning(
                "kvtier: tier %s takes no saves: %s; loads go on, saves are tried again",
                self.name,
                reason,
            )
        else:
            logger.warning("kvtier: tier %s takes saves again", self.name)

    def load(self, spec: RecordSpec, into: Buffers, slow_s: float = float("inf")) -> ChunkStatus:
        """Read one verified record; on a lane's thread. A damaged one is quarantined.

        One that took longer than ``slow_s`` counts against the tier.
        """
        if not self.online:
            return ChunkStatus.TIER_DOWN
        if self._distrusted.get(spec.key, False):
            self._counts.add(f"load_failed_chunks.{self.name}.missing")
            return ChunkStatus.MISSING
        return self._read(spec, into, slow_s)

    def _read(self, spec: RecordSpec, into: Buffers, slow_s: float) -> ChunkStatus:
        begin_s = self._clock()
        try:
            n_bytes = self.tier.get(spec, into)
        except RecordMissing:
            self.breaker.success()
            self._counts.add(f"load_failed_chunks.{self.name}.missing")
            return ChunkStatus.MISSING
        except RecordDamaged as err:
            self.breaker.success()
            self._counts.add(f"load_failed_chunks.{self.name}.{err.reason.value}")
            return self._damaged(spec.key, err)
        except TierUnavailable as err:
            self._counts.add(f"load_failed_chunks.{self.name}.unavailable")
            self.breaker.failure(str(err))
            return ChunkStatus.TIER_DOWN
        except Exception as err:  # a tier's bug must not stop the engine
            logger.exception("kvtier: tier %s failed unexpectedly", self.name)
            self._counts.add(f"load_failed_chunks.{self.name}.unexpected")
            self.breaker.failure(repr(err))
            return ChunkStatus.TIER_DOWN
        took_s = self._clock() - begin_s
        if took_s > slow_s:
            self.breaker.failure(f"one record took {took_s:.3g} s and requests wait {slow_s:.3g} s")
        else:
            self.breaker.success()
        self._counts.add(f"load_bytes.{self.name}", n_bytes)
        self._counts.add(f"load_chunks.{self.name}")
        self._counts.add(f"load_s.{self.name}", took_s)
        return ChunkStatus.OK

    def late(self) -> None:
        """A request has given up on a read that is still under way. Never blocks."""
        self.breaker.failure("reads do not come back in time")

    def _damaged(self, key: bytes, error: RecordDamaged) -> ChunkStatus:
        """Take a damaged record out of sight, but not one that only lacks our encryption key.

        Such a one may be another engine's: it stays until a save of ours takes its place.
        """
        if error.reason is not DamageReason.KEY:
            self._distrust(key)
            self.discard(key, str(error))
            return ChunkStatus.DAMAGED
        self._distrust(key)
        return ChunkStatus.MISSING

    def _distrust(self, key: bytes, *, wrong: bool = False) -> None:
        with self._distrust_lock:
            self._distrusted[key] = wrong
            if len(self._distrusted) > _MAX_DISTRUSTED:
                del self._distrusted[next(iter(self._distrusted))]

    def _trust(self, key: bytes) -> None:
        with self._distrust_lock:
            self._distrusted.pop(key, None)

    def discard(self, key: bytes, reason: str) -> None:
        """Take a bad record out of sight; where that fails, the next save takes its place."""
        try:
            self.tier.quarantine(key, reason)
            self._trust(key)
        except Exception as err:  # noqa: BLE001 - the record stays forgotten by the catalog
            logger.debug("kvtier: quarantine failed: %r", err)
            self._counts.add(f"quarantine_failed.{self.name}")

    def condemn(self, key: bytes, reason: str) -> None:
        """Take a record out of sight that reads well but is known to be wrong. Never blocks.

        No load that begins after this reads it.
        """
        self._distrust(key, wrong=True)
        self.load_lane.offer(partial(self._condemn, key, reason))

    def _condemn(self, key: bytes, reason: str) -> None:
        # A task handed back asks the tier nothing; a save may have been quicker.
        if not self._closing and key in self._distrusted:
            self.discard(key, reason)

    def save(self, spec: RecordSpec, payload: Buffers) -> bool:
        """Write one record; on a lane's thread. True when it is on the tier."""
        if not self.online or not (self.write_breaker.closed or self.write_breaker.take_probe()):
            self._counts.add(f"save_dropped_chunks.{self.name}.tier_off")
            return False
        begin_s = self._clock()
        stored = False
        try:
            stored = self._put(spec, payload)
        finally:
            if stored:
                self.write_breaker.success()
            elif not self.write_breaker.closed:
                self.write_breaker.failure("it still fails")  # a probe of saves has ended
        if stored:
            self._counts.add(f"save_bytes.{self.name}", spec.raw_bytes)
            self._counts.add(f"save_chunks.{self.name}")
            self._counts.add(f"save_s.{self.name}", self._clock() - begin_s)
        return stored

    def _put(self, spec: RecordSpec, payload: Buffers) -> bool:
        try:
            self.tier.put(spec, payload, replace=spec.key in self._distrusted)
            self._trust(spec.key)
        except RecordRefused:
            self._counts.add(f"save_dropped_chunks.{self.name}.refused")
            self.breaker.success()
            return False
        except TierRefused as err:
            self._counts.add(f"save_dropped_chunks.{self.name}.refused")
            self.breaker.success()
            self.write_breaker.failure(str(err))
            return False
        except TierUnavailable as err:
            self._counts.add(f"save_dropped_chunks.{self.name}.unavailable")
            self.breaker.failure(str(err))
            return False
        except Exception as err:  # a tier's bug must not stop the engine
            logger.exception("kvtier: tier %s failed unexpectedly", self.name)
            self._counts.add(f"save_dropped_chunks.{self.name}.unexpected")
            self.breaker.failure(repr(err))
            return False
        self.breaker.success()
        return True

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark records as used, on a save thread, if there is room for that. Never blocks."""
        if self.online:
            self.save_lane.offer(partial(self._touch, keys), sum(map(len, keys)))

    def _touch(self, keys: Sequence[bytes]) -> None:
        if self._closing:
            return  # handed back by the lane, on the thread that closes
        try:
            self.tier.touch(keys)
        except Exception as err:  # noqa: BLE001 - only the order of eviction suffers
            logger.debug("kvtier: touch failed: %r", err)
            self._counts.add(f"touch_failed.{self.name}")

    def changes(self) -> TierChanges:
        """Return what came and went on the tier. Never blocks on I/O, never raises."""
        try:
            return self.tier.changes()
        except Exception as err:
            logger.debug("kvtier: tier %s: changes failed", self.name, exc_info=True)
            self.breaker.failure(repr(err))
            return TierChanges(complete=False)

    def stored_bytes(self) -> int:
        """Return what this rank keeps on the tier, as far as is known without I/O. Never raises."""
        try:
            return self.tier.stat().stored_bytes
        except Exception as err:  # noqa: BLE001 - a gauge is not worth a step
            logger.debug("kvtier: stat failed: %r", err)
            return 0

    def poll(self) -> None:
        """Replace stuck threads, open the breaker when too many are, send due probes."""
        if not self.load_lane.poll() or not self.save_lane.poll():
            self.breaker.trip("too many reads or writes never came back")
        if self.breaker.take_probe() and not self.save_lane.offer(self._probe):
            self.breaker.failure("no thread is free to probe")
        if not self.breaker.closed:
            for lane in (self.load_lane, self.save_lane):
                lane.help_while(lambda: not self.breaker.closed)

    def _probe(self) -> None:
        if self._closing:
            return
        try:
            self.tier.probe()
        except Exception as err:  # noqa: BLE001 - whatever it is, the tier stays off
            self.breaker.failure(str(err))
        else:
            self.breaker.success()

    def close(self, stop_s: float) -> None:
        """Stop: tasks not begun only report, running ones have until the clock shows ``stop_s``."""
        self._closing = True
        for lane in (self.load_lane, self.save_lane):
            for task in lane.close():
                task()  # the link is offline: the task only reports
        for lane in (self.load_lane, self.save_lane):
            lane.join(stop_s)
        # A tier that hangs hangs in its own close, too.
        closing = threading.Thread(
            target=self._close_tier, name=f"kvtier-{self.name}-close", daemon=True
        )
        try:
            closing.start()
        except RuntimeError:
            return  # no thread left: the process's end closes it
        closing.join(CLOSE_S)

    def _close_tier(self) -> None:
        try:
            self.tier.close()
        except Exception as err:  # noqa: BLE001 - nobody can do anything about it any more
            logger.debug("kvtier: tier %s: close failed: %r", self.name, err)
