"""`kvtier bench engine --no-reuse`: what kvtier costs where nothing is ever used again.

Two engines in processes of their own, one without kvtier and one with RAM and disk, take
turns with the same batches of prompts that nobody has sent before. Every chunk is saved, RAM
and disk are full and evict, nothing is restored. A batch's time ends when its last save has.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import models
from .engine import Engine, EngineError, EngineOptions
from .engine_child import EngineChild

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class ThroughputBench:
    """What to run; the defaults are about four minutes on two cores."""

    requests: int = 4
    prompt_tokens: int = 512
    answer_tokens: int = 16
    rounds: int = 6
    model: str | None = None
    dtype: str = "float32"
    ram: str = "256MiB"
    disk_capacity: str = "512MiB"
    seed: int = 5
    folder: str | None = None


def run(options: ThroughputBench, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the figures; blocking, minutes."""
    model = options.model or str(models.smollm2(options.dtype))
    samples: dict[str, list[float]] = {"without": [], "with": []}
    rng = random.Random(options.seed)  # noqa: S311 - prompts, not secrets
    with ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=options.folder)
        )
        kvtier = {
            "ram": options.ram,
            "disk": os.path.join(folder, "store"),
            "disk_capacity": options.disk_capacity,
        }
        children = {}
        for name, config in (("without", None), ("with", kvtier)):
            say(f"{name} kvtier: starting vLLM")
            children[name] = stack.enter_context(
                EngineChild(_engine_options(options, model, config))
            )
            children[name].do(run_batch, [[1] * options.prompt_tokens], options.answer_tokens)
        restored_tokens = 0
        for number in range(options.rounds):
            prompts = [
                [rng.randrange(10, 40_000) for _ in range(options.prompt_tokens)]
                for _ in range(options.requests)
            ]
            # Turn about, so that a machine that slows down or speeds up favours nobody.
            for name in sorted(samples, reverse=bool(number % 2)):
                took_s, restored = children[name].do(run_batch, prompts, options.answer_tokens)
                samples[name].append(round(took_s, 4))
                restored_tokens += restored
            say(f"round {number + 1} of {options.rounds}")
        saved_bytes = _tree_bytes(kvtier["disk"])
    if restored_tokens or not saved_bytes:
        raise EngineError(
            f"{restored_tokens} tokens restored, {saved_bytes} bytes saved: this was to be a run "
            "that saves everything and restores nothing; no figure to report"
        )
    ratios = [a / b for a, b in zip(samples["without"], samples["with"], strict=True)]
    n_tokens = options.requests * (options.prompt_tokens + options.answer_tokens)
    return {
        "throughput_ratio": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "tokens_per_batch": n_tokens,
        "tokens_per_s": {
            name: round(n_tokens / statistics.median(times), 1) for name, times in samples.items()
        },
        "disk_bytes": saved_bytes,
        "samples_s": samples,
    }


def _engine_options(
    options: ThroughputBench, model: str, kvtier: dict[str, Any] | None
) -> EngineOptions:
    longest = options.prompt_tokens + options.answer_tokens
    return EngineOptions(
        model=model,
        device_tokens=(longest + 256) * options.requests,
        max_model_tokens=longest + 64,
        dtype=options.dtype,
        kvtier=kvtier,
    )


def _tree_bytes(folder: str) -> int:
    return sum(
        os.path.getsize(os.path.join(at, name))
        for at, _, names in os.walk(folder)
        for name in names
        if name.endswith(".kvt")
    )


def run_batch(engine: Engine, prompts: list[list[int]], answer_tokens: int) -> tuple[float, int]:
    """Run prompts together until their last save has ended; in the child.

    Returns:
        Seconds, and the tokens that were restored.
    """
    began_s = time.perf_counter()
    answers = engine.ask_together(prompts, answer_tokens)
    engine.drain()
    restored_tokens = sum(answer.restored_tokens for answer in answers)
    return time.perf_counter() - began_s, restored_tokens
