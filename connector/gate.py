"""Whether loading beats computing, from what this engine has measured.

Scheduler thread only; a decision is a few multiplications. What has not been
measured counts as worth loading, and every `EXPLORE_EVERY`-th refusal loads
anyway, so that a tier which was slow once gets another chance.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

MIN_STEP_TOKENS = 64  # smaller steps tell of decoding, not of prefill
EXPLORE_EVERY = 16
MIN_SAMPLES = 3
SMOOTHING = 0.25

FIRST_DEADLINE_S = 30.0  # at most, before anything was measured
FIRST_LATENCY_S = 5.0
FIRST_BYTES_PER_S = 64 << 20  # what a tier must do at least, until it is measured
MIN_DEADLINE_S = 2.0
MAX_DEADLINE_S = 60.0


@dataclass(slots=True)
class TierSpeed:
    """Moving averages of how long loads of one tier took, by size.

    ``seconds[k]`` is of loads of 2**k to 2**(k+1) bytes, from plan to report: queues
    and steps included, because a request waits for them too.
    """

    seconds: dict[int, float] = field(default_factory=dict)
    samples: int = 0
    late: dict[int, float] = field(default_factory=dict)  # given up after so long, by size

    def note(self, n_bytes: int, took_s: float) -> None:
        """Take in one load."""
        size = n_bytes.bit_length()
        old = self.seconds.get(size)
        self.seconds[size] = took_s if old is None else old + SMOOTHING * (took_s - old)
        self.samples += 1
        self.late = {k: s for k, s in self.late.items() if k > size}  # what is larger is slower

    def note_late(self, n_bytes: int, after_s: float) -> None:
        """Take in one load that had not ended when its request gave it up."""
        size = n_bytes.bit_length()
        self.late[size] = max(after_s, self.late.get(size, 0.0))

    def estimate_s(self, n_bytes: int) -> float | None:
        """Return the expected time of a load, or None with too little to go by."""
        if self.samples < MIN_SAMPLES:
            return None
        size = n_bytes.bit_length()
        near = min(self.seconds, key=lambda k: (abs(k - size), k))
        # Larger loads scale with their bytes; smaller ones may be all latency.
        return self.seconds[near] * max(1.0, 2.0 ** (size - near))

    def at_least_s(self, n_bytes: int) -> float | None:
        """Return the expected time of a load, or how long such a one was waited for in vain."""
        size = n_bytes.bit_length()
        late_s = max((s for k, s in self.late.items() if k <= size), default=None)
        estimate_s = self.estimate_s(n_bytes)
        if late_s is None or estimate_s is None:
            return estimate_s if late_s is None else late_s
        return max(late_s, estimate_s)


class Gate:
    """Decides for one engine.

    Args:
        policy: "auto", "always" or "never".
    """

    def __init__(self, policy: str = "auto") -> None:
        self.policy = policy
        self._speeds: dict[str, TierSpeed] = {}
        self._prefill: deque[float] = deque(maxlen=32)  # seconds a token
        self._refused = 0
        self._step: tuple[float, int] | None = None

    # -- measuring -----------------------------------------------------------

    def note_step(self, now_s: float, n_tokens: int) -> None:
        """A step with ``n_tokens`` to compute begins now; the one before it has ended."""
        if self._step is not None:
            began_s, tokens = self._step
            if tokens >= MIN_STEP_TOKENS:
                self._prefill.append((now_s - began_s) / tokens)
        self._step = (now_s, n_tokens) if n_tokens else None

    def note_load(self, bytes_by_tier: Mapping[str, int], took_s: float) -> None:
        """A load has ended well; it is charged to the tier that gave most of it."""
        if bytes_by_tier:
            tier = max(bytes_by_tier, key=lambda name: bytes_by_tier[name])
            self._speeds.setdefault(tier, TierSpeed()).note(bytes_by_tier[tier], took_s)

    def note_late(self, bytes_by_tier: Mapping[str, int], after_s: float) -> None:
        """A load was given up: each tier in it counts as slow for such loads until one ends well.

        Not for deadlines, which would grow with every one that is missed.
        """
        for tier, n_bytes in bytes_by_tier.items():
            self._speeds.setdefault(tier, TierSpeed()).note_late(n_bytes, after_s)

    def prefill_s(self, n_tokens: int) -> float | None:
        """Return how long computing ``n_tokens`` would take, or None if not known yet."""
        if len(self._prefill) < MIN_SAMPLES:
            return None
        return median(self._prefill) * n_tokens

    # -- deciding ------------------------------------------------------------

    def doubts(self, n_tokens: int, n_bytes: int) -> bool:
        """Say, quickly, whether any tier might be too slow for a hit of this size."""
        if self.policy != "auto":
            return False
        compute_s = self.prefill_s(n_tokens)
        if compute_s is None:
            return False
        estimates = [speed.at_least_s(n_bytes) for speed in self._speeds.values()]
        return any(load_s is not None and load_s >= compute_s for load_s in estimates)

    def pays(self, tier: str, n_tokens: int, n_bytes: int) -> bool:
        """Say whether loading ``n_tokens`` from ``tier`` is quicker than computing them."""
        if self.policy != "auto":
            return self.policy == "always"
        speed = self._speeds.get(tier)
        load_s = speed.at_least_s(n_bytes) if speed is not None else None
        compute_s = self.prefill_s(n_tokens)
        if load_s is None or compute_s is None or load_s < compute_s:
            return True
        self._refused += 1
        return self._refused % EXPLORE_EVERY == 0

    def deadline_s(self, tiers: Mapping[str, int], n_tokens: int) -> float:
        """Return how long a request may wait for a load.

        Four times what the load should take, or what computing would, whichever
        is longer, between a floor and a cap. Before that is measured, what a poor disk would take.
        """
        compute_s = self.prefill_s(n_tokens)
        loads = [
            self._speeds[tier].estimate_s(n) if tier in self._speeds else None
            for tier, n in tiers.items()
        ]
        if compute_s is None or any(load is None for load in loads):
            first_s = FIRST_LATENCY_S + sum(tiers.values()) / FIRST_BYTES_PER_S
            return min(FIRST_DEADLINE_S, first_s)
        expected_s = sum(load for load in loads if load is not None)
        return min(MAX_DEADLINE_S, max(MIN_DEADLINE_S, 4 * expected_s, compute_s))
