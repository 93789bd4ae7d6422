"""Whole soaks of a tiny model in the real vLLM: a healthy one, and one in which two are at fault.

Engines run in children; this process only plays users. Both soaks share the right answers.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtier.tools import cli
from kvtier.tools.soak import Soak
from kvtier.tools.soak_commands import exit_code, write_report
from kvtier.tools.soak_html import PLOTS
from kvtier.tools.soak_listener import Listener
from kvtier.tools.soak_options import SoakOptions

from . import models
from .soak_connectors_names import FLIPPED_START, MARK

CHUNK_TOKENS = 128
SESSIONS, TURNS, CONTEXT_TOKENS = 4, 3, 768


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache folder of this module's own, which has the model and keeps the right answers."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        model = models.LLAMA.folder()
        patch.setenv("KVTIER_CACHE", str(folder))
        yield folder, model


def test_a_healthy_engine_passes(cache, tmp_path):
    """Agents, a damaged record, a killed engine: every answer right, nothing grows, exit code 0."""
    result = CliRunner().invoke(
        cli.app,
        ["soak", "--minutes", "1.5", "--model", str(cache[1]), "--report", str(tmp_path),
         "--sessions", str(SESSIONS), "--turns", str(TURNS), "--aborts", "0.15",
         "--context-tokens", str(CONTEXT_TOKENS), "--faults", "disk-corrupt,engine-kill",
         "--kvtier", json.dumps({"chunk_tokens": CHUNK_TOKENS})],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "nothing was wrong" in result.stdout
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["ok"]
    traffic = found["traffic"]
    assert traffic["wrong"] == 0
    assert traffic["answered"] > SESSIONS * TURNS
    assert traffic["aborted"] > 0
    assert sum(traffic["tokens"].get(tier, 0) for tier in ("ram", "disk")) > 0
    assert found["traffic_vllm"]["answered"] == SESSIONS * TURNS
    assert {f["kind"] for f in found["faults"]} == {"disk-corrupt", "engine-kill"}
    assert all(f["failed"] is None for f in found["faults"])
    assert found["noise"]["repeats"] > 0
    assert {row["verdict"] for row in found["steadiness"]["growth"]} <= {"flat", "too_short"}
    assert [row["verdict"] for row in found["steadiness"]["caps"]] == ["held"]
    assert found["steadiness"]["rests"] >= 1
    assert len(found["samples"]) > 10
    page = (tmp_path / "report.html").read_text()
    assert all(f'id="plot-{name}"' in page for name in PLOTS)


def test_damage_is_found_and_charged_to_whoever_made_it(cache, tmp_path, monkeypatch):
    """A bit flipped below the checksum is kvtier's, a broken device hit vLLM's; both are named.

    The engine breaks sessions whose token at `MARK` is even, with kvtier and without; kvtier's
    disk tier flips a bit of every chunk that begins at `FLIPPED_START`, before the checksum.
    """
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    soak = Soak(
        SoakOptions(
            minutes=0.5,
            report=tmp_path,
            model=str(cache[1]),
            sessions=SESSIONS,
            turns=TURNS,
            context_tokens=CONTEXT_TOKENS,
            kvtier={"chunk_tokens": CHUNK_TOKENS, "ram": "8MiB"},
            connector=("Both", "soak_connectors"),
            plain_connector=("EngineFault", "soak_connectors"),
        ),
        Listener(),
        threading.Event(),
    )
    found = soak.run()
    write_report(tmp_path, found)
    assert exit_code(found) == 1
    broken = {turns[0].session: turns[0].prompt[MARK] % 2 == 0 for turns in soak.script.sessions}
    assert set(broken.values()) == {True, False}
    parties = {name: set() for name in broken}
    for row in found["mismatches"]:
        parties[row["session"]].add(row["party"])
    assert all(parties[name] <= {"vllm"} for name, is_broken in broken.items() if is_broken)
    assert all(parties[name] <= {"kvtier"} for name, is_broken in broken.items() if not is_broken)
    assert set().union(*parties.values()) == {"vllm", "kvtier"}
    ours = [row for row in found["mismatches"] if row["party"] == "kvtier"]
    for row in ours:
        starts = {chunk["start_tokens"] for chunk in row["suspects"]}
        assert FLIPPED_START in starts, row
        assert row["position"] == row["prompt_tokens"] + row["answer_position"]
    told = "\n".join(row["text"] for row in found["findings"])
    key = next(c["key"] for c in ours[0]["suspects"] if c["start_tokens"] == FLIPPED_START)
    for part in (f"turn {ours[0]['turn']}", f"position {ours[0]['position']}", key):
        assert part in told
    assert os.path.isdir(tmp_path / "store")  # what was wrong is kept to be looked at
