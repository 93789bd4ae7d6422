"""Requests given up, preempted and asked for prompt logprobs by the dozen, with slow copies.

Several uneven requests share a pool for fewer; copies in both directions take their time; most
requests are given up, in whatever state they are. After every cycle nothing may be held, and
what was not given up must be right. `KVTIER_STORM_CYCLES` sets the length of the long form.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import time
from collections import Counter
from dataclasses import replace

import pytest

from . import models
from .harness import FLOAT32_TOLERANCE, Engine, prompt

SHARED = prompt(290, 1)
PROMPTS = [SHARED + prompt(410, 2), SHARED + prompt(37, 3), prompt(513, 4), SHARED[:257]]
N = 48
STATES = {"WAITING", "WAITING_FOR_REMOTE_KVS", "RUNNING", "PREEMPTED", "over"}
SHORT_CYCLES = 30
LONG_CYCLES = int(os.environ.get("KVTIER_STORM_CYCLES", "1000"))  # with kvtier, and without
POOL = {"blocks": 26, "budget": 96, "max_model_len": 768}


@pytest.fixture(scope="module")
def right():
    """Answers of an engine that has no cache at all, each request alone."""
    with Engine(models.LLAMA, prefix_caching=False, **{**POOL, "blocks": 120}) as engine:
        return engine.ask_each(PROMPTS, N)


def settings(folder):
    return {"ram": "8MiB", "disk": str(folder), "disk_capacity": "64MiB", "chunk_tokens": 64}


class Storm:
    """Cycles of requests on one engine; counts in which states they were given up."""

    def __init__(self, engine, right, seed):
        print("seed", seed)
        self.engine, self.right = engine, right
        self.rng = random.Random(seed)
        self.states = Counter()
        self.counts = Counter()
        if engine.half is not None:
            self._slow_copies()
        preempt = engine.scheduler._preempt_request

        def counted(*args, **kwargs):
            self.counts["preempted"] += 1
            return preempt(*args, **kwargs)

        engine.scheduler._preempt_request = counted

    def _slow_copies(self):
        mover = self.engine.worker._mover
        late = random.Random(self.rng.random())  # of the copying threads
        for name, most_s in (("save", 0.03), ("load", 0.02)):
            copy = getattr(mover, name)

            def slow(*args, copy=copy, most_s=most_s, **kwargs):
                if late.random() < 0.3:
                    time.sleep(late.random() * most_s)
                return copy(*args, **kwargs)

            setattr(mover, name, slow)

    def cycle(self):
        """A handful of requests, most of them given up; then nothing may be held."""
        engine, rng = self.engine, self.rng
        asked = {}
        for _ in range(rng.randrange(2, 7)):
            which, n = rng.randrange(len(PROMPTS)), rng.choice((1, rng.randrange(1, N + 1), N))
            more = {"prompt_logprobs": 1} if rng.random() < 0.15 else {}
            self.counts["prompt logprobs"] += len(more)
            salt = rng.choice([None, None, "a", f"{rng.random()}"])
            asked[engine.submit(PROMPTS[which], n, salt=salt, **more)] = which, n
            self._steps(rng.choice((0, 1, 3, 8)))
        self._steps(rng.choice((0, 0, 4, 15)))
        doomed = rng.sample(sorted(asked), k=rng.randrange(len(asked) + 1))
        if rng.random() < 0.4:
            doomed = list(dict.fromkeys(self._preempt_all()[:1] + doomed))
        for request in doomed:
            known = engine.scheduler.requests.get(request)
            self.states["over" if known is None else known.status.name] += 1
            engine.abort(request)
            del asked[request]
            self._steps(rng.choice((0, 0, 1, 2)))
        for (which, n), answer in zip(asked.values(), engine.finish(*asked), strict=True):
            whole = self.right[which]
            expected = replace(whole, tokens=whole.tokens[:n], logprobs=whole.logprobs[:n])
            assert answer.distance(expected) <= FLOAT32_TOLERANCE
            self.counts["restored"] += answer.restored_tokens > 0
        engine.assert_clean()
        engine._answers.clear()
        engine._prefill.clear()
        if rng.random() < 0.5:
            engine.forget()
        self.counts["cycles"] += 1

    def _preempt_all(self):
        """Preempt whatever runs, as vLLM does when it empties its cache under running requests."""
        scheduler = self.engine.scheduler
        running = [request.request_id for request in scheduler.running]
        while scheduler.running:
            request = scheduler.running.pop()
            scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        scheduler.prev_step_scheduled_req_ids.clear()
        return running

    def _steps(self, n):
        for _ in range(n):
            self.engine.step()


def footprint():
    """Resident MiB and open descriptors of this process."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20), len(os.listdir("/proc/self/fd"))


def drawn_seed():
    # vLLM seeds `random`: this seed is drawn by the system.
    return int(os.environ.get("KVTIER_SEED", random.SystemRandom().randrange(1 << 30)))


def test_storms_leave_nothing_behind(right, tmp_path):
    """Aborts in every state, preemptions, prompt logprobs: right answers, and nothing held."""
    with Engine(models.LLAMA, settings(tmp_path), **POOL) as engine:
        storm = Storm(engine, right, drawn_seed())
        while not (set(storm.states) >= STATES and storm.counts["cycles"] >= SHORT_CYCLES):
            storm.cycle()
            assert storm.counts["cycles"] < 10 * SHORT_CYCLES, storm.states
        print(storm.counts, storm.states)
    assert min(storm.counts[name] for name in ("preempted", "prompt logprobs", "restored")) > 3


@pytest.mark.torture
def test_storms_need_no_more_memory_than_without_kvtier(right, tmp_path):
    """Memory grows no more than the engine's own does, descriptors not at all."""
    seed, grown = drawn_seed(), {}
    for kvtier in (None, settings(tmp_path)):
        with Engine(models.LLAMA, kvtier, **POOL) as engine:
            storm = Storm(engine, right, seed)
            while storm.counts["cycles"] < LONG_CYCLES // 4:
                storm.cycle()
            before_mib, files = footprint()
            while storm.counts["cycles"] < LONG_CYCLES:
                storm.cycle()
            after_mib, files_after = footprint()
        print(storm.counts, storm.states, f"{before_mib:.1f} to {after_mib:.1f} MiB")
        grown[kvtier is None] = after_mib - before_mib
        assert files_after <= files
    assert grown[False] - grown[True] < 16
