"""What a store holds, by namespace: counted in one walk, the rest from a sample of headers."""

from __future__ import annotations

import bisect
import random
import time
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .store_base import Record, Space, Store
from .store_words import words

EXACT_RECORDS = 10_000  # of a Redis store: read all heads up to so many, else a sample
SAMPLE_RECORDS = 1000
SAMPLE_HEADERS = 200
AGE_LIMITS_S = {"minute": 60.0, "hour": 3600.0, "day": 86400.0, "week": 7 * 86400.0}
SIZE_LIMITS_BYTES = {
    "64 KiB": 1 << 16,
    "1 MiB": 1 << 20,
    "4 MiB": 1 << 22,
    "16 MiB": 1 << 24,
    "64 MiB": 1 << 26,
}


class Reservoir:
    """A fair sample of a stream whose length nobody knows (algorithm R)."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.kept: list[Any] = []
        self._size = size
        self._seen = 0
        self._random = random.Random(seed)  # noqa: S311 - repeatable on purpose

    def add(self, item: Any) -> None:
        """Keep it, or not."""
        self._seen += 1
        if len(self.kept) < self._size:
            self.kept.append(item)
        elif (place := int(self._random.random() * self._seen)) < self._size:
            self.kept[place] = item


@dataclass(slots=True)
class SpaceSummary:
    """What one namespace holds.

    Attributes:
        space: the namespace.
        by_place: records by (group, rank).
        sizes_bytes, uses_s: of the records that were looked at.
        sample: some of those.
    """

    space: Space
    by_place: Counter[tuple[int, int]] = field(default_factory=Counter)
    sizes_bytes: array[int] = field(default_factory=lambda: array("q"))
    uses_s: array[float] = field(default_factory=lambda: array("d"))
    sample: Reservoir = field(default_factory=lambda: Reservoir(SAMPLE_HEADERS))

    def look(self, record: Record) -> None:
        """Take in size and age of one record."""
        self.sizes_bytes.append(record.stored_bytes)
        self.uses_s.append(record.used_at_s)
        self.sample.add(record)

    @property
    def records(self) -> int:
        """How many there are."""
        return self.by_place.total()

    @property
    def seen(self) -> int:
        """How many were looked at for size and age."""
        return len(self.sizes_bytes)

    @property
    def total_bytes(self) -> int:
        """Of all records, from the mean of those looked at."""
        return round(sum(self.sizes_bytes) * self.records / self.seen) if self.seen else 0

    def as_dict(self, store: Store, now_s: float) -> dict[str, Any]:
        """Return the fields for ``--json``; reads the headers of the sample."""
        ranks = sorted({rank for _, rank in self.by_place})
        groups = sorted({group for group, _ in self.by_place})
        by_rank = {r: sum(self.by_place[g, r] for g in groups) for r in ranks}
        return {
            "namespace": self.space.name,
            "words": words(self.space.description),
            "description": self.space.description,
            "problem": self.space.problem,
            "ranks": ranks,
            "records": self.records,
            "chunks": max(by_rank.values(), default=0),
            "stored_bytes": self.total_bytes,
            "exact": self.seen == self.records,
            **self._from_headers(store, groups),
            "oldest_use_s": min(self.uses_s, default=None),
            "newest_use_s": max(self.uses_s, default=None),
            "records_by_group": {str(g): sum(self.by_place[g, r] for r in ranks) for g in groups},
            "records_by_rank": {str(r): n for r, n in by_rank.items()},
            "records_by_last_use": self._histogram(
                sorted(now_s - used_at_s for used_at_s in self.uses_s), AGE_LIMITS_S, "older"
            ),
            "records_by_size": self._histogram(
                sorted(self.sizes_bytes), SIZE_LIMITS_BYTES, "larger"
            ),
        }

    def _histogram(
        self, ascending: list[Any], limits: Mapping[str, float], rest: str
    ) -> dict[str, int]:
        """Return how many records lie up to each limit and above the one before."""
        ends = [bisect.bisect_right(ascending, limit) for limit in limits.values()]
        ends.append(len(ascending))
        share = self.records / self.seen if self.seen else 0.0
        counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        return {
            name: round(count * share)
            for name, count in zip([*limits, rest], counts, strict=True)
            if count
        }

    def _from_headers(self, store: Store, groups: list[int]) -> dict[str, Any]:
        """Return tokens and compression, from the headers of a sample.

        Tokens count once however many groups and ranks keep them: the group that
        has most of them, on the rank that has most of it.
        """
        spans: dict[int, list[int]] = {group: [] for group in groups}
        raw_bytes = stored_bytes = read = 0
        codecs: Counter[str] = Counter()
        for record, header in store.headers(self.sample.kept):
            spans[record.key[-1]].append(header.end_tokens - header.start_tokens)
            raw_bytes += header.raw_bytes
            stored_bytes += header.stored_bytes
            codecs[header.codec.name.lower() + (" sealed" if header.sealed else "")] += 1
            read += 1
        chunks = {g: max(n for (og, _), n in self.by_place.items() if og == g) for g in groups}
        tokens = [round(sum(spans[g]) / len(spans[g]) * chunks[g]) for g in groups if spans[g]]
        return {
            "tokens": max(tokens, default=0 if not self.records else None),
            "compression": round(raw_bytes / stored_bytes, 3) if stored_bytes else None,
            "codecs": dict(sorted(codecs.items())),
            "headers_read": read,
        }


def summarise(store: Store, namespace: bytes | None = None) -> dict[str, Any]:
    """Return what a store holds; reads no payload.

    A folder is walked once: names, sizes and times of its files. Of a Redis server the
    names are walked, and the heads of all records or of a sample are read.
    """
    began_s, now_s = time.perf_counter(), time.time()
    spaces = {space.namespace: SpaceSummary(space) for space in _known(store, namespace)}
    if store.kind == "disk":
        for record in store.records(namespace):
            summary = spaces.get(record.namespace) or _of(spaces, record.namespace)
            summary.by_place[record.key[-1], record.rank] += 1
            summary.look(record)
    else:
        _sample(store, namespace, spaces)
    capacity = store.capacity()
    parts = [spaces[name].as_dict(store, now_s) for name in sorted(spaces)]
    quarantined = store.quarantined()
    unfinished = getattr(store, "unfinished", lambda: (0, 0))()
    return {
        "store": store.name,
        "kind": store.kind,
        "records": sum(part["records"] for part in parts),
        "stored_bytes": sum(part["stored_bytes"] for part in parts),
        "exact": all(part["exact"] for part in parts),
        "namespaces": parts,
        "capacity": capacity.as_dict(),
        "quarantine": {"files": quarantined[0], "bytes": quarantined[1]},
        "unfinished": {"files": unfinished[0], "bytes": unfinished[1]},
        "pins": [pin.as_dict() for pin in store.pins() if namespace in {None, pin.namespace}],
        "seconds": round(time.perf_counter() - began_s, 3),
    }


def _known(store: Store, namespace: bytes | None) -> list[Space]:
    return [space for space in store.described() if namespace in {None, space.namespace}]


def _of(spaces: dict[bytes, SpaceSummary], namespace: bytes) -> SpaceSummary:
    if namespace not in spaces:
        spaces[namespace] = SpaceSummary(Space(namespace, None, "no description is kept"))
    return spaces[namespace]


def _sample(store: Store, namespace: bytes | None, spaces: dict[bytes, SpaceSummary]) -> None:
    seen: set[int] = set()  # a name may come twice
    some: dict[bytes, Reservoir] = {}
    for place in store.count(namespace):
        mark = hash(place)
        if mark in seen:
            continue
        seen.add(mark)
        space, rank, key = place
        _of(spaces, space).by_place[key[-1], rank] += 1
        reservoir = some.get(space)
        if reservoir is None:
            reservoir = some[space] = Reservoir(EXACT_RECORDS)
        reservoir.add(place)
    wanted: list[tuple[bytes, int, bytes]] = []
    for space, reservoir in some.items():
        kept = reservoir.kept
        if spaces[space].records > EXACT_RECORDS:
            kept = kept[:SAMPLE_RECORDS]
        wanted += kept
    for record in store.sample(wanted):
        _of(spaces, record.namespace).look(record)
