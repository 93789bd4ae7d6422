"""What `kvtier demo` shows to people: a line a turn, a progress bar on a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .demo import Listener

if TYPE_CHECKING:
    from .demo import DemoReport
    from .trial import Outcome

HEADING = (
    f"{'session':<9}{'turn':>5}{'prompt':>8}{'restored':>10}  {'from':<12}"
    f"{'first token':>12}{'without':>9}{'speedup':>9}  answer"
)


class DemoView(Listener):
    """Shows progress on stderr where that is a terminal, and results as they come.

    Args:
        quiet: show no results (``--json`` prints them at the end).
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._shown_phase = ""
        self._errors = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._errors,
            disable=not sys.stderr.isatty(),
            transient=True,
        )
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> DemoView:  # noqa: PYI034 (Python 3.10 has no typing.Self)
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def phase(self, text: str) -> None:
        """Show the phase in the bar, or as a line where there is no terminal."""
        self._progress.reset(self._task, description=text, total=None)
        if self._progress.disable and not self._quiet:
            print(f"-- {text}", file=sys.stderr, flush=True)

    def asked(self, done: int, of: int) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=done, total=of)

    def outcome(self, outcome: Outcome, phase: str) -> None:
        """Print one turn."""
        if self._quiet:
            return
        if phase != self._shown_phase:
            self._shown_phase = phase
            self._print(f"\n{phase}\n{HEADING}")
        self._print(turn_line(outcome))

    def summary(self, report: DemoReport) -> None:
        """Print what it comes to."""
        if not self._quiet:
            for line in summary_lines(report):
                self._print(line)

    def _print(self, text: str) -> None:
        if sys.stdout.isatty() and not self._progress.disable:
            self._progress.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            print(text, flush=True)


def turn_line(outcome: Outcome) -> str:
    """Return one row of the table."""
    answer, turn = outcome.answer, outcome.turn
    tiers = "+".join(answer.restored_by_tier) or "-"
    speedup = outcome.speedup
    return (
        f"{turn.session:<9}{turn.turn:>5}{answer.prompt_tokens:>8}{answer.restored_tokens:>10}  "
        f"{tiers:<12}{answer.ttft_s:>10.2f} s{turn.baseline.ttft_s:>7.2f} s"
        f"{'-' if speedup is None else f'{speedup:.1f}x':>9}  "
        f"{'equal' if outcome.equal else 'DIFFERENT'}"
    )


def summary_lines(report: DemoReport) -> list[str]:
    """Return the last lines; a speedup only where something was restored."""
    lines = [""]
    for label, outcomes in (
        ("returning turns", report.returning),
        ("after the restart", report.after_restart),
    ):
        restored = [o for o in outcomes if o.answer.restored_tokens]
        if not restored:
            lines.append(f"{label}: nothing was restored, so there is no speedup to report")
            continue
        with_s = sum(o.answer.ttft_s for o in restored)
        without_s = sum(o.turn.baseline.ttft_s for o in restored)
        share = min(o.restored_share for o in outcomes)
        lines.append(
            f"{label}: {share:.0%} or more of each prompt restored, first token after "
            f"{with_s:.1f} s in all instead of {without_s:.1f} s ({without_s / with_s:.1f}x)"
        )
    lines += [f"problem: {problem}" for problem in report.problems]
    if report.outputs_equal:
        lines.append("every answer equals that of vLLM without kvtier, tokens and logprobs")
    lines.append(f"took {report.wall_s:.0f} s")
    return lines
