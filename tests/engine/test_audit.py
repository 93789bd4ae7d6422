"""Audits in the real engine: damage made before saving is found, named and cleared away."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import replace

import numpy as np
import pytest

from . import models
from .harness import BLOCK_TOKENS, CHUNK_TOKENS, FLOAT32_TOLERANCE, Engine, prompt

LENGTH = 4 * CHUNK_TOKENS + 100
BAD_TOKENS = CHUNK_TOKENS + 2 * BLOCK_TOKENS  # where the damaged block begins
BAD_LAYER = 1


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return str(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def engine(store):
    settings = {"ram": "64MiB", "disk": store, "disk_capacity": "1GiB", "audit_rate": 0.5}
    settings["load_policy"] = "always"
    with Engine(models.LLAMA, settings) as engine:
        yield engine


def audit(engine, on):
    """Audit every hit from now on, or none."""
    auditor = engine.half._auditor
    auditor._options = replace(auditor._options, draw=lambda: 0.0 if on else 1.0)


class Damage:
    """While inside, one block of one layer is damaged in device memory before it is saved."""

    def __init__(self, engine):
        self.mover = engine.worker._mover
        self.arena = engine.worker._arena
        self.group = engine.half.geometry.groups[0]
        self.page = np.array([engine.worker._plan.staging_pages - 1])
        self.left = 1

    def __enter__(self):
        self.save = self.mover.save
        self.mover.save = self.damaging_save
        return self

    def __exit__(self, *_):
        del self.mover.save
        assert self.left == 0

    def damaging_save(self, group, blocks, pages, after=None):
        index = BAD_TOKENS // BLOCK_TOKENS
        if self.left and len(blocks) > index:
            self.left -= 1
            block = blocks[index : index + 1]
            self.save(group, block, self.page, after).wait(10)
            (view,) = self.arena.buffers(self.page, self.group.padded_block_bytes)
            lengths = self.group.page_bytes
            start = sum(lengths[:BAD_LAYER])
            values = np.frombuffer(view[start : start + lengths[BAD_LAYER]], np.float32)
            values[:] = np.roll(values, 5)
            self.mover.load(group, block, self.page, after).wait(10)
        return self.save(group, blocks, pages, after)


def counts(engine):
    engine.drain()
    engine.flush_stats()
    return {k: v for k, v in engine.stats.items() if k.startswith("audit")}


def test_a_healthy_engine_passes_every_audit(engine, caplog):
    """Hits that are computed instead compare well, from the first turn to the last."""
    text = prompt(LENGTH, 1)
    audit(engine, on=False)
    truth = [engine.ask(text[:n]) for n in (300, 800, LENGTH)]
    audit(engine, on=True)
    for n, expected in zip((300, 800, LENGTH), truth, strict=True):
        engine.forget()
        answer = engine.ask(text[:n])
        assert answer.restored_tokens == 0
        assert answer.distance(expected) < FLOAT32_TOLERANCE
    seen = counts(engine)
    assert seen["audits"] == 3
    assert seen["audited_chunks"] >= 1 + 3 + 4
    assert "audit_differing_chunks" not in seen
    assert not [r for r in caplog.records if r.name == "kvtier.audit"]
    engine.assert_clean()


def test_damage_before_a_save_is_found(engine, store, caplog):
    """Damaged KV is named by layer and tokens, dropped with all after it, and heals."""
    text = prompt(LENGTH, 2)
    audit(engine, on=False)
    truth = engine.ask(text, salt="sound")
    with Damage(engine):
        engine.ask(text, salt="bad")
    engine.forget()
    wrong = engine.ask(text, salt="bad")
    assert wrong.restored_tokens >= 4 * CHUNK_TOKENS
    assert wrong.distance(truth) > FLOAT32_TOLERANCE, "the damage makes no difference"

    audit(engine, on=True)
    engine.forget()
    before = counts(engine)
    with caplog.at_level(logging.ERROR, "kvtier.audit"):
        assert engine.ask(text, salt="bad").distance(truth) < FLOAT32_TOLERANCE
        seen = counts(engine)
    assert seen["audit_differing_chunks"] > before.get("audit_differing_chunks", 0)
    lines = [r.getMessage() for r in caplog.records if r.name == "kvtier.audit"]
    assert len(lines) == 1
    found = re.search(r"stored KV of (\S+) .* at tokens (\d+) to (\d+)", lines[0])
    assert found[1] == engine.half.geometry.groups[0].layer_names[BAD_LAYER]
    assert (int(found[2]), int(found[3])) == (BAD_TOKENS, BAD_TOKENS + BLOCK_TOKENS)
    assert seen["audit_dropped_chunks"] >= 4 - 1
    quarantined = [name for name in os.listdir(f"{store}/quarantine") if ".audit." in name]
    assert len(quarantined) == seen["audit_dropped_chunks"]

    audit(engine, on=False)
    engine.forget()
    healed = engine.ask(text, salt="bad")
    assert healed.restored_tokens == CHUNK_TOKENS
    assert healed.distance(truth) < FLOAT32_TOLERANCE
    engine.forget()
    again = engine.ask(text, salt="bad")
    assert again.restored_tokens >= 4 * CHUNK_TOKENS
    assert again.distance(truth) < FLOAT32_TOLERANCE
    engine.assert_clean()
