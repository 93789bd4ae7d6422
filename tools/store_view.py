"""How people see what a store holds."""

from __future__ import annotations

import json
import shlex
import time
from typing import TYPE_CHECKING, Any

from .reporting import age, count, size, table

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        f"{summary['store']}: {count(summary['records'], 'record')}, {about}"
        f"{size(summary['stored_bytes'])}{room}"
    )
    if free is not None and not room:
        print(f"free: {size(free)} of {size(limit)} ({capacity['note']})")
    elif free is None and capacity["used_bytes"] is not None:
        print(f"in use: {size(capacity['used_bytes'])}, no limit ({capacity['note']})")
    for part in ("quarantine", "unfinished"):
        if summary[part]["files"]:
            files = count(summary[part]["files"], "file")
            print(f"{part}: {files}, {size(summary[part]['bytes'])}")
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
        ("records", f"{namespace['records']:,}{_of_ranks(namespace['ranks'])}"),
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


def _of_ranks(ranks: list[int]) -> str:
    if not ranks:
        return ""
    return f" of rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "..."


def print_records(records: list[dict[str, Any]]) -> None:
    """Print what ``show`` found."""
    for number, record in enumerate(records):
        if number:
            print()
        table(("field", "value"), list(_record_rows(record)))
        neighbours = record.get("neighbours")
        if neighbours is None:
            continue
        for side in ("same_boundary", "before", "after"):
            for other in neighbours[side]:
                print(f"{side.replace('_', ' ')}: {other['key']} {other['tokens']}")
        print(f"neighbours: {neighbours['note']}")


def _record_rows(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name in ("key", "namespace", "rank", "group"):
        yield name, str(record[name])
    yield "check", "ok" if record["ok"] else record["check"]
    yield "path", record["path"]
    yield "size", _exact(record["stored_bytes"])
    yield "last use", _time(record["used_at_s"])
    if "start_tokens" in record:
        yield "tokens", f"{record['start_tokens']:,} to {record['end_tokens']:,}"
        yield "codec", record["codec"]
        yield "encrypted", "yes" if record["sealed"] else "no"
        yield "raw size", _exact(record["raw_bytes"])
        yield "payload", _exact(record["payload_bytes"])
        yield "payload checksum", record["payload_checksum"]
        yield "created", _time(record["created_at_s"])
    yield "pins", ", ".join(record["pins"]) or "-"


def _exact(n_bytes: int) -> str:
    return f"{size(n_bytes)} ({n_bytes:,} bytes)" if n_bytes >= 1024 else size(n_bytes)


def _time(at_s: float) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))
    return f"{age(at_s)} ago ({at})"


def print_verification(store: Store, result: Verification, namespace: str | None) -> None:
    """Print what ``verify`` found, of one ``namespace`` or of all, and what to do about it."""
    for damage in result.damaged:
        print(f"damaged   {damage.place}  {damage.detail}")
    for item in result.orphaned:
        print(f"orphaned  {item.place}  {item.what}")
    n_stale = 0
    for part in result.stale.values():
        n_stale += part.records
        if part.records:
            records = count(part.records, "record")
            print(f"stale     {records} of namespace {part.namespace}: {part.why}")
    for broken in result.descriptions:
        print(f"broken    {broken.place}  {broken.problem}")
    fixed = f", {result.quarantined} {store.fixed}" if result.n_damaged else ""
    print(
        f"{count(result.records, 'record')} checked{' (a sample)' if result.sampled else ''}, "
        f"{size(result.bytes_read)} read, {result.n_damaged} damaged{fixed}, "
        f"{len(result.orphaned)} orphaned"
        f"{f' ({result.swept} removed)' if result.swept else ''}, {n_stale} stale"
        f"{'' if result.complete else '; not all of the store'}"
    )
    name = shlex.quote(store.name)
    if namespace is not None:
        name += f" --namespace {shlex.quote(namespace)}"
    _print_what_to_do(store, result, name, stale=n_stale > 0)


def _print_what_to_do(store: Store, result: Verification, name: str, *, stale: bool) -> None:
    if result.n_broken:
        print(
            f"{count(result.n_broken, 'namespace')} with a description that cannot be read: "
            "engines use the records as ever, but `stat`, `explain` and `pin` "
            "cannot tell what they are of"
        )
    if result.dropped_descriptions:
        print(
            f"{count(result.dropped_descriptions, 'description')} {store.fixed}: "
            "the next engine to save there writes it anew"
        )
    if result.n_left or len(result.orphaned) > result.swept:
        print(f"to {store.to_fix}: kvtier verify --fix {name}")
    if stale:
        print(f"to delete what is stale: kvtier prune {name} --stale")
    if result.complete or result.sampled:
        return
    if result.after is None:
        print("nothing was read: give it more time")
    else:
        print(f"to go on from here: kvtier verify --resume {name}")
