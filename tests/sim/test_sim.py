"""The scheduler half and the workers under random interleavings, without vLLM.

`KVTIER_SIM_SEEDS` sets how many seeds are played (``100`` or ``500-900``); a seed
that fails is printed with the command that replays it, and becomes a named test.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from .world import World

N_SEEDS = 200
BATCH = 10


def seeds():
    given = os.environ.get("KVTIER_SIM_SEEDS", str(N_SEEDS))
    first, _, last = given.partition("-")
    numbers = range(int(first), int(last)) if last else range(int(first))
    return [numbers[i : i + BATCH] for i in range(0, len(numbers), BATCH)]


def play(seed):
    try:
        return World(seed).run()
    except BaseException:
        print(f"seed {seed} fails; replay: KVTIER_SIM_SEEDS={seed}-{seed + 1} pytest {__file__}")
        raise


@pytest.mark.parametrize("batch", seeds(), ids=lambda batch: f"{batch[0]}-{batch[-1]}")
def test_random_interleavings(batch):
    """No leak, no wrong byte, no foreign block touched, one report a job, every request ends."""
    total = Counter()
    for seed in batch:
        total += play(seed)
    print(dict(total))
