"""One vLLM engine under test, stepped by hand, and the ways to look at what it did.

The engine core runs in this process. `Engine` asks it for answers, one request at a time or
several at once, and keeps what reached the front end: tokens, logprobs, prefill counts, the
connector's stats. Nothing here knows how kvtier works but `Engine.half` and the two ways of
damaging KV on purpose, which reach into every rank's worker, also in processes of their own.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from kvtier.storage.catalog_check import check_catalog

BLOCK_TOKENS = 32
CHUNK_TOKENS = 256
TOP = 3  # logprobs compared at each position
FLOAT32_TOLERANCE = 1e-3
STEP_LIMIT = 20_000


@dataclass(frozen=True)
class Answer:
    """What one request gave: tokens, and the best logprobs of every position."""

    tokens: tuple[int, ...]
    logprobs: tuple[tuple[float, ...], ...]
    prompt_tokens: int
    local_tokens: int = 0  # of the prompt, from the device's own prefix cache
    restored_tokens: int = 0  # of the prompt, from kvtier
    finish_reason: str | None = None

    def distance(self, other: Answer) -> float:
        """Largest difference of a logprob; infinite where tokens or a NaN differ."""
        if self.tokens != other.tokens or len(self.logprobs) != len(other.logprobs):
            return math.inf
        worst = 0.0
        for a, b in zip(self.logprobs, other.logprobs, strict=True):
            for x, y in zip(a, b, strict=True):
                worst = max(worst, abs(x - y))
                if math.isnan(x - y):
                    return math.inf
        return worst


def distance(answers, others):
    """Largest distance of two lists of answers."""
    assert len(answers) == len(others)
    return max((a.distance(b) for a, b in zip(answers, others, strict=True)), default=0.0)


def prompt(n_tokens, seed):
    """Tokens that no other seed begins with."""
    rng = np.random.default_rng((seed, 7))
    return rng.integers(5, 1000, n_tokens).tolist()


class Engine:
    """One running vLLM; a context manager.

    Args:
        model: a `TinyModel`.
        kvtier: the connector's settings; None for a plain engine.
        blocks: device blocks, the null block included.
        more: further arguments of `vllm.LLM`.
    """

    def __init__(
        self,
        model,
        kvtier=None,
        *,
        blocks=120,
        block_tokens=BLOCK_TOKENS,
        prefix_caching=True,
        budget=512,
        **more,
    ):
        import vllm
        from vllm.config import KVTransferConfig

        self._vllm = vllm
        register_kernels_once()
        if kvtier is not None:
            # On these models computing can beat loading, which is not what is tested here.
            kvtier = {"load_policy": "always", **kvtier}
            more["kv_transfer_config"] = KVTransferConfig(
                kv_connector="KVTierConnector",
                kv_connector_module_path="kvtier.connector",
                kv_role="kv_both",
                kv_connector_extra_config=kvtier,
            )
        if block_tokens is not None:
            more["block_size"] = block_tokens
        more.setdefault("max_model_len", 2048)
        more.setdefault("max_num_seqs", 4)
        self.llm = vllm.LLM(
            str(model.folder()),
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype=model.dtype,
            num_gpu_blocks_override=blocks,
            max_num_batched_tokens=budget,
            enable_prefix_caching=prefix_caching,
            disable_log_stats=False,
            use_tqdm_on_load=False,
            seed=0,
            **more,
        )
        self.stats = Counter()  # the connector's counters as the front end saw them
        self.vllm_hits = Counter()  # vLLM's own count of connector hits
        self._prefill = {}
        self._answers = {}
        self._count = 0
        self._watch()
        self.free_at_start = self.free_blocks

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    # -- inside ---------------------------------------------------------------------------

    @property
    def core(self):
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self):
        return self.core.scheduler

    @property
    def connector(self):
        return self.scheduler.connector

    @property
    def half(self):
        several = getattr(self.connector, "_connectors", [self.connector])  # MultiConnector's
        halves = [getattr(one, "scheduler_half", None) for one in several]
        return next((half for half in halves if half is not None), None)

    @property
    def worker(self):
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().worker_half

    def in_workers(self, function, *args):
        """What ``function(worker half, *args)`` returns in each rank."""
        return self.core.model_executor.collective_rpc(_in_worker, args=(function, *args))

    @property
    def free_blocks(self):
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def _watch(self):
        client = self.llm.llm_engine.engine_core
        get_output = client.get_output

        def watched():
            outputs = get_output()
            for output in outputs.outputs:
                if output.prefill_stats is not None:
                    self._prefill.setdefault(output.request_id, output.prefill_stats)
            told = outputs.scheduler_stats
            if told is not None and told.kv_connector_stats:
                counted = told.kv_connector_stats
                counted = counted.get("KVTierConnector", counted)  # beside others
                for name, value in counted.get("data", counted).items():
                    if name.startswith("gauge."):
                        self.stats[name] = value
                    else:
                        self.stats[name] += value
            if told is not None and told.connector_prefix_cache_stats is not None:
                seen = told.connector_prefix_cache_stats
                self.vllm_hits["queries"] += seen.queries
                self.vllm_hits["hits"] += seen.hits
            return outputs

        client.get_output = watched

    # -- asking ---------------------------------------------------------------------------

    def submit(self, tokens, n=6, *, lora=None, salt=None, **sampling):
        """Hand one request over; returns its id."""
        self._count += 1
        sampling.setdefault("logprobs", TOP)
        params = self._vllm.SamplingParams(
            temperature=0.0,
            max_tokens=n,
            min_tokens=n,
            ignore_eos=True,
            detokenize=False,
            **sampling,
        )
        inputs = {"prompt_token_ids": list(tokens)}
        if salt is not None:
            inputs["cache_salt"] = salt
        return self.llm.llm_engine.add_request(f"r{self._count}", inputs, params, lora_request=lora)

    def step(self):
        """One step of the engine; finished answers are kept for `finish`."""
        engine = self.llm.llm_engine
        for output in engine.step():
            if output.finished:
                self._answers[output.request_id] = output

    def finish(self, *ids):
        """Step until these requests are over; their answers in order."""
        short = [i.rsplit("-", 1)[0] for i in ids]
        steps = 0
        while any(s not in self._answers for s in short):
            self.step()
            steps += 1
            assert steps < STEP_LIMIT, f"requests {ids} never end"
            if not self.scheduler.running:
                time.sleep(0.0005)  # loads run on threads of this process
        return [self._answer(i, self._answers.pop(s)) for i, s in zip(ids, short, strict=True)]

    def _answer(self, request_id, output):
        completion = output.outputs[0]
        rows = completion.logprobs or []
        stats = self._prefill.pop(request_id, None)
        best = tuple(
            tuple(sorted((x.logprob for x in row.values()), reverse=True)[:TOP]) for row in rows
        )
        return Answer(
            tokens=tuple(completion.token_ids),
            logprobs=best,
            prompt_tokens=len(output.prompt_token_ids),
            local_tokens=int(stats.num_local_cached_tokens) if stats else 0,
            restored_tokens=int(stats.num_external_cached_tokens) if stats else 0,
            finish_reason=completion.finish_reason,
        )

    def ask(self, tokens, n=6, **more):
        """One request, alone in the engine."""
        return self.finish(self.submit(tokens, n, **more))[0]

    def ask_each(self, prompts, n=6, **more):
        """Requests one after another, so that every one is alone in its batch."""
        return [self.ask(tokens, n, **more) for tokens in prompts]

    def ask_together(self, prompts, n=6, **more):
        """Requests all at once."""
        return self.finish(*[self.submit(tokens, n, **more) for tokens in prompts])

    def abort(self, request_id):
        """Give a request up, whatever it is doing."""
        self.llm.llm_engine.abort_request([request_id], internal=True)

    # -- between ---------------------------------------------------------------------------

    def drain(self, timeout_s=30.0):
        """Step until nothing that kvtier started is outstanding."""
        end_s = time.monotonic() + timeout_s
        while self.connector is not None and (
            self.connector.has_pending_push_work() or (self.half and self.half.outstanding)
        ):
            assert time.monotonic() < end_s, "kvtier's work never drains"
            self.step()
            time.sleep(0.0005)

    def forget(self):
        """Empty the device's prefix cache, and only that."""
        self.drain()
        assert self.core.reset_prefix_cache()

    def assert_clean(self):
        """Nothing is held: device blocks, RAM pages, jobs, requests."""
        self.drain()
        assert self.free_blocks == self.free_at_start
        assert not self.scheduler.requests
        if self.half is not None:
            check_catalog(self.half.catalog)
            assert self.half.catalog.pinned_pages == 0
            assert not self.half._trackers  # nothing is kept of requests that are gone

    def sources(self, answer_index=-1):
        """Tokens by tier of the last admissions, newest last."""
        return list(self.half.last_hits.values())[answer_index]

    def read_bytes(self, tier):
        """Bytes that kvtier says it has read from ``tier``."""
        self.flush_stats()
        return self.stats[f"load_bytes.{tier}"]

    def flush_stats(self):
        """Take in what both halves have counted since the last step."""
        if self.connector is None or self.half is None:
            return
        for counts in (self.half.take_counts(), *self.in_workers(_take_counts)):
            for name, value in counts.items():
                self.stats[name] += value

    def close(self):
        """Stop the engine and give everything back."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        if self.llm is None:
            return
        self.drain()
        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        gc.collect()
        cleanup_dist_env_and_memory()


def _in_worker(_, function, *args):
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return function(get_kv_transfer_group().worker_half, *args)


def _take_counts(half):
    return half.take_counts()


def register_kernels_once():
    """Let engines start after one that speculates with ngram.

    vLLM registers its CPU kernels anew with every engine; the search for them in all modules
    fails at one of numba's, which ngram brings. The first registration holds for the process.
    """
    try:
        from vllm.triton_utils import dispatcher
    except ImportError:  # older ones
        return
    register = dispatcher.register_kernels

    def missing_only(overrides):
        if not overrides.keys() <= dispatcher._registry.keys():
            register(overrides)

    if register.__name__ != missing_only.__name__:
        dispatcher.register_kernels = missing_only


@contextmanager
def forked_workers():
    """While inside, ranks are forked from this process: they need not import vLLM again."""
    from vllm.v1.executor import multiproc_executor

    fork = multiprocessing.get_context("fork")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiproc_executor, "get_mp_context", lambda: fork)
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        yield


# -- damage on purpose -----------------------------------------------------------------------


@contextmanager
def damaged_ram(engine, every=7):
    """While inside, flip a bit of every so-many-th byte of all RAM pages."""
    engine.drain()
    engine.in_workers(_flip_ram, every)
    try:
        yield
    finally:
        engine.drain()
        engine.in_workers(_flip_ram, every)


def _flip_ram(half, every):
    arena = half._arena
    for view in arena.buffers(list(range(arena.ready_pages)), arena.page_bytes):
        data = np.frombuffer(view, np.uint8)
        data[::every] ^= 0x41


def record_files(folder):
    """Every record file below a store's folder."""
    return [
        os.path.join(root, name)
        for root, _, names in os.walk(folder)
        for name in names
        if name.endswith(".kvt") and "quarantine" not in root
    ]


def damage_files(paths, at=-100):
    """Flip one byte in each file; ``at`` as in an index."""
    for path in paths:
        with open(path, "r+b") as file:
            data = bytearray(file.read())
            data[at] ^= 0x10
            file.seek(0)
            file.write(data)
