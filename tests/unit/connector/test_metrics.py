"""Counters and gauges: every name has a family, and sums agree with a scripted truth."""

from __future__ import annotations

import ast
import re
import warnings
from collections import Counter
from pathlib import Path

import pytest

import kvtier.connector
import kvtier.storage
from kvtier.connector.lookup import MissReason
from kvtier.connector.metric_table import METRICS
from kvtier.storage.errors import DamageReason

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's own imports warn
    pytest.importorskip("vllm")
    from kvtier.connector.metrics import KVTierPromMetrics, KVTierStats, totals

GAUGE = "gauge."


class Child:
    def __init__(self):
        self.value = 0.0

    def inc(self, amount):
        self.value += amount

    def set(self, value):
        self.value = value


class Family:
    """A Prometheus family that remembers its children."""

    made: dict[str, Family]

    def __init__(self, name, documentation, labelnames, **options):
        self.labelnames, self.children = labelnames, {}
        assert name not in self.made
        self.made[name] = self

    def labels(self, *values):
        assert len(values) == len(self.labelnames)
        return self.children.setdefault(values, Child())


@pytest.fixture
def families(monkeypatch):
    monkeypatch.setattr(Family, "made", {}, raising=False)
    return Family.made


@pytest.fixture
def prom(families, monkeypatch):
    metrics = KVTierPromMetrics.__new__(KVTierPromMetrics)

    def init(self, config, types, labelnames, values):
        self._gauge_cls = self._counter_cls = Family
        self.per_engine_labelvalues = values

    base = KVTierPromMetrics.__mro__[1]
    monkeypatch.setattr(base, "__init__", init)
    metrics.__init__(None, {}, ["model", "engine"], {0: ["m", "0"], 1: ["m", "1"]})
    return metrics


def names_in_source():
    """Every counter name that the code adds to, with its labels filled in."""
    found = set()
    for package in (kvtier.connector, kvtier.storage):
        for path in Path(package.__path__[0]).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                is_add = isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
                    "counts.add"
                )
                if is_add and node.args:
                    found |= set(texts(node.args[0]))
    return found


def texts(node):
    if isinstance(node, ast.IfExp):
        return [*texts(node.body), *texts(node.orelse)]
    if isinstance(node, ast.JoinedStr):
        return [fill(ast.unparse(node)[2:-1])]
    return [node.value] if isinstance(node, ast.Constant) else []


def fill(text):
    examples = {
        "self.name": "disk",
        "name": "disk",
        "source": "ram",
        "link.name": "disk",
        "err.reason.value": DamageReason.PAYLOAD.value,
        "tracker.reason.value": MissReason.NOT_STORED.value,
        "status.name.lower()": "missing",
    }
    return re.sub(r"{([^}]+)}", lambda m: examples.get(m.group(1), "x"), text)


def test_every_counter_has_a_family(prom):
    """Nothing that the code counts is lost on its way to Prometheus."""
    names = names_in_source()
    assert len(names) > 25
    lost = [name for name in sorted(names) if prom._child(name, 0) is None]
    assert lost == []


def test_every_family_is_counted():
    """No family is registered that nobody ever adds to."""
    heads = {name.split(".")[0] for name in names_in_source()}
    told = {"ram_evicted_chunks", "ram_evicted_lost_chunks"}  # through `take_counts`
    for metric in METRICS:
        if not metric.name.startswith(GAUGE) and metric.name not in told:
            assert metric.name in heads, metric.name


def test_sums_over_steps_and_ranks(prom, families):
    """Counters add up; of a gauge the last step counts, summed over ranks."""
    prom.observe({"load_bytes.disk": 5.0, "gauge.resident_bytes.disk@0": 10.0}, 0)
    prom.observe({"load_bytes.disk": 7.0, "gauge.resident_bytes.disk@1": 20.0}, 0)
    prom.observe({"load_bytes.disk": 1.0, "load_bytes.ram": 2.0, "nonsense.x": 3.0}, 1)
    prom.observe({"gauge.resident_bytes.disk@0": 11.0, "misses.not_stored": 0.0}, 0)
    loads = families["kvtier:load_bytes"].children
    assert {k: c.value for k, c in loads.items()} == {
        ("m", "0", "disk"): 12.0,
        ("m", "1", "disk"): 1.0,
        ("m", "1", "ram"): 2.0,
    }
    (gauge,) = families["kvtier:resident_bytes"].children.values()
    assert gauge.value == 31.0
    assert families["kvtier:misses"].children == {}


def test_stats_aggregate():
    """Two ranks' stats become one, in any order and number of pieces."""
    pieces = [
        {"hits": 1.0, "load_s.disk": 0.5, "gauge.tier_online.disk@0": 0.0},
        {"hits": 2.0, "gauge.tier_online.disk@0": 1.0},
        {"load_s.disk": 0.25, "gauge.tier_online.disk@1": 1.0},
    ]
    whole = KVTierStats(data={})
    for piece in pieces:
        whole.aggregate(KVTierStats(data=dict(piece)))
    truth = Counter({"hits": 3.0, "load_s.disk": 0.75, "gauge.tier_online.disk": 2.0})
    assert totals(whole.data) == truth
    assert whole.reduce() == {"hits": 3}
    assert not whole.is_empty()
    whole.reset()
    assert whole.is_empty()


def test_stats_are_plain():
    """They cross a process border as plain strings and numbers."""
    stats = KVTierStats(data={"hits": 1.0})
    again = KVTierStats(data=dict(stats.data))
    assert again.data == stats.data
    assert all(type(v) in (int, float) for v in stats.reduce().values())
