"""The verb ``warm``: records of a store up into the RAM of running engines."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from .exit_codes import EXIT_CODES_HELP, ExitCode
from .prompt_choice import CacheSalt, Everything, Recording, RequestId, Tenant, Tokens, UpTo
from .reporting import CommandError, Progress, count, finish, print_json, reported
from .store_commands import Json, Namespace, StoreName

if TYPE_CHECKING:
    from .prompt_choice import Choice
    from .store_base import Record, Store
    from .warm import EngineAnswer


def add_warm_verb(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command(epilog=EXIT_CODES_HELP)(warm)


@reported
def warm(
    store: StoreName,
    prompt: Tokens = None,
    request: RequestId = None,
    recording: Recording = None,
    up_to: UpTo = None,
    everything: Everything = False,
    namespace: Namespace = None,
    cache_salt: CacheSalt = None,
    tenant: Tenant = None,
    control: Annotated[
        Optional[str],  # noqa: UP045 (typer reads annotations at run time, on Python 3.10 too)
        typer.Option(
            metavar="FOLDER", help="The engines' setting `control`; by default below a folder."
        ),
    ] = None,
    wake: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="URL", help="A vLLM server to wake with one token if it is idle."),
    ] = None,
    seconds: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", help="How long to wait.", min=0.1)
    ] = 30.0,
    as_json: Json = False,
) -> None:
    """Bring records up into the RAM of the engines that run.

    Those of a prompt, or of a namespace.
    """
    from . import warm as asking
    from .prompt_choice import choose, read_asked
    from .store import open_store

    if everything == (prompt is not None or request is not None):
        raise CommandError("give token ids, --request, or --all with --namespace", ExitCode.USAGE)
    asked = None
    if not everything:
        asked = read_asked(prompt, request, recording, cache_salt, tenant)
    with open_store(store) as opened:
        choice = choose(opened, asked, namespace, up_to)
        folder = _folder(opened, control)
        keys = wanted(opened, choice)
        name, tier = opened.name, opened.kind
    progress = Progress()
    answers = asking.ask(folder, asking.wish(tier, choice.space.namespace, keys))
    try:
        waker = None if wake is None else lambda: asking.wake_server(wake)
        asking.wait(answers, seconds, waker, progress)
    finally:
        progress.clear()
        asking.close(answers)
    if as_json:
        print_json(
            {
                "store": name,
                "kind": tier,
                "namespace": choice.space.name,
                "tokens": choice.hit_tokens,
                "chunks": len(keys),
                "engines": [answer.as_dict() for answer in answers],
            }
        )
    else:
        _print(answers, len(keys))
    finish(_code(answers))


def _folder(opened: Store, control: str | None) -> str:
    from ..connector.control import FOLDER

    if control is not None:
        return os.path.abspath(os.path.expanduser(control))
    if opened.kind != "disk":
        raise CommandError(
            "give --control: the folder that the engines' setting `control` names", ExitCode.USAGE
        )
    return os.path.join(opened.name, FOLDER)


def wanted(opened: Store, choice: Choice) -> list[tuple[bytes, int]]:
    """Return keys and where their records end, the most wanted first, each once.

    Of a prompt its beginning; of a namespace what was used last, as many as may be asked for.
    """
    from ..connector.warm_request import MAX_KEYS

    if choice.hit_tokens:
        places = zip(choice.records, choice.ends, strict=True)
        return list({(record.key, end): None for record, end in places})
    latest: dict[bytes, Record] = {}
    for record in choice.records:  # of all ranks
        known = latest.get(record.key)
        if known is None or record.used_at_s > known.used_at_s:
            latest[record.key] = record
    newest = sorted(latest.values(), key=lambda r: (-r.used_at_s, r.order))
    headers = opened.headers(newest[:MAX_KEYS])
    return [(header.key, header.end_tokens) for _, header in headers]


def _print(answers: list[EngineAnswer], n_chunks: int) -> None:
    for answer in answers:
        row = answer.as_dict()
        text = f"engine {row['engine']}: "
        if row["state"] == "refused":
            text += f"refused: {row['why']}"
        elif row["state"] == "other_namespace":
            text += "has another namespace"
        elif row["state"] == "waiting":
            text += "did not begin: it is idle, and begins with its next request (or --wake URL)"
        else:
            skipped = ", ".join(
                f"{n:,} {why.replace('_', ' ')}" for why, n in row["skipped"].items()
            )
            text += (
                f"{row['loaded']:,} of {count(n_chunks, 'chunk')} loaded, "
                f"{row['in_ram']:,} were there"
                f"{f', {skipped}' if skipped else ''}"
                f"{'' if row['state'] == 'done' else ' (' + row['state'] + ')'}"
            )
        print(text)


def _code(answers: list[EngineAnswer]) -> ExitCode:
    """Return OK when every engine of the namespace, and at least one, has done all it could."""
    own = [answer for answer in answers if answer.state != "other_namespace"]
    if not own or any(answer.state != "done" for answer in own):
        return ExitCode.FAILURE
    return ExitCode.OK
