"""`kvtier bench engine`: what a restore costs over a hit in the device's own cache.

One long prompt through the real engine, again and again: computed cold, found on the device,
restored from RAM, restored from disk. Beside them one plain copy and one plain read of as many
bytes as the prompt's KV has, which is what a restore cannot be faster than.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import models
from .engine import Answer, Engine, EngineError, EngineOptions
from .plain_io import time_memcpy, time_plain_read, write_plain
from .sessions import Session, SessionPlan, encoder
from .trial import tolerance

if TYPE_CHECKING:
    from collections.abc import Callable

RAM = "2GiB"
DISK_CAPACITY = "4GiB"
ALWAYS = {"load_policy": "always"}  # what a restore costs, even where computing is cheaper


@dataclass(frozen=True, slots=True)
class EngineBench:
    """What to measure. Times are medians over ``rounds``; the cold prefill runs ``cold`` times."""

    prompt_tokens: int = 6000
    rounds: int = 5
    cold: int = 1
    model: str | None = None
    dtype: str = "float32"
    block_tokens: int | None = None
    answer_tokens: int = 2
    folder: str | None = None


def run(options: EngineBench, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the figures; blocking, a few minutes."""
    model = options.model or str(models.smollm2(options.dtype))
    plan = SessionPlan("bench", (options.prompt_tokens,))
    encode = encoder(model)
    prompts = [Session(plan, encode, seed).next_prompt() for seed in range(options.cold)]
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=options.folder) as folder:
        disk = {"disk": os.path.join(folder, "store"), "disk_capacity": DISK_CAPACITY, **ALWAYS}
        say("RAM: starting vLLM")
        ram = _Series(options, model, {"ram": RAM, **ALWAYS}, "ram")
        ram.measure(prompts, say)
        say("disk: starting vLLM")
        on_disk = _Series(options, model, disk, "disk")
        on_disk.measure(prompts, say)
        memcpy_s = _median(lambda: time_memcpy(ram.kv_bytes), options.rounds)
        plain = os.path.join(folder, "plain")
        write_plain(plain, ram.kv_bytes)
        plain_read_s = _median(lambda: time_plain_read(plain, ram.kv_bytes), options.rounds)
    device_hit_s = statistics.median(ram.device_hits + on_disk.device_hits)
    ram_s, disk_s = statistics.median(ram.restores), statistics.median(on_disk.restores)
    return {
        "kv_bytes": ram.kv_bytes,
        "prompt_tokens": options.prompt_tokens,
        "cold_s": round(statistics.median(ram.cold + on_disk.cold), 4),
        "device_hit_s": round(device_hit_s, 4),
        "ram_s": round(ram_s, 4),
        "disk_s": round(disk_s, 4),
        "memcpy_s": round(memcpy_s, 4),
        "plain_read_s": round(plain_read_s, 4),
        "ram_over_device_s": round(ram_s - device_hit_s, 4),
        "disk_over_device_s": round(disk_s - device_hit_s, 4),
        "restored_tokens": {"ram": ram.restored_tokens, "disk": on_disk.restored_tokens},
        "outputs_equal": ram.equal and on_disk.equal,
        "samples": {
            "cold_s": ram.cold + on_disk.cold,
            "device_hit_s": ram.device_hits + on_disk.device_hits,
            "ram_s": ram.restores,
            "disk_s": on_disk.restores,
        },
    }


class _Series:
    """Cold, device hit and restore in one engine whose only tier is ``tier``."""

    def __init__(self, options: EngineBench, model: str, kvtier: dict[str, Any], tier: str) -> None:
        self._options = options
        self._tier = tier
        self._engine_options = EngineOptions(
            model=model,
            device_tokens=options.prompt_tokens + 1024,
            block_tokens=options.block_tokens,
            max_model_tokens=options.prompt_tokens + 64,
            dtype=options.dtype,
            kvtier=kvtier,
        )
        self.cold: list[float] = []
        self.device_hits: list[float] = []
        self.restores: list[float] = []
        self.kv_bytes = 0
        self.restored_tokens = 0
        self.equal = True

    def measure(self, prompts: list[list[int]], say: Callable[[str], None]) -> None:
        with Engine(self._engine_options) as engine:
            engine.ask([1] * 256, 2)
            engine.drain()
            for prompt in prompts:
                say(f"{self._tier}: cold prefill of {len(prompt)} tokens")
                first = self._ask(engine, prompt, self.cold)
                for _ in range(self._options.rounds):
                    say(f"{self._tier}: device hit and restore")
                    self._compare(first, self._ask(engine, prompt, self.device_hits))
                    engine.forget_device_cache()
                    again = self._ask(engine, prompt, self.restores)
                    self._compare(first, again)
                    if not again.restored_by_tier.get(self._tier):
                        raise EngineError(
                            f"nothing was restored from {self._tier} "
                            f"(restored: {dict(again.restored_by_tier)}); no figure to report"
                        )
                    self.restored_tokens = again.restored_tokens
            self.kv_bytes = self.restored_tokens * engine.kv_bytes_per_token()

    def _ask(self, engine: Engine, prompt: list[int], into: list[float]) -> Answer:
        answer = engine.ask(prompt, self._options.answer_tokens)
        engine.drain()
        into.append(round(answer.ttft_s, 4))
        return answer

    def _compare(self, first: Answer, again: Answer) -> None:
        self.equal &= again.same_as(first, tolerance(self._options.dtype))


def _median(measure: Callable[[], float], rounds: int) -> float:
    return statistics.median(measure() for _ in range(rounds))
