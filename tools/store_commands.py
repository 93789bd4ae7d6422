"""Verbs that look into a store: ``ls``, ``stat``, ``du``, ``show``, ``verify``."""

from __future__ import annotations

import json
import secrets
import time
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from .exit_codes import EXIT_CODES_HELP, ExitCode
from .reporting import Progress, age, finish, note, print_json, reported, size, table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .store_base import Record, Store
    from .store_verify import SavedState, Verification

StoreName = Annotated[
    str, typer.Argument(metavar="STORE", help="Folder of a disk tier, or URL of a Redis server.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Namespace = Annotated[
    Optional[str],  # noqa: UP045 (typer reads annotations at run time, on Python 3.10 too)
    typer.Option(help="Only the namespace that begins so."),
]


def add_store_verbs(app: typer.Typer) -> None:
    """Add the verbs to the command."""
    from .store_change_commands import copy, prune, rm

    for verb in (ls, stat, du, show, verify, prune, rm, copy):
        app.command(epilog=EXIT_CODES_HELP)(verb)


@reported
def ls(
    store: StoreName,
    namespace: Namespace = None,
    prefix: Annotated[str, typer.Option(help="Only keys that begin so.")] = "",
    as_json: Json = False,
) -> None:
    """List the records of a store as they are found."""
    from .store import open_store

    with open_store(store) as opened:
        rows = opened.records(opened.pick(namespace), prefix)
        pinned = opened.pinned()
        if as_json:
            _print_rows(opened, rows, pinned)
            return
        print(f"{'namespace':<10}{'rank':>5}{'size':>12}{'last use':>10}  key", flush=True)
        now_s = time.time()
        for number, record in enumerate(rows):
            print(
                f"{record.namespace.hex()[:8]:<10}{record.rank:>5}{size(record.stored_bytes):>12}"
                f"{age(record.used_at_s, now_s):>10}  {record.name}"
                f"{'  pinned' if _is_pinned(record, pinned) else ''}",
                flush=not number % 512,
            )


def _print_rows(
    opened: Store, rows: Iterator[Record], pinned: dict[bytes, frozenset[bytes]]
) -> None:
    """Print one JSON object as it grows, whole whatever ends it; it says whether that was all."""
    complete = False
    print(f'{{"store": {json.dumps(opened.name)}, "records": [', end="")
    try:
        for number, record in enumerate(rows):
            row = json.dumps(_row(record, pinned))
            print(",\n" if number else "\n", row, sep="", end="", flush=not number % 512)
        complete = True
    finally:
        print(f'\n], "complete": {json.dumps(complete)}}}')


def _is_pinned(record: Record, pinned: dict[bytes, frozenset[bytes]]) -> bool:
    return record.key in pinned.get(record.namespace, ())


def _row(record: Record, pinned: dict[bytes, frozenset[bytes]]) -> dict[str, Any]:
    return {
        "namespace": record.namespace.hex(),
        "rank": record.rank,
        "key": record.name,
        "group": record.key[-1],
        "stored_bytes": record.stored_bytes,
        "used_at_s": record.used_at_s,
        "pinned": _is_pinned(record, pinned),
    }


@reported
def stat(
    store: StoreName,
    namespace: Namespace = None,
    fields: Annotated[
        bool, typer.Option("--fields", help="Show every field of each namespace.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Sum up a store by namespace.

    Which model, how many records, how large, how old.
    """
    from .store import open_store
    from .store_summary import summarise
    from .store_view import print_summary

    with open_store(store) as opened:
        summary = summarise(opened, opened.pick(namespace))
    if as_json:
        print_json(summary)
    else:
        print_summary(summary, fields=fields)


@reported
def du(store: StoreName, as_json: Json = False) -> None:
    """Say how many bytes each namespace and rank takes."""
    from .store import open_store

    totals: dict[tuple[str, int], list[int]] = {}
    with open_store(store) as opened:
        seen = set()
        for record in opened.records():
            if opened.kind != "disk":  # a walk over a server may meet a name twice
                mark = hash(record.order)
                if mark in seen:
                    continue
                seen.add(mark)
            total = totals.setdefault((record.namespace.hex(), record.rank), [0, 0])
            total[0] += 1
            total[1] += record.stored_bytes
        quarantined = opened.quarantined()[1]
    rows: list[dict[str, Any]] = [
        {"namespace": name, "rank": rank, "records": n, "stored_bytes": n_bytes}
        for (name, rank), (n, n_bytes) in sorted(totals.items())
    ]
    stored_bytes = sum(n_bytes for _, n_bytes in totals.values())
    if as_json:
        print_json(
            {
                "store": opened.name,
                "kind": opened.kind,
                "stored_bytes": stored_bytes,
                "quarantine_bytes": quarantined,
                "parts": rows,
            }
        )
        return
    table(
        ("size", "records", "rank", "namespace"),
        [
            *((size(r["stored_bytes"]), r["records"], r["rank"], r["namespace"]) for r in rows),
            *([(size(quarantined), None, None, "quarantine")] if quarantined else []),
            (size(stored_bytes + quarantined), sum(n for n, _ in totals.values()), None, "total"),
        ],
    )


@reported
def show(
    store: StoreName,
    key: Annotated[str, typer.Argument(help="A key, or the beginning of one.")],
    namespace: Namespace = None,
    neighbours: Annotated[
        bool, typer.Option(help="Look for the chunks before and after it; reads many headers.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Show one record, of every rank that has it.

    Its header, whether all of it checks, and its neighbours.
    """
    from .store import open_store
    from .store_show import describe, neighbours_of
    from .store_view import print_records

    with open_store(store) as opened:
        found = opened.find(key, opened.pick(namespace))
        pins = opened.pins()
        shown = []
        for record in found:
            shown.append(describe(opened, record))
            shown[-1]["pins"] = [
                pin.name
                for pin in pins
                if pin.namespace == record.namespace and record.key in pin.keys
            ]
            if neighbours:
                shown[-1]["neighbours"] = neighbours_of(opened, record, shown[-1])
    if as_json:
        print_json({"store": opened.name, "kind": opened.kind, "records": shown})
    else:
        print_records(shown)
    finish(ExitCode.OK if all(record["ok"] for record in shown) else ExitCode.FINDINGS)


@reported
def verify(
    store: StoreName,
    fix: Annotated[
        bool,
        typer.Option(
            "--fix",
            help="Quarantine (in Redis: delete) what is damaged, remove what belongs to no record.",
        ),
    ] = False,
    max_seconds: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Stop after so long, with a partial result.", min=0.0),
    ] = None,
    sample: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="N|P%", help="Check only so many records, or such a share."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where the last run of this store ended.")
    ] = False,
    namespace: Namespace = None,
    as_json: Json = False,
) -> None:
    """Read every record and check all of it.

    Header, identity, lengths, checksum.
    """
    from . import store_verify as checks
    from .store import open_store
    from .store_view import print_verification

    result = checks.Verification(sampled=sample is not None)
    stop_at_s = None if max_seconds is None else time.monotonic() + max_seconds
    with open_store(store) as opened:
        chosen = opened.pick(namespace)
        state = checks.SavedState(opened.name, chosen.hex() if chosen else None)
        interrupted = _check(opened, chosen, result, state, stop_at_s, sample, resume=resume)
        if fix and not interrupted:
            checks.repair(opened, result)
        if as_json:
            print_json(result.as_dict(opened))
        else:
            print_verification(opened, result, namespace)
    if interrupted:
        finish(ExitCode.INTERRUPTED)
    if result.n_left:
        finish(ExitCode.FINDINGS)


def _check(
    opened: Store,
    chosen: bytes | None,
    result: Verification,
    state: SavedState,
    stop_at_s: float | None,
    sample: str | None,
    *,
    resume: bool,
) -> bool:
    """Fill ``result``; return whether Ctrl-C ended it. How far it came is kept for --resume."""
    from . import store_verify as checks

    result.stale = checks.stale_spaces(opened, opened.described())
    result.descriptions = [
        broken for broken in opened.broken_descriptions() if chosen in {None, broken.namespace}
    ]
    if resume and sample is None and not state.load(opened, result):
        note("nothing to go on from: starting at the beginning")
    progress = Progress()

    def after_each(found: Verification) -> None:
        if sample is None:
            state.save(found)
        progress(f"{found.records:,} records, {size(found.bytes_read)} checked")

    def late() -> bool:
        return stop_at_s is not None and time.monotonic() >= stop_at_s

    interrupted = False
    try:
        records = opened.ordered(chosen)
        if sample is not None:
            records = checks.sampled(records, sample, secrets.randbits(32))
        checks.verify(opened, records, result, after_each, late)
        if result.complete:
            result.orphaned = opened.loose()
    except KeyboardInterrupt:
        interrupted = True
    finally:
        progress.clear()
    if sample is None and result.complete:
        state.forget()
    elif sample is None:
        state.save(result, now=True)
    return interrupted
