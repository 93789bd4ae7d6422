"""The second model runner, which no CPU runs: its way of calling a connector, and its outputs.

The engine here runs with the first runner's model code and the second one's own connector
code around it. How requests that go on after a preemption look is built by hand, both ways.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from ..unit.connector.halves import Half, request_of
from . import models
from .harness import CHUNK_TOKENS, FLOAT32_TOLERANCE, Engine, distance, prompt

N = 6
PROMPTS = [prompt(600, 60), prompt(320, 61)]


@pytest.fixture
def second_runner(monkeypatch):
    """Let the connector be called by the second runner's code; returns the calls in order."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
    from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

    calls = []

    def active(vllm_config=None):
        one = ActiveKVConnector.__new__(ActiveKVConnector)  # all but registering memory again
        one.vllm_config, one.kv_connector = vllm_config, get_kv_transfer_group()
        one._pending_load_kwargs, one._disabled = None, False
        calls.append(len(calls))
        return one

    @contextmanager
    def around_forward(scheduler_output, defer_finalize=False):
        assert not defer_finalize
        output, one = KVConnectorOutput(), active()
        one.pre_forward(scheduler_output)
        yield output
        one.finish_forward()
        told = one.post_forward(scheduler_output.finished_req_ids)
        vars(output).update(vars(told))

    def no_forward(scheduler_output, vllm_config):
        return active(vllm_config).no_forward(scheduler_output)

    mixin = KVConnectorModelRunnerMixin
    monkeypatch.setattr(mixin, "_get_kv_connector_output", staticmethod(around_forward))
    monkeypatch.setattr(mixin, "kv_connector_no_forward", staticmethod(no_forward))
    return calls


def test_the_second_runners_calls_save_and_restore(second_runner, tmp_path):
    """Several requests at once, given up, restored from RAM and from disk: all are right."""
    with Engine(models.LLAMA, prefix_caching=False) as engine:
        right = engine.ask_each(PROMPTS, N)
    settings = {"ram": "64MiB", "disk": str(tmp_path), "disk_capacity": "1GiB"}
    for source in ("ram", "disk"):
        with Engine(models.LLAMA, settings) as engine:
            if source == "ram":
                assert distance(engine.ask_together(PROMPTS, N), right) <= FLOAT32_TOLERANCE
                engine.forget()
            given_up = engine.submit(PROMPTS[0], N)
            engine.step()
            engine.abort(given_up)
            answers = engine.ask_together(PROMPTS, N)
            assert distance(answers, right) <= FLOAT32_TOLERANCE
            assert sum(a.restored_tokens for a in answers) >= 3 * CHUNK_TOKENS
            assert engine.read_bytes(source) > 0
            engine.assert_clean()
    assert second_runner


def output_of(half, request, n_tokens, *, second):
    """One step that goes on with a preempted request, as either runner is told of it."""
    from vllm.v1.core.sched.output import (
        CachedRequestData,
        KVConnectorBlockState,
        NewRequestData,
        SchedulerOutput,
    )

    name, blocks = request.request_id, half.tables[request.request_id]
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = {name: n_tokens}
    output.total_num_scheduled_tokens = n_tokens
    output.kv_connector_block_state = KVConnectorBlockState({name}, half.tables.__getitem__, {})
    if second:
        tokens = list(range(request.num_tokens))
        new = NewRequestData(name, tokens[:100], [], None, None, blocks, 0, None)
        new.prefill_token_ids = tokens
        output.scheduled_new_reqs = [new]
    else:
        output.scheduled_cached_reqs = CachedRequestData(
            [name], {name}, [], {}, [blocks], [0], [request.num_tokens - 100]
        )
    return output


@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
def test_a_request_that_goes_on_after_a_preemption_is_saved_alike(second):
    """Told as new (second runner) or as resumed (first): from its new blocks, what is missing."""
    half = Half()
    request = request_of("a", 140, n_prompt=100)
    half.half.on_new_request(request)
    half.table(request, 140)
    (job,) = half.half.build_plan(output_of(half, request, 90, second=second)).saves
    assert [(c.start_tokens, c.end_tokens) for c in job.chunks] == [(0, 64)]
    half.save_ends(job)
    request.num_computed_tokens = 0  # preempted; other blocks
    (row,) = half.table(request, 140)
    plan = half.half.build_plan(output_of(half, request, 140, second=second))
    chunks = {c.end_tokens: c for job in plan.saves for c in job.chunks}
    assert chunks[128].blocks.tolist() == row[4:8]
    assert 64 not in chunks, "the first chunk is there already"
