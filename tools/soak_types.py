"""What a soak asks, what comes back, and what it remembers of both: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..storage.errors import KVTierError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Top = tuple[tuple[int, float], ...]
"""The likeliest tokens of one position with their logprobs, best first."""

TOP_LOGPROBS = 5


class SoakError(KVTierError):
    """The soak cannot go on; the message says what to do."""


class EngineGone(SoakError):
    """The engine ended while a request was under way."""


@dataclass(frozen=True, slots=True)
class ChunkUse:
    """One chunk that was loaded for a request."""

    key: str  # as `kvtier ls` prints it
    start_tokens: int
    end_tokens: int
    source: str  # tier

    def as_dict(self) -> dict[str, Any]:
        """Return the fields of the report."""
        return {
            "key": self.key,
            "start_tokens": self.start_tokens,
            "end_tokens": self.end_tokens,
            "tier": self.source,
        }


@dataclass(frozen=True, slots=True)
class Reply:
    """One finished request.

    Attributes:
        tokens: what was generated.
        top: for each of them, the likeliest tokens with their logprobs.
        prompt_tokens: length of the prompt.
        ttft_s: to the first token, waiting included.
        total_s: to the last.
        device_tokens: of the prompt, found in the device's own prefix cache.
        restored: of the prompt, brought back by kvtier: tokens by tier.
        loads: chunks behind them, where the engine tells.
        aborted: it was given up; what was loaded for it may be in the device's cache all the same.
    """

    tokens: tuple[int, ...]
    top: tuple[Top, ...]
    prompt_tokens: int = 0
    ttft_s: float = 0.0
    total_s: float = 0.0
    device_tokens: int = 0
    restored: Mapping[str, int] = field(default_factory=dict)
    loads: tuple[ChunkUse, ...] = ()
    aborted: bool = False

    @property
    def restored_tokens(self) -> int:
        """Tokens that kvtier brought back."""
        return sum(self.restored.values())


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
        prompt: token ids.
        answer_tokens: how many to generate, greedily.
        salt: `cache_salt`: requests of different salts share no KV; None for none.
        kvtier: False keeps kvtier out of this request.
        abort_after_s: give it up after so long.
    """

    prompt: tuple[int, ...]
    answer_tokens: int
    salt: str | None = None
    kvtier: bool = True
    abort_after_s: float | None = None


class Client(Protocol):
    """An engine that answers; thread-safe."""

    def ask(self, ask: Ask) -> Reply:
        """Run one request to its end, or until it is given up.

        Raises:
            EngineGone: the engine ended.
            SoakError: it refused.
        """

    def sample(self) -> dict[str, float]:
        """Return counters (growing) and gauges (``gauge.``) of now."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session's script.

    Attributes:
        session: name.
        number: from 1.
        prompt: token ids.
        answer_tokens: how many to generate.
        think_s: pause before it.
    """

    session: str
    number: int
    prompt: tuple[int, ...]
    answer_tokens: int
    think_s: float

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.session} turn {self.number}"


@dataclass(frozen=True, slots=True)
class Script:
    """Sessions whose right answers are known.

    Attributes:
        sessions: turns of each, in order.
        truth: the oracle's reply to each turn.
    """

    sessions: tuple[tuple[Turn, ...], ...]
    truth: Mapping[tuple[str, int], Reply]

    @property
    def turns(self) -> Sequence[Turn]:
        """All turns, session by session."""
        return [turn for session in self.sessions for turn in session]

    @property
    def working_tokens(self) -> int:
        """Tokens of all sessions at their longest."""
        return sum(len(turns[-1].prompt) + turns[-1].answer_tokens for turns in self.sessions)

    @property
    def longest_tokens(self) -> int:
        """Longest prompt and answer together."""
        return max((len(turn.prompt) + turn.answer_tokens for turn in self.turns), default=0)
