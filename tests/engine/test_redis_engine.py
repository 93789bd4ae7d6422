"""Redis below a real engine: shared with another one, and with every fault in mid-traffic.

Truth is an engine without any KV cache of ours. All requests run alone.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import kvtier.connector.assembly as assembly
import kvtier.connector.prober as prober
import kvtier.connector.shared_epoch as shared_epoch
import kvtier.connector.shared_tiers as shared_tiers
from kvtier.storage.link import LinkLimits

from ..redis_server import Cluster
from . import models, redis_faults
from .harness import FLOAT32_TOLERANCE, Answer, Engine, prompt
from .redis_faults import Store

PROMPT_TOKENS = 700
CHUNK = 128
N_WHOLE = PROMPT_TOKENS // CHUNK * CHUNK
DEADLINE_S = 2.0
SLACK_S = 4.0  # of a machine that others use
ANSWER_TOKENS = 4
MIDDLE_BYTES = 900_000  # of 2.5 MB a prompt

FAULTS = (
    redis_faults.Killed,
    redis_faults.ClientKill,
    redis_faults.Refused,
    redis_faults.Silent,
    redis_faults.Slow,
    redis_faults.Evicting,
    redis_faults.Full,
    redis_faults.TenBytes,
    redis_faults.AList,
    redis_faults.RandomBytes,
    redis_faults.StripeGone,
)
OUTAGES = FAULTS[:5]
RUNNING: list[Engine] = []
ROUNDS = 10
GROWTH_MIB = 12  # over six rounds: less than 2 MiB a round
SEEDS = {f"{way}-{fault.__name__}": 100 + 2 * i + j
         for i, fault in enumerate(FAULTS) for j, way in enumerate(("load", "save"))}  # fmt: skip
SEEDS.update(shared=300, gone=301, reset=302, unreachable=303, policy=304, monitor=305, start=306)


def settings(url, **more):
    return {
        "redis": url,
        "redis_codec": "raw",
        "redis_stripe": "64KiB",
        "redis_timeout": 1.0,
        "redis_connect_timeout": 1.0,
        "load_policy": "always",
        "load_deadline": DEADLINE_S,
        "lookup_deadline_ms": 500,
        "chunk_tokens": CHUNK,
        "staging": "8MiB",
        **more,
    }


@pytest.fixture(scope="module")
def patched():
    """Back-offs of tenths of seconds, so that healing is not waited for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            assembly, "_link_limits", lambda _: LinkLimits(min_backoff_s=0.1, max_backoff_s=0.3)
        )
        for module in (prober, shared_epoch):
            patch.setattr(module, "MIN_BACKOFF_S", 0.1)
            patch.setattr(module, "MAX_BACKOFF_S", 0.3)
        yield patch


@pytest.fixture(scope="module")
def other():
    """Another engine, in a process of its own, started beside everything else."""
    store = Store()
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.engine.redis_child", store.wall.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    yield store, child
    child.kill()
    child.communicate()
    store.close()


@pytest.fixture(scope="module")
def truth(patched, other):
    with Engine(models.LLAMA) as plain:
        return {
            name: plain.ask(prompt(PROMPT_TOKENS, seed), ANSWER_TOKENS)
            for name, seed in SEEDS.items()
        }


@pytest.fixture(scope="module")
def store():
    store = Store()
    yield store
    store.close()


class Subject:
    """An engine over Redis and the truth beside it."""

    def __init__(self, engine, truth):
        self.engine = engine
        self.truth = truth

    def ask(self, name):
        """Ask with an empty device cache; the answer must be right and in time."""
        self.engine.forget()
        begin_s = time.monotonic()
        answer = self.engine.ask(prompt(PROMPT_TOKENS, SEEDS[name]), ANSWER_TOKENS)
        took_s = time.monotonic() - begin_s
        assert answer.distance(self.truth[name]) <= FLOAT32_TOLERANCE
        assert took_s < DEADLINE_S + SLACK_S
        return answer.restored_tokens

    def ask_until_restored(self, name, n_tokens=N_WHOLE, limit_s=20.0):
        """Ask again and again, always right, until so much comes from Redis."""
        end_s = time.monotonic() + limit_s
        while (restored := self.ask(name)) < n_tokens:
            assert time.monotonic() < end_s, f"only {restored} tokens come back"
            time.sleep(0.05)


def rss_mib():
    """Memory of this process that is in RAM."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def our_threads():
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("kvtier"))


@pytest.fixture(scope="module")
def engine(truth, store):
    with Engine(models.LLAMA, settings(store.wall.url)) as engine:
        RUNNING.append(engine)
        subject = Subject(engine, truth)
        subject.ask("start")  # starts the threads
        engine.drain()
        engine.threads_at_start = our_threads()
        yield subject


@pytest.fixture
def alone(truth):
    """No other engine in this process: there can be only one."""
    while RUNNING:
        RUNNING.pop().close()
    return truth


@pytest.mark.parametrize("kind", FAULTS, ids=lambda kind: kind.__name__)
def test_a_fault_during_a_load(engine, store, kind):
    """The request ends in time with the right tokens; afterwards hits come back by themselves."""
    name, fault = f"load-{kind.__name__}", kind(store)
    store.empty()
    engine.ask(name)
    engine.engine.drain()
    if isinstance(fault, redis_faults.Damage):
        fault.strike()
    else:
        store.wall.arm("down", MIDDLE_BYTES, fault.strike)
    try:
        engine.ask(name)
        assert not store.wall.armed, "the fault never struck"
        if kind in OUTAGES:
            engine.ask(name)
    finally:
        fault.mend()
    engine.ask_until_restored(name)
    assert not store.forbidden()


@pytest.mark.parametrize("kind", FAULTS, ids=lambda kind: kind.__name__)
def test_a_fault_during_a_save(engine, store, kind):
    """Nothing of a save that went wrong is ever served; later saves go through."""
    name, fault = f"save-{kind.__name__}", kind(store)
    store.empty()
    store.wall.arm("up", MIDDLE_BYTES, fault.strike)
    try:
        engine.ask(name)
        engine.engine.drain()
        assert not store.wall.armed, "the fault never struck"
        engine.ask(name)
    finally:
        fault.mend()
    engine.ask_until_restored(name)


def test_nothing_is_left_of_the_faults(engine, store):
    """After all of them no page, block, job or thread is held, and memory does not grow."""
    sizes_mib = []
    for number in range(ROUNDS):
        fault = OUTAGES[number % len(OUTAGES)](store)
        fault.strike()
        try:
            for name in ("shared", "gone", "reset"):
                engine.ask(name)
        finally:
            fault.mend()
        engine.ask_until_restored("shared")
        engine.engine.drain()
        sizes_mib.append(rss_mib())
    grown_mib = statistics.median(sizes_mib[-3:]) - statistics.median(sizes_mib[1:4])
    assert grown_mib < GROWTH_MIB, sizes_mib
    engine.engine.assert_clean()
    assert our_threads() == engine.engine.threads_at_start


def test_a_reset_reaches_redis_and_leaves_foreign_keys(engine, store, caplog):
    """MONITOR sees no KEYS and no FLUSH; old records are found no more and then deleted."""
    store.empty()
    foreign = [b"kvtier", b"kvtier2:x", b"kvtierx:y", b"other", b"kvtier:nothing-of-ours"]
    with store.server.client() as client:
        for key in foreign:
            client.set(key, "mine")
        seen = []
        ready = threading.Event()

        def watch():
            with client.monitor() as monitor:
                ready.set()
                for entry in monitor.listen():
                    seen.append(entry["command"].split()[0].upper())
                    if seen[-1] == "ECHO":
                        return

        watcher = threading.Thread(target=watch)
        watcher.start()
        assert ready.wait(10)
        engine.ask_until_restored("reset")
        old = set(client.scan_iter("kvtier:*")) - set(foreign)
        assert engine.engine.connector.reset_cache() is True
        assert engine.ask("reset") == 0
        engine.ask_until_restored("reset")
        end_s = time.monotonic() + 15
        while any(b":r0:" in key for key in old & set(client.scan_iter("*"))):
            assert time.monotonic() < end_s, "old records stay"
            time.sleep(0.05)
        assert [client.get(key) for key in foreign] == [b"mine"] * len(foreign)
        assert [client.get(key) for key in client.scan_iter("kvtier:epoch:*")] == [b"1"]
        client.echo("end")
        watcher.join(10)
    assert {"SET", "GET", "EXISTS", "UNLINK", "SCAN", "INCRBY"} <= set(seen)
    assert not {name for name in seen if name == "KEYS" or name.startswith("FLUSH")}


def test_a_reset_that_does_not_reach_redis_says_so(engine, store, caplog, monkeypatch):
    """Then Redis is left alone until it answers; old records are never served again."""
    engine.ask_until_restored("unreachable")
    store.wall.refuse()
    with caplog.at_level(logging.ERROR, "kvtier"):
        ours = logging.getLogger("kvtier")
        monkeypatch.setattr(ours, "handlers", [*ours.handlers, caplog.handler])
        assert engine.engine.connector.reset_cache() is False
    assert "not cleared" in caplog.text
    assert engine.ask("unreachable") == 0
    store.wall.listen_again()
    time.sleep(1.0)
    assert engine.ask("unreachable") == 0
    engine.ask_until_restored("unreachable")


def answers_of(child, *names):
    child.stdin.write(json.dumps([SEEDS[name] for name in names]) + "\n")
    child.stdin.flush()
    lines = [child.stdout.readline() for _ in names]
    return [_answer(json.loads(line)) for line in lines]


def _answer(told):
    rows = tuple(tuple(row) for row in told["logprobs"])
    return Answer(**{**told, "tokens": tuple(told["tokens"]), "logprobs": rows})


def test_two_engines_share_a_server(alone, truth, other):
    """What one process computed another restores as if computed, also when the first is gone."""
    store, child = other
    for name, answer in zip(("shared", "gone"), answers_of(child, "shared", "gone"), strict=True):
        assert answer.distance(truth[name]) <= FLOAT32_TOLERANCE
        assert answer.restored_tokens == 0
    with Engine(models.LLAMA, settings(store.wall.url)) as second:
        subject = Subject(second, truth)
        assert subject.ask("shared") >= N_WHOLE
        assert second.sources() == {"redis": subject.ask("shared")}
        child.send_signal(signal.SIGKILL)
        child.wait(10)
        assert subject.ask("gone") >= N_WHOLE
        second.assert_clean()


def test_a_reset_outlives_the_engine(alone, truth, monkeypatch):
    """Even where the old records are still there, an engine that starts later finds none."""
    monkeypatch.setattr(shared_tiers, "clear_in_background", lambda *_: None)
    store = Store()
    with Engine(models.LLAMA, settings(store.wall.url)) as engine:
        Subject(engine, truth).ask_until_restored("start")
        assert engine.connector.reset_cache() is True
    with store.server.client() as client:
        assert list(client.scan_iter("kvtier:*:h"))
    with Engine(models.LLAMA, settings(store.wall.url)) as engine:
        subject = Subject(engine, truth)
        assert subject.ask("start") == 0
        subject.ask_until_restored("start")
    store.close()


def test_a_server_that_is_dead_at_the_start_is_used_when_it_comes(alone, truth):
    """An engine starts without its Redis, answers, and shares as soon as the server is there."""
    store = Store()
    store.wall.refuse()
    with Engine(models.LLAMA, settings(store.wall.url, ram="16MiB")) as engine:
        subject = Subject(engine, truth)
        assert subject.ask("start") == 0
        assert subject.ask("start") >= N_WHOLE  # from RAM
        store.wall.listen_again()
        end_s = time.monotonic() + 20
        with store.server.client() as client:
            while not list(client.scan_iter("kvtier:*:h")):
                assert time.monotonic() < end_s
                subject.ask("start")
                engine.connector.scheduler_half.catalog.clear()
    store.close()


def test_write_back_writes_what_ram_gives_up(alone, truth):
    """With "back" Redis sees nothing until RAM is short of room; then nothing is lost."""
    store = Store()
    names = list(SEEDS)[:6]
    more = {"redis_write": "back", "ram": "10MiB", "staging": "4MiB"}
    with Engine(models.LLAMA, settings(store.wall.url, **more)) as engine:
        subject = Subject(engine, truth)
        subject.ask(names[0])
        engine.drain()
        with store.server.client() as client:
            assert not list(client.scan_iter("kvtier:*:h"))
        for name in names[1:]:
            subject.ask(name)
            engine.drain()
        assert subject.ask(names[0]) >= N_WHOLE
        assert "redis" in engine.sources()
    store.close()


def test_a_node_of_a_cluster_that_hangs(alone, truth):
    """Every answer is right and in time, the breaker stays closed, and hits come back."""
    cluster = Cluster()
    try:
        with Engine(models.LLAMA, settings(cluster.url)) as engine:
            subject = Subject(engine, truth)
            subject.ask_until_restored("shared")
            cluster.nodes[1].freeze()
            try:
                for name in ("shared", "shared", "gone", "shared", "gone"):
                    subject.ask(name)
                    engine.drain()
                assert not engine.connector.scheduler_half.catalog.is_offline("redis")
            finally:
                cluster.nodes[1].thaw()
            subject.ask_until_restored("shared", limit_s=60.0)
            engine.assert_clean()
    finally:
        cluster.close()


@pytest.mark.parametrize("promote", [True, False])
def test_an_engine_that_only_reads_redis(alone, truth, promote):
    """With "none" what others saved is served and nothing is added; `promote` keeps it in RAM."""
    store = Store()
    with Engine(models.LLAMA, settings(store.wall.url)) as engine:
        Subject(engine, truth).ask("shared")
        engine.drain()
    more = {"redis_write": "none", "promote": promote, "ram": "64MiB"}
    with (
        Engine(models.LLAMA, settings(store.wall.url, **more)) as engine,
        store.server.client() as c,
    ):
        subject, kept = Subject(engine, truth), set(c.scan_iter("kvtier:*:h"))
        assert kept
        assert subject.ask("shared") >= N_WHOLE
        assert set(engine.sources()) == {"redis"}
        subject.ask("shared")
        assert set(engine.sources()) == {"ram" if promote else "redis"}
        subject.ask("gone")
        engine.drain()
        assert set(c.scan_iter("kvtier:*:h")) == kept
        engine.assert_clean()
    store.close()
