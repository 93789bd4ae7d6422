from __future__ import annotations

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from kvtier.tools import cli
from kvtier.tools.exit_codes import ExitCode
from kvtier.tools.reporting import CommandError
from kvtier.tools.scrape import metrics_url, scrape
from kvtier.tools.soak_commands import exit_code
from kvtier.tools.soak_listener import Listener
from kvtier.tools.soak_options import SoakOptions
from kvtier.tools.soak_types import Ask, SoakError
from kvtier.tools.soak_url import UrlEngine
from kvtier.tools.soak_url_run import UrlSoak
from kvtier.tools.warm import wake_server

from .soak_fakes import FakeEngine


class Server:
    """An OpenAI-compatible server whose model is a hash, with kvtier's metrics.

    Args:
        wrong: given an `Ask` and the tokens restored for it, whether the answer is wrong.

    Attributes:
        cut: given the number of an answer, whether the connection ends in the middle of it.
        hides: given the number of a look, whether its metrics can not be had.
    """

    def __init__(self, wrong=lambda ask, restored: False):
        self.engine = FakeEngine(wrong)
        self.bodies = []
        self.logins = set()
        self.delay_s = 0.0
        self.cut = self.hides = lambda number: False
        self.looks = 0
        self.restored = self.looked_up = 0
        handler = type("Handler", (_Handler,), {"owner": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def answer(self, body):
        self.bodies.append(body)
        kvtier = "kv_transfer_params" not in body
        ask = Ask(tuple(body["prompt"]), body["max_tokens"], body.get("cache_salt"), kvtier)
        time.sleep(self.delay_s)
        reply = self.engine.ask(ask)
        self.restored += reply.restored_tokens
        self.looked_up += len(ask.prompt)
        return reply


class _Handler(BaseHTTPRequestHandler):
    owner: Server

    def log_message(self, *_):
        pass

    def _send(self, text, kind="application/json"):
        data = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.owner.logins.add(self.headers["Authorization"])
        if self.path == "/metrics":
            self.owner.looks += 1
        if self.path == "/metrics" and self.owner.hides(self.owner.looks):
            self.send_error(503)
        elif self.path == "/v1/models":
            self._send(json.dumps({"data": [{"id": "hash", "max_model_len": 1024}]}))
        elif self.path == "/metrics":
            labels = 'engine="0",model_name="hash"'
            self._send(
                f'kvtier:hit_tokens_total{{{labels},tier="disk"}} {self.owner.restored}\n'
                f"kvtier:lookup_tokens_total{{{labels}}} {self.owner.looked_up}\n"
                f'kvtier:tier_online{{{labels},tier="disk"}} 1\n'
                f'kvtier:load_failed_chunks_total{{{labels},reason="missing",tier="disk"}} 2\n'
                f"vllm:num_requests_waiting{{{labels}}} 3\n"
                f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} 40\n"
                f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} 4\n",
                "text/plain",
            )
        else:
            self.send_error(404)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions" or body["model"] != "hash":
            self.send_error(404)
            return
        reply = self.owner.answer(body)
        cut = self.owner.cut(len(self.owner.bodies))
        lines = []
        for token, top in zip(reply.tokens, reply.top, strict=True):
            told = {
                "tokens": [f"token_id:{token}"],
                "token_logprobs": [dict(top)[token]],
                "top_logprobs": [{f"token_id:{t}": x for t, x in top}],
            }
            lines.append("data: " + json.dumps({"choices": [{"text": "", "logprobs": told}]}))
        lines = lines[:1] if cut else [*lines, "data: [DONE]"]
        self._send("\n\n".join(lines) + "\n\n", "text/event-stream")


def test_answers_come_with_their_logprobs():
    """Tokens and the likeliest of each position, exactly as the server told them."""
    with Server() as server:
        engine = UrlEngine(server.url + "/v1")
        assert engine.max_model_tokens == 1024
        reply = engine.ask(Ask((1, 2, 3), 4, "s"))
        right = FakeEngine().ask(Ask((1, 2, 3), 4, "s"))
        assert (reply.tokens, reply.top) == (right.tokens, right.top)
        assert server.bodies[0]["cache_salt"] == "s"
        assert server.bodies[0]["min_tokens"] == 4


def test_uncached_requests_share_nothing():
    """Each has a salt of its own and keeps kvtier out."""
    with Server() as server:
        engine = UrlEngine(server.url, uncached=True)
        for _ in range(2):
            engine.ask(Ask((1, 2, 3), 4, "s"))
        assert len({body["cache_salt"] for body in server.bodies}) == 2
        assert all(
            body["kv_transfer_params"] == {"kvtier": {"read": False, "store": False}}
            for body in server.bodies
        )


def test_a_request_can_be_given_up():
    """One that takes longer than it may is closed."""
    with Server() as server:
        engine = UrlEngine(server.url)
        server.delay_s = 0.5
        assert engine.ask(Ask((1, 2, 3), 4, abort_after_s=0.02)).aborted
        time.sleep(0.6)  # the server finds out when it writes


def test_an_answer_that_ends_in_the_middle_is_no_answer():
    """A connection that closes before the end is the server's fault, not a wrong answer."""
    with Server() as server:
        engine = UrlEngine(server.url)
        server.cut = lambda number: True
        with pytest.raises(SoakError, match="in the middle"):
            engine.ask(Ask((1, 2, 3), 4))


def test_what_speaks_no_http_is_told_in_one_line(monkeypatch):
    """A server of another kind, ports that cannot be, logins: errors of ours, without secrets."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        def chat():
            for _ in range(3):
                with other.accept()[0] as visitor:
                    visitor.recv(4096)
                    visitor.sendall(b"-ERR unknown command\r\n")

        thread = threading.Thread(target=chat)
        thread.start()
        for look in (UrlEngine, lambda url: scrape(metrics_url(url)), wake_server):
            with pytest.raises(CommandError) as caught:
                look(f"http://me:s3cret@127.0.0.1:{port}")
            assert caught.value.code == ExitCode.UNREACHABLE
            assert "s3cret" not in str(caught.value)
        thread.join()
    for look in (UrlEngine, metrics_url, wake_server):
        for url in (
            "http://[::1",
            "http://h:99999",
            "http://h:http",
            "http://",
            "ftp://h",
        ):
            with pytest.raises(CommandError) as caught:
                look(url)
            assert caught.value.code == ExitCode.USAGE, url


def test_a_server_with_a_key_is_told_it(monkeypatch):
    """The API key in the environment, or a login in the URL, goes with every request."""
    with Server() as server:
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        UrlEngine(server.url).sample()
        assert server.logins == {"Bearer k"}
        server.logins.clear()
        UrlEngine(server.url.replace("//", "//me:p%40@")).sample()
        assert server.logins == {"Basic bWU6cEA="}


def test_metrics_have_the_names_of_an_engine_of_our_own():
    """Counters by tier and reason, gauges, drafts."""
    with Server() as server:
        assert UrlEngine(server.url).sample() == {
            "hit_tokens.disk": 0.0,
            "lookup_tokens": 0.0,
            "gauge.tier_online.disk": 1.0,
            "load_failed_chunks.disk.missing": 2.0,
            "gauge.waiting": 3.0,
            "draft_tokens": 40.0,
            "accepted_tokens": 4.0,
        }


def test_what_is_no_server_is_told():
    """Nobody there, another model, a refusal: one line each."""
    with pytest.raises(CommandError, match=r"no OpenAI-compatible server: Connection refused$"):
        UrlEngine("http://127.0.0.1:9")
    with pytest.raises(CommandError, match=r"not woken: Connection refused$"):
        wake_server("http://127.0.0.1:9")
    with pytest.raises(CommandError, match=r"metrics: Connection refused$"):
        scrape(metrics_url("http://127.0.0.1:9"))
    with Server() as server:
        with pytest.raises(CommandError, match="there is hash"):
            UrlEngine(server.url, "other")
        engine = UrlEngine(server.url)
        engine.model = "gone"
        with pytest.raises(SoakError, match="404"):
            engine.ask(Ask((1,), 2))


def soak(server, tmp_path, monkeypatch, *more, minutes=0.06):
    monkeypatch.setenv("KVTIER_CACHE", str(tmp_path / "cache"))
    result = CliRunner().invoke(
        cli.app,
        ["soak", "--url", server.url, "--minutes", str(minutes), "--report", str(tmp_path / "r"),
         "--sessions", "3", "--turns", "3", "--context-tokens", "600", *more],
    )  # fmt: skip
    path = tmp_path / "r" / "report.json"
    return result, json.loads(path.read_text()) if path.exists() else None


def test_a_healthy_server_passes(tmp_path, monkeypatch):
    """Right answers from salted requests, hits from the metrics, exit code 0."""
    with Server() as server:
        result, found = soak(server, tmp_path, monkeypatch)
    assert result.exit_code == 0, result.output
    assert found["traffic"]["answered"] > 9
    assert found["setup"]["model"] == "hash"
    assert found["traffic"]["tokens"]["disk"] > 0
    assert found["samples"]


def test_a_server_that_ends_leaves_a_report(tmp_path, monkeypatch):
    """What was found until then is told, with how it ended; exit code 1."""
    with Server() as server:
        server.cut = lambda number: number > 24
        result, found = soak(server, tmp_path, monkeypatch)
    assert result.exit_code == 1, result.output
    assert [row["kind"] for row in found["findings"]] == ["cut_short"]
    assert "in the middle" in found["findings"][0]["text"]
    assert found["traffic"]["answered"] > 0


@pytest.mark.parametrize(("hides", "kinds"), [
    (lambda number: number % 2, set()), (lambda number: True, {"cut_short", "nothing_restored"}),
], ids=["now and then", "always"])  # fmt: skip
def test_metrics_that_cannot_be_had(tmp_path, monkeypatch, hides, kinds):
    """A busy server may miss a look; one that never shows its metrics proves nothing."""
    with Server() as server:
        server.hides = hides
        result, found = soak(server, tmp_path, monkeypatch, minutes=0.1)
    assert {row["kind"] for row in found["findings"]} == kinds
    assert result.exit_code == bool(kinds)


def test_other_weights_under_the_same_name_are_asked_anew(tmp_path, monkeypatch):
    """Right answers that are kept belong to what the server computes, not to its address."""
    with Server() as server:
        _, first = soak(server, tmp_path, monkeypatch)
        _, again = soak(server, tmp_path, monkeypatch)
        server.engine = FakeEngine(lambda ask, restored: True)  # now wrong is right
        result, other = soak(server, tmp_path, monkeypatch)
    assert first["setup"]["right_answers_computed"] > 0
    assert again["setup"]["right_answers_computed"] == 0
    assert other["setup"]["right_answers_computed"] == first["setup"]["right_answers_computed"]
    assert result.exit_code == 0


def test_ended_before_the_first_answer_there_is_a_report(tmp_path, monkeypatch):
    """Ctrl-C while right answers are computed: 130, and nothing is wrong."""
    with Server() as server:
        stopped = threading.Event()
        stopped.set()
        monkeypatch.setenv("KVTIER_CACHE", str(tmp_path / "cache"))
        options = SoakOptions(minutes=1, report=tmp_path, url=server.url)
        found = UrlSoak(options, Listener(), stopped).run()
    assert found["interrupted"]
    assert exit_code(found) == ExitCode.INTERRUPTED


@pytest.mark.parametrize(
    ("wrong", "party"),
    [
        (lambda ask, restored: restored > 0, "kvtier"),
        (lambda ask, restored: ask.salt.startswith(("soak-own", "soak-1-0")), "vllm"),
    ],
    ids=["kvtier's loads", "everything shared"],
)
def test_a_wrong_server_fails(tmp_path, monkeypatch, wrong, party):
    """What is wrong only with kvtier is not vLLM's; what is wrong without it is."""
    with Server(wrong) as server:
        result, found = soak(server, tmp_path, monkeypatch)
    assert result.exit_code == 1
    assert {row["party"] for row in found["mismatches"]} == {party}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--faults", "disk-fire"], "no fault 'disk-fire'"),
        (["--url", "http://h", "--faults", "engine-kill"], "without --url"),
        (["--url", "http://h", "--faults", "disk-corrupt"], "needs its folder"),
        (["--redis", "redis://h", "--faults", "redis-kill"], "leave out --redis"),
        (["--kvtier", "{"], "--kvtier is no JSON"),
        (["--traffic", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--report", __file__], "--report"),
        (["--operations", "5"], "goes with --storage-only"),
        (["--pid", "1"], "go with --url"),
        (["--url", "http://h", "--pid", "99999999"], "no such process"),
        (["--storage-only", "--faults", "engine-kill"], "not engine-kill"),
        (["--storage-only", "--url", "http://h"], "no --url"),
        (["--storage-only", "--faults", "all", "--redis", "start"], "needs the disk"),
        (["--minutes", "0"], "--minutes"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, options, words):
    """Exit code 2 and one line, before anything is started."""
    result = CliRunner().invoke(cli.app, ["soak", "--report", str(tmp_path / "r"), *options])
    assert result.exit_code == 2
    assert words in result.stderr
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--traffic", __file__], 5, "no JSON"),
        (["--kvtier", '{"rom": 1}'], 3, "did you mean 'ram'"),
        (["--redis", "http://h"], 3, "redis"),
    ],
)
def test_what_an_engine_would_refuse_is_refused_at_once(tmp_path, options, code, words):
    """A trace that is none and settings that are none cost no minutes of right answers."""
    result = CliRunner().invoke(cli.app, ["soak", "--report", str(tmp_path / "r"), *options])
    assert result.exit_code == code
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1
