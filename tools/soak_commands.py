"""``kvtier soak``: options, progress and how it ends."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from . import reporting
from .exit_codes import EXIT_CODES_HELP, ExitCode
from .reporting import CommandError, finish, note, print_json, reported
from .soak_listener import Listener

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .soak_options import SoakOptions

FINDINGS_SHOWN = 12
REFRESH_S = 1.0
LINE_S = 60.0  # where there is no terminal: a log of days stays readable


def add_soak_verb(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command(epilog=EXIT_CODES_HELP)(soak)


@reported
def soak(
    minutes: Annotated[float, typer.Option(help="Minutes of traffic through kvtier.")] = 10.0,
    report: Annotated[
        Path, typer.Option(help="Folder for report.html, report.json and the engine's log.")
    ] = Path("soak-report"),
    model: Annotated[
        Optional[str],  # noqa: UP045 (typer reads annotations at run time, on Python 3.10 too)
        typer.Option(help="Model folder or name; by default SmolLM2-135M-Instruct."),
    ] = None,
    dtype: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="Type of weights and KV; by default float32, and of a server at --url not known."
        ),
    ] = None,
    url: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="A running OpenAI-compatible server instead of an engine of its own."),
    ] = None,
    oracle_url: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Beside --url: a server without any cache, for the right answers."),
    ] = None,
    pid: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Beside --url: process whose memory is watched."),
    ] = None,
    traffic: Annotated[
        str, typer.Option(help="synthetic, agent-sessions, or a trace file.")
    ] = "synthetic",
    sessions: Annotated[int, typer.Option(help="Different sessions.", min=1)] = 6,
    turns: Annotated[int, typer.Option(help="Most turns of a session.", min=1)] = 4,
    users: Annotated[int, typer.Option(help="Sessions under way at a time.", min=1)] = 2,
    answer_tokens: Annotated[int, typer.Option(help="Tokens of an answer.", min=1)] = 8,
    aborts: Annotated[
        float, typer.Option(help="Share of requests that are given up.", min=0, max=1)
    ] = 0.06,
    tolerance: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            help="How far logprobs may lie apart; by default from dtype and noise.", min=0
        ),
    ] = None,
    context_tokens: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Longest prompt and answer; by default fitted to the time.", min=128),
    ] = None,
    device_tokens: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            help="Size of the device's cache; by default too small for all sessions.", min=1
        ),
    ] = None,
    kvtier: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="JSON", help="Settings of kvtier, over those that the soak chooses."),
    ] = None,
    engine: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="JSON", help="Further arguments of vllm.LLM, for all engines."),
    ] = None,
    redis: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="A Redis URL as a further tier, or start for one of the soak's own."),
    ] = None,
    faults: Annotated[
        str,
        typer.Option(
            help="Of disk-corrupt, disk-full, disk-slow, redis-kill, redis-hang, redis-evict, "
            "engine-kill; several with commas, or all."
        ),
    ] = "",
    three_way: Annotated[
        bool, typer.Option(help="Also play all sessions with vLLM's own prefix cache alone.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Traffic and faults come from it.")] = 1,
    storage_only: Annotated[
        bool, typer.Option("--storage-only", help="The storage half alone, without an engine.")
    ] = False,
    operations: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="With --storage-only: end after so many.", min=1),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report's JSON.")] = False,
) -> None:
    """Drive an engine for long, and check all that it does.

    Runs agent sessions; proves that answers are right and memory is steady.
    """
    if not 0 < minutes < math.inf:
        raise CommandError("--minutes must be a number more than 0", ExitCode.USAGE)
    from .soak_options import ALL_FAULTS, STORAGE_FAULTS, SoakOptions

    chosen = [name.strip() for name in faults.split(",") if name.strip()]
    if chosen == ["all"]:
        chosen = list(STORAGE_FAULTS if storage_only else ALL_FAULTS)
    options = SoakOptions(
        minutes=minutes,
        report=report,
        model=model,
        dtype=dtype or ("float32" if url is None else "auto"),
        url=url,
        oracle_url=oracle_url,
        metrics_pid=pid,
        traffic=traffic,
        sessions=sessions,
        turns=turns,
        answer_tokens=answer_tokens,
        users=users,
        abort_share=aborts,
        tolerance=tolerance,
        context_tokens=context_tokens,
        device_tokens=device_tokens,
        kvtier=_object("--kvtier", kvtier),
        redis=redis,
        faults=tuple(chosen),
        three_way=three_way,
        seed=seed,
        engine=_object("--engine", engine),
    )
    options.check(storage_only=storage_only)
    if operations is not None and not storage_only:
        raise CommandError("--operations goes with --storage-only", ExitCode.USAGE)
    _check_traffic(traffic)
    try:
        report.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"--report {report}: {error.strerror}", ExitCode.USAGE) from None
    with _interruptible() as stopped:
        found = _run(options, stopped, storage_only, operations)
    write_report(report, found)
    if as_json:
        print_json(found)
    else:
        _say(found, report)
    finish(exit_code(found))


def _check_traffic(traffic: str) -> None:
    """Read a trace file before an engine is started for it.

    Raises:
        CommandError: there is none, or it is none.
    """
    if traffic in ("synthetic", "agent-sessions"):
        return
    from .plan_options import TraceErrors
    from .traces_read import read_trace

    with TraceErrors(traffic):
        read_trace(traffic, share_prefix=True)


def exit_code(found: dict[str, Any]) -> ExitCode:
    """Return how the command ends: 1 when something was wrong, 130 when it was cut short."""
    if not found["ok"]:
        return ExitCode.FAILURE
    return ExitCode.INTERRUPTED if found["interrupted"] else ExitCode.OK


def _object(option: str, text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise CommandError(f"{option} is no JSON: {error}", ExitCode.USAGE) from None
    if not isinstance(value, dict):
        raise CommandError(f"{option} is no JSON object", ExitCode.USAGE)
    return value


def _run(
    options: SoakOptions, stopped: threading.Event, storage_only: bool, operations: int | None
) -> dict[str, Any]:
    progress = Progress(sys.stderr.isatty())
    if storage_only:
        from .soak_storage import StorageSoak

        return StorageSoak(options, progress, stopped, operations).run()
    if options.url is not None:
        from .soak_url_run import UrlSoak

        return UrlSoak(options, progress, stopped).run()
    from .soak import Soak

    return Soak(options, progress, stopped).run()


@contextlib.contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Turn the first Ctrl-C into an event; a second one ends at once."""
    stopped = threading.Event()

    def on_interrupt(*_: object) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()
        note("ending: the report follows (once more to end at once)")

    before = {s: signal.signal(s, on_interrupt) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


class Progress(Listener):
    """How far it is: one line on a terminal, rewritten; elsewhere a line a minute.

    Args:
        shown: whether there is a terminal.
        clock: tells seconds.
    """

    def __init__(self, shown: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._shown = shown
        self._now = clock
        self._phase = ""
        self._at_s = clock()
        self._line = reporting.Progress()

    def phase(self, text: str) -> None:
        """Begin a phase."""
        self._phase = text
        if self._shown:
            self._line.show(text)

    def progress(self, done_s: float, of_s: float, text: str) -> None:
        """Say how far it is, once a second; where that is no terminal, once a minute."""
        now_s = self._now()
        if now_s - self._at_s < (REFRESH_S if self._shown else LINE_S):
            return
        self._at_s = now_s
        left = _clock(max(0.0, of_s - done_s))
        line = f"{self._phase}: {_clock(done_s)} of {_clock(of_s)}, {left} left; {text}"
        self._line.show(line) if self._shown else note(line)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def write_report(folder: Path, found: dict[str, Any]) -> None:
    """Write report.json and report.html."""
    from .soak_html import page
    from .soak_storage_html import FORMAT, storage_page

    draw = storage_page if found["format"] == FORMAT else page
    (folder / "report.json").write_text(json.dumps(found, indent=1) + "\n")
    (folder / "report.html").write_text(draw(found), encoding="utf-8")


def _say(found: dict[str, Any], folder: Path) -> None:
    if sys.stderr.isatty():
        note("")
    _say_storage(found) if "operations" in found else _say_answers(found)
    for row in found["findings"][:FINDINGS_SHOWN]:
        print(f"{row['party']}: {row['text']}")
    if len(found["findings"]) > FINDINGS_SHOWN:
        print(f"and {len(found['findings']) - FINDINGS_SHOWN} more findings")
    print(f"{found['verdict']}; report: {folder / 'report.html'}")


def _say_answers(found: dict[str, Any]) -> None:
    traffic, noise = found["traffic"], found["noise"]
    print(f"noise: logprobs of equal requests differ by {noise['alone']:.2g} alone, "
          f"{noise['together']:.2g} beside others; "
          f"up to {found['setup'].get('tolerance', 0):.2g} is no difference")  # fmt: skip
    tokens = ", ".join(f"{n:,} {name}" for name, n in traffic["tokens"].items() if n)
    print(f"answers: {traffic['answered']}, wrong: {traffic['wrong']}, given up: "
          f"{traffic['aborted']}; prompt tokens: {tokens or 'none'}")  # fmt: skip


def _say_storage(found: dict[str, Any]) -> None:
    done, lives = found["operations"], found["lives"]
    killed = sum(life["killed"] for life in lives)
    print(f"operations: {done['all']:,}; lives: {len(lives)}, killed: {killed}; "
          f"{done['all'] / max(1.0, found['duration_s']):,.0f} a second")  # fmt: skip
