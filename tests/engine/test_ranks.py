"""Tensor parallel ranks hold a part of every block each, pipeline stages their own layers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from . import models
from .harness import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    FLOAT32_TOLERANCE,
    Engine,
    damage_files,
    forked_workers,
    prompt,
    record_files,
)

TOKENS = prompt(600, 80)
N = 6


@pytest.fixture
def forked():
    with forked_workers():
        yield


def records_of(folder, rank):
    return [path for path in record_files(folder) if f"{os.sep}r{rank}{os.sep}" in path]


def test_a_hit_counts_only_when_every_rank_has_it(forked, tmp_path):
    """Both ranks store and restore, also after a restart; one bad record recomputes all."""
    folder = str(tmp_path)
    with Engine(models.LLAMA, prefix_caching=False) as engine:
        right = engine.ask(TOKENS, N)
    settings = {"disk": folder, "disk_capacity": "1GiB"}
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with Engine(models.LLAMA, settings, blocks=60, max_model_len=1024, **ranks) as engine:

        def ask():
            engine.forget()
            answer = engine.ask(TOKENS, N)
            assert answer.distance(right) <= FLOAT32_TOLERANCE
            engine.drain()
            return answer.restored_tokens

        def ask_until_healed():
            # A load stops at its first bad record, so that it may take some to find all three.
            assert any(ask() >= 2 * CHUNK_TOKENS for _ in range(4))

        assert ask() == 0
        ours, theirs = records_of(folder, 0), records_of(folder, 1)
        assert len(ours) == len(theirs) > 0
        assert {Path(p).name for p in ours} == {Path(p).name for p in theirs}
        assert {Path(p).read_bytes() for p in ours}.isdisjoint(Path(p).read_bytes() for p in theirs)
        assert ask() >= 2 * CHUNK_TOKENS
        assert engine.stats["load_bytes.disk"] > 0
        failed = engine.stats["loads_failed"]
        damage_files(theirs)
        assert ask() == 0
        assert engine.stats["loads_failed"] > failed
        ask_until_healed()
        for path in ours:
            Path(path).unlink()
        assert ask() == 0
        ask_until_healed()
        assert engine.free_blocks == engine.free_at_start
    with Engine(models.LLAMA, settings, blocks=60, max_model_len=1024, **ranks) as engine:
        answer = engine.ask(TOKENS, N)  # the first of a new engine
        assert answer.distance(right) <= FLOAT32_TOLERANCE
        assert answer.restored_tokens >= 2 * CHUNK_TOKENS
        assert engine.half.catalog.resident()["disk"] == len(records_of(folder, 0))


def test_ranks_of_a_hybrid_model_restore_what_the_engine_hits(forked, tmp_path):
    """Recurrent groups and a full one, half of each on a rank; one bad record recomputes all."""
    prompts = [prompt(n, 900 + n) for n in (255, 257, 600)]
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    more = {"block_tokens": None, "blocks": 60, "max_model_len": 1024, **ranks}
    with Engine(models.QWEN3_NEXT_DEEP, **more) as plain:
        right = plain.ask_each(prompts, N)
        own = plain.ask_each(prompts, N)
    settings = {"disk": str(tmp_path), "disk_capacity": "1GiB"}
    with Engine(models.QWEN3_NEXT_DEEP, settings, **more) as ours:
        cold = ours.ask_each(prompts, N)
        ours.forget()
        warm = ours.ask_each(prompts, N)
        for a, b, c, d in zip(right, cold, own, warm, strict=True):
            assert b.distance(a) <= FLOAT32_TOLERANCE
            assert d.restored_tokens == c.local_tokens > 0
            assert d.distance(c) <= FLOAT32_TOLERANCE
        ours.forget()
        damage_files(records_of(str(tmp_path), 1))
        hurt = ours.ask_each(prompts, N)
        for a, b in zip(right, hurt, strict=True):
            assert b.restored_tokens == 0
            assert b.distance(a) <= FLOAT32_TOLERANCE
        ours.drain()
        assert ours.free_blocks == ours.free_at_start


@pytest.fixture
def staged(monkeypatch, forked):
    """Pipeline stages on the CPU: vLLM makes a later stage's buffers only while it warms up."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    gather = GPUModelRunner.sync_and_gather_intermediate_tensors

    def gather_into_buffers(self, *args, **kwargs):
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return gather(self, *args, **kwargs)

    monkeypatch.setattr(GPUModelRunner, "sync_and_gather_intermediate_tensors", gather_into_buffers)


def test_pipeline_stages_store_their_own_layers(staged, tmp_path):
    """Both stages restore, and only together; a stage's damaged record recomputes the request."""
    folder = str(tmp_path)
    with Engine(models.LLAMA, prefix_caching=False) as engine:
        right = engine.ask(TOKENS, N)
    more = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
    more |= {"blocks": 60, "max_model_len": 1024}
    with Engine(models.LLAMA, {"disk": folder, "disk_capacity": "1GiB"}, **more) as engine:
        restored = []
        for damage in (False, False, True):
            engine.forget()
            if damage:
                damage_files(records_of(folder, 1))
            answer = engine.ask(TOKENS, N)
            assert answer.distance(right) <= FLOAT32_TOLERANCE
            restored.append(answer.restored_tokens)
        assert restored == [0, (len(TOKENS) - 1) // BLOCK_TOKENS * BLOCK_TOKENS, 0]
        ours, theirs = records_of(folder, 0), records_of(folder, 1)
        assert {Path(p).name for p in ours} == {Path(p).name for p in theirs}
        assert {Path(p).read_bytes() for p in ours}.isdisjoint(Path(p).read_bytes() for p in theirs)
        engine.drain()
        assert engine.free_blocks == engine.free_at_start
