"""Verbs that change a store: ``prune``, ``rm``, ``copy``."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from .exit_codes import ExitCode
from .reporting import (
    CommandError,
    Progress,
    count,
    finish,
    note,
    print_json,
    reported,
    size,
    table,
)
from .store_commands import Json, Namespace, StoreName

if TYPE_CHECKING:
    from .store_base import Loose, Record, Store
    from .store_select import Pinned

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Included = Annotated[bool, typer.Option("--pinned", help="Also what is pinned; its pins go, too.")]


@reported
def prune(
    store: StoreName,
    unused: Annotated[
        Optional[str],  # noqa: UP045 (typer reads annotations at run time, on Python 3.10 too)
        typer.Option(metavar="AGE", help="What was not used for so long, like 12h or 7d."),
    ] = None,
    to_size: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="SIZE", help="What was used least, until so much is left."),
    ] = None,
    namespace: Namespace = None,
    prefix: Annotated[str, typer.Option(help="Only keys that begin so.")] = "",
    stale: Annotated[
        bool, typer.Option("--stale", help="Only what was cleared and is never asked for again.")
    ] = False,
    orphaned: Annotated[
        bool, typer.Option("--orphaned", help="Also what belongs to no record.")
    ] = False,
    pinned: Included = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete the records that meet every condition given.

    At least one must be given.
    """
    from .store import open_store
    from .store_select import Pinned, Selection, n_bytes, seconds

    with open_store(store) as opened:
        chosen = Selection(
            None if unused is None else seconds(unused),
            None if to_size is None else n_bytes(to_size),
            opened.pick(namespace),
            prefix,
            stale,
        )
        if chosen.says_nothing and not orphaned:
            raise CommandError(
                "prune deletes nothing without a condition: --unused, --to-size, --namespace, "
                "--prefix, --stale or --orphaned",
                ExitCode.USAGE,
            )
        if (unused is not None or to_size is not None) and (why := opened.no_ages()) is not None:
            raise CommandError(f"{why}: choose with --namespace, --prefix or --stale")
        progress = Progress()
        # what no engine asks for any more is not worth its pin
        spare = Pinned(opened, included=pinned or stale)
        try:
            records = (
                []
                if chosen.says_nothing
                else chosen.find(opened, lambda n: progress(f"{n:,} records seen"), spare=spare)
            )
        finally:
            progress.clear()
        loose = opened.loose() if orphaned else []
        _delete(opened, records, loose, spare, dry_run=dry_run, yes=yes, as_json=as_json)


@reported
def rm(
    store: StoreName,
    keys: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(help="Keys, or unmistakable beginnings of some."),
    ] = None,
    namespace: Namespace = None,
    everything: Annotated[
        bool, typer.Option("--all", help="All records of all namespaces.")
    ] = False,
    pinned: Included = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete single records, one namespace, or all.

    All is everything that kvtier keeps there.
    """
    from .store import open_store
    from .store_select import Pinned

    if not keys and namespace is None and not everything:
        raise CommandError("rm needs keys, --namespace or --all", ExitCode.USAGE)
    if everything and (keys or namespace is not None):
        raise CommandError("rm --all goes with neither keys nor --namespace", ExitCode.USAGE)
    with open_store(store) as opened:
        chosen = opened.pick(namespace)
        records: dict[tuple[str, str, str], Record] = {}
        for key in keys or ():
            records.update({record.order: record for record in opened.find(key, chosen)})
        if not keys:
            records.update({record.order: record for record in opened.records(chosen)})
        spaces = {record.namespace for record in records.values()}
        if not keys:
            spaces |= {s.namespace for s in opened.described() if chosen in {None, s.namespace}}
        spare = Pinned(opened, included=pinned)
        _delete(
            opened,
            [records[order] for order in sorted(records) if not spare(records[order])],
            [],
            spare,
            dry_run=dry_run,
            yes=yes or bool(keys),
            as_json=as_json,
        )
        if not keys and not dry_run:
            for space in sorted(spaces):
                opened.forget(space)


def _delete(
    opened: Store,
    records: list[Record],
    loose: list[Loose],
    spare: Pinned,
    *,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    from .store_base import delete
    from .store_select import drop_pins, outcome

    total = size(sum(record.stored_bytes for record in records))
    what = f"{count(len(records), 'record')}, {total}"
    if loose:
        what += f", and {count(len(loose), 'left-over')}"
    deleted = swept = 0
    progress = Progress()
    try:
        if (records or loose) and not dry_run:
            _confirm(f"delete {what} from {opened.name}?", yes=yes)
            for _ in opened.change(records, delete):
                deleted += 1
                progress(f"{deleted:,} of {len(records):,} deleted")
            swept = opened.sweep(loose)
            drop_pins(opened, records)
    finally:
        progress.clear()
        result = outcome(
            opened, records, deleted=deleted, dry_run=dry_run, swept=swept, pinned=spare.spared
        )
        if deleted or swept or dry_run or not records:
            _print_outcome(result, what, as_json=as_json)


def _print_outcome(result: dict[str, Any], what: str, *, as_json: bool) -> None:
    if as_json:
        print_json(result)
        return
    if result["namespaces"]:
        table(
            ("records", "size", "namespace"),
            [(n["records"], size(n["stored_bytes"]), n["namespace"]) for n in result["namespaces"]],
        )
    if result["dry_run"]:
        print(f"would delete {what}")
    else:
        left = f" and {count(result['swept'], 'left-over')}" if result["swept"] else ""
        print(f"{count(result['deleted'], 'record')}{left} deleted")
    if result["pinned"] == 1:
        print("1 pinned record stays; --pinned takes it, too")
    elif result["pinned"]:
        print(f"{result['pinned']:,} pinned records stay; --pinned takes them, too")


def _confirm(question: str, *, yes: bool) -> None:
    """Ask on a terminal.

    Raises:
        CommandError: the answer is no, or nobody can be asked.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise CommandError(
            f"{question} Nobody can be asked here: give --yes, or look first with --dry-run",
            ExitCode.USAGE,
        )
    note(f"{question} [y/N] ")
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise CommandError("nothing was deleted")


@reported
def copy(
    source: Annotated[str, typer.Argument(metavar="FROM", help="Store to read.")],
    target: Annotated[str, typer.Argument(metavar="TO", help="Store to write; may be new.")],
    namespace: Namespace = None,
    key_file: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--encryption-key-file",
            metavar="FILE",
            help="Encrypt with the first key of this file; the others open what FROM has. "
            "TO may then be FROM.",
        ),
    ] = None,
    key_env: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--encryption-key-env", metavar="NAME", help="The same with keys in this variable."
        ),
    ] = None,
    read_back: Annotated[
        bool, typer.Option(help="Read every record in the target once more, and compare.")
    ] = True,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Copy records between any two stores, each checked.

    As they are stored, or encrypted anew.
    """
    from ..storage.keyring import read_key_ring
    from .store import open_store
    from .store_copy import Copying
    from .store_copy import copy as copy_records

    result = Copying()
    progress = Progress()
    interrupted = False

    def after_each(now: Copying) -> None:
        speed = now.copied_bytes / now.seconds if now.seconds else 0
        left_s = (now.of_records - now.done) * now.seconds / max(1, now.done)
        progress(
            f"{now.done:,} of {now.of_records:,} records, {size(now.copied_bytes)}, "
            f"{size(speed)}/s, {left_s:.0f} s left"
        )

    keys = read_key_ring(key_file, key_env)
    with open_store(source) as old, open_store(target, create=True) as new:
        if keys is None and old.is_same(new):
            raise CommandError(
                "FROM and TO are the same store; that is only of use with other encryption keys",
                ExitCode.USAGE,
            )
        try:
            copy_records(
                old,
                new,
                old.pick(namespace),
                result,
                after_each,
                dry_run=dry_run,
                read_back=read_back,
                keys=keys,
            )
        except KeyboardInterrupt:
            interrupted = True
        finally:
            progress.clear()
            if result.of_records or result.complete:
                _print_copying(old, new, result, dry_run=dry_run, as_json=as_json)
    if interrupted:
        finish(ExitCode.INTERRUPTED)
    if result.unlike:
        finish(ExitCode.FAILURE)
    if result.n_damaged or result.n_locked:
        finish(ExitCode.FINDINGS)


def _print_copying(old: Store, new: Store, result: Any, *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        print_json(result.as_dict(old, new, dry_run=dry_run))
        return
    for key, why in result.damaged:
        print(f"damaged, not copied  {key}  {why}")
    for key, key_id in result.locked:
        print(f"encrypted with key {key_id}, which is not given; not copied  {key}")
    for key in result.unlike:
        print(f"differs in {new.name}  {key}")
    if dry_run:
        print(f"would copy {count(result.of_records, 'record')}, {size(result.of_bytes)}")
        return
    locked = f", {result.n_locked:,} of other keys" if result.n_locked else ""
    anew = f" ({result.sealed:,} encrypted anew)" if result.sealed else ""
    print(
        f"{count(result.copied, 'record')} copied{anew}, {size(result.copied_bytes)} "
        f"in {result.seconds:.1f} s; "
        f"{result.there:,} there already, {result.gone:,} gone meanwhile, "
        f"{result.n_damaged:,} damaged{locked}"
        f"{'' if result.complete else '; not all'}"
    )
    if result.n_damaged:
        print(f"to {old.to_fix}: kvtier verify --fix {shlex.quote(old.name)}")
