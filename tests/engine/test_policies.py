"""What is written where, and kept: `disk_write`, `min_uses`, `promote` in the real engine."""

from __future__ import annotations

import pytest

from . import models
from .harness import CHUNK_TOKENS, FLOAT32_TOLERANCE, Engine, prompt, record_files

N = 6
TOKENS = prompt(540, 77)


@pytest.fixture(scope="module")
def right():
    """The answer of an engine that has no cache at all."""
    with Engine(models.LLAMA, prefix_caching=False) as engine:
        return engine.ask(TOKENS, N)


def restored(engine, right):
    """Ask with an empty device cache; return what came from where."""
    engine.drain()
    engine.forget()
    before = {tier: engine.read_bytes(tier) for tier in ("ram", "disk")}
    answer = engine.ask(TOKENS, N)
    assert answer.distance(right) <= FLOAT32_TOLERANCE
    read = {tier for tier, n in before.items() if engine.read_bytes(tier) > n}
    return answer.restored_tokens >= 2 * CHUNK_TOKENS, read


def settings(folder, **more):
    return {"ram": "64MiB", "disk": str(folder), "disk_capacity": "1GiB", **more}


def test_nothing_is_written_to_a_disk_that_is_only_read(right, tmp_path):
    """`disk_write: none` serves what lies there and adds nothing."""
    with Engine(models.LLAMA, settings(tmp_path, disk_write="none")) as engine:
        engine.ask(TOKENS, N)
        assert restored(engine, right) == (True, {"ram"})
        assert not record_files(tmp_path)
    with Engine(models.LLAMA, settings(tmp_path)) as engine:
        engine.ask(TOKENS, N)
        engine.drain()
    kept = record_files(tmp_path)
    assert kept
    with Engine(models.LLAMA, settings(tmp_path, disk_write="none")) as engine:
        assert restored(engine, right) == (True, {"disk"})
        engine.ask(prompt(400, 78), N)
        engine.drain()
        assert record_files(tmp_path) == kept
        engine.assert_clean()


def test_a_prompt_is_saved_when_it_was_met_often_enough(right, tmp_path):
    """`min_uses: 2` keeps nothing of the first meeting, all of the second."""
    with Engine(models.LLAMA, settings(tmp_path, min_uses=2)) as engine:
        engine.ask(TOKENS, N)
        assert restored(engine, right) == (False, set())
        assert restored(engine, right) == (True, {"ram"})
        engine.flush_stats()
        assert engine.stats["save_skipped_chunks.min_uses"] > 0
        engine.assert_clean()


@pytest.mark.parametrize("promote", [True, False])
def test_what_is_loaded_from_below_is_kept_in_ram_or_not(right, tmp_path, promote):
    """With `promote` the second restore is RAM's, without it the disk's again."""
    with Engine(models.LLAMA, settings(tmp_path)) as engine:
        engine.ask(TOKENS, N)
        engine.drain()
    with Engine(models.LLAMA, settings(tmp_path, promote=promote)) as engine:
        assert restored(engine, right) == (True, {"disk"})
        assert restored(engine, right) == (True, {"ram" if promote else "disk"})
        engine.assert_clean()
