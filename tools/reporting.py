"""How commands speak: results on stdout, everything else on stderr, one line for an error."""

from __future__ import annotations

import functools
import io
import json
import shutil
import sys
import time
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import typer

from ..storage.errors import ConfigError, KVTierError, TierUnavailable
from .exit_codes import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

P = ParamSpec("P")
R = TypeVar("R")
PROGRESS_EVERY_S = 0.5
_UNBOUNDED_COLUMNS = 10_000  # of what is no terminal: a line a row


class CommandError(KVTierError):
    """A command cannot go on; carries the exit code."""

    def __init__(self, message: str, code: ExitCode = ExitCode.FAILURE) -> None:
        super().__init__(message)
        self.code = code


def exit_code_of(error: BaseException) -> ExitCode:
    """Return how the process ends for an error."""
    if isinstance(error, CommandError):
        return error.code
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    if isinstance(error, ConfigError):
        return ExitCode.FINDINGS
    if isinstance(error, (TierUnavailable, OSError)):
        return ExitCode.UNREACHABLE
    return ExitCode.FAILURE


def reported(command: Callable[P, R]) -> Callable[P, R]:
    """Turn our errors and Ctrl-C into one line on stderr and an exit code."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except BrokenPipeError:  # `kvtier ls | head`: nobody reads on, and that is fine
            sys.stderr.close()
            raise typer.Exit(ExitCode.OK) from None
        except (KVTierError, OSError, KeyboardInterrupt) as error:
            text = "interrupted" if isinstance(error, KeyboardInterrupt) else _line(error)
            note(f"kvtier: {text}")
            raise typer.Exit(exit_code_of(error)) from None

    return wrapped


def _line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    return " ".join(str(error).split()).removeprefix("kvtier: ").removeprefix("kvtier ")


def note(text: str) -> None:
    """Say something that is not a result."""
    print(text, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Print one object as one line of JSON on stdout."""
    print(json.dumps(value), flush=True)


def finish(code: ExitCode) -> None:
    """End the command with a code."""
    if code is not ExitCode.OK:
        raise typer.Exit(code)


class Progress:
    """One line on a terminal, rewritten now and then; elsewhere nothing."""

    def __init__(self) -> None:
        self._shown_at_s = time.monotonic()
        self._wide = 0

    def __call__(self, text: str) -> None:
        """Show it, when the last is long enough ago."""
        now_s = time.monotonic()
        if sys.stderr.isatty() and now_s - self._shown_at_s > PROGRESS_EVERY_S:
            self._shown_at_s = now_s
            self.show(text)

    def show(self, text: str) -> None:
        """Show it now, as far as the terminal is wide."""
        text = text[: max(1, shutil.get_terminal_size().columns - 1)]
        sys.stderr.write("\r" + text.ljust(self._wide))
        sys.stderr.flush()
        self._wide = len(text)

    def clear(self) -> None:
        """Leave an empty line for whatever comes next."""
        if self._wide:
            self.show("")
            sys.stderr.write("\r")
            sys.stderr.flush()


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table for people: as wide as the terminal, nothing cut off; numbers to the right."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    on_terminal = sys.stdout.isatty()
    body = [[cell if isinstance(cell, str) else _cell(cell) for cell in row] for row in rows]
    shown = Table(box=SIMPLE_HEAD if on_terminal else None, pad_edge=False, show_edge=False)
    for i, column in enumerate(columns):
        to_right = all(row[i][:1].isdigit() or row[i] == "-" for row in body)
        shown.add_column(Text(column), justify="right" if to_right else "left", overflow="fold")
    for row in body:
        shown.add_row(*map(Text, row))
    width = shutil.get_terminal_size().columns if on_terminal else _UNBOUNDED_COLUMNS
    # Into memory first: a pipe that closes is met where every other output meets it.
    text = io.StringIO()
    Console(file=text, width=width, force_terminal=on_terminal, highlight=False).print(shown)
    print("\n".join(line.rstrip() for line in text.getvalue().splitlines()))


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def size(n_bytes: float) -> str:
    """Return a size as people read it."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(n_bytes) < 1024 or unit == "TiB":
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    raise AssertionError


def count(n: int, singular: str, plural: str | None = None) -> str:
    """Return so many of a thing: ``1 record``, ``2,000 records``."""
    return f"{n:,} {singular if n == 1 else plural or singular + 's'}"


def age(since_s: float, now_s: float | None = None) -> str:
    """Return how long ago a Unix time was."""
    seconds = max(0.0, (time.time() if now_s is None else now_s) - since_s)
    for limit, unit_s, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"
