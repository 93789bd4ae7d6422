"""``kvtier replay`` and ``kvtier plan``: options, tables and pictures."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from .exit_codes import EXIT_CODES_HELP, ExitCode
from .reporting import CommandError, note, print_json, reported, size, table

if TYPE_CHECKING:
    from .replay_chunks import Shape
    from .replay_results import Result
    from .replay_tiers import Policy, Sizes, Speeds

GIGA = 1e9
DEFAULT_MODEL = "Llama-3.1-8B"
DEFAULT_SIZES = "32GiB+256GiB,64GiB+512GiB,128GiB+1TiB,256GiB+2TiB,512GiB+4TiB"
DEFAULT_POLICIES = "lru,fifo,twice,optimum"

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Png = Annotated[
    Optional[str],  # noqa: UP045 (typer reads annotations at run time, on Python 3.10 too)
    typer.Option(metavar="FILE", help="Also draw hit rate over size into a PNG."),
]
Tp = Annotated[int, typer.Option(help="Tensor parallel size.", min=1, max=1024)]
KvDtype = Annotated[str, typer.Option(help="The engine's --kv-cache-dtype.")]
ChunkTokens = Annotated[int, typer.Option(help="Tokens of a chunk.", min=1, max=1 << 20)]
Users = Annotated[int, typer.Option(help="Agent sessions that run at a time.", min=1)]
SharePrefix = Annotated[
    bool,
    typer.Option(
        "--share-prefix",
        help="Take equally long tools and system prompts of agent sessions for the same.",
    ),
]
Jobs = Annotated[int, typer.Option(help="Processes.", min=1, max=256)]
RamSpeed = Annotated[float, typer.Option(help="RAM to device, GB/s, all ranks.", min=0.001)]
DiskRead = Annotated[float, typer.Option(help="Disk reads, GB/s.", min=0.001)]
DiskWrite = Annotated[float, typer.Option(help="Disk writes, GB/s.", min=0.001)]
Prefill = Annotated[float, typer.Option(help="Prefill of the engine, tokens/s.", min=0.001)]
Latency = Annotated[float, typer.Option(help="Least time of any load, ms.", min=0.0)]


def add_planning_verbs(app: typer.Typer) -> None:
    """Add the verbs to the command."""
    for verb in (replay, plan):
        app.command(epilog=EXIT_CODES_HELP)(verb)


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
    """Run a trace against kvtier's catalog and eviction: hits by tier, bytes, policies."""
    from .replay_results import Setup
    from .replay_run import Job, run_all

    shape = _shape(model, bytes_per_token, kv_cache_dtype, tp, chunk_tokens)
    speeds = _speeds(ram_speed, disk_read, disk_write, prefill, latency_ms)
    if load_policy not in {"auto", "always"}:
        raise CommandError(f"--load-policy {load_policy!r} is not auto or always", ExitCode.USAGE)
    device_tokens = _size("--device", device) // max(1, shape.stored_bytes_per_token)
    setup = Setup(shape, speeds, device_tokens, gated=load_policy == "auto")
    with _Traced():
        results = run_all(
            Job(trace, setup, users, share_prefix, merge),
            _all_sizes(sizes),
            _policies(policies),
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
    """Plan RAM and disk for a model: what fits, what it brings, from where on a hit pays."""
    from . import plan as planning
    from .model_sizes import ModelError, find_model
    from .replay_tiers import Sizes

    if png is not None and trace is None:
        raise CommandError("--png needs --trace: the curve is made from one", ExitCode.USAGE)
    chosen = Sizes(_size("--ram", ram), _size("--disk", disk))
    if not chosen.ram_bytes and not chosen.disk_bytes:
        raise CommandError("give --ram, --disk or both, like --ram 64GiB", ExitCode.USAGE)
    try:
        kv = find_model(model, kv_cache_dtype, tp)
    except ModelError as error:
        raise CommandError(str(error), ExitCode.USAGE) from None
    speeds = _speeds(ram_speed, disk_read, disk_write, prefill, latency_ms)
    wish = planning.Wish(kv, chosen, speeds, session_tokens, chunk_tokens, disk_path)
    traced = None if trace is None else planning.TraceWish(trace, users, share_prefix)
    with _Traced():
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


# -- options ---------------------------------------------------------------------


class _Traced:
    """Gives a broken trace its exit code."""

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Turn a trace's error into the command's."""
        from .traces import TraceError

        if isinstance(error, TraceError):
            raise CommandError(str(error), ExitCode.WRONG_FORMAT) from None


def _size(option: str, text: str) -> int:
    from ..connector.values import parse_size

    try:
        return parse_size(int(text) if text.isdigit() else text)
    except ValueError:
        raise CommandError(f"{option} {text!r} is no size like 64GiB", ExitCode.USAGE) from None


def _all_sizes(text: str) -> list[Sizes]:
    from .replay_tiers import Sizes

    found = []
    for one in text.split(","):
        ram, _, disk = one.strip().partition("+")
        sizes = Sizes(_size("--sizes", ram), _size("--sizes", disk) if disk else 0)
        if not sizes.ram_bytes and not sizes.disk_bytes:
            raise CommandError(f"--sizes {one!r} has neither RAM nor disk", ExitCode.USAGE)
        if sizes not in found:
            found.append(sizes)
    return found


def _policies(text: str) -> list[Policy]:
    from .replay_tiers import POLICIES

    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in POLICIES:
            known = "; ".join(f"{policy.name}: {policy.doc}" for policy in POLICIES.values())
            raise CommandError(f"policy {name!r} is not known ({known})", ExitCode.USAGE)
    return [POLICIES[name] for name in names]


def _speeds(
    ram: float, disk_read: float, disk_write: float, prefill: float, latency_ms: float
) -> Speeds:
    from .replay_tiers import Speeds

    return Speeds(ram * GIGA, disk_read * GIGA, disk_write * GIGA, latency_ms / 1000, prefill)


def _shape(
    model: str, bytes_per_token: int, kv_dtype: str, n_ranks: int, chunk_tokens: int
) -> Shape:
    from .model_sizes import ModelError, find_model
    from .replay_chunks import Shape

    if bytes_per_token:
        return Shape(bytes_per_token, bytes_per_token, chunk_tokens=chunk_tokens)
    try:
        return find_model(model, kv_dtype, n_ranks).shape(chunk_tokens)
    except ModelError as error:
        raise CommandError(str(error), ExitCode.USAGE) from None
