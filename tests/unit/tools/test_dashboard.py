"""The Grafana dashboard shows what engines serve, and all of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvtier.connector.metric_table import GAUGE, METRICS

DASHBOARD = json.loads(
    (Path(__file__).parents[3] / "docs" / "grafana-dashboard.json").read_text(encoding="utf-8")
)
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(p["title"], target) for p in PANELS for target in p["targets"]]
SERVED = {m.prometheus_name + ("" if m.name.startswith(GAUGE) else "_total"): m for m in METRICS}


def names(text):
    return set(re.findall(r"kvtier:[a-z0-9_]+", text))


@pytest.mark.parametrize(("title", "target"), QUERIES, ids=[t for t, _ in QUERIES])
def test_every_query_asks_for_what_is_served(title, target):
    """Names exist, counters are rated and gauges are not, labels are those of the metric."""
    expr = target["expr"]
    assert names(expr)
    for name in names(expr):
        assert name in SERVED, f"{title}: {name}"
        rated = f"rate({name}{{" in expr
        assert rated == name.endswith("_total"), f"{title}: {name}"
    labels = {
        label.strip() for by in re.findall(r"by \(([^)]*)\)", expr) for label in by.split(",")
    }
    labels |= set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
    for label in labels:
        assert all(label in SERVED[name].labels for name in names(expr)), f"{title}: {label}"
    assert expr.count("(") == expr.count(")")
    assert expr.count("{") == expr.count("}")


def test_every_metric_is_shown():
    """Nothing is counted that the dashboard leaves out."""
    shown = {name for _, target in QUERIES for name in names(target["expr"])}
    assert shown == set(SERVED)


def test_panels_lie_side_by_side():
    """No two panels overlap, none is wider than the grid, ids are unique."""
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))


def test_the_model_can_be_chosen():
    """Every query goes by the dashboard's variables."""
    assert {v["name"] for v in DASHBOARD["templating"]["list"]} == {"datasource", "model"}
    for title, target in QUERIES:
        assert target["expr"].count('model_name=~"$model"') == len(
            re.findall(r"kvtier:", target["expr"])
        ), title
