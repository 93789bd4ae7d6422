"""Engines that lack something: RAM, device blocks, a layout that is known."""

from __future__ import annotations

import logging

import pytest

from kvtier.connector import engine_api

from . import models
from .harness import CHUNK_TOKENS, FLOAT32_TOLERANCE, Engine, prompt

N = 6
PROMPTS = [prompt(540, 4000 + i) for i in range(8)]


@pytest.fixture(scope="module")
def right():
    """Answers of an engine that has no cache at all."""
    with Engine(models.LLAMA, prefix_caching=False) as engine:
        return engine.ask_each(PROMPTS, N)


def test_more_prompts_than_ram_and_prompts_larger_than_ram(right, tmp_path):
    """A RAM tier of a few chunks over a disk: prompts stream through it and come back right."""
    settings = {"ram": "5MiB", "disk": str(tmp_path), "disk_capacity": "1GiB"}
    with Engine(models.LLAMA, settings) as engine:
        for tokens, expected in zip(PROMPTS, right, strict=True):
            assert engine.ask(tokens, N).distance(expected) <= FLOAT32_TOLERANCE
            engine.drain()
        engine.forget()
        for tokens, expected in zip(PROMPTS, right, strict=True):
            answer = engine.ask(tokens, N)
            assert answer.distance(expected) <= FLOAT32_TOLERANCE
            assert answer.restored_tokens >= 2 * CHUNK_TOKENS
            engine.forget()
        assert engine.read_bytes("disk") > 0
        engine.assert_clean()


def test_ram_that_is_full_of_nothing_else(right, monkeypatch, caplog):
    """RAM alone and too little of it: what was least recently used goes, nothing is wrong.

    In an engine of a version that nobody has tried: one warning, and all the rest as ever.
    """
    monkeypatch.setattr(engine_api, "engine_version", lambda: "0.99.0")
    ours = logging.getLogger("kvtier")
    monkeypatch.setattr(ours, "handlers", [*ours.handlers, caplog.handler])
    with Engine(models.LLAMA, {"ram": "5MiB"}) as engine:
        for _ in range(2):
            for tokens, expected in zip(PROMPTS, right, strict=True):
                assert engine.ask(tokens, N).distance(expected) <= FLOAT32_TOLERANCE
        engine.forget()
        answer = engine.ask(PROMPTS[-1], N)
        assert answer.restored_tokens >= CHUNK_TOKENS
        assert answer.distance(right[-1]) <= FLOAT32_TOLERANCE
        engine.assert_clean()
    told = {id(r): r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING}
    (line,) = [line for line in told.values() if "0.99.0" in line]
    assert "not among the versions" in line


def test_an_engine_that_is_not_understood_is_served_without_kvtier(right, monkeypatch, caplog):
    """A KV cache of an unknown kind: one warning, no hits, nothing saved, right answers."""
    monkeypatch.delitem(engine_api._KIND_BY_CLASS_NAME, "FullAttentionSpec")
    ours = logging.getLogger("kvtier")
    monkeypatch.setattr(ours, "handlers", [*ours.handlers, caplog.handler])
    with Engine(models.LLAMA, {"ram": "64MiB"}) as engine:
        assert engine.half is None
        for _ in range(2):
            for tokens, expected in zip(PROMPTS[:2], right, strict=False):
                answer = engine.ask(tokens, N)
                assert answer.distance(expected) <= FLOAT32_TOLERANCE
                assert answer.restored_tokens == 0
            engine.forget()
        assert engine.free_blocks == engine.free_at_start
    told = [r for r in caplog.records if r.levelno >= logging.WARNING and "kvtier" in r.name]
    assert [r.getMessage() for r in told if "off in this engine" not in r.getMessage()] == []
    assert len({r.getMessage() for r in told}) == 1
