"""The engine without any cache, which says what is right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .soak_client import ChildEngine
from .soak_listener import Listener
from .soak_parties import Parties, warm_up
from .soak_script import Asker
from .soak_truth import TruthStore
from .soak_types import Ask, Reply


class Oracle:
    """Asks the engine without any cache, opened when the first answer is missing.

    Attributes:
        computed: requests asked.
    """

    def __init__(
        self,
        engine: ChildEngine,
        store: TruthStore,
        parties: Parties,
        listener: Listener,
    ) -> None:
        self._parties = parties
        self._listener = listener
        self._engine = engine
        self._store = store
        self._asker: Asker | None = None
        self.computed = 0

    def __enter__(self) -> Oracle:  # noqa: PYI034 (Python 3.10 has no typing.Self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._asker is not None and self._engine.alive:
            self._engine.shut()

    def facts(self) -> dict[str, Any]:
        """Return the engine's."""
        self.asker()
        self._store.note("engine", self._engine.facts)
        return self._engine.facts

    def asker(self) -> Asker:
        """Return what asks; opens the engine if need be."""
        if self._asker is None:
            self._listener.phase("right answers, without any cache: starting vLLM")
            self._engine.open(self._parties.without_cache(2))
            warm_up(self._engine)
            self._listener.phase("right answers, without any cache")
            self._asker = Asker(self._alone, self._together)
        return self._asker

    def _alone(self, ask: Ask) -> Reply:
        self.computed += 1
        return self._engine.ask(ask)

    def _together(self, asks: Sequence[Ask]) -> list[Reply]:
        return self._engine.ask_together(list(asks))
