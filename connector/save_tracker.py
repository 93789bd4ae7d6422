"""How far each request has been saved."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count


@dataclass(slots=True)
class SaveTracker:
    """How far a request has been saved.

    Attributes:
        saved_tokens: whole chunks up to here have been planned, or given up.
        saved_hash: the prefix hash there; another one means that the tokens before
            it are not those that were planned (streaming sessions rewrite their end).
        blocked: nothing of this request is to be stored.
        prompt_tail_tokens: where the prompt's tail that was planned ends.
        age: of the request's chunks in RAM, see `Catalog.age`.
        number: of the request, no other's.
    """

    saved_tokens: int = 0
    saved_hash: bytes | None = None
    blocked: bool = False
    prompt_tail_tokens: int = 0
    age: int | None = None
    number: int = field(default_factory=count().__next__)

    def rewind(self) -> None:
        """Something that was kept is lost: look again, from the start, at what is to be saved."""
        self.saved_tokens = self.prompt_tail_tokens = 0
        self.saved_hash = None
