"""`kvtier demo`: agent sessions in the real vLLM, with and without kvtier.

Three sessions share a device cache that holds one of them at a time, so each turn finds its
session's KV evicted. Without kvtier vLLM computes the whole prompt again; with it the prompt
comes back from RAM, and after a restart of the engine from disk or Redis. Every answer is
compared with the one of the engine without kvtier.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import models
from .engine import Engine, EngineOptions
from .engine_choice import check_engine
from .redis_server import RedisServer
from .sessions import SessionPlan, encoder
from .trial import Outcome, Turn, run_again, run_baseline, tolerance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# A returning turn grows by less than a tenth, so that 90 % of it can have been seen before.
# The two short sessions together overflow the device cache before the long one returns.
SESSIONS = (
    SessionPlan("long", (3650, 4010)),
    SessionPlan("mid", (2150, 2330)),
    SessionPlan("also-mid", (2150, 2330)),
)
DEVICE_TOKENS = 4160
BLOCK_TOKENS = 32
ANSWER_TOKENS = 8
SEED = 1
OWN_SERVER = "start"


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the demo runs.

    Attributes:
        model: folder or name; None makes SmolLM2 from its package.
        disk: folder of the disk tier; None uses one that is removed afterwards.
        redis: URL of a server to use instead of a disk; `OWN_SERVER` starts one.
    """

    model: str | None = None
    dtype: str = "float32"
    disk: str | None = None
    redis: str | None = None
    ram: str = "1GiB"
    disk_capacity: str = "4GiB"
    sessions: Sequence[SessionPlan] = SESSIONS
    device_tokens: int = DEVICE_TOKENS
    block_tokens: int = BLOCK_TOKENS
    answer_tokens: int = ANSWER_TOKENS

    def check(self) -> None:
        """Refuse now what an engine would refuse after minutes.

        Raises:
            CommandError: one line that says what to change.
            ConfigError: a folder or an address that no engine would start with.
        """
        from ..connector.config import load

        check_engine(self.model, self.dtype)
        settings: dict[str, Any] = {"ram": self.ram}
        if self.redis not in {None, OWN_SERVER}:
            settings.update(redis=self.redis)
        if self.disk is not None:
            settings.update(disk=self.disk, disk_capacity=self.disk_capacity)
        load(settings)


class Listener:
    """Told what happens, for a display; does nothing by itself."""

    def phase(self, text: str) -> None:
        """Note that a phase begins, such as an engine's start."""

    def asked(self, done: int, of: int) -> None:
        """Note that so many requests of this phase are answered."""

    def outcome(self, outcome: Outcome, phase: str) -> None:
        """Take one turn's result."""


@dataclass(frozen=True, slots=True)
class DemoReport:
    """What came out."""

    turns: tuple[Outcome, ...]
    after_restart: tuple[Outcome, ...]
    model: str
    wall_s: float

    @property
    def outputs_equal(self) -> bool:
        """Whether every answer was the baseline's."""
        return all(outcome.equal for outcome in (*self.turns, *self.after_restart))

    @property
    def returning(self) -> tuple[Outcome, ...]:
        """The turns whose session has been seen before."""
        return tuple(outcome for outcome in self.turns if outcome.turn.turn > 1)

    @property
    def restored_tokens(self) -> int:
        """Tokens that the connector brought back before the restart."""
        return sum(outcome.answer.restored_tokens for outcome in self.turns)

    @property
    def problems(self) -> list[str]:
        """What is wrong, in words; empty when the demo shows what it should."""
        found = [
            f"{where}: session {o.turn.session} turn {o.turn.turn} answered differently"
            for where, outcomes in (("", self.turns), ("after the restart", self.after_restart))
            for o in outcomes
            if not o.equal
        ]
        if not self.restored_tokens:
            found.append("nothing was restored")
        if not sum(outcome.answer.restored_tokens for outcome in self.after_restart):
            found.append("nothing was restored after the restart")
        return [text.removeprefix(": ") for text in found]

    def as_dict(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        problems = self.problems
        return {
            "ok": not problems,
            "problems": problems,
            "outputs_equal": self.outputs_equal,
            "restored_tokens": self.restored_tokens,
            "restored_share": _least_share(self.returning),
            "turns": [outcome.as_dict() for outcome in self.turns],
            "after_restart": {
                "outputs_equal": all(outcome.equal for outcome in self.after_restart),
                "restored_tokens": sum(o.answer.restored_tokens for o in self.after_restart),
                "restored_share": _least_share(self.after_restart),
                "turns": [outcome.as_dict() for outcome in self.after_restart],
            },
            "model": self.model,
            "wall_s": round(self.wall_s, 1),
        }


def _least_share(outcomes: Sequence[Outcome]) -> float:
    return round(min((outcome.restored_share for outcome in outcomes), default=0.0), 4)


def run_demo(
    options: DemoOptions,
    listener: Listener,
    *,
    open_engine: Callable[[EngineOptions], Any] = Engine,
    encode: Callable[[str], list[int]] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> DemoReport:
    """Run the three engines one after the other; blocking, minutes.

    Args:
        options: what to run.
        listener: told of progress, on this thread.
        open_engine: starts an engine (tests put a fake here).
        encode: text to token ids; None takes the model's tokenizer.
        clock: seconds.

    Raises:
        ModelError, EngineError: the model or vLLM cannot be had.
    """
    begin_s = clock()
    model = options.model
    if model is None:
        listener.phase("model: SmolLM2-135M-Instruct")
        model = str(models.smollm2(options.dtype))
    encode = encode or encoder(model)
    total = sum(len(plan.prompt_tokens) for plan in options.sessions)
    base = _engine_options(options, model)

    listener.phase("vLLM without kvtier: starting")
    with open_engine(base) as engine:
        _warm_up(engine)
        listener.phase("vLLM without kvtier")
        asked: list[Turn] = []

        def noted(turn: Turn) -> None:
            asked.append(turn)
            listener.asked(len(asked), total)

        turns = run_baseline(
            engine,
            options.sessions,
            encode,
            answer_tokens=options.answer_tokens,
            seed=SEED,
            done=noted,
        )
    with _tiers(options) as kvtier:
        with_kvtier = _engine_options(options, model, kvtier)
        before = _run(with_kvtier, turns, "vLLM with kvtier", options, listener, open_engine)
        last = list({turn.session: turn for turn in turns}.values())
        after = _run(with_kvtier, last, "after a restart", options, listener, open_engine)
    return DemoReport(tuple(before), tuple(after), model, clock() - begin_s)


def _run(
    engine_options: EngineOptions,
    turns: Sequence[Turn],
    phase: str,
    options: DemoOptions,
    listener: Listener,
    open_engine: Callable[[EngineOptions], Any],
) -> list[Outcome]:
    listener.phase(f"{phase}: starting")
    with open_engine(engine_options) as engine:
        _warm_up(engine)
        listener.phase(phase)
        seen: list[Outcome] = []

        def noted(outcome: Outcome) -> None:
            seen.append(outcome)
            listener.outcome(outcome, phase)
            listener.asked(len(seen), len(turns))

        return run_again(
            engine,
            turns,
            answer_tokens=options.answer_tokens,
            logprob_tolerance=tolerance(options.dtype),
            done=noted,
        )


def _engine_options(
    options: DemoOptions, model: str, kvtier: dict[str, Any] | None = None
) -> EngineOptions:
    longest = max(max(plan.prompt_tokens) for plan in options.sessions)
    return EngineOptions(
        model=model,
        device_tokens=options.device_tokens,
        block_tokens=options.block_tokens,
        max_model_tokens=longest + options.answer_tokens,
        dtype=options.dtype,
        kvtier=kvtier,
    )


def _warm_up(engine: Any) -> None:
    """Pay for what an engine does only once, so that no turn is charged for it."""
    engine.ask([1] * 2 * BLOCK_TOKENS, 2)
    engine.drain()


@contextlib.contextmanager
def _tiers(options: DemoOptions) -> Iterator[dict[str, Any]]:
    """Yield kvtier's settings; what was made for the demo alone is gone afterwards."""
    with contextlib.ExitStack() as stack:
        settings: dict[str, Any] = {"ram": options.ram}
        if options.redis is not None:
            url = options.redis
            if url == OWN_SERVER:
                url = stack.enter_context(RedisServer()).url
            # In somebody's own server the demo's records are few, apart, and go by themselves.
            settings.update(redis=url, redis_prefix="kvtier-demo", redis_ttl=3600)
            settings.update(lookup_deadline_ms=1000)  # on a busy machine 50 ms may be too short
        if options.disk is not None or options.redis is None:
            disk = options.disk or stack.enter_context(
                tempfile.TemporaryDirectory(prefix="kvtier-demo-")
            )
            settings.update(disk=disk, disk_capacity=options.disk_capacity)
        yield settings
