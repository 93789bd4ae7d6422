"""The table of metrics: complete, and the same in the documentation."""

import ast
import re
from pathlib import Path

from kvtier.connector.metric_table import METRICS, markdown_table

REPO = Path(__file__).parents[3]


def counter_names():
    """Names given to `Counts.add` anywhere, with labels written in place as ``*``."""
    for folder in ("connector", "storage"):
        for path in (REPO / folder).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                    continue
                owner = ast.unparse(node.func.value)
                if node.func.attr != "add" or not owner.endswith("counts") or not node.args:
                    continue
                yield path.name, re.sub(r"\{.*?\}", "*", ast.unparse(node.args[0])).strip("f'\"")


def test_every_counter_is_in_the_table():
    """No counter is added up and then never shown."""
    heads = {metric.name for metric in METRICS}
    found = list(counter_names())
    assert len(found) > 20
    for where, name in found:
        if name.isidentifier() and name in {"name", "counter"}:
            continue  # a variable: its values are literals elsewhere
        head = name.split(".")[0]
        assert head in heads or head == "*", f"{where}: {name}"


def test_docs_show_the_table():
    """docs/metrics.md has exactly the metrics that the engine serves."""
    assert markdown_table() in (REPO / "docs" / "metrics.md").read_text()
