"""`kvtier bench sessions`: more sessions than RAM holds, in the real engine.

Six agent sessions in round robin over a device cache that holds two of them and a RAM tier
that holds two more; the disk holds all. What counts is the time to the first token of the
turns that return to a session, with and without kvtier in one run.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import models
from .engine import Engine, EngineOptions
from .sessions import SessionPlan, encoder
from .trial import Outcome, Turn, run_again, run_baseline, tolerance

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .engine import Answer

FIRST_TOKENS, LAST_TOKENS, GROWTH_TOKENS, TURNS = 1500, 2700, 200, 4


@dataclass(frozen=True, slots=True)
class SessionsBench:
    """What to run; the defaults are about six minutes on two cores."""

    sessions: int = 6
    turns: int = TURNS
    model: str | None = None
    dtype: str = "float32"
    device_tokens: int = 5120
    block_tokens: int = 32
    ram: str = "256MiB"
    disk_capacity: str = "4GiB"
    answer_tokens: int = 8
    seed: int = 3
    folder: str | None = None


def session_plans(n_sessions: int, turns: int) -> list[SessionPlan]:
    """Return plans whose lengths run from 1,500 tokens (first turn) to 2,700 (last)."""
    last_start = LAST_TOKENS - GROWTH_TOKENS * (TURNS - 1)
    step = (last_start - FIRST_TOKENS) // max(1, n_sessions - 1)
    return [
        SessionPlan(
            f"agent-{i + 1}",
            tuple(FIRST_TOKENS + step * i + GROWTH_TOKENS * turn for turn in range(turns)),
        )
        for i in range(n_sessions)
    ]


def run(options: SessionsBench, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the figures; blocking, minutes."""
    model = options.model or str(models.smollm2(options.dtype))
    plans = session_plans(options.sessions, options.turns)
    say("without kvtier: starting vLLM")
    with Engine(_engine_options(options, model, plans, None)) as engine:
        engine.ask([1] * 256, 2)
        turns = run_baseline(
            engine,
            plans,
            encoder(model),
            answer_tokens=options.answer_tokens,
            seed=options.seed,
            done=lambda turn: say(_line("without", turn, turn.baseline)),
        )
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=options.folder) as folder:
        kvtier = {
            "ram": options.ram,
            "disk": os.path.join(folder, "store"),
            "disk_capacity": options.disk_capacity,
        }
        say("with kvtier: starting vLLM")
        with Engine(_engine_options(options, model, plans, kvtier)) as engine:
            engine.ask([1] * 256, 2)
            engine.drain()
            outcomes = run_again(
                engine,
                turns,
                answer_tokens=options.answer_tokens,
                logprob_tolerance=tolerance(options.dtype),
                done=lambda outcome: say(_line("with", outcome.turn, outcome.answer)),
            )
    return figures(outcomes)


def figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the JSON object; ``restored_share`` is the least of all returning turns."""
    returning = [outcome for outcome in outcomes if outcome.turn.turn > 1]
    shares = [outcome.restored_share for outcome in returning]
    baseline_mean_s = statistics.fmean(o.turn.baseline.ttft_s for o in returning)
    mean_s = statistics.fmean(o.answer.ttft_s for o in returning)
    return {
        "baseline_mean_s": round(baseline_mean_s, 4),
        "mean_s": round(mean_s, 4),
        "ratio": round(mean_s / baseline_mean_s, 4),
        "restored_share": round(min(shares), 4),
        "restored_share_mean": round(statistics.fmean(shares), 4),
        "restored_by_tier": _by_tier(returning),
        "outputs_equal": all(outcome.equal for outcome in outcomes),
        "turns": [outcome.as_dict() for outcome in outcomes],
    }


def _by_tier(outcomes: Sequence[Outcome]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for outcome in outcomes:
        for tier, tokens in outcome.answer.restored_by_tier.items():
            totals[tier] = totals.get(tier, 0) + tokens
    return totals


def _engine_options(
    options: SessionsBench,
    model: str,
    plans: Sequence[SessionPlan],
    kvtier: dict[str, Any] | None,
) -> EngineOptions:
    return EngineOptions(
        model=model,
        device_tokens=options.device_tokens,
        block_tokens=options.block_tokens,
        max_model_tokens=max(max(p.prompt_tokens) for p in plans) + options.answer_tokens,
        dtype=options.dtype,
        kvtier=kvtier,
    )


def _line(which: str, turn: Turn, answer: Answer) -> str:
    return (
        f"{which}: {turn.session} turn {turn.turn}: {answer.prompt_tokens} tokens, "
        f"{answer.device_tokens} on device, restored {dict(answer.restored_by_tier)}, "
        f"first token after {answer.ttft_s:.2f} s"
    )
