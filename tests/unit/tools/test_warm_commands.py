"""`kvtier warm` as people see it: engines that do it, refuse, sleep, vanish, are not there."""

from __future__ import annotations

import http.server
import json
import random
import threading
import time
from contextlib import contextmanager
from queue import Empty

import pytest

from kvtier.connector.control import ControlServer
from kvtier.storage.key import chunk_key, key_name

from .stores import NAMESPACES, Folder, golden, here, key, put
from .test_explain import chain, save

TOKENS = random.Random(5).choices(range(32000), k=300)


@pytest.fixture
def store(tmp_path):
    (tmp_path / "store").mkdir()
    return Folder(tmp_path / "store")


@pytest.fixture
def prompt(tmp_path):
    path = tmp_path / "prompt.json"
    path.write_text(json.dumps(TOKENS))
    return path


def run(*arguments):
    return here("warm", *arguments)


@contextmanager
def engine(store, work, awake=None):
    """Something that listens as an engine does, and works on wishes with ``work``."""
    made = ControlServer(store.target + "/control")
    made.seen = []
    stop = threading.Event()

    def step():
        while not stop.wait(0.01):
            if awake is not None and not awake.is_set():
                continue
            try:
                wish = made.wishes.get_nowait()
            except Empty:
                continue
            made.seen.append(wish)
            work(wish)

    helper = threading.Thread(target=step)
    helper.start()
    try:
        yield made
    finally:
        stop.set()
        helper.join()
        made.close()


def load_all(wish):
    wish.begin()
    wish.count("loaded", len(wish.keys) - 1)
    wish.count("no_room")
    wish.end("done")


def elsewhere(wish):
    wish.end("other_namespace")


def test_a_prompt_is_asked_for_from_its_beginning(store, prompt):
    """Every engine that listens gets the keys and where they end; each one's outcome is told."""
    save(store, TOKENS, [64, 128, 192, 256, 288])
    hashes = chain(TOKENS)
    with engine(store, load_all) as one, engine(store, elsewhere) as other:
        code, out, err = run(store.target, prompt, "--up-to", 200, "--json")
    data = json.loads(out)
    data["engines"].sort(key=lambda row: row["state"])  # a list's shape is that of its first
    golden("warm", data)
    assert (code, err) == (0, "")
    assert (data["tokens"], data["chunks"]) == (192, 3)
    for listener in (one, other):
        (wish,) = listener.seen
        assert wish.namespace == NAMESPACES[0]
        assert wish.tier == "disk"
        assert list(wish.keys) == [(chunk_key(hashes[e], 0), e) for e in (64, 128, 192)]
    states = {row["engine"]: row for row in data["engines"]}
    told = states[one._name.removesuffix(".sock")]
    assert (told["state"], told["loaded"], told["skipped"]) == ("done", 2, {"no_room": 1})
    assert states[other._name.removesuffix(".sock")]["state"] == "other_namespace"
    with engine(store, load_all):
        code, out, _ = run(store.target, prompt)
    assert code == 0
    assert "4 of 5 chunks loaded, 0 were there, 1 no room" in out


def test_of_a_namespace_what_was_used_last_comes_first(store):
    """All keys of all ranks, each once, the most recently used first, ends from their headers."""
    put(store.tier(), range(6))
    put(store.tier(rank=1), range(6))
    put(store.tier(NAMESPACES[1]), range(9, 12))
    for rank, touched in ((0, [4, 1]), (1, [2])):
        tier = store.tier(rank=rank)
        assert tier.wait_complete(10)
        tier.touch([key(n) for n in touched])
        tier.close()
    with engine(store, load_all) as listener:
        code, _, err = run(store.target, "--all", "--namespace", NAMESPACES[0].hex())
    assert code == 0, err
    keys = list(listener.seen[0].keys)
    assert sorted(keys) == sorted((key(n), 256 * n + 256) for n in range(6))
    assert [k for k, _ in keys[:3]] == [key(2), key(1), key(4)]


def test_nobody_does_it(store, prompt):
    """No folder, nobody there, another namespace only, asleep: one line or row, code 4 or 1."""
    save(store, TOKENS, [64, 128])
    code, _, err = run(store.target, prompt)
    assert (code, err.count("\n")) == (4, 1)
    with engine(store, load_all):
        pass
    code, _, err = run(store.target, prompt)
    assert (code, "no engine listens" in err) == (4, True)
    with engine(store, elsewhere):
        code, out, _ = run(store.target, prompt)
    assert (code, "another namespace" in out) == (1, True)
    with engine(store, load_all, awake=threading.Event()) as listener:
        code, out, _ = run(store.target, prompt, "--wait", 0.3)
        assert (code, "idle" in out) == (1, True)
        wish = listener.wishes.get(timeout=5)
        until_s = time.monotonic() + 5
        while not wish.cancelled:
            assert time.monotonic() < until_s
            time.sleep(0.01)


def test_an_engine_that_ends_meanwhile(store, prompt):
    """It is told as lost, not waited for."""
    save(store, TOKENS, [64, 128])
    closing = []

    def die(wish):
        wish.begin()
        thread = threading.Thread(target=listener.close)
        thread.start()
        closing.append(thread)

    with engine(store, die) as listener:
        began_s = time.monotonic()
        code, out, _ = run(store.target, prompt, "--json", "--wait", 30)
        assert time.monotonic() - began_s < 20
    closing[0].join()
    assert (code, json.loads(out)["engines"][0]["state"]) == (1, "lost")


def test_wrong_use(store, prompt):
    """One line for each way to ask wrongly."""
    save(store, TOKENS, [64])
    for code, words, arguments in (
        (2, "give token ids", (store.target,)),
        (2, "give token ids", (store.target, prompt, "--all")),
        (2, "--all needs --namespace", (store.target, "--all")),
        (1, "no namespace begins", (store.target, "--all", "--namespace", "ff")),
        (1, "nothing of this prompt", (store.target, prompt, "--up-to", 10)),
    ):
        found, _, err = run(*arguments)
        assert (found, words in err, err.count("\n")) == (code, True, 1), (arguments, err)


# -- waking ------------------------------------------------------------------------------


@contextmanager
def vllm_server(on_completion):
    """The two answers of vLLM's HTTP server that waking needs."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply({"data": [{"id": "the-model"}]})

        def do_POST(self):
            length = int(self.headers["Content-Length"])
            asked.append((self.path, json.loads(self.rfile.read(length)), dict(self.headers)))
            on_completion()
            self.reply({"choices": []})

        def reply(self, value):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(value).encode())

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def test_an_idle_engine_is_woken(store, prompt, monkeypatch):
    """One token is asked of the server when an engine does not begin, and none when it does."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    save(store, TOKENS, [64, 128])
    awake = threading.Event()
    with vllm_server(awake.set) as (url, asked), engine(store, load_all, awake=awake):
        code, _, err = run(store.target, prompt, "--wake", url, "--wait", 20)
        assert code == 0, err
        ((path, body, headers),) = asked
        assert (path, body["model"], body["max_tokens"]) == ("/v1/completions", "the-model", 1)
        assert headers["Authorization"] == "Bearer sk-1"
        code, _, _ = run(store.target, prompt, "--wake", url + "/v1")
        assert (code, len(asked)) == (0, 1)


def test_an_engine_at_work_is_not_woken(store, prompt):
    """However long it takes: one that has begun needs no request."""
    save(store, TOKENS, [64])

    def slowly(wish):
        wish.begin()
        time.sleep(1.0)
        wish.end("done")

    with vllm_server(lambda: None) as (url, asked), engine(store, slowly):
        code, _, err = run(store.target, prompt, "--wake", url, "--wait", 1.4)
        assert (code, asked) == (0, []), err


def test_a_server_that_is_not_there(store, prompt):
    """One line, and the wish is given up."""
    save(store, TOKENS, [64])
    with engine(store, load_all, awake=threading.Event()):
        for url, words in (("http://127.0.0.1:9", "not woken"), ("ftp://x", "server's address")):
            code, _, err = run(store.target, prompt, "--wake", url, "--wait", 3)
            assert code in {2, 4}
            assert words in err
            assert err.count("\n") == 1


def test_keys_are_what_ls_prints(store, prompt):
    """What a command asks for is what the store lists."""
    save(store, TOKENS, [64])
    with engine(store, load_all) as listener:
        run(store.target, prompt)
    ((found, _),) = listener.seen[0].keys
    assert key_name(found) in here("ls", store.target)[1]
