"""`kvtier bench outage`: what a Redis that stops costs the requests of a running engine.

Two engines in processes of their own, both with a small RAM tier, one of them with Redis
below it. Both have seen the same prompts, which only Redis still holds. Then its server stops:
frozen (it takes everything and says nothing) in one half of the run, killed in the other. The
first request after that meets the fault in the middle of a load; the ones after it go on
until the breaker is open; from there on both engines take turns with the same prompts.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from . import models
from .engine import EngineError, EngineOptions
from .engine_child import EngineChild
from .redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable

    from .engine import Answer, Engine

REDIS = "redis"
OPENING = 3  # requests after the first; by then the breaker must be open
SERVES_S = 120.0
FAULTS = ("frozen", "killed")


@dataclass(frozen=True, slots=True)
class OutageBench:
    """What to run; the defaults are about four minutes on two cores.

    Attributes:
        rounds: requests to each engine after the breaker has opened, for each fault.
        ram: must hold less than half of the prompts.
        load_deadline_s: the setting ``load_deadline``.
        lookup_deadline_s: the setting ``lookup_deadline_ms``, in seconds.
    """

    prompt_tokens: int = 512
    answer_tokens: int = 2
    rounds: int = 7
    model: str | None = None
    dtype: str = "float32"
    ram: str = "64MiB"
    load_deadline_s: float = 1.0
    lookup_deadline_s: float = 0.05
    seed: int = 9


def run(options: OutageBench, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the figures; blocking, minutes.

    Raises:
        EngineError: what is to be measured did not happen; then there is no figure.
    """
    options = replace(options, model=options.model or str(models.smollm2(options.dtype)))
    rng = random.Random(options.seed)  # noqa: S311 - prompts, not secrets
    prompts = [
        [rng.randrange(10, 1000) for _ in range(options.prompt_tokens)]
        for _ in range(1 + OPENING + options.rounds)
    ]
    kvtier: dict[str, Any] = {
        "ram": options.ram,
        "load_deadline": options.load_deadline_s,
        "lookup_deadline_ms": options.lookup_deadline_s * 1000,
    }
    with ExitStack() as stack:
        server = stack.enter_context(RedisServer())
        say("without Redis: starting vLLM")
        without = stack.enter_context(EngineChild(_engine_options(options, kvtier)))
        say("with Redis: starting vLLM")
        settings = {**kvtier, "redis": server.url}
        subject = stack.enter_context(EngineChild(_engine_options(options, settings)))
        rig = _Rig(options, server, without, subject, prompts, say)
        rig.fill()
        faults = {fault: rig.measure(fault) for fault in FAULTS}
    return figures(faults, options)


def figures(faults: dict[str, dict[str, Any]], options: OutageBench) -> dict[str, Any]:
    """Return the JSON object; the headlines are the worst over the faults."""
    return {
        "ttft_ratio": max(fault["ttft_ratio"] for fault in faults.values()),
        "first_late_s": max(fault["first_late_s"] for fault in faults.values()),
        "deadline_s": options.load_deadline_s + options.lookup_deadline_s,
        "prompt_tokens": options.prompt_tokens,
        "faults": faults,
    }


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a table's rows, one for each fault."""
    return [
        {
            "Redis is": fault,
            "first token, to without Redis": found["ttft_ratio"],
            "first request later by (s)": found["first_late_s"],
            "its deadline (s)": result["deadline_s"],
        }
        for fault, found in result["faults"].items()
    ]


class _Rig:
    """Both engines, the server, and the prompts that both have seen."""

    def __init__(
        self,
        options: OutageBench,
        server: RedisServer,
        without: EngineChild,
        subject: EngineChild,
        prompts: list[list[int]],
        say: Callable[[str], None],
    ) -> None:
        self._options = options
        self._server = server
        self._children = {"without": without, "with": subject}
        self._prompts = prompts
        self._say = say

    def fill(self) -> None:
        """Let both engines see every prompt; RAM ends with the last ones, Redis with all."""
        for name in self._children:
            self._ask(name, [1] * self._options.prompt_tokens)
        for number, prompt in enumerate(self._prompts, 1):
            self._say(f"prompt {number} of {len(self._prompts)}")
            for name in self._children:
                self._ask(name, prompt)

    def measure(self, fault: str) -> dict[str, Any]:
        """Stop the server, measure, and have it back."""
        restored_tokens = self._restored_by_redis()
        self._say(f"the server is {fault}")
        self._server.freeze() if fault == "frozen" else self._server.kill()
        try:
            return {**self._stopped(), "restored_before_tokens": restored_tokens}
        finally:
            self._server.thaw() if fault == "frozen" else self._server.start()

    def _restored_by_redis(self) -> int:
        """Ask some prompts until one comes from Redis; return how much of it."""
        self._say("waiting until Redis serves")
        end_s = time.monotonic() + SERVES_S
        for prompt in itertools.cycle(self._prompts[1 + OPENING :]):
            restored_tokens = int(self._ask("with", prompt).restored_by_tier.get(REDIS, 0))
            if restored_tokens and not self._offline():
                return restored_tokens
            if time.monotonic() > end_s:
                break
        raise EngineError(
            "Redis serves nothing although it is there: RAM holds too many of the "
            f"{len(self._prompts)} prompts, make them longer or more; no figure to report"
        )

    def _stopped(self) -> dict[str, Any]:
        meeting = [self._ask("with", self._prompts[0]).ttft_s]
        for prompt in self._prompts[1 : 1 + OPENING]:
            offline = self._offline()
            ttft_s = self._ask("with", prompt).ttft_s
            if not offline:
                meeting.append(ttft_s)
        if not self._offline():
            raise EngineError(
                f"the breaker is not open after {1 + OPENING} requests; no figure to report"
            )
        samples: dict[str, list[float]] = {"without": [], "with": []}
        for number, prompt in enumerate(self._prompts[1 + OPENING :], 1):
            self._say(f"round {number} of {self._options.rounds}")
            # Turn about, so that a machine that slows down or speeds up favours nobody.
            for name in sorted(samples, reverse=bool(number % 2)):
                answer = self._ask(name, prompt)
                if answer.restored_tokens:
                    raise EngineError("a prompt came from RAM; no figure to report")
                samples[name].append(round(answer.ttft_s, 4))
        if not self._offline():
            raise EngineError("the breaker has closed without a server; no figure to report")
        usual_s = statistics.median(samples["without"])
        late_s = [round(ttft_s - usual_s, 4) for ttft_s in meeting]
        ratios = [b / a for a, b in zip(samples["without"], samples["with"], strict=True)]
        return {
            "ttft_ratio": round(statistics.median(ratios), 4),
            "ratios": [round(ratio, 4) for ratio in ratios],
            "first_late_s": late_s[0],
            "late_s": late_s,
            "samples_s": samples,
        }

    def _ask(self, name: str, prompt: list[int]) -> Answer:
        return self._children[name].do(ask_afresh, prompt, self._options.answer_tokens)

    def _offline(self) -> bool:
        return self._children["with"].do(is_offline)


def ask_afresh(engine: Engine, prompt: list[int], answer_tokens: int) -> Answer:
    """Ask with an empty device cache and wait for the saves; in the child."""
    engine.forget_device_cache()
    answer = engine.ask(prompt, answer_tokens)
    engine.drain()
    return answer


def is_offline(engine: Engine) -> bool:
    """Whether lookups skip Redis now; in the child."""
    return bool(engine.connector.scheduler_half.catalog.is_offline(REDIS))


def _engine_options(options: OutageBench, kvtier: dict[str, Any]) -> EngineOptions:
    assert options.model is not None
    return EngineOptions(
        model=options.model,
        device_tokens=2 * options.prompt_tokens + 256,
        max_model_tokens=options.prompt_tokens + 64,
        dtype=options.dtype,
        kvtier=kvtier,
    )
