"""Verbs about an engine and its prompts: ``doctor``, ``explain``, ``top``."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from .exit_codes import EXIT_CODES_HELP, ExitCode
from .prompt_choice import CacheSalt, Recording, RequestId, Tenant, Tokens
from .reporting import CommandError, count, finish, print_json, reported, table
from .store_commands import Json, Namespace, StoreName

if TYPE_CHECKING:
    from .explain import Prompt

CLEAR = "\x1b[H\x1b[2J"


def add_inspect_verbs(app: typer.Typer) -> None:
    """Add the verbs to the command."""
    for verb in (doctor, explain, top):
        app.command(epilog=EXIT_CODES_HELP)(verb)


@reported
def doctor(
    source: Annotated[
        Optional[str],  # noqa: UP045 (typer reads annotations at run time, on Python 3.10 too)
        typer.Argument(metavar="FILE-OR-JSON", help="kvtier's settings, as for `config check`."),
    ] = None,
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Model folder, to look for faults that this model would meet."),
    ] = None,
    block_size: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="vLLM's --block-size."),
    ] = None,
    prefix_match_unit: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="vLLM's --prefix-match-unit."),
    ] = None,
    hash_algorithm: Annotated[
        str, typer.Option(help="vLLM's --prefix-caching-hash-algo.")
    ] = "sha256",
    ranks: Annotated[int, typer.Option(help="Ranks of one engine (TP x PP).", min=1)] = 1,
    as_json: Json = False,
) -> None:
    """Check this machine, its vLLM and a configuration before serving."""
    from . import doctor as checks
    from .config_check import read_settings

    engine: dict[str, Any] = {
        "block_size": block_size,
        "prefix_match_unit": prefix_match_unit,
        "prefix_caching_hash_algo": hash_algorithm,
        "model_config": _model_config(model),
    }
    settings = None if source is None else read_settings(source)
    findings = []
    for finding in checks.examine(settings, engine, n_ranks=ranks):
        findings.append(finding)
        if not as_json:
            print(f"{finding.level.value:<8} {finding.name}: {finding.text}", flush=True)
            if finding.todo:
                print(f"{'':<9}-> {finding.todo}", flush=True)
    bad = any(finding.level is checks.Level.PROBLEM for finding in findings)
    if as_json:
        print_json({"ok": not bad, "findings": [finding.as_dict() for finding in findings]})
    finish(ExitCode.FINDINGS if bad else ExitCode.OK)


def _model_config(folder: str | None) -> dict[str, Any] | None:
    import json
    import os

    if folder is None:
        return None
    path = os.path.join(folder, "config.json")
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise CommandError(f"{path}: {error}", ExitCode.USAGE) from None
    return value if isinstance(value, dict) else None


@reported
def explain(
    store: StoreName,
    prompt: Tokens = None,
    request: RequestId = None,
    recording: Recording = None,
    namespace: Namespace = None,
    cache_salt: CacheSalt = None,
    tenant: Tenant = None,
    check: Annotated[
        bool, typer.Option(help="Read the payloads that a hit would use, and check them.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Say how far a prompt hits in a store, and why it ends there."""
    from . import explain as reasons
    from .prompt_choice import read_asked
    from .store import open_store

    asked = read_asked(prompt, request, recording, cache_salt, tenant)
    with open_store(store) as opened:
        verdicts = reasons.explain(opened, asked, opened.pick(namespace), check=check)
        name, kind = opened.name, opened.kind
    if as_json:
        print_json(
            {
                "store": name,
                "kind": kind,
                "prompt_tokens": asked.n_tokens,
                "request": None if asked.recorded is None else asked.recorded.as_dict(),
                "namespaces": verdicts,
            }
        )
    else:
        _print_explanation(name, asked, verdicts)
    if any(verdict["reason"] == "damaged" for verdict in verdicts):
        finish(ExitCode.FINDINGS)


def _print_explanation(name: str, asked: Prompt, verdicts: list[dict[str, Any]]) -> None:
    if asked.recorded is not None:
        _print_request(asked.recorded.as_dict())
    if not verdicts:
        print(f"{name} has no namespace with a description: nothing was stored there")
    for number, verdict in enumerate(verdicts):
        if number:
            print()
        _print_verdict(verdict)


def _print_request(said: dict[str, Any]) -> None:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(said["at_s"]))
    restored = [("on the device", said["device_tokens"] or 0)]
    restored += [(f"from {tier}", n) for tier, n in sorted(said["hit_tokens"].items())]
    parts = [(n, where) for where, n in restored if n]
    tokens = ", ".join(
        f"{n:,} {where}" if i else f"{count(n, 'token')} {where}"
        for i, (n, where) in enumerate(parts)
    )
    print(f"request {said['request']} at {at}, {said['end'] or 'end not known'}")
    print(f"  the engine restored: {tokens or 'nothing'}")
    if said["miss"] == "none":
        print("  which is all that any request may restore")
    else:
        why = said["miss"] or "the recording does not say"
        print(f"  and ended there because: {why.replace('_', ' ')}")
    if said["others"]:
        print(f"  ({count(said['others'], 'older request')} of this name)")
    print()


def _print_verdict(verdict: dict[str, Any]) -> None:
    if verdict["hit_tokens"] is None:
        print(f"namespace {verdict['namespace']}: {verdict['detail']}")
        return
    print(f"namespace {verdict['namespace']} ({verdict['model'] or 'model not known'})")
    print(
        f"  hit: {verdict['hit_tokens']:,} of {count(verdict['prompt_tokens'], 'token')}, "
        f"{count(verdict['records_found'], 'record')} found"
    )
    if verdict["reason"] == "none":
        print(f"  {verdict['detail']}")
    else:
        print(f"  ends there because: {verdict['reason'].replace('_', ' ')}: {verdict['detail']}")
    other = verdict["differs_from_best"]
    if other is not None:
        print(f"  namespace {other['namespace']} has {other['hit_tokens']:,} tokens of it, but")
        table(
            ("field", "here", "there"),
            [(field, str(a), str(b)) for field, (a, b) in other["fields"].items()],
        )


@reported
def top(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="vLLM's server, as http://host:8000.")
    ] = "http://127.0.0.1:8000",
    once: Annotated[bool, typer.Option("--once", help="Look twice, print once, end.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between looks.", min=0.1)] = 2.0,
    as_json: Json = False,
) -> None:
    """Watch a running engine.

    Its tiers, hit tokens a second, queue, breakers, bandwidths.
    """
    from .scrape import metrics_url, safe_url, scrape
    from .top import View, lines, require_kvtier

    address = metrics_url(url)
    where = safe_url(address)
    before, before_s = scrape(address), time.monotonic()
    require_kvtier(before, where)
    live = sys.stdout.isatty() and not once and not as_json
    if live:
        print(CLEAR + "\n".join(lines(View(before, None, 0.0).as_dict(where))), flush=True)
    while True:
        time.sleep(every)
        try:
            now, now_s = scrape(address), time.monotonic()
        except CommandError as error:
            if not live:
                raise
            print(f"{CLEAR}{error}; looking again every {every:g} s", flush=True)
            continue
        state = View(now, before, now_s - before_s).as_dict(where)
        if as_json:
            print_json(state)
        else:
            print((CLEAR if live else "") + "\n".join(lines(state)), flush=True)
        if once:
            return
        before, before_s = now, now_s
