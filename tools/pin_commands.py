"""Verbs that keep a prefix from eviction: ``pin``, ``unpin``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from .exit_codes import EXIT_CODES_HELP, ExitCode
from .prompt_choice import CacheSalt, Everything, Recording, RequestId, Tenant, Tokens, UpTo
from .reporting import CommandError, count, note, print_json, reported, size
from .store_change_commands import DryRun
from .store_commands import Json, Namespace, StoreName

if TYPE_CHECKING:
    from ..storage.pins import Pin
    from .store_base import Store


def add_pin_verbs(app: typer.Typer) -> None:
    """Add the verbs to the command."""
    for verb in (pin, unpin):
        app.command(epilog=EXIT_CODES_HELP)(verb)


@reported
def pin(
    store: StoreName,
    prompt: Tokens = None,
    request: RequestId = None,
    recording: Recording = None,
    up_to: UpTo = None,
    everything: Everything = False,
    namespace: Namespace = None,
    cache_salt: CacheSalt = None,
    tenant: Tenant = None,
    text: Annotated[str, typer.Option("--note", help="What `stat` shows beside it.")] = "",
    capacity: Annotated[
        Optional[str],  # noqa: UP045 (typer reads annotations at run time, on Python 3.10 too)
        typer.Option(metavar="SIZE", help="Of the store, where no engine (or server) has said it."),
    ] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Keep records of a prompt or namespace from eviction."""
    from ..storage.pins import MAX_KEYS, Pin
    from .prompt_choice import choose, read_asked
    from .store import open_store

    if everything == (prompt is not None or request is not None):
        raise CommandError("give token ids, --request, or --all with --namespace", ExitCode.USAGE)
    asked = None
    if not everything:
        asked = read_asked(prompt, request, recording, cache_salt, tenant)
    with open_store(store) as opened:
        choice = choose(opened, asked, namespace, up_to)
        keys = tuple(dict.fromkeys(record.key for record in choice.records))
        if len(keys) > MAX_KEYS:
            raise CommandError(f"{len(keys):,} keys are too many for one pin ({MAX_KEYS:,})")
        made = Pin(
            choice.space.namespace, keys, choice.hit_tokens, choice.stored_bytes, time.time(), text
        )
        limit_bytes = _limit(opened, capacity)
        _check_room(opened, made, limit_bytes)
        warning = opened.pin_warning()
        if not dry_run:
            opened.pin(made, choice.records)
        result = {
            "store": opened.name,
            "kind": opened.kind,
            "dry_run": dry_run,
            "records": len(choice.records),
            "limit_bytes": limit_bytes,
            "warning": warning,
            **made.as_dict(),
        }
    if as_json:
        print_json(result)
        return
    what = count(made.n_tokens, "token") if made.n_tokens else "the whole namespace"
    print(
        f"{'would pin' if dry_run else 'pinned'} {what}: {count(len(choice.records), 'record')}, "
        f"{size(made.stored_bytes)}, as {made.name}"
    )
    if warning is not None:
        note(f"kvtier: {warning}")


def _limit(opened: Store, capacity: str | None) -> int:
    from ..storage.pins import PIN_SHARE
    from .store_select import n_bytes

    limit_bytes = opened.pin_limit_bytes() if capacity is None else n_bytes(capacity) // PIN_SHARE
    if limit_bytes is None:
        raise CommandError(
            f"{opened.name} does not say how much it may hold; give --capacity, of which half "
            "may be pinned",
            ExitCode.USAGE,
        )
    return limit_bytes


def _check_room(opened: Store, made: Pin, limit_bytes: int) -> None:
    """Refuse what would leave too little room for everything else.

    Raises:
        CommandError.
    """
    held = sum(p.stored_bytes for p in opened.pins() if p.name != made.name)
    if held + made.stored_bytes > limit_bytes:
        raise CommandError(
            f"not pinned: {size(made.stored_bytes)} beside {size(held)} that are pinned would be "
            f"more than {size(limit_bytes)}, half of the capacity; --up-to pins less"
        )


@reported
def unpin(
    store: StoreName,
    pins: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="PIN...", help="Names, or unmistakable beginnings of some."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All pins of the store.")] = False,
    as_json: Json = False,
) -> None:
    """Let what was pinned be evicted again; deletes nothing."""
    from .store import open_store

    if everything == bool(pins):
        raise CommandError("give names of pins, as `kvtier stat` shows them, or --all",
                           ExitCode.USAGE)  # fmt: skip
    with open_store(store) as opened:
        there = opened.pins()
        chosen = there if everything else [_named(there, name) for name in pins or ()]
        for one in dict.fromkeys(chosen):
            opened.unpin(one)
        result = {
            "store": opened.name,
            "kind": opened.kind,
            "unpinned": [one.as_dict() for one in dict.fromkeys(chosen)],
        }
    if as_json:
        print_json(result)
    else:
        print(f"{count(len(result['unpinned']), 'pin')} dropped")


def _named(there: list[Pin], start: str) -> Pin:
    from .store_base import ambiguous

    if not start:  # an empty variable in a script
        raise CommandError("the name of a pin is empty", ExitCode.USAGE)
    found = [one for one in there if one.name.startswith(start)]
    if len(found) != 1:
        raise ambiguous("pin", start, len(found))
    return found[0]
