"""What can happen to a request in the real engine, on one full-attention model.

One engine without any cache gives the right answers; one engine with RAM over disk serves
most tests, each with prompts of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import time

import pytest

from kvtier.connector.tier_states import NEWS_AGE_S
from kvtier.storage.disk_layout import key_of_file

from . import models
from .harness import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    FLOAT32_TOLERANCE,
    Engine,
    prompt,
    record_files,
)

N = 6
EXACT = [64, 256, 512, 768]  # whole blocks, whole chunks
PROMPTS = {
    **{f"exact-{n}": prompt(n, 1000 + n) for n in EXACT},
    **{f"offset-{n}": prompt(600, 2000 + n) for n in range(0, 9, 2)},
    "first": prompt(600, 3000),
    "scripted": prompt(1000, 3001),
    "salted": prompt(300, 3002),
    "asked-twice": prompt(600, 3003),
    "aborted": prompt(620, 3004),
    "other": prompt(200, 3005),
    "slow": prompt(610, 3006),
    "wiped": prompt(600, 3007),
    "reset": prompt(600, 3008),
    "moved": prompt(600, 3011),
    "emptied": prompt(600, 3012),
    "probed": prompt(300, 3009),
    "asked-for": prompt(300, 3010),
    "pair-0": prompt(300, 5000) + prompt(280, 5001),
    "pair-1": prompt(300, 5000) + prompt(90, 5002),
}


@pytest.fixture(scope="module")
def right():
    """The answer of every prompt from an engine that has no cache at all."""
    with Engine(models.LLAMA, prefix_caching=False) as engine:
        return dict(zip(PROMPTS, engine.ask_each(PROMPTS.values(), N), strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def shared(right, folder):
    with Engine(models.LLAMA, {"ram": "64MiB", "disk": folder, "disk_capacity": "1GiB"}) as engine:
        # The very first request: what it computes is kept, whatever is still warming up.
        cold = engine.ask(PROMPTS["first"], N)
        engine.forget()
        warm = engine.ask(PROMPTS["first"], N)
        assert_right(right, "first", cold)
        assert_right(right, "first", warm)
        assert warm.restored_tokens >= 2 * CHUNK_TOKENS
        yield engine


@pytest.fixture
def engine(shared):
    """The shared engine, with an empty device cache before and nothing held after."""
    shared.forget()
    yield shared
    shared.assert_clean()


def assert_right(right, name, answer):
    assert answer.distance(right[name]) <= FLOAT32_TOLERANCE, name


class Gate:
    """Holds every copy to the device until it is opened."""

    def __init__(self, engine):
        self._mover = engine.worker._mover
        self._load = self._mover.load
        self._open = threading.Event()
        self.waiting = threading.Event()

    def __enter__(self):
        def load(*args, **kwargs):
            self.waiting.set()
            assert self._open.wait(30)
            return self._load(*args, **kwargs)

        self._mover.load = load
        return self

    def open(self):
        self._open.set()

    def __exit__(self, *_):
        self.open()
        del self._mover.load


def step_until(engine, condition, limit_s=20.0):
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "never came to be"
        engine.step()
        time.sleep(0.0005)


@pytest.mark.parametrize("n", EXACT)
def test_an_identical_prompt_of_whole_blocks_leaves_a_token_to_compute(engine, right, n):
    """A prompt of exactly k blocks or chunks restores all but its last block."""
    name = f"exact-{n}"
    assert_right(right, name, engine.ask(PROMPTS[name], N))
    engine.forget()
    warm = engine.ask(PROMPTS[name], N)
    assert_right(right, name, warm)
    assert warm.restored_tokens == n - BLOCK_TOKENS
    again = engine.ask(PROMPTS[name], N)  # on the device now
    assert_right(right, name, again)
    assert again.local_tokens + again.restored_tokens == n - BLOCK_TOKENS


@pytest.mark.parametrize("n_local", range(0, 9, 2))
def test_device_hits_that_end_inside_a_chunk_are_continued(engine, right, n_local):
    """The device holds the first blocks of a chunk, kvtier brings the rest, whatever the offset."""
    name = f"offset-{n_local}"
    tokens = PROMPTS[name]
    assert_right(right, name, engine.ask(tokens, N))
    engine.forget()
    half, engine.connector._scheduler = engine.half, None  # the device's own hits only
    try:
        engine.ask(tokens[: n_local * BLOCK_TOKENS + 3], 1)
    finally:
        engine.connector._scheduler = half
    warm = engine.ask(tokens, N)
    assert_right(right, name, warm)
    assert warm.local_tokens == n_local * BLOCK_TOKENS
    assert warm.local_tokens + warm.restored_tokens >= 2 * CHUNK_TOKENS


def test_what_is_counted_is_what_happened(engine, right):
    """1000 tokens asked, so many on the device, so many from RAM: every counter says so."""
    from prometheus_client import REGISTRY, generate_latest

    tokens = PROMPTS["scripted"]
    engine.ask(tokens, N)
    engine.forget()
    local = 10 * BLOCK_TOKENS
    engine.ask(tokens[: local + 1], 1)  # 10 blocks: all of them restored, now on the device
    engine.drain()
    names = ("lookups", "lookup_tokens", "hits", "local_hit_tokens", "hit_tokens.ram")
    before = {name: engine.stats[name] for name in names}
    vllm_before = engine.vllm_hits.copy()
    scraped_before = scrape(generate_latest(REGISTRY).decode())
    answer = engine.ask(tokens, N)
    engine.step()
    grown = {name: engine.stats[name] - before[name] for name in names}
    limit = (1000 - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert answer.local_tokens == local
    assert answer.restored_tokens in {limit - local, 3 * CHUNK_TOKENS - local}
    assert grown == {
        "lookups": 1,
        "lookup_tokens": 1000,
        "hits": 1,
        "local_hit_tokens": local,
        "hit_tokens.ram": answer.restored_tokens,
    }
    assert engine.sources() == {"ram": answer.restored_tokens}
    assert engine.vllm_hits["hits"] - vllm_before["hits"] == answer.restored_tokens
    scraped = scrape(generate_latest(REGISTRY).decode())
    for name, series in (
        ("lookup_tokens", "kvtier:lookup_tokens_total"),
        ("local_hit_tokens", "kvtier:local_hit_tokens_total"),
        ("hit_tokens.ram", 'kvtier:hit_tokens_total{tier="ram"}'),
    ):
        assert scraped[series] - scraped_before.get(series, 0) == grown[name]
    resident = engine.half.catalog.resident()
    assert scraped['kvtier:resident_chunks{tier="ram"}'] == resident["ram"]
    assert_right(right, "scripted", answer)


def scrape(text):
    """Prometheus text to values by name and our own labels."""
    out = {}
    for line in text.splitlines():
        match = re.match(r"(kvtier:\w+)\{(.*)\} (\S+)$", line)
        if match:
            labels = re.findall(r'(tier|reason|state)="([^"]*)"', match[2])
            tail = ",".join(f'{k}="{v}"' for k, v in labels)
            out[match[1] + (f"{{{tail}}}" if tail else "")] = float(match[3])
    return out


def test_salts_never_share(engine, right):
    """The same tokens under another cache salt are not served; under the same one they are."""
    tokens = PROMPTS["salted"]
    engine.ask(tokens, N, salt="a")
    engine.forget()
    for salt, restored in (("b", False), (None, False), ("a", True)):
        answer = engine.ask(tokens, N, salt=salt)
        assert (answer.restored_tokens > 0) == restored, salt
        assert_right(right, "salted", answer)
        engine.drain()


def test_what_a_request_may_ask(engine, right):
    """Not stored, not read, a tenant of its own, and nonsense: each is right, in this order."""
    for asked, restored in (
        ({"store": False}, False),
        (None, False),  # nothing was stored
        ({"read": False}, False),
        ({"store": False}, True),
        ({"tenant": "a"}, False),
        ({"tenant": "b"}, False),
        ({"tenant": "a"}, True),
        ({"tenant": "a\ud800"}, False),
        ("off", False),
        (None, True),
    ):
        params = {} if asked is None else {"kvtier": asked}
        answer = engine.ask(PROMPTS["asked-for"], N, extra_args={"kv_transfer_params": params})
        assert (answer.restored_tokens > 0) == restored, asked
        assert_right(right, "asked-for", answer)
        engine.forget()
    engine.assert_clean()


def test_prompt_logprobs_read_nothing(engine, right):
    """A request that must see its whole prompt is served nothing, and holds nothing."""
    tokens = PROMPTS["probed"]
    engine.ask(tokens, N)
    engine.forget()
    engine.flush_stats()
    before = engine.stats["misses.not_read"]
    answer = engine.ask(tokens, N, prompt_logprobs=1)
    engine.flush_stats()
    assert answer.restored_tokens == answer.local_tokens == 0
    assert engine.stats["misses.not_read"] == before + 1
    assert_right(right, "probed", answer)


def test_one_load_serves_requests_that_come_together(engine, right):
    """Two identical prompts at once read a chunk once."""
    tokens = PROMPTS["asked-twice"]
    engine.ask(tokens, N)
    engine.forget()
    before = engine.read_bytes("ram")
    alone = engine.ask(tokens, N)
    once = engine.read_bytes("ram") - before
    engine.forget()
    before = engine.read_bytes("ram")
    both = engine.ask_together([tokens, tokens], N)
    for answer in both:
        assert_right(right, "asked-twice", answer)
    assert alone.restored_tokens > 0
    assert once <= engine.read_bytes("ram") - before <= 2 * once


def test_requests_that_part_share_their_prefix(engine, right):
    """Two prompts with 300 tokens in common, at once, cold and restored."""
    names = ["pair-0", "pair-1"]
    for _ in range(2):
        for name, answer in zip(
            names, engine.ask_together([PROMPTS[n] for n in names], N), strict=True
        ):
            assert_right(right, name, answer)
        engine.forget()


@pytest.mark.parametrize("when", ["waiting", "loading", "running"])
def test_aborts_leave_nothing_behind(engine, right, when):
    """A request given up in any state: nothing is held, and the next one is right."""
    tokens = PROMPTS["aborted"]
    engine.ask(tokens, N)
    engine.forget()
    if when == "waiting":
        request = engine.submit(tokens, N)
        engine.abort(request)
    elif when == "running":
        request = engine.submit(tokens, 40)
        step_until(engine, lambda: engine.scheduler.running)
        for _ in range(5):
            engine.step()
        engine.abort(request)
    else:
        with Gate(engine) as gate:
            request = engine.submit(tokens, N)
            step_until(engine, gate.waiting.is_set)
            engine.abort(request)
            for _ in range(5):
                engine.step()
            assert engine.free_blocks < engine.free_at_start  # still being written to
            gate.open()
            engine.drain()
    engine.drain()
    assert engine.free_blocks == engine.free_at_start
    answer = engine.ask(tokens, N)
    assert_right(right, "aborted", answer)


def test_a_slow_load_holds_nobody_else_up(engine, right):
    """While one request waits for its load, another is served."""
    engine.ask(PROMPTS["slow"], N)
    engine.forget()
    with Gate(engine) as gate:
        slow = engine.submit(PROMPTS["slow"], N)
        step_until(engine, gate.waiting.is_set)
        assert_right(right, "other", engine.ask(PROMPTS["other"], N))
        gate.open()
        answer = engine.finish(slow)[0]
    assert_right(right, "slow", answer)
    assert answer.restored_tokens >= 2 * CHUNK_TOKENS


def test_a_load_past_its_deadline_is_computed(engine, right):
    """A load that does not come in time is given up: the request computes and is right."""
    engine.ask(PROMPTS["slow"], N)
    engine.forget()
    engine.flush_stats()
    before = engine.stats["loads_failed"]
    options, kept = engine.half.options, engine.half.options.deadline_s
    options.deadline_s = 0.05
    over = threading.Event()
    lane = engine.worker.transfer._ram_lane
    for _ in lane._threads:
        lane.offer(lambda: over.wait(30))  # every thread that could load is busy
    try:
        answer = engine.ask(PROMPTS["slow"], N)
    finally:
        over.set()
        options.deadline_s = kept
    engine.flush_stats()
    assert answer.restored_tokens == 0
    assert engine.stats["loads_failed"] == before + 1
    assert_right(right, "slow", answer)


def test_a_reset_forgets_every_tier(engine, right):
    """What was stored before a reset of the cache is never served again."""
    tokens = PROMPTS["reset"]
    engine.ask(tokens, N)
    engine.drain()
    assert engine.core.reset_prefix_cache(reset_connector=True)
    answer = engine.ask(tokens, N)
    assert answer.restored_tokens == answer.local_tokens == 0
    engine.forget()
    again = engine.ask(tokens, N)
    assert again.restored_tokens >= 2 * CHUNK_TOKENS
    for each in (answer, again):
        assert_right(right, "reset", each)


def test_the_device_s_cache_can_be_emptied_while_saves_hold_blocks(engine, right):
    """New weights must be able to forget old KV at once, with requests under way too."""
    tokens = PROMPTS["emptied"]
    answer = engine.ask(tokens, 20)  # its end fills a block, which no step has saved
    assert engine.half._ledger.pinned_blocks
    assert engine.core.reset_prefix_cache()
    again = engine.ask(tokens, N)
    assert again.local_tokens == 0
    running = engine.submit(PROMPTS["other"], N)
    engine.step()
    engine.step()
    assert engine.core.reset_prefix_cache(reset_running_requests=True)
    (other,) = engine.finish(running)
    assert answer.tokens[:N] == right["emptied"].tokens
    assert_right(right, "emptied", again)
    assert_right(right, "other", other)


def test_a_store_deleted_under_a_running_engine(engine, right, folder):
    """The disk's folder vanishes: requests compute, the engine lives, and saving goes on."""
    tokens = PROMPTS["wiped"]
    engine.ask(tokens, N)
    engine.drain()
    assert record_files(folder)
    shutil.rmtree(folder)
    engine.half.catalog.clear()  # RAM would serve it
    for _ in range(3):
        engine.forget()
        assert_right(right, "wiped", engine.ask(tokens, N))
    engine.forget()
    assert engine.ask(tokens, N).restored_tokens >= 2 * CHUNK_TOKENS


def test_what_another_engine_saved_while_this_one_rested(engine, right, folder, tmp_path):
    """Records that come to the folder while nothing is computed serve the very next request."""
    before = set(record_files(folder))
    engine.ask(PROMPTS["moved"], N)
    engine.drain()
    tier = engine.worker.transfer.links["disk"].tier
    files = {key_of_file(os.path.basename(f)): f for f in set(record_files(folder)) - before}
    for path in files.values():
        shutil.copy2(path, tmp_path)
    tier.delete(files)
    engine.half.catalog.clear()  # RAM would serve it
    while tier._index._pending:
        engine.ask(PROMPTS["other"], N)
    engine.forget()
    for key, path in files.items():
        shutil.copy2(tmp_path / os.path.basename(path), path)
        tier._journal.append(key)
    end_s = time.monotonic() + 10
    while not all(tier._index.contains_many(list(files))):
        assert time.monotonic() < end_s
        time.sleep(0.05)
    time.sleep(NEWS_AGE_S)
    answer = engine.ask(PROMPTS["moved"], N)
    assert answer.restored_tokens >= 2 * CHUNK_TOKENS
    assert_right(right, "moved", answer)
