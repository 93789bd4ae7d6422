"""``kvtier plan``: options, tables and picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from .exit_codes import EXIT_CODES_HELP, ExitCode
from .plan_options import (
    ChunkTokens,
    DiskRead,
    DiskWrite,
    Jobs,
    Json,
    KvDtype,
    Latency,
    Png,
    Prefill,
    RamSpeed,
    SharePrefix,
    Tp,
    TraceErrors,
    Users,
    all_speeds,
    size_of,
)
from .replay_commands import replay
from .reporting import CommandError, print_json, reported, size, table

if TYPE_CHECKING:
    from .replay_tiers import Sizes


def add_planning_verbs(app: typer.Typer) -> None:
    """Add the verbs to the command."""
    for verb in (replay, plan):
        app.command(epilog=EXIT_CODES_HELP)(verb)


@reported
def plan(
    model: Annotated[str, typer.Option(help="Folder with config.json, or a public name.")],
    ram: Annotated[str, typer.Option(help="Size of the RAM tier.")] = "0",
    disk: Annotated[str, typer.Option(help="Size of the disk tier.")] = "0",
    trace: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="A trace, or agent-sessions: adds hit rates over sizes."),
    ] = None,
    session_tokens: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Length of a session; by default the trace's median.", min=1),
    ] = None,
    users: Users = 16,
    share_prefix: SharePrefix = False,
    chunk_tokens: ChunkTokens = 256,
    tp: Tp = 1,
    kv_cache_dtype: KvDtype = "auto",
    ram_speed: RamSpeed = 20.0,
    disk_read: DiskRead = 5.0,
    disk_write: DiskWrite = 2.0,
    prefill: Prefill = 8000.0,
    latency_ms: Latency = 5.0,
    disk_path: Annotated[str, typer.Option(help="Folder to put into the settings.")] = (
        "/path/on/nvme"
    ),
    jobs: Jobs = 2,
    png: Png = None,
    as_json: Json = False,
) -> None:
    """Plan RAM and disk for a model.

    What fits, what it brings, from where on a hit pays.
    """
    from . import plan as planning
    from .model_sizes import ModelError, find_model
    from .replay_tiers import Sizes

    if png is not None and trace is None:
        raise CommandError("--png needs --trace: the curve is made from one", ExitCode.USAGE)
    if png is not None:
        from .plan_chart import check_png

        check_png(png)
    chosen = Sizes(size_of("--ram", ram), size_of("--disk", disk))
    if not chosen.ram_bytes and not chosen.disk_bytes:
        raise CommandError("give --ram, --disk or both, like --ram 64GiB", ExitCode.USAGE)
    try:
        kv = find_model(model, kv_cache_dtype, tp)
    except ModelError as error:
        raise CommandError(str(error), ExitCode.USAGE) from None
    speeds = all_speeds(ram_speed, disk_read, disk_write, prefill, latency_ms)
    wish = planning.Wish(kv, chosen, speeds, session_tokens, chunk_tokens, disk_path)
    traced = None if trace is None else planning.TraceWish(trace, users, share_prefix)
    with TraceErrors(trace):
        result = planning.plan(wish, traced, jobs)
    if png is not None:
        _draw_plan(png, result, chosen)
    if as_json:
        print_json(result)
    else:
        _print_plan(result)
        print(f"\n{planning.settings_text(wish)}")


def _print_plan(result: dict[str, Any]) -> None:
    kv = result["model"]
    print(
        f"{kv['name']}: {size(kv['stored_bytes_per_token'])} of KV a token in the tiers; "
        f"a session of {result['session_tokens']:,} tokens takes {size(result['session_bytes'])}"
    )
    if kv["state_bytes"]:
        print(
            f"a recurrent state takes {size(kv['state_bytes'])} and is kept at each prompt's "
            f"end, on multiples of {kv['state_every_tokens']:,} tokens"
        )
    print()
    rows = [
        (
            layers["kind"],
            layers["layers"],
            size(layers["token_bytes"]) if layers["token_bytes"] else "-",
            layers["window_tokens"],
            size(layers["state_bytes"]) if layers["state_bytes"] else "-",
        )
        for layers in kv["layers"]
    ]
    table(("layers", "count", "a token", "window", "a state"), rows)
    print()
    table(
        ("tier", "size", "tokens", "sessions", "load a session", "prefill it", "a hit pays from"),
        [
            (
                tier["tier"],
                size(tier["bytes"]),
                tier["tokens"],
                f"{tier['sessions']:,}",
                f"{tier['session_load_s']:.2f} s",
                f"{tier['session_prefill_s']:.1f} s",
                "never" if tier["pays_from_tokens"] is None
                else f"{tier['pays_from_tokens']:,} tokens",
            )
            for tier in result["tiers"]
        ],
    )  # fmt: skip
    if "curve" in result:
        _print_curve(result)


def _print_curve(result: dict[str, Any]) -> None:
    trace = result["trace"]
    print(
        f"\n{trace['name']}: {trace['requests']:,} requests, {trace['prompt_tokens']:,} prompt "
        f"tokens, of which {trace['distinct_tokens']:,} differ ({size(trace['distinct_bytes'])})"
    )
    table(
        ("size", "tokens", "hit %", "best possible %", ""),
        [
            (
                size(point["bytes"]),
                point["tokens"],
                f"{100 * point['hit_rate']:.1f}",
                f"{100 * point['best_hit_rate']:.1f}",
                "planned" if point["planned"] else "",
            )
            for point in result["curve"]
        ],
    )


def _draw_plan(path: str, result: dict[str, Any], chosen: Sizes) -> None:
    from .plan_chart import Curve, Mark, draw_curves

    curve = result["curve"]
    marks = [Mark("RAM", float(chosen.ram_bytes))] if chosen.ram_bytes else []
    if chosen.disk_bytes:
        name = "RAM + disk" if chosen.ram_bytes else "disk"
        marks.append(Mark(name, float(chosen.ram_bytes + chosen.disk_bytes)))
    draw_curves(
        path,
        f"{result['model']['name']}, {result['trace']['name']}",
        [
            Curve("least recently used", tuple((p["bytes"], p["hit_rate"]) for p in curve)),
            Curve("best possible", tuple((p["bytes"], p["best_hit_rate"]) for p in curve)),
        ],
        marks,
    )
