"""Warmed before the turn, and recorded after it: what people ask of a running engine."""

from __future__ import annotations

import json
import os
import threading
import time

import pytest
from typer.testing import CliRunner

from kvtier.tools.cli import app
from kvtier.tools.redis_server import RedisServer

from . import models
from .harness import CHUNK_TOKENS, FLOAT32_TOLERANCE, Engine, prompt

N = 6
TOKENS = prompt(1200, 9100)
OTHER = prompt(700, 9101)


def kvtier(*arguments, code=0):
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert done.exit_code == code, (done.stdout, done.stderr, done.exception)
    return json.loads(done.stdout)


def while_stepping(engine, *arguments):
    """Run a command on a thread while the engine does what an idle server does not: step."""
    out = []
    thread = threading.Thread(target=lambda: out.append(kvtier(*arguments)))
    thread.start()
    deadline_s = time.monotonic() + 60
    while thread.is_alive():
        assert time.monotonic() < deadline_s
        engine.step()
        time.sleep(0.001)
    thread.join()
    (result,) = out
    return result


@pytest.mark.parametrize("tier", ["disk", "redis"])
def test_warmed_records_are_restored_from_ram(tmp_path, tier):
    """After a restart: recorded, warmed by request id, restored without a byte from below."""
    recording, control = tmp_path / "recording", tmp_path / "control"
    tokens_file = tmp_path / "tokens.json"
    tokens_file.write_text(json.dumps(TOKENS))
    settings = {"ram": "64MiB", "record": str(recording), "control": str(control)}
    with RedisServer() as server:
        if tier == "disk":
            store = str(tmp_path / "store")
            settings |= {"disk": store, "disk_capacity": "1GiB"}
        else:
            store = server.url
            settings |= {"redis": store}
        with Engine(models.LLAMA, settings) as engine:
            right = engine.ask_each([TOKENS, OTHER], N)  # nothing is stored yet: computed
            assert [answer.restored_tokens for answer in right] == [0, 0]
            engine.drain()
        (asked, _) = [json.loads(line)["request"] for line in recorded(recording)]
        where = ("--request", asked, "--recording", recording)
        told = kvtier("explain", store, *where)
        by_tokens = kvtier("explain", store, tokens_file)
        for verdict in (*told["namespaces"], *by_tokens["namespaces"]):
            verdict.pop("hash_function")
        assert told["namespaces"] == by_tokens["namespaces"]
        assert told["namespaces"][0]["hit_tokens"] >= 1184
        assert told["request"]["hit_tokens"] == {}

        with Engine(models.LLAMA, settings) as engine:
            idle = kvtier("warm", store, *where, "--control", control, "--wait", "0.5", code=1)
            assert idle["engines"][0]["state"] == "waiting"
            said = while_stepping(engine, "warm", store, *where, "--control", control)
            (told,) = said["engines"]
            assert told["engine"].startswith(f"{os.getpid()}-")
            assert (told["state"], told["skipped"]) == ("done", {})
            assert told["loaded"] == said["chunks"] >= 1200 // CHUNK_TOKENS
            read = engine.read_bytes(tier)
            assert read > 0
            answer = engine.ask(TOKENS, N)
            assert answer.distance(right[0]) <= FLOAT32_TOLERANCE
            assert answer.restored_tokens >= 1184
            assert set(engine.sources()) == {"ram"}
            assert engine.read_bytes(tier) == read
            again = while_stepping(engine, "warm", store, *where, "--control", control)
            assert again["engines"][0]["in_ram"] == said["chunks"]
            # The rest of the namespace, by itself.
            space = said["namespace"]
            whole = ("warm", store, "--all", "--namespace", space, "--control", control)
            rest = while_stepping(engine, *whole)["engines"][0]
            assert rest["loaded"] > 0
            assert rest["loaded"] + rest["in_ram"] >= said["chunks"] + 700 // CHUNK_TOKENS
            engine.forget()
            assert engine.ask(OTHER, N).distance(right[1]) <= FLOAT32_TOLERANCE
            assert set(engine.sources()) == {"ram"}
            engine.assert_clean()
        replayed = kvtier("replay", recording, "--sizes", "1GiB", "--policies", "lru")
        assert replayed["results"][0]["requests"] == 2
    assert os.listdir(control) == []
    assert not [t for t in threading.enumerate() if t.name in {"kvtier-control", "kvtier-record"}]


def recorded(folder):
    """Lines of requests in the oldest recording."""
    path = min(folder.glob("*.jsonl"))
    return [line for line in path.read_text().splitlines() if '"format"' not in line]
