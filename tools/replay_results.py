"""What a replay is asked, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from .replay_chunks import Shape
from .replay_tiers import Speeds


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything of a replay but sizes and policy.

    Attributes:
        shape: of the model's KV.
        speeds: simulated.
        device_tokens: what the engine's own prefix cache holds; its hits come first.
        gated: load only when that is quicker than computing (`load_policy` "auto").
    """

    shape: Shape
    speeds: Speeds = field(default_factory=Speeds)
    device_tokens: int = 0
    gated: bool = True


@dataclass(slots=True)
class Result:
    """What one policy made of a trace at one size."""

    policy: str
    ram_bytes: int
    disk_bytes: int
    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: dict[str, int] = field(default_factory=dict)  # device, ram, disk
    loaded_bytes: dict[str, int] = field(default_factory=dict)  # ram, disk
    gate_cut_tokens: int = 0
    disk_written_bytes: int | None = None
    saved_chunks: int | None = None
    skipped_chunks: int | None = None
    dropped_writes: int | None = None
    ram_evicted_chunks: int | None = None
    disk_evicted_chunks: int | None = None
    load_s: float = 0.0
    prefill_s: float = 0.0
    first_token_p50_s: float = 0.0
    first_token_p90_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens that some tier, or the device, had."""
        return sum(self.hit_tokens.values()) / max(1, self.prompt_tokens)
