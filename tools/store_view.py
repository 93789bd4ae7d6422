"""How people see what a store holds."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

from .reporting import age, size, table

if TYPE_CHECKING:
    from .store_base import Store
    from .store_verify import Verification

_MAX_TEXT = 100


def print_summary(summary: dict[str, Any], *, fields: bool) -> None:
    """Print what ``stat`` found."""
    capacity = summary["capacity"]
    about = "" if summary["exact"] else "about "
    free, limit = capacity["free_bytes"], capacity["limit_bytes"]
    own_limit = capacity["store_limit_bytes"]
    room = (
        f" of {size(own_limit)} (disk_capacity); {size(free)} free on the file system"
        if own_limit is not None
        else ""
    )
    print(
        f"{summary['store']}: {summary['records']:,} records, {about}"
        f"{size(summary['stored_bytes'])}{room}"
    )
    if free is not None and not room:
        print(f"free: {size(free)} of {size(limit)} ({capacity['note']})")
    elif free is None and capacity["used_bytes"] is not None:
        print(f"in use: {size(capacity['used_bytes'])}, no limit ({capacity['note']})")
    for part in ("quarantine", "unfinished"):
        if summary[part]["files"]:
            print(f"{part}: {summary[part]['files']} files, {size(summary[part]['bytes'])}")
    if summary["pins"]:
        print(f"pinned: {size(sum(p['stored_bytes'] for p in summary['pins']))}")
        table(
            ("pin", "namespace", "tokens", "size", "pinned", "note"),
            [
                (
                    p["pin"],
                    p["namespace"][:8],
                    p["tokens"] or None,
                    size(p["stored_bytes"]),
                    f"{age(p['created_at_s'])} ago",
                    p["note"],
                )
                for p in summary["pins"]
            ],
        )
    for namespace in summary["namespaces"]:
        print()
        table(("namespace", namespace["namespace"]), _namespace_rows(namespace, fields=fields))


def _namespace_rows(namespace: dict[str, Any], *, fields: bool) -> list[tuple[str, str]]:
    about = "" if namespace["exact"] else "about "
    rows = list(namespace["words"].items())
    rows += [
        ("records", f"{namespace['records']:,} of ranks {_list(namespace['ranks'])}"),
        ("chunks", f"{namespace['chunks']:,}"),
    ]
    if namespace["tokens"] is not None:
        sampled = "" if namespace["headers_read"] >= namespace["records"] else "about "
        rows.append(("tokens kept", f"{sampled}{namespace['tokens']:,}"))
    rows.append(("size", about + size(namespace["stored_bytes"])))
    if namespace["compression"] is not None:
        codecs = ", ".join(namespace["codecs"])
        rows.append(("compression", f"{namespace['compression']:.2f} times ({codecs})"))
    if namespace["newest_use_s"] is not None:
        newest, oldest = namespace["newest_use_s"], namespace["oldest_use_s"]
        rows.append(("last use", f"{age(newest)} ago, the oldest {age(oldest)} ago"))
    for name, what in (
        ("by group", "records_by_group"),
        ("used within", "records_by_last_use"),
        ("records up to", "records_by_size"),
    ):
        rows.append((name, ", ".join(f"{k}: {n:,}" for k, n in namespace[what].items()) or "-"))
    if namespace["problem"]:
        rows.append(("no description", namespace["problem"]))
    if fields:
        from .store_words import flat

        rows += [(name, _short(value)) for name, value in flat(namespace["description"] or {})]
    return rows


def _list(values: list[int]) -> str:
    return ", ".join(map(str, values)) or "-"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "..."


def print_records(records: list[dict[str, Any]]) -> None:
    """Print what ``show`` found."""
    for number, record in enumerate(records):
        if number:
            print()
        rows = [(n, _plain(v)) for n, v in record.items() if n != "neighbours"]
        table(("field", "value"), rows)
        neighbours = record.get("neighbours")
        if neighbours is None:
            continue
        for side in ("same_boundary", "before", "after"):
            for other in neighbours[side]:
                print(f"{side.replace('_', ' ')}: {other['key']} {other['tokens']}")
        print(f"neighbours: {neighbours['note']}")


def _plain(value: Any) -> str:
    return ", ".join(value) or "-" if isinstance(value, list) else str(value)


def print_verification(store: Store, result: Verification) -> None:
    """Print what ``verify`` found, and what to do about it."""
    name = shlex.quote(store.name)
    for damage in result.damaged:
        print(f"damaged   {damage.place}  {damage.detail}")
    for item in result.orphaned:
        print(f"orphaned  {item.place}  {item.what}")
    stale = [part for part in result.stale.values() if part.records]
    for part in stale:
        print(f"stale     {part.records:,} records of namespace {part.namespace}: {part.why}")
    fixed = f", {result.quarantined} quarantined" if result.n_damaged else ""
    print(
        f"{result.records:,} records checked{' (a sample)' if result.sampled else ''}, "
        f"{size(result.bytes_read)} read, {result.n_damaged} damaged{fixed}, "
        f"{len(result.orphaned)} orphaned"
        f"{f' ({result.swept} removed)' if result.swept else ''}, "
        f"{sum(part.records for part in stale)} stale"
        f"{'' if result.complete else '; not all of the store'}"
    )
    if result.n_damaged > result.quarantined or len(result.orphaned) > result.swept:
        print(f"to move them out of the way: kvtier verify --fix {name}")
    if stale:
        print(f"to delete what is stale: kvtier prune {name} --stale")
    if not result.complete and not result.sampled:
        print(f"to go on from here: kvtier verify --resume {name}")
