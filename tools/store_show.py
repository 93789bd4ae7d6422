"""One record in full, and what can be known of the chunks around it.

A key is a hash over everything before it: it does not tell its parent. What can be known
without the tokens: records of other groups and ranks at the same boundary (the same hash), and
the records whose token ranges touch this one's, of which only one can be its neighbour.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ..storage.key import key_name

if TYPE_CHECKING:
    from ..storage.record import Header
    from .store_base import Record, Store

MAX_SECONDS = 3.0
MAX_NAMED = 8
_BATCH = 64


def describe(store: Store, record: Record) -> dict[str, Any]:
    """Return what the record says of itself, and whether all of it checks. Reads all of it."""
    checked = store.check(record)
    header = checked.header
    known = {
        "key": record.name,
        "namespace": record.namespace.hex(),
        "rank": record.rank,
        "group": record.key[-1],
        "ok": checked.ok,
        "check": checked.detail,
        "path": record.place,
        "stored_bytes": record.stored_bytes,
        "used_at_s": record.used_at_s,
    }
    if header is not None:
        known |= {
            "start_tokens": header.start_tokens,
            "end_tokens": header.end_tokens,
            "codec": header.codec.name.lower(),
            "sealed": header.sealed,
            "raw_bytes": header.raw_bytes,
            "payload_bytes": header.stored_bytes,
            "payload_checksum": header.payload_checksum.hex(),
            "created_at_s": header.created_us / 1e6,
        }
    return known


def neighbours_of(
    store: Store, record: Record, known: dict[str, Any], max_seconds: float = MAX_SECONDS
) -> dict[str, Any]:
    """Return the records around one; reads headers of its namespace for a bounded time.

    Args:
        store: the store.
        record: which.
        known: what `describe` said of it.
        max_seconds: stop looking after so long.
    """
    boundary = record.key[:-1].hex()
    same = {
        other.name: {"key": other.name, "tokens": ""}
        for other in store.records(record.namespace, boundary)
        if other.name != record.name
    }
    sides: dict[str, list[dict[str, str]]] = {"before": [], "after": []}
    complete = False
    if "start_tokens" in known:
        complete = _touching(store, record, known, sides, time.monotonic() + max_seconds)
    return {
        "same_boundary": [same[name] for name in sorted(same)],
        **{side: found[:MAX_NAMED] for side, found in sides.items()},
        "n_before": len(sides["before"]),
        "n_after": len(sides["after"]),
        "complete": complete,
        "note": _note(known, sides, complete=complete),
    }


def _touching(
    store: Store,
    record: Record,
    known: dict[str, Any],
    sides: dict[str, list[dict[str, str]]],
    stop_at_s: float,
) -> bool:
    """Fill ``sides``; False when the time was up before all headers were read."""
    batch: list[Record] = []
    for other in store.records(record.namespace):
        if other.rank == record.rank and other.key[-1] == record.key[-1]:
            batch.append(other)
        if len(batch) >= _BATCH:
            _sort(store, batch, known, sides)
            batch = []
            if time.monotonic() > stop_at_s:
                return False
    _sort(store, batch, known, sides)
    return True


def _sort(
    store: Store, batch: list[Record], known: dict[str, Any], sides: dict[str, list[dict[str, str]]]
) -> None:
    for _, header in store.headers(batch):
        if header.end_tokens == known["start_tokens"]:
            sides["before"].append(_named(header))
        elif header.start_tokens == known["end_tokens"]:
            sides["after"].append(_named(header))


def _named(header: Header) -> dict[str, str]:
    tokens = f"tokens {header.start_tokens} to {header.end_tokens}"
    return {"key": key_name(header.key), "tokens": tokens}


def _note(known: dict[str, Any], sides: dict[str, list[dict[str, str]]], *, complete: bool) -> str:
    if "start_tokens" not in known:
        return "unknown, the header cannot be trusted"
    n_before = len(sides["before"])
    if known["start_tokens"] == 0:
        text = "this chunk begins its prefix"
    elif not complete:
        text = "not all headers were read"
    elif n_before == 1:
        text = "one record ends where this begins: the chunk before it, if that is still kept"
    elif n_before:
        text = f"one of {n_before} records is the chunk before it; `kvtier explain` knows which"
    else:
        text = "the chunk before it is not kept, so no hit can reach this one"
    return text
