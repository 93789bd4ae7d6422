"""``kvtier replay``: options, table and picture."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from .exit_codes import ExitCode
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
    all_sizes,
    all_speeds,
    chosen_policies,
    model_shape,
    size_of,
)
from .reporting import CommandError, note, print_json, reported, size, table

if TYPE_CHECKING:
    from .replay_results import Result

DEFAULT_MODEL = "Llama-3.1-8B"
DEFAULT_SIZES = "32GiB+256GiB,64GiB+512GiB,128GiB+1TiB,256GiB+2TiB,512GiB+4TiB"
DEFAULT_POLICIES = "lru,fifo,twice,optimum"


@reported
def replay(
    trace: Annotated[
        str,
        typer.Argument(
            help="Agent sessions, Mooncake JSONL or a kvtier recording; by default those packaged."
        ),
    ] = "agent-sessions",
    model: Annotated[str, typer.Option(help="Folder with config.json, or a public name.")] = (
        DEFAULT_MODEL
    ),
    bytes_per_token: Annotated[
        int, typer.Option(help="KV bytes of a token, instead of a model.", min=0)
    ] = 0,
    sizes: Annotated[
        str, typer.Option(help="RAM or RAM+DISK, several with commas.")
    ] = DEFAULT_SIZES,
    policies: Annotated[
        str, typer.Option(help="Of lru, fifo, back, twice, optimum; several with commas.")
    ] = DEFAULT_POLICIES,
    device: Annotated[
        str, typer.Option(help="The engine's own prefix cache, which is asked first; a size.")
    ] = "0",
    users: Users = 16,
    share_prefix: SharePrefix = False,
    chunk_tokens: ChunkTokens = 256,
    merge: Annotated[
        int,
        typer.Option(
            help="Neighbouring chunks moved as one where no request tells them apart; 1 is exact.",
            min=1,
            max=4096,
        ),
    ] = 4,
    load_policy: Annotated[str, typer.Option(help="auto or always.")] = "auto",
    tp: Tp = 1,
    kv_cache_dtype: KvDtype = "auto",
    ram_speed: RamSpeed = 20.0,
    disk_read: DiskRead = 5.0,
    disk_write: DiskWrite = 2.0,
    prefill: Prefill = 8000.0,
    latency_ms: Latency = 5.0,
    jobs: Jobs = 2,
    png: Png = None,
    as_json: Json = False,
) -> None:
    """Run a trace against kvtier's catalog and eviction.

    Tells hits by tier, bytes, and what other policies would bring.
    """
    from .replay_results import Setup
    from .replay_run import Job, run_all

    if png is not None:
        from .plan_chart import check_png

        check_png(png)
    shape = model_shape(model, bytes_per_token, kv_cache_dtype, tp, chunk_tokens)
    speeds = all_speeds(ram_speed, disk_read, disk_write, prefill, latency_ms)
    if load_policy not in {"auto", "always"}:
        raise CommandError(f"--load-policy {load_policy!r} is not auto or always", ExitCode.USAGE)
    device_tokens = size_of("--device", device) // max(1, shape.stored_bytes_per_token)
    setup = Setup(shape, speeds, device_tokens, gated=load_policy == "auto")
    with TraceErrors(trace):
        results = run_all(
            Job(trace, setup, users, share_prefix, merge),
            all_sizes(sizes),
            chosen_policies(policies),
            jobs,
            _progress,
        )
    if png is not None:
        _draw_replay(png, trace, results)
    if as_json:
        rows = [{**asdict(result), "hit_rate": result.hit_rate} for result in results]
        print_json({"trace": trace, "setup": asdict(setup), "results": rows})
    else:
        _print_results(trace, results)


def _progress(done: int, of: int) -> None:
    if sys.stderr.isatty():
        note(f"{done} of {of} replays")


def _print_results(trace: str, results: list[Result]) -> None:
    first = results[0]
    print(f"{trace}: {first.requests:,} requests, {first.prompt_tokens:,} prompt tokens")
    rows = []
    for result in results:
        total = max(1, result.prompt_tokens)
        shares = [f"{100 * result.hit_tokens[t] / total:.1f}" for t in ("device", "ram", "disk")]
        row: list[object] = [
            result.policy,
            size(result.ram_bytes),
            size(result.disk_bytes) if result.disk_bytes else "-",
            f"{100 * result.hit_rate:.1f}",
            *shares,
            *(size(result.loaded_bytes[t]) for t in ("ram", "disk")),
        ]
        if result.disk_written_bytes is None:  # a bound tells nothing of these
            rows.append([*row, "-", "-", "-"])
            continue
        times = (result.first_token_p50_s, result.first_token_p90_s)
        rows.append([*row, size(result.disk_written_bytes), *(f"{t:.2f}" for t in times)])
    table(
        ("policy", "RAM", "disk", "hit %", "device %", "RAM %", "disk %", "from RAM", "from disk",
         "to disk", "first token s", "p90 s"),
        rows,
    )  # fmt: skip


def _draw_replay(path: str, trace: str, results: list[Result]) -> None:
    from .plan_chart import Curve, draw_curves

    curves: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        n_bytes = float(result.ram_bytes + result.disk_bytes)
        curves.setdefault(result.policy, []).append((n_bytes, result.hit_rate))
    draw_curves(
        path,
        f"{trace}: hit rate by policy, RAM and disk together",
        [Curve(name, tuple(sorted(points))) for name, points in curves.items()],
    )
