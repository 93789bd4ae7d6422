"""The same prompts through an engine without kvtier and one with it, answer by answer.

The baseline runs first and makes the prompts, for each turn contains the answer of the one
before; the engine with kvtier then gets exactly these prompts. So a difference in one answer
cannot hide behind different prompts later on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .sessions import Session, SessionPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .engine import Answer

FLOAT32_LOGPROB_TOLERANCE = 1e-3
"""Prefill cut at another place moves float32 logprobs by about 2e-5 here; a damaged block by
0.1 and more."""
COARSE_LOGPROB_TOLERANCE = 0.15
"""The same for bfloat16 and float16, whose last bit is that much coarser."""


class Asks(Protocol):
    """The part of `kvtier.tools.engine.Engine` that a trial needs; tests put a fake here."""

    def ask(self, prompt_token_ids: Sequence[int], answer_tokens: int = 16) -> Answer:
        """Run one request to its end."""

    def drain(self) -> None:
        """Wait for saves under way."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of one session, as the baseline answered it."""

    session: str
    turn: int  # from 1
    prompt: tuple[int, ...]
    baseline: Answer


@dataclass(frozen=True, slots=True)
class Outcome:
    """A turn answered by the engine with kvtier, beside the baseline's answer."""

    turn: Turn
    answer: Answer
    equal: bool

    @property
    def restored_share(self) -> float:
        """Part of the prompt that the connector brought back."""
        return self.answer.restored_tokens / self.answer.prompt_tokens

    @property
    def speedup(self) -> float | None:
        """Baseline's time to first token over kvtier's; None where nothing was restored."""
        if not self.answer.restored_tokens:
            return None
        return self.turn.baseline.ttft_s / self.answer.ttft_s

    def as_dict(self) -> dict[str, Any]:
        """Return the fields of one turn in ``--json`` output."""
        speedup = self.speedup
        return {
            "session": self.turn.session,
            "turn": self.turn.turn,
            "prompt_tokens": self.answer.prompt_tokens,
            "device_tokens": self.answer.device_tokens,
            "restored_tokens": self.answer.restored_tokens,
            "restored_by_tier": dict(self.answer.restored_by_tier),
            "restored_share": round(self.restored_share, 4),
            "ttft_s": round(self.answer.ttft_s, 4),
            "ttft_baseline_s": round(self.turn.baseline.ttft_s, 4),
            "device_tokens_baseline": self.turn.baseline.device_tokens,
            "speedup": None if speedup is None else round(speedup, 2),
            "equal": self.equal,
            "logprob_difference": self.answer.logprob_distance(self.turn.baseline),
        }


def tolerance(dtype: str) -> float:
    """Return how far logprobs of equal answers may lie apart in ``dtype``."""
    return FLOAT32_LOGPROB_TOLERANCE if dtype in {"float32", "float"} else COARSE_LOGPROB_TOLERANCE


def run_baseline(
    engine: Asks,
    plans: Sequence[SessionPlan],
    encode: Callable[[str], list[int]],
    *,
    answer_tokens: int,
    seed: int,
    done: Callable[[Turn], None],
) -> list[Turn]:
    """Play the sessions in round robin; return what was asked and answered, in order."""
    sessions = [Session(plan, encode, seed) for plan in plans]
    answers: list[tuple[int, ...]] = [() for _ in plans]
    turns: list[Turn] = []
    for number in range(max(len(plan.prompt_tokens) for plan in plans)):
        for i, session in enumerate(sessions):
            if number >= len(session.plan.prompt_tokens):
                continue
            prompt = session.next_prompt(answers[i])
            answer = engine.ask(prompt, answer_tokens)
            answers[i] = answer.token_ids
            turns.append(Turn(session.plan.name, number + 1, tuple(prompt), answer))
            done(turns[-1])
    return turns


def run_again(
    engine: Asks,
    turns: Sequence[Turn],
    *,
    answer_tokens: int,
    logprob_tolerance: float,
    done: Callable[[Outcome], None],
) -> list[Outcome]:
    """Ask the same prompts in the same order; saves of a turn end before the next begins."""
    outcomes: list[Outcome] = []
    for turn in turns:
        answer = engine.ask(turn.prompt, answer_tokens)
        engine.drain()
        equal = answer.same_as(turn.baseline, logprob_tolerance)
        outcomes.append(Outcome(turn, answer, equal))
        done(outcomes[-1])
    return outcomes
