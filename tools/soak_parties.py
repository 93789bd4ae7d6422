"""The three engines of a soak: none, vLLM's own cache, kvtier. Options for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .soak_client import ChildEngine
from .soak_options import SoakOptions
from .soak_types import Ask, Reply, Turn

WARM_UP_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Parties:
    """Starts engines that differ in nothing but their caches.

    Attributes:
        options: of the soak.
        model: folder or name.
        max_model_tokens: of the oracle; the others take what the script needs.
    """

    options: SoakOptions
    model: str
    max_model_tokens: int

    def _base(self, device_tokens: int, max_model_tokens: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "dtype": self.options.dtype,
            "block_tokens": self.options.block_tokens,
            "device_tokens": device_tokens,
            "max_model_tokens": max_model_tokens,
        }

    def without_cache(self, users: int) -> dict[str, Any]:
        """Return the options of the oracle's engine: every request is computed whole."""
        more = {**self.options.engine, "enable_prefix_caching": False}
        most = self.max_model_tokens
        return {**self._base(users * (most + 256), most), "more": more}

    def own_cache(self, device_tokens: int, longest_tokens: int) -> dict[str, Any]:
        """Return the options of an engine with vLLM's prefix cache and nothing else."""
        return self._with_connector(
            {**self._base(device_tokens, longest_tokens), "more": dict(self.options.engine)},
            self.options.plain_connector,
        )

    def kvtier(
        self, device_tokens: int, longest_tokens: int, settings: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the options of the engine under test."""
        return self._with_connector(
            {
                **self._base(device_tokens, longest_tokens),
                "kvtier": settings,
                "more": dict(self.options.engine),
            },
            self.options.connector,
        )

    @staticmethod
    def _with_connector(
        options: dict[str, Any], connector: tuple[str, str] | None
    ) -> dict[str, Any]:
        if connector is not None:
            options["connector"] = {"name": connector[0], "module": connector[1]}
        return options


def warm_up(engine: ChildEngine) -> None:
    """Pay for what an engine does only once, so that no turn is charged for it."""
    vocab = max(8, int(engine.facts.get("vocab_tokens", 8)))
    prompt = tuple(5 + i % min(3, vocab - 5) for i in range(WARM_UP_TOKENS))
    engine.ask(Ask(prompt, 2, salt="warm-up", kvtier=False))


@contextmanager
def opened(engine: ChildEngine, options: dict[str, Any]) -> Iterator[ChildEngine]:
    """Have an engine open in a child while inside."""
    engine.open(options)
    warm_up(engine)
    try:
        yield engine
    finally:
        if engine.alive:
            engine.shut()


def asks_sessions(
    engine: ChildEngine, options: dict[str, Any]
) -> Callable[[Sequence[Sequence[Turn]]], list[Reply]]:
    """Return what opens an engine and plays turns in it, alone; the last reply of each list."""

    def play(sessions: Sequence[Sequence[Turn]]) -> list[Reply]:
        last = []
        with opened(engine, options):
            for number, turns in enumerate(sessions):
                salt = f"again-{number}"
                replies = [engine.ask(Ask(t.prompt, t.answer_tokens, salt)) for t in turns]
                last += replies[-1:]
        return last

    return play
