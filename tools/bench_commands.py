"""`kvtier bench ...`: options and tables; the measuring is in the modules named after each."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any, Optional

import typer

from .exit_codes import EXIT_CODES_HELP, ExitCode
from .reporting import CommandError, finish, note, print_json, reported, table

bench = typer.Typer(
    help="Measure parts of kvtier, as ratios taken in one run.", no_args_is_help=True
)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Folder = Annotated[
    Optional[str],  # noqa: UP045 (typer reads annotations at run time, on Python 3.10 too)
    typer.Option(help="Where the disk's files go; by default the temporary folder."),
]
Model = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="Model folder or name; by default SmolLM2-135M-Instruct."),
]


def _say(text: str) -> None:
    if sys.stderr.isatty():
        note(text)


def _check_folder(folder: str | None) -> None:
    if folder is not None and not os.path.isdir(folder):
        raise CommandError(f"--folder {folder}: no such folder", ExitCode.USAGE)


def _rows(rows: list[dict[str, Any]]) -> None:
    columns = list(rows[0])
    table(columns, [[row[column] for column in columns] for row in rows])


def _fields(result: dict[str, Any], *, without: tuple[str, ...] = ()) -> None:
    table(
        ("figure", "value"),
        [(name, value) for name, value in result.items() if name not in without],
    )


@bench.command(epilog=EXIT_CODES_HELP)
@reported
def address(as_json: Json = False) -> None:
    """Time chunks and block ids to addresses.

    Against vLLM's own function and a scalar loop.
    """
    from . import bench_address

    bench_address.run(as_json)


@bench.command(epilog=EXIT_CODES_HELP)
@reported
def lookup(as_json: Json = False) -> None:
    """Time a lookup on the engine's scheduling thread.

    How much of a long prompt is stored.
    """
    from . import bench_lookup

    result = bench_lookup.run(_say)
    print_json(result) if as_json else _rows(result["rows"])


@bench.command(epilog=EXIT_CODES_HELP)
@reported
def tiers(
    folder: Folder = None,
    rounds: Annotated[int, typer.Option(help="Rounds; medians are reported.", min=1)] = 5,
    total_mib: Annotated[int, typer.Option(help="MiB moved in each round.", min=32)] = 256,
    as_json: Json = False,
) -> None:
    """Time RAM and disk through the worker's own code.

    Against plain copies, reads and writes.
    """
    from . import bench_tiers

    _check_folder(folder)
    options = bench_tiers.TiersBench(folder=folder, rounds=rounds, total_mib=total_mib)
    result = bench_tiers.run(options, _say)
    print_json(result) if as_json else bench_tiers.show(result["rows"])


@bench.command(epilog=EXIT_CODES_HELP)
@reported
def engine(
    model: Model = None,
    folder: Folder = None,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the prompt.", min=512)] = 6000,
    rounds: Annotated[int, typer.Option(help="Rounds; medians are reported.", min=1)] = 5,
    no_reuse: Annotated[
        bool,
        typer.Option(
            "--no-reuse", help="Throughput where nothing is used again, with and without kvtier."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Time to first token in the real engine, by where KV is.

    Cold, from the device, from RAM, from disk.
    """
    from . import bench_engine, bench_throughput
    from .engine_choice import check_engine

    check_engine(model)
    _check_folder(folder)
    if no_reuse:
        load = bench_throughput.ThroughputBench(model=model, folder=folder, rounds=rounds + 1)
        result = bench_throughput.run(load, _say)
        print_json(result) if as_json else _fields(result, without=("samples_s",))
        return
    options = bench_engine.EngineBench(
        model=model, folder=folder, prompt_tokens=prompt_tokens, rounds=rounds
    )
    result = bench_engine.run(options, _say)
    print_json(result) if as_json else _fields(result, without=("samples",))


@bench.command(epilog=EXIT_CODES_HELP)
@reported
def sessions(
    model: Model = None,
    folder: Folder = None,
    n_sessions: Annotated[int, typer.Option("--sessions", help="How many.", min=2)] = 6,
    turns: Annotated[int, typer.Option(help="Turns of each.", min=2)] = 4,
    as_json: Json = False,
) -> None:
    """Time more agent sessions than RAM holds.

    In the real engine, with and without kvtier.
    """
    from . import bench_sessions
    from .engine_choice import check_engine

    check_engine(model)
    _check_folder(folder)
    options = bench_sessions.SessionsBench(
        model=model, folder=folder, sessions=n_sessions, turns=turns
    )
    result = bench_sessions.run(options, _say)
    print_json(result) if as_json else _fields(result, without=("turns",))


@bench.command(epilog=EXIT_CODES_HELP)
@reported
def device(
    ordinal: Annotated[int, typer.Option("--device", help="Which CUDA device.", min=0)] = 0,
    gib: Annotated[float, typer.Option(help="GiB moved by each copy.", min=0.25)] = 2.0,
    rounds: Annotated[int, typer.Option(help="Rounds; medians are reported.", min=1)] = 5,
    as_json: Json = False,
) -> None:
    """Time copies between device blocks and pinned pages.

    Without a CUDA device host copies only.
    """
    from . import bench_device
    from .bench_device_copies import GIB, Options

    options = Options(device=ordinal, volume_bytes=int(gib * GIB), repeats=rounds)
    result = bench_device.run(options, _say)
    print_json(result) if as_json else _rows(bench_device.bar_rows(result))
    if result.get("failed"):
        note(f"kvtier: could not be measured: {result['failed']}")
        finish(ExitCode.FAILURE)


@bench.command(epilog=EXIT_CODES_HELP)
@reported
def redis(as_json: Json = False) -> None:
    """Time verified records through a Redis of its own.

    Against plain sockets and redis-py.
    """
    from . import bench_redis

    finish(ExitCode(bench_redis.run(as_json)))


@bench.command(epilog=EXIT_CODES_HELP)
@reported
def outage(
    model: Model = None,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the prompts.", min=512)] = 512,
    rounds: Annotated[int, typer.Option(help="Rounds; medians are reported.", min=4)] = 7,
    as_json: Json = False,
) -> None:
    """Time to first token while the engine's Redis is stopped.

    In the real engine, against one without Redis.
    """
    from . import bench_outage
    from .engine_choice import check_engine

    check_engine(model)
    options = bench_outage.OutageBench(model=model, prompt_tokens=prompt_tokens, rounds=rounds)
    result = bench_outage.run(options, _say)
    print_json(result) if as_json else _rows(bench_outage.rows(result))


@bench.command(epilog=EXIT_CODES_HELP)
@reported
def store(
    records: Annotated[int, typer.Option(help="Records of the store.", min=1)] = 100_000,
    folder: Folder = None,
    as_json: Json = False,
) -> None:
    """Time `stat`, the first row of `ls`, and `--help`.

    With a large store.
    """
    from . import bench_store

    _check_folder(folder)
    result = bench_store.run(records, folder, _say)
    print_json(result) if as_json else _fields(result, without=("bars",))
