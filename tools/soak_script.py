"""The script of a soak: sessions with the right answer to every turn.

Turns are asked of an engine without any cache, one at a time, and what it says is kept on disk:
a second soak of the same model starts at once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .soak_options import SoakOptions
from .soak_traffic import (
    RandomStream,
    Session,
    Stream,
    TextStream,
    TrafficOptions,
    fitting_context,
    synthetic_sessions,
    trace_sessions,
)
from .soak_truth import Noise, TruthStore, measure_noise
from .soak_types import Ask, Reply, Script, SoakError, Turn

NOISE_PROMPT_TOKENS = (150, 310, 470)
MIN_TURNS = 4
SPEED_FACT = "prefill_tokens_per_s"
NOISE_FACT = "noise"


@dataclass(frozen=True, slots=True)
class Asker:
    """Asks the oracle; both are blocking.

    Attributes:
        alone: one request with nothing beside it.
        together: several at once.
    """

    alone: Callable[[Ask], Reply]
    together: Callable[[Sequence[Ask]], list[Reply]]


def stream_opener(
    options: SoakOptions, encode: Callable[[str], list[int]] | None, vocab_tokens: int
) -> Callable[[str], Stream]:
    """Return what gives the tokens of a name: text where there is a tokenizer."""
    if encode is None:
        return lambda name: RandomStream(name, options.seed, vocab_tokens)
    return lambda name: TextStream(name, options.seed, encode)


def learn_noise(
    store: TruthStore,
    asker: Callable[[], Asker],
    open_stream: Callable[[str], Stream],
    options: SoakOptions,
    max_tokens: int,
) -> tuple[Noise, float]:
    """Return the noise and the prefill speed in tokens/s, measured unless they are kept."""
    kept, speed = store.fact(NOISE_FACT), store.fact(SPEED_FACT)
    if isinstance(kept, dict) and isinstance(speed, float):
        return Noise(**kept), speed
    lengths = [min(n, max_tokens - options.answer_tokens) for n in NOISE_PROMPT_TOKENS]
    prompts = [tuple(open_stream(f"noise-{i}").take(n)) for i, n in enumerate(lengths)]
    ask = asker()
    took: list[tuple[int, float]] = []

    def alone(prompt: tuple[int, ...]) -> Reply:
        reply = ask.alone(Ask(prompt, options.answer_tokens))
        took.append((len(prompt), reply.ttft_s))
        return reply

    def together(some: Sequence[tuple[int, ...]]) -> list[Reply]:
        return ask.together([Ask(prompt, options.answer_tokens) for prompt in some])

    noise = measure_noise(alone, together, prompts)
    again = took[len(took) // 2 :]  # the first of each length pays for what is done once
    speed = sum(n for n, _ in again) / max(1e-6, sum(s for _, s in again))
    store.note(NOISE_FACT, noise.as_dict())
    store.note(SPEED_FACT, speed)
    return noise, speed


def traffic_options(options: SoakOptions, max_tokens: int, speed: float) -> TrafficOptions:
    """Return the shape of the traffic, its context fitted to the time unless it is given."""
    context = options.context_tokens or fitting_context(
        max_tokens, speed, options.duration_s, options.sessions, options.turns
    )
    return TrafficOptions(
        context_tokens=min(context, max_tokens),
        sessions=options.sessions,
        turns=options.turns,
        answer_tokens=options.answer_tokens,
        seed=options.seed,
    )


def open_sessions(
    options: SoakOptions, shape: TrafficOptions, open_stream: Callable[[str], Stream]
) -> list[Session]:
    """Return the sessions to play, synthetic or of a trace."""
    if options.traffic == "synthetic":
        return synthetic_sessions(shape, open_stream)
    from .traces_read import read_trace

    trace = read_trace(options.traffic, share_prefix=True)
    sessions = trace_sessions(trace, shape, open_stream)
    if not sessions:
        raise SoakError(f"{options.traffic}: no session in it has two long prompts")
    return sessions


def build_script(
    sessions: Sequence[Session],
    store: TruthStore,
    asker: Callable[[], Asker],
    budget_s: float,
    stopped: Callable[[], bool],
    told: Callable[[int, float], None],
    clock: Callable[[], float] = time.monotonic,
) -> Script:
    """Return as many turns as the budget allows, of all sessions in turn.

    Args:
        sessions: what to ask.
        store: right answers known and to be kept.
        asker: opens the oracle, at the first answer that is not known.
        budget_s: of asking; known answers cost nothing.
        stopped: whether to end now with what there is.
        told: called with (turns so far, seconds of the budget that are left).
        clock: monotonic seconds.
    """
    turns: dict[str, list[Turn]] = {session.name: [] for session in sessions}
    truth: dict[tuple[str, int], Reply] = {}
    spent_s = 0.0
    active: list[tuple[Session, tuple[int, ...]]] = [(session, ()) for session in sessions]
    while active:
        following: list[tuple[Session, tuple[int, ...]]] = []
        for session, answer in active:
            turn = session.next_turn(answer)
            if turn is None or not turn.prompt:
                continue
            reply = store.get(turn.prompt, turn.answer_tokens)
            if reply is None:
                if stopped() or (spent_s > budget_s and len(truth) >= MIN_TURNS):
                    continue
                ask, began_s = asker(), clock()
                reply = ask.alone(Ask(turn.prompt, turn.answer_tokens))
                spent_s += clock() - began_s
                store.put(turn.prompt, turn.answer_tokens, reply)
            turns[session.name].append(turn)
            truth[turn.session, turn.number] = reply
            following.append((session, reply.tokens))
            told(len(truth), max(0.0, budget_s - spent_s))
        active = following
    return Script(tuple(tuple(some) for some in turns.values() if some), truth)


def example_text(seed: int) -> str:
    """Return text like that of the sessions, to find out whether a tokenizer works."""
    from .sessions import pieces

    return next(pieces("example", random.Random(seed)))  # noqa: S311
