"""Verbs over a disk store: ``ls``, ``stat``, ``show``, ``verify``."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from .exit_codes import EXIT_CODES_HELP, ExitCode
from .reporting import age, finish, note, print_json, reported, size, table

if TYPE_CHECKING:
    from .store import Verification

Store = Annotated[str, typer.Argument(metavar="STORE", help="Folder of a disk tier.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Namespace = Annotated[
    Optional[str],  # noqa: UP045 (typer reads annotations at run time, on Python 3.10 too)
    typer.Option(help="Only the namespace that begins so."),
]
PROGRESS_EVERY_S = 0.5


def add_store_verbs(app: typer.Typer) -> None:
    """Add the verbs to the command."""
    for verb in (ls, stat, show, verify):
        app.command(epilog=EXIT_CODES_HELP)(verb)


@reported
def ls(store: Store, namespace: Namespace = None, as_json: Json = False) -> None:
    """List the records of a store as they are found."""
    from . import store as stores

    root = stores.open_store(store)
    rows = stores.listing(root, stores.pick_namespace(root, namespace))
    if as_json:
        print(f'{{"store": {json.dumps(root)}, "records": [', end="")
        for number, row in enumerate(rows):
            print(",\n" if number else "\n", json.dumps(row), sep="", end="")
        print("\n]}")
        return
    print(f"{'namespace':<10}{'rank':>5}{'size':>12}{'last use':>10}  key")
    now_s = time.time()
    for row in rows:
        print(
            f"{row['namespace'][:8]:<10}{row['rank']:>5}{size(row['stored_bytes']):>12}"
            f"{age(row['used_at_s'], now_s):>10}  {row['key']}"
        )


@reported
def stat(store: Store, as_json: Json = False) -> None:
    """Sum up a store by namespace: which model, how many records, how large, how old."""
    from . import store as stores

    summary = stores.summarise(stores.open_store(store))
    if as_json:
        print_json(summary)
        return
    print(
        f"{summary['store']}: {summary['records']:,} records, {size(summary['stored_bytes'])}, "
        f"{size(summary['free_bytes'])} free on its disk"
    )
    for part in ("quarantine", "unfinished"):
        if summary[part]["files"]:
            print(f"{part}: {summary[part]['files']} files, {size(summary[part]['bytes'])}")
    for namespace in summary["namespaces"]:
        print()
        table(("namespace", namespace["namespace"]), _namespace_rows(namespace))


def _namespace_rows(namespace: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("records", f"{namespace['records']:,}"),
        ("size", size(namespace["stored_bytes"])),
        ("ranks", ", ".join(map(str, namespace["ranks"])) or "-"),
    ]
    if namespace["newest_use_s"] is not None:
        newest, oldest = namespace["newest_use_s"], namespace["oldest_use_s"]
        rows.append(("last use", f"{age(newest)} ago, the oldest {age(oldest)} ago"))
    for name, what in (("group", "records_by_group"), ("used within", "records_by_last_use")):
        counts = ", ".join(f"{key}: {n:,}" for key, n in namespace[what].items())
        rows.append((name, counts or "-"))
    if namespace["problem"]:
        rows.append(("no description", namespace["problem"]))
    return rows + list(_flat(namespace["description"] or {}))


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            rows += _flat(value, f"{prefix}{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            rows.append((prefix + name, text if len(text) <= 100 else text[:97] + "..."))
    return rows


@reported
def show(
    store: Store,
    key: Annotated[str, typer.Argument(help="A key, or the beginning of one.")],
    as_json: Json = False,
) -> None:
    """Show one record of every rank that has it: header, and whether all of it checks."""
    from ..storage.disk_verify import verify_file
    from . import store as stores

    root = stores.open_store(store)
    found = [_record(file, verify_file(file.path, file)) for file in stores.find_records(root, key)]
    if as_json:
        print_json({"store": root, "records": found})
    for number, record in enumerate(() if as_json else found):
        if number:
            print()
        table(("field", "value"), [(name, str(value)) for name, value in record.items()])
    finish(ExitCode.OK if all(record["ok"] for record in found) else ExitCode.FINDINGS)


def _record(file: Any, checked: Any) -> dict[str, Any]:
    from ..storage.key import key_name

    header = checked.header
    record = {
        "key": key_name(file.key),
        "namespace": file.namespace.hex(),
        "rank": file.rank,
        "group": file.key[-1],
        "ok": checked.ok,
        "check": checked.detail,
        "path": file.path,
        "stored_bytes": file.file_bytes,
        "used_at_s": file.used_at_s,
    }
    if header is not None:
        record |= {
            "start_tokens": header.start_tokens,
            "end_tokens": header.end_tokens,
            "codec": header.codec.name.lower(),
            "raw_bytes": header.raw_bytes,
            "payload_bytes": header.stored_bytes,
            "payload_checksum": header.payload_checksum.hex(),
            "created_at_s": header.created_us / 1e6,
        }
    return record


@reported
def verify(
    store: Store,
    fix: Annotated[bool, typer.Option("--fix", help="Move damaged records to quarantine.")] = False,
    max_seconds: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Stop after so long, with a partial result.", min=0.0),
    ] = None,
    namespace: Namespace = None,
    as_json: Json = False,
) -> None:
    """Read every record and check all of it: header, identity, lengths, checksum."""
    from . import store as stores

    root = stores.open_store(store)
    result = stores.Verification()
    stop_at_s = None if max_seconds is None else time.monotonic() + max_seconds
    chosen = stores.pick_namespace(root, namespace)
    interrupted = False
    try:
        stores.verify(root, chosen, _Progress(), result, stop_at_s)
    except KeyboardInterrupt:
        interrupted = True
    if fix and result.damaged and not interrupted:
        stores.repair(root, result)
    if as_json:
        print_json(result.as_dict(root))
    else:
        _print_verification(root, result)
    if interrupted:
        finish(ExitCode.INTERRUPTED)
    if len(result.damaged) > result.quarantined:
        finish(ExitCode.FINDINGS)


def _print_verification(root: str, result: Verification) -> None:
    for file, checked in result.damaged:
        print(f"damaged  {file.path}  {checked.detail}")
    print(
        f"{result.records:,} records checked, {size(result.bytes_read)} read, "
        f"{len(result.damaged)} damaged, {result.quarantined} moved to quarantine"
        f"{'' if result.complete else '; not all of the store'}"
    )
    if len(result.damaged) > result.quarantined:
        print(f"to move them out of the way: kvtier verify --fix {root}")


class _Progress:
    """A line on a terminal, now and then."""

    def __init__(self) -> None:
        self._shown_at_s = time.monotonic()

    def __call__(self, result: Verification) -> None:
        now_s = time.monotonic()
        if sys.stderr.isatty() and now_s - self._shown_at_s > PROGRESS_EVERY_S:
            self._shown_at_s = now_s
            note(f"{result.records:,} records, {size(result.bytes_read)}")
