"""The process of a storage soak that works until it is killed."""

from __future__ import annotations

import json
import mmap
import random
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..storage.disk import DiskTier
from ..storage.errors import RecordDamaged, RecordMissing, TierRefused, TierUnavailable
from ..storage.key import NAMESPACE_BYTES
from ..storage.tier import PutResult, RecordSpec, Tier
from . import soak_chunks as chunks
from .soak_chunks import Wrong
from .soak_ledger import (
    ACKED,
    BEGUN,
    DELETED,
    HURT,
    KINDS,
    STATE,
    STORED,
    UNKNOWN,
    Ledger,
    Payloads,
    key_of,
)
from .soak_storage_jobs import JobPlayer

NAMESPACE = bytes(range(NAMESPACE_BYTES))
WEIGHTS = {"put": 24, "replace": 8, "get": 45, "contains": 12, "delete": 5, "quarantine": 2,
           "touch": 3, "scan": 0.01}  # fmt: skip
CONTAINS_KEYS = 16
SPARE_S = 0.05
REFUSED_S = 60.0  # a tier waits for five seconds, then refuses


@dataclass(frozen=True, slots=True)
class Work:
    """What a child does.

    Attributes:
        folder: of the store.
        ledger: file.
        capacity_bytes: of the disk tier.
        redis: URL; then Redis is what is soaked.
        n_keys, threads, record_bytes, seed: size of it.
        life: number of this process; makes its own random numbers.
        lossless: whether there is room for everything: nothing is evicted.
    """

    folder: str
    ledger: str
    capacity_bytes: int
    redis: str | None
    n_keys: int
    threads: int
    record_bytes: int
    seed: int
    life: int
    lossless: bool = True


def open_tier(work: Work, namespace: bytes = NAMESPACE) -> Tier:
    """Open the tier to soak."""
    if work.redis is None:
        return DiskTier(work.folder, namespace, 0, work.capacity_bytes, poll_s=0.1)
    from ..storage.redis import RedisTier
    from ..storage.redis_url import parse_redis_url

    settings = parse_redis_url(work.redis, prefix="kvtier-soak", connections=work.threads)
    return RedisTier(settings, namespace, 0)


class Worker:
    """One thread: writes its own keys, reads everybody's."""

    def __init__(self, number: int, work: Work, tier: Tier, ledger: Ledger) -> None:
        self._number = number
        self._work = work
        self._tier = tier
        self._keys = ledger.keys
        self._counts = ledger.counts
        self._rng = random.Random(f"{work.seed}/{work.life}/{number}")  # noqa: S311
        self._payloads = Payloads(work.seed, work.record_bytes)
        self._names = [key_of(i, work.seed) for i in range(work.n_keys)]
        self._own = [i for i in range(work.n_keys) if i % work.threads == number]
        self._refused_since_s = 0.0
        self._view = memoryview(mmap.mmap(-1, work.record_bytes))

    def run(self, stopped: threading.Event) -> None:
        """Work until told to stop.

        Raises:
            Wrong: what was found must never be.
        """
        kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
        while not stopped.is_set():
            kind = self._rng.choices(kinds, weights)[0]
            try:
                getattr(self, f"_{kind}")()
            except (TierRefused, TierUnavailable) as error:
                self._refused(kind, error)
                continue
            self._counts[KINDS.index(kind), self._number] += 1

    def _refused(self, kind: str, error: Exception) -> None:
        """Bear a tier that cannot for a while: it evicts a lot, or another one of the folder does.

        Raises:
            Wrong: it has not stored a record for too long.
        """
        now_s = time.monotonic()
        since_s = self._refused_since_s = self._refused_since_s or now_s
        if now_s - since_s > REFUSED_S:
            raise Wrong(f"{kind}: the tier does not serve: {error}") from None
        time.sleep(SPARE_S)

    def _spec(self, number: int) -> RecordSpec:
        return RecordSpec(self._names[number], 0, 256, self._work.record_bytes)

    def _put(self) -> None:
        self._store(replace=False)

    def _replace(self) -> None:
        self._store(replace=True)

    def _store(self, *, replace: bool) -> None:
        number = self._rng.choice(self._own)
        row = self._keys[number]
        version, before = int(row[BEGUN]) + 1, int(row[STATE])
        row[STATE] = UNKNOWN
        row[BEGUN] = version
        self._payloads.fill(self._view, number, version)
        hurt = int(row[HURT])
        result = self._tier.put(self._spec(number), [self._view], replace=replace)
        self._refused_since_s = 0.0
        if result is PutResult.STORED:
            row[ACKED] = version
            if int(row[HURT]) == hurt:  # else it was hurt again while it was written
                row[HURT] = 0
            row[STATE] = STORED
            return
        if replace or before == DELETED:
            raise Wrong(f"key {number} was to be stored and is said to exist already")
        row[STATE] = before

    def _get(self) -> None:
        number = self._rng.randrange(self._work.n_keys)
        row = self._keys[number]
        own = number % self._work.threads == self._number
        least, deleted = int(row[ACKED]), own and row[STATE] == DELETED
        hurt = int(row[HURT])  # its writer may replace it, and clear this, while it is read
        try:
            self._tier.get(self._spec(number), [self._view])
        except RecordMissing:
            return
        except RecordDamaged as error:
            if not hurt and not row[HURT]:
                raise Wrong(f"key {number} is damaged, by no fault: {error}") from None
            if own:
                self._tier.quarantine(self._names[number], "soak")
                row[STATE] = UNKNOWN
            return
        version = self._payloads.version_of(self._view, number)
        if version is None:
            raise Wrong(f"key {number} verified, but holds bytes that were never written")
        if deleted:
            raise Wrong(f"key {number} was deleted, and version {version} is there again")
        if not least <= version <= int(row[BEGUN]):
            raise Wrong(f"key {number} holds version {version}; {least} had been acknowledged")

    def _contains(self) -> None:
        numbers = [self._rng.randrange(self._work.n_keys) for _ in range(CONTAINS_KEYS)]
        found = self._tier.contains_many([self._names[number] for number in numbers])
        if len(found) != CONTAINS_KEYS:
            raise Wrong(f"asked for {CONTAINS_KEYS} keys, told of {len(found)}")

    def _delete(self) -> None:
        number = self._rng.choice(self._own)
        self._keys[number][STATE] = UNKNOWN
        self._tier.delete([self._names[number]])
        self._keys[number][STATE] = DELETED

    def _quarantine(self) -> None:
        number = self._rng.choice(self._own)
        self._keys[number][STATE] = UNKNOWN
        self._tier.quarantine(self._names[number], "soak")
        self._keys[number][STATE] = DELETED

    def _touch(self) -> None:
        self._tier.touch([self._names[self._rng.randrange(self._work.n_keys)]])

    def _scan(self) -> None:
        known = set(self._names)
        for info in self._tier.scan():
            if info.key not in known:
                raise Wrong(f"a scan tells of a key that was never written: {info.key.hex()}")


def check_jobs(work: Work) -> dict[str, Any]:
    """Open the store anew and compare every chunk that jobs have written; counts and wrongs."""
    tier = open_tier(work, chunks.NAMESPACE)
    try:
        return chunks.check_chunks(tier, work.seed)
    finally:
        tier.close()


def check(work: Work, ledger: Ledger, *, lossless: bool) -> dict[str, Any]:
    """Open the store anew and compare every key with the ledger; return counts and wrongs.

    Args:
        work: which store.
        ledger: what must be there.
        lossless: whether everything acknowledged in this life must be there: no eviction.
    """
    tier = open_tier(work)
    payloads = Payloads(work.seed, work.record_bytes)
    view = memoryview(mmap.mmap(-1, work.record_bytes))
    wrong: list[str] = []
    there = missing = damaged = 0
    try:
        for number in range(work.n_keys):
            row = ledger.keys[number]
            begun, acked, state = int(row[BEGUN]), int(row[ACKED]), int(row[STATE])
            spec = RecordSpec(key_of(number, work.seed), 0, 256, work.record_bytes)
            try:
                tier.get(spec, [view])
            except RecordMissing:
                missing += 1
                if lossless and state == STORED and not row[HURT]:
                    wrong.append(f"key {number}: version {acked} was acknowledged and is lost")
                continue
            except RecordDamaged as error:
                damaged += 1
                if not row[HURT]:
                    wrong.append(f"key {number} is damaged, by no fault: {error}")
                continue
            there += 1
            version = payloads.version_of(view, number)
            if version is None:
                wrong.append(f"key {number} verifies, but holds bytes that were never written")
            elif state == DELETED:
                wrong.append(f"key {number} was deleted, and version {version} is there again")
            elif not acked <= version <= begun:
                wrong.append(f"key {number} holds version {version} of {acked} to {begun}")
        return {"there": there, "missing": missing, "damaged": damaged, "wrong": wrong}
    finally:
        tier.close()


def main(arguments: Sequence[str]) -> None:
    """Work until killed, or until stdin ends: then close the tier and return."""
    work = Work(**json.loads(arguments[0]))
    ledger = Ledger(Path(work.ledger), work.n_keys)
    tier = open_tier(work)
    stopped = threading.Event()

    def count(kind: str) -> None:
        ledger.counts[KINDS.index(kind), 0] += 1

    player = JobPlayer(
        open_tier(work, chunks.NAMESPACE), work.seed, work.life, count, lossless=work.lossless
    )

    def run(worker: Worker | JobPlayer) -> None:
        try:
            worker.run(stopped)
        except Exception as error:  # noqa: BLE001 - told to whoever watches, before it kills us
            print(json.dumps({"failures": [f"{type(error).__name__}: {error}"]}), flush=True)
            stopped.set()

    workers = [Worker(i, work, tier, ledger) for i in range(work.threads)]
    threads = [threading.Thread(target=run, args=(one,)) for one in (player, *workers)]
    print(json.dumps({"ready": True}), flush=True)  # the first line; failures follow
    for thread in threads:
        thread.start()
    threading.Thread(target=_until_stdin_ends, args=(stopped,), daemon=True).start()
    while not stopped.wait(SPARE_S):
        tier.changes()  # as an engine does: what is not taken would pile up
    for thread in threads:
        thread.join()
    tier.close()


def _until_stdin_ends(stopped: threading.Event) -> None:
    sys.stdin.read()
    stopped.set()


if __name__ == "__main__":
    main(sys.argv[1:])
