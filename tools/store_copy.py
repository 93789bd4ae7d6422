"""Copying records from one store to another, each checked on both sides.

Byte for byte; or sealed anew on the way, also inside one store: that is how keys are changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..storage.errors import (
    RecordDamaged,
    RecordMissing,
    RecordRefused,
    TierLocked,
    TierRefused,
)
from ..storage.reseal import can_open, has_current_seal, resealed
from .exit_codes import ExitCode
from .reporting import CommandError, size

if TYPE_CHECKING:
    from ..storage.keyring import KeyRing
    from .store_base import Record, Space, Store, Writer

_MAX_NAMED = 1000


@dataclass(slots=True)
class Copying:
    """What a copy has done so far.

    Attributes:
        of_records, of_bytes: to copy in all.
        copied, copied_bytes: written.
        sealed: of these, sealed anew.
        there: in the target already.
        gone: evicted from the source meanwhile.
        damaged: in the source, not copied: (key, why).
        locked: sealed with a key that was not given, not copied: (key, the key's id).
        unlike: read back from the target and found to differ: key.
    """

    of_records: int = 0
    of_bytes: int = 0
    copied: int = 0
    copied_bytes: int = 0
    sealed: int = 0
    there: int = 0
    gone: int = 0
    n_damaged: int = 0
    damaged: list[tuple[str, str]] = field(default_factory=list)
    n_locked: int = 0
    locked: list[tuple[str, str]] = field(default_factory=list)
    unlike: list[str] = field(default_factory=list)
    complete: bool = False
    seconds: float = 0.0

    @property
    def done(self) -> int:
        """How many records are dealt with."""
        kept = self.there + self.gone + self.n_damaged + self.n_locked
        return self.copied + kept + len(self.unlike)

    def as_dict(self, source: Store, target: Store, *, dry_run: bool) -> dict[str, Any]:
        """Return the fields for ``--json``."""
        return {
            "from": source.name,
            "to": target.name,
            "dry_run": dry_run,
            "records": self.of_records,
            "stored_bytes": self.of_bytes,
            "copied": self.copied,
            "copied_bytes": self.copied_bytes,
            "sealed": self.sealed,
            "there": self.there,
            "gone": self.gone,
            "damaged_records": self.n_damaged,
            "damaged": [{"key": key, "detail": why} for key, why in self.damaged],
            "locked_records": self.n_locked,
            "locked": [{"key": key, "key_id": key_id} for key, key_id in self.locked],
            "unlike": self.unlike,
            "complete": self.complete,
            "seconds": round(self.seconds, 3),
        }


def copy(
    source: Store,
    target: Store,
    namespace: bytes | None,
    result: Copying,
    progress: Callable[[Copying], None],
    *,
    dry_run: bool = False,
    read_back: bool = True,
    keys: KeyRing | None = None,
) -> None:
    """Copy records, the least recently used first, so that the target evicts as the source would.

    A record goes as it is stored: neither codec nor keys are needed, and what is encrypted
    stays so. With ``keys`` it arrives sealed with their first, and the target may be the source:
    each record then takes the place of itself. A record that is damaged in the source is not
    copied, nor, with ``keys``, one that none of them opens.

    Args:
        source: only read.
        target: written; what is there already stays.
        namespace: only this one, or None for all.
        result: filled as it goes, so that Ctrl-C loses nothing.
        progress: called after each record.
        dry_run: only count.
        read_back: check each record in the target once more.
        keys: the first seals, the others open what the source has.

    Raises:
        CommandError: the target has no room.
        TierError: one of the two does not answer, or takes no more.
    """
    began_s = time.perf_counter()
    found = {record.order: record for record in source.records(namespace)}
    chosen = sorted(found.values(), key=lambda record: (record.used_at_s, record.order))
    result.of_records = len(chosen)
    result.of_bytes = sum(record.stored_bytes for record in chosen)
    in_place = source.is_same(target)
    if not in_place:
        _check_room(source, target, chosen)
    if not dry_run:
        spaces = {space.namespace: space for space in source.spaces()}
        by_place: dict[tuple[bytes, int], list[Record]] = {}
        for record in chosen:
            by_place.setdefault((record.namespace, record.rank), []).append(record)
        for (space, rank), records in sorted(by_place.items()):
            with target.writer(_described(spaces, space), rank) as writer:
                for record in records:
                    _copy_one(
                        source,
                        target,
                        writer,
                        record,
                        result,
                        read_back=read_back,
                        keys=keys,
                        in_place=in_place,
                    )
                    result.seconds = time.perf_counter() - began_s
                    progress(result)
    result.complete = True
    result.seconds = time.perf_counter() - began_s


def _check_room(source: Store, target: Store, chosen: list[Record]) -> None:
    """Refuse what the target has no room for, beside what it has of it already.

    Raises:
        CommandError.
    """
    free_bytes = target.capacity().free_bytes
    n_bytes = sum(record.stored_bytes for record in chosen)
    if free_bytes is None or n_bytes <= free_bytes:
        return
    found = target.sample([(record.namespace, record.rank, record.key) for record in chosen])
    there = {record.order for record in found}
    n_bytes = sum(record.stored_bytes for record in chosen if record.order not in there)
    if n_bytes > free_bytes:
        raise CommandError(
            f"{target.name} has {size(free_bytes)} free, {source.name} holds "
            f"{size(n_bytes)} that it has not; choose with --namespace, or prune first",
            ExitCode.FAILURE,
        )


def _described(spaces: dict[bytes, Space], namespace: bytes) -> Space:
    from .store_base import Space

    return spaces.get(namespace) or Space(namespace, None)


def _copy_one(
    source: Store,
    target: Store,
    writer: Writer,
    record: Record,
    result: Copying,
    *,
    read_back: bool,
    keys: KeyRing | None,
    in_place: bool,
) -> None:
    sealing = False
    try:
        header, stored = source.stored(record)
        if keys is not None and not has_current_seal(header, keys):
            if not can_open(header, keys):
                _note_locked(result, record, header.key_id)
                return
            header, stored = resealed(header, stored, keys)
            sealing = True
    except RecordMissing:
        result.gone += 1
        return
    except RecordDamaged as damage:
        result.n_damaged += 1
        if len(result.damaged) < _MAX_NAMED:
            result.damaged.append((record.name, str(damage)))
        return
    if in_place and not sealing:
        result.there += 1
        return
    try:
        written = writer.put(header, stored, record.used_at_s, replace=in_place)
    except (TierRefused, RecordRefused) as refusal:
        raise CommandError(
            f"{target.name} takes no more after {result.copied:,} records: {refusal}",
            ExitCode.LOCKED if isinstance(refusal, TierLocked) else ExitCode.FAILURE,
        ) from None
    if not written:
        result.there += 1
        return
    if read_back and not _same(target, record, header.payload_checksum):
        result.unlike.append(record.name)
        return
    result.copied += 1
    result.sealed += sealing
    result.copied_bytes += header.stored_bytes


def _note_locked(result: Copying, record: Record, key_id: int) -> None:
    result.n_locked += 1
    if len(result.locked) < _MAX_NAMED:
        result.locked.append((record.name, f"{key_id:08x}"))


def _same(target: Store, record: Record, payload_checksum: bytes) -> bool:
    """Read a record from the target; whether it is there, intact, with this payload."""
    found = target.sample([(record.namespace, record.rank, record.key)])
    if not found:
        return False
    checked = target.check(found[0])
    return (
        checked.ok
        and checked.header is not None
        and (checked.header.payload_checksum == payload_checksum)
    )
