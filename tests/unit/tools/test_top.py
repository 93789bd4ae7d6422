"""`kvtier top` against a metrics page that the real metrics classes serve."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvtier.connector.metric_table import GAUGE, METRICS
from kvtier.tools import scrape, top

from .stores import golden, kvtier


class Engine:
    """Serves pages, one after another; the last for ever."""

    def __init__(self, *pages, status=200):
        pages = list(pages)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                body = (pages.pop(0) if len(pages) > 1 else pages[0]).encode()
                self.send_response(status if self.path == "/metrics" else 404)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def page(**values):
    """A page as prometheus_client writes it; names as in METRICS, labels after a dot."""
    from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

    registry = CollectorRegistry()
    given = {name.replace("__", "."): value for name, value in values.items()}
    for metric in METRICS:
        kind = Gauge if metric.name.startswith(GAUGE) else Counter
        labels = ["model_name", "engine", *metric.labels]
        family = kind(metric.prometheus_name, metric.help, labels, registry=registry)
        plain = metric.name.removeprefix(GAUGE)
        for name, value in given.items():
            if name == plain or name.startswith(plain + "."):
                rest = [label for label in name[len(plain) + 1 :].split(".") if label]
                child = family.labels("m", "0", *rest)
                child.set(value) if kind is Gauge else child.inc(value)
    running = Gauge("vllm:num_requests_running", "x", ["model_name"], registry=registry)
    running.labels("m").set(3)
    return generate_latest(registry).decode()


FIRST = {
    "lookups": 10,
    "lookup_tokens": 10_000,
    "hits": 4,
    "hit_tokens__ram": 2000,
    "hit_tokens__disk": 1000,
    "misses__not_stored": 6,
    "load_bytes__disk": 1 << 20,
    "load_s__disk": 0.5,
    "resident_chunks__ram": 7,
    "resident_bytes__disk": 1 << 30,
    "tier_online__disk": 1,
    "tier_online__redis": 0,
    "breaker_opened__redis": 1,
    "refusal_began__disk": 1,
    "resident_bytes__ram": 3 << 20,
    "ram_pages__free": 5,
    "ram_pages__pinned": 2,
    "ram_pages__held": 13,
    "ram_pages__all": 20,
    "save_queue_bytes": 4096,
}


def test_top_shows_what_the_engine_counts():
    """Rates between two looks, totals, breaker and refusals by tier; the same in --json."""
    second = {**FIRST, "hit_tokens__disk": 3000, "load_bytes__disk": 3 << 20}
    with Engine(page(**FIRST), page(**second)) as engine:
        code, out, err = kvtier("top", engine.url, "--once", "--every", "0.5", "--json")
    state = json.loads(out)
    assert code == 0, err
    golden("top", state)
    tiers = {tier["tier"]: tier for tier in state["tiers"]}
    assert list(tiers) == ["ram", "disk", "redis"]
    assert state["requests"]["running"] == 3
    assert state["tokens"]["restored_share"] == 0.5
    seconds = state["seconds"]
    assert seconds >= 0.5
    assert tiers["disk"]["hit_tokens_per_s"] == pytest.approx(2000 / seconds, rel=0.01)
    assert tiers["disk"]["load_bytes_per_s"] == pytest.approx((2 << 20) / seconds, rel=0.01)
    assert tiers["disk"]["load_bytes_per_thread_s"] == (3 << 20) / 0.5
    assert tiers["redis"]["breaker"] == "open"
    assert tiers["redis"]["online"] is False
    assert tiers["disk"]["refuses_saves"] is True
    assert tiers["ram"]["online"] is None
    assert state["misses"] == {"not_stored": 6}
    with Engine(page(**FIRST)) as engine:
        code, out, _ = kvtier("top", engine.url, "--once", "--every", "0.1")
    assert code == 0
    assert "OFF" in out
    assert "no saves" in out
    assert "not_stored 6" in out
    assert "RAM pages: 5 free, 13 hold chunks, 2 in use by transfers, of 20;" in out
    assert "3.0 MiB" in next(line for line in out.splitlines() if line.startswith("ram "))


def test_top_uses_only_names_that_are_served():
    """Every kvtier metric that the view reads is in the table of metrics."""
    import inspect
    import re

    served = {m.prometheus_name + ("" if m.name.startswith(GAUGE) else "_total") for m in METRICS}
    text = inspect.getsource(top)
    used = {f"kvtier:{name}" for name in re.findall(r"\{P\}([a-z_]+)", text) if name}
    used |= {f"kvtier:{what}_{unit}_total" for what in ("load", "save") for unit in ("s", "bytes")}
    assert used <= served
    assert len(used) > 20


def test_top_says_what_a_server_is_not():
    """Nobody there: 4. An error, no metrics, an engine without kvtier: 5. No URL: 2."""
    assert kvtier("top", "http://127.0.0.1:1")[0] == 4
    assert kvtier("top", "redis://127.0.0.1")[0] == 2
    with Engine("hello") as engine:
        assert kvtier("top", engine.url)[0] == 5
    with Engine("x", status=500) as engine:
        assert kvtier("top", engine.url)[0] == 5
    with Engine("vllm:num_requests_running 1\n") as engine:
        code, _, err = kvtier("top", engine.url)
        assert code == 5
        assert "is the connector configured" in err


def test_the_text_format_is_read_with_its_escapes():
    """Labels with quotes and braces, sums over engines, comments and rubbish passed over."""
    text = (
        "# HELP kvtier:hits_total x\n"
        'kvtier:hits_total{engine="0",model_name="a\\"}b\\\\"} 2.0\n'
        'kvtier:hits_total{engine="1",model_name="c"} 3\n'
        "kvtier:hits_total nonsense\n"
        "}{\n"
        "up 1 1700000000\n"
    )
    read = scrape.parse(text)
    assert read.total("kvtier:hits_total") == 5
    assert read.by("kvtier:hits_total", "model_name") == {'a"}b\\': 2.0, "c": 3.0}
    assert read.total("up") == 1


def test_a_restarted_engine_shows_no_negative_rate():
    """Counters that begin again count as nothing, not as less."""
    before, now = scrape.parse("kvtier:lookups_total 9\n"), scrape.parse("kvtier:lookups_total 1\n")
    assert top.View(now, before, 1.0).rate("kvtier:lookups_total") == 0.0
