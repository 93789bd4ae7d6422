"""An hour of audits (long form): on a healthy engine not one of them finds a difference.

`KVTIER_AUDIT_S` sets how long each model runs (an hour in all with the default).
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter

import pytest

from . import models
from .harness import Engine, prompt

MODELS = (models.LLAMA, models.GEMMA3, models.GPT_OSS)
SECONDS = float(os.environ.get("KVTIER_AUDIT_S", "1200"))
RATE = 0.5
LONGEST = 900


class Sessions:
    """Conversations that grow, share their beginnings, end, and come back."""

    def __init__(self, rng):
        self.rng = rng
        self.shared = [prompt(rng.randrange(100, 400), 9000 + i) for i in range(3)]
        self.open = []
        self.made = 0

    def next(self):
        """The next turn of a session, at times of a new one."""
        rng = self.rng
        if len(self.open) < 6 or rng.random() < 0.1:
            self.open.append(list(rng.choice(self.shared)))
        session = rng.choice(self.open)
        self.made += 1
        session += prompt(rng.randrange(5, 120), 10_000 + self.made)
        if len(session) > LONGEST:
            self.open.remove(session)
        return list(session), session


@pytest.mark.torture
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_an_hour_of_audits_finds_nothing(model, tmp_path, caplog):
    """Sessions through RAM and disk, every other hit computed and compared: no difference."""
    seed = int(os.environ.get("KVTIER_SEED", random.SystemRandom().randrange(1 << 30)))
    print("seed", seed)
    rng = random.Random(seed)
    settings = {"ram": "24MiB", "disk": str(tmp_path), "disk_capacity": "256MiB"}
    with Engine(model, {**settings, "audit_rate": RATE}, blocks=160) as engine:
        end_s = time.monotonic() + SECONDS
        sessions, turns = Sessions(rng), Counter()
        while time.monotonic() < end_s:
            batch = [sessions.next() for _ in range(rng.randrange(1, 4))]
            answers = engine.ask_together([turn for turn, _ in batch], rng.randrange(1, 12))
            for (turn, session), answer in zip(batch, answers, strict=True):
                session[len(turn) :] = answer.tokens
                turns["asked"] += 1
                turns["restored"] += answer.restored_tokens > 0
            if rng.random() < 0.5:
                engine.forget()
        engine.drain()
        engine.flush_stats()
        seen = {k: v for k, v in engine.stats.items() if k.startswith("audit")}
        print(model.name, dict(turns), seen)
        assert seen["audits"] > 20
        assert seen["audited_chunks"] > 20
        assert turns["restored"] > 20
        assert not seen.get("audit_differing_chunks")
        assert not [r for r in caplog.records if r.name == "kvtier.audit"]
        engine.assert_clean()
