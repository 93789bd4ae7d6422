"""Checking a store: what is damaged, what belongs to nothing, what can never be used again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..storage.errors import DamageReason, RecordMissing
from .exit_codes import ExitCode
from .reporting import CommandError

if TYPE_CHECKING:
    from ..storage.tier import Tier
    from .store_base import Broken, Loose, Record, Space, Store

STATE_FORMAT = 1
_SAVE_EVERY_S = 10.0
_MAX_KEPT_DAMAGED = 100_000  # more are counted, not named


@dataclass(frozen=True, slots=True)
class Damage:
    """One record that failed its check."""

    order: tuple[str, str, str]  # namespace, rank folder, key
    place: str
    reason: str
    detail: str
    n_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for ``--json``."""
        return {
            "path": self.place,
            "namespace": self.order[0],
            "rank": int(self.order[1][1:]),
            "key": self.order[2],
            "reason": self.reason,
            "detail": self.detail,
        }


@dataclass(slots=True)
class Stale:
    """A namespace whose records no engine asks for any more."""

    namespace: str
    why: str
    records: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for ``--json``."""
        return {"namespace": self.namespace, "why": self.why, "records": self.records}


@dataclass(slots=True)
class Verification:
    """What a verification has found so far.

    Attributes:
        records: checked, over all runs that this one goes on from.
        of_records: to check in all, where that is known.
        after: the last record that was checked.
        complete: the end was reached.
        stale: by namespace, those that are.
        descriptions: of namespaces, those that cannot be read.
        old_format: records of a format that this build does not read, by namespace.
    """

    records: int = 0
    bytes_read: int = 0
    of_records: int | None = None
    after: tuple[str, str, str] | None = None
    complete: bool = False
    resumed: bool = False
    sampled: bool = False
    damaged: list[Damage] = field(default_factory=list)
    more_damaged: int = 0
    orphaned: list[Loose] = field(default_factory=list)
    stale: dict[str, Stale] = field(default_factory=dict)
    descriptions: list[Broken] = field(default_factory=list)
    quarantined: int = 0
    swept: int = 0
    dropped_descriptions: int = 0

    @property
    def n_damaged(self) -> int:
        """How many records are damaged."""
        return len(self.damaged) + self.more_damaged

    @property
    def n_left(self) -> int:
        """How much that is a finding is as it was: damaged records and broken descriptions."""
        return self.n_damaged - self.quarantined + self.n_broken

    @property
    def n_broken(self) -> int:
        """How many descriptions are still there and cannot be read."""
        return len(self.descriptions) - self.dropped_descriptions

    def as_dict(self, store: Store) -> dict[str, Any]:
        """Return the fields for ``--json``."""
        return {
            "store": store.name,
            "kind": store.kind,
            "records": self.records,
            "bytes_read": self.bytes_read,
            "complete": self.complete,
            "resumed": self.resumed,
            "sampled": self.sampled,
            "damaged_records": self.n_damaged,
            "damaged": [damage.as_dict() for damage in self.damaged],
            "orphaned": [
                {"path": item.place, "bytes": item.n_bytes, "what": item.what}
                for item in self.orphaned
            ],
            "stale": [stale.as_dict() for stale in self.stale.values() if stale.records],
            "descriptions": [broken.as_dict() for broken in self.descriptions],
            "quarantined": self.quarantined,
            "swept": self.swept,
            "dropped_descriptions": self.dropped_descriptions,
        }


def stale_spaces(store: Store, spaces: list[Space]) -> dict[str, Stale]:
    """Return the namespaces that were cleared, with why no engine asks for them any more.

    A clear raises the cache epoch, which is part of the namespace and kept in the store.
    """
    found = {}
    for space in spaces:
        current = store.current_epoch(space.description) if space.description else None
        if current is None or space.description is None:
            continue
        own = space.description.get("cache_epoch")
        if isinstance(own, int) and own < current:
            why = f"cleared: of epoch {own}, engines use {current}"
            found[space.name] = Stale(space.name, why)
    return found


def verify(
    store: Store,
    records: Iterator[Record],
    result: Verification,
    progress: Callable[[Verification], None],
    stop: Callable[[], bool],
) -> None:
    """Read and check records; fill ``result`` as it goes, so that Ctrl-C loses nothing.

    Args:
        store: the store.
        records: what to check, in order.
        result: filled; records up to ``result.after`` are passed over.
        progress: called after each record.
        stop: asked before each record; when it says so ``result.complete`` stays False.
    """
    after = result.after
    for record in records:
        order = record.order
        if after is not None and order <= after:
            continue
        if stop():
            return
        try:
            checked = store.check(record)
        except RecordMissing:  # evicted meanwhile
            continue
        result.records += 1
        result.bytes_read += checked.bytes_read
        result.after = order
        if checked.reason is DamageReason.FORMAT:
            why = "records of a format that this build does not read"
            result.stale.setdefault(order[0], Stale(order[0], why)).records += 1
        elif not checked.ok:
            _note(result, record, checked)
        elif order[0] in result.stale:
            result.stale[order[0]].records += 1
        progress(result)
    result.complete = True


def _note(result: Verification, record: Record, checked: Any) -> None:
    if len(result.damaged) >= _MAX_KEPT_DAMAGED:
        result.more_damaged += 1
        return
    result.damaged.append(
        Damage(
            record.order,
            record.place,
            checked.reason.value,
            checked.detail,
            record.stored_bytes or checked.bytes_read,
        )
    )


def sampled(records: Iterator[Record], size: str, seed: int) -> Iterator[Record]:
    """Yield some of ``records``, in order: a number of them, or a share like ``5%``.

    Raises:
        CommandError: ``size`` is neither.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%?)\s*", size)
    if match is None or not float(match[1]) or ("." in match[1] and not match[2]):
        raise CommandError(
            f"--sample {size}: give a number of records, or a share like 5%", ExitCode.USAGE
        )
    if match[2]:
        share = float(match[1]) / 100
        draw = random.Random(seed)  # noqa: S311 - a sample, repeatable by its seed
        return (record for record in records if draw.random() < share)
    from .store_summary import Reservoir

    reservoir = Reservoir(int(match[1]), seed)
    for record in records:
        reservoir.add(record)
    return iter(sorted(reservoir.kept, key=lambda record: record.order))


def repair(store: Store, result: Verification) -> None:
    """Quarantine what was found damaged, as an engine would, and sweep what is orphaned.

    Broken descriptions go, too: an engine writes one only where there is none.

    What an engine has meanwhile saved anew, or taken away, is no damage any more.

    Raises:
        TierUnavailable: a record could not be moved.
    """
    result.damaged = still_damaged(store, result.damaged)
    reasons: dict[tuple[str, str, str], str] = {d.order: d.reason for d in result.damaged}

    def quarantine(tier: Tier, records: Sequence[Record]) -> None:
        for record in records:
            tier.quarantine(record.key, reasons[record.order])

    for _ in store.change(_records_of(store, result.damaged), quarantine):
        result.quarantined += 1
    result.swept = store.sweep(result.orphaned)
    broken_still = store.broken_descriptions()
    result.descriptions = [broken for broken in result.descriptions if broken in broken_still]
    for broken in result.descriptions:
        result.dropped_descriptions += store.drop_description(broken)


def still_damaged(store: Store, damaged: Iterable[Damage]) -> list[Damage]:
    """Return what is as damaged now as it was found to be. Reads those records."""
    by_order = {damage.order: damage for damage in damaged}
    kept = []
    for record in _records_of(store, by_order.values()):
        with contextlib.suppress(RecordMissing):
            if not store.check(record).ok:
                kept.append(by_order[record.order])
    return kept


def _records_of(store: Store, damaged: Iterable[Damage]) -> list[Record]:
    """Return the records of this damage that are there."""
    from ..storage.key import parse_key_name

    return store.sample(
        [
            (bytes.fromhex(space), int(rank[1:]), parse_key_name(key))
            for space, rank, key in (damage.order for damage in damaged)
        ]
    )


class SavedState:
    """How far a verification came, kept between runs in the user's cache folder."""

    def __init__(self, store_name: str, namespace: str | None) -> None:
        """Know where: one file for each store and choice of namespace."""
        from .models import cache_dir

        digest = hashlib.sha256(f"{store_name}\0{namespace or ''}".encode()).hexdigest()[:24]
        self.path = str(cache_dir() / "verify" / f"{digest}.json")
        self._store = store_name
        self._saved_s = time.monotonic()

    def load(self, store: Store, result: Verification) -> bool:
        """Go on where the last run ended; False when there is nothing to go on from.

        What was found damaged then is looked at again.
        """
        try:
            with open(self.path, encoding="utf-8") as file:
                state = json.load(file)
            if state["format"] != STATE_FORMAT or state["store"] != self._store:
                return False
            result.after = tuple(state["after"])
            result.records, result.bytes_read = int(state["records"]), int(state["bytes_read"])
            damaged = [
                Damage(tuple(d["order"]), d["place"], d["reason"], d["detail"], d["n_bytes"])
                for d in state["damaged"]
            ]
            for name, n in state["stale"].items():
                if name in result.stale:
                    result.stale[name].records = int(n)
        except (OSError, ValueError, KeyError, TypeError):
            return False
        result.damaged = still_damaged(store, damaged)
        result.resumed = True
        return True

    def save(self, result: Verification, *, now: bool = False) -> None:
        """Keep how far this run came, every few seconds or ``now``; best effort."""
        if result.after is None or (not now and time.monotonic() - self._saved_s < _SAVE_EVERY_S):
            return
        self._saved_s = time.monotonic()
        state = {
            "format": STATE_FORMAT,
            "store": self._store,
            "after": list(result.after),
            "records": result.records,
            "bytes_read": result.bytes_read,
            "damaged": [
                {
                    "order": list(d.order),
                    "place": d.place,
                    "reason": d.reason,
                    "detail": d.detail,
                    "n_bytes": d.n_bytes,
                }
                for d in result.damaged
            ],
            "stale": {name: stale.records for name, stale in result.stale.items()},
        }
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            temporary = f"{self.path}.{os.getpid()}"
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump(state, file)
            os.replace(temporary, self.path)

    def forget(self) -> None:
        """Remove what is kept."""
        with contextlib.suppress(OSError):
            os.unlink(self.path)


def reasons(result: Verification) -> str:
    """Return how many records are damaged in which way."""
    counts = Counter(damage.reason for damage in result.damaged)
    return ", ".join(f"{n:,} {reason}" for reason, n in counts.most_common())
