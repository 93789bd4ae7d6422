"""The demo's judgement, on engines that are made up: what counts as restored, equal, a speedup."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import ClassVar, get_args

import pytest
from typer.testing import CliRunner

from kvtier.tools import cli, engine_choice, models
from kvtier.tools import demo as demo_module
from kvtier.tools import engine as engine_module
from kvtier.tools.bench_sessions import figures
from kvtier.tools.demo import DemoOptions, Listener, run_demo
from kvtier.tools.demo_view import summary_lines, turn_line
from kvtier.tools.engine import Answer, EngineError, EngineOptions
from kvtier.tools.sessions import SessionPlan

PLANS = (SessionPlan("a", (300, 340)), SessionPlan("b", (200, 240)))


class FakeEngine:
    """Answers from the prompt; with kvtier it "restores" what any engine on that disk has seen."""

    disks: ClassVar[dict[str, list[tuple[int, ...]]]] = {}

    def __init__(self, options, *, restores=True, wrong_at=None, logprob=-1.0):
        self.options = options
        store = options.kvtier and (options.kvtier.get("disk") or options.kvtier["redis"])
        self._seen = self.disks.setdefault(store, []) if store else None
        self._restores, self._wrong_at, self._logprob = restores, wrong_at, logprob
        self._asked = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def drain(self):
        pass

    def ask(self, prompt, answer_tokens=16):
        self._asked += 1
        restored = 0
        if self._seen is not None:
            if self._restores:
                restored = max(
                    (len(p) for p in self._seen if tuple(prompt[: len(p)]) == p), default=0
                )
                restored = min(restored, len(prompt) - 1)
            self._seen.append(tuple(prompt))
        token = sum(prompt) % 1000 + (self._asked == self._wrong_at)
        return Answer(
            prompt_tokens=len(prompt),
            token_ids=(token,) * answer_tokens,
            logprobs=(self._logprob if self._seen is not None else -1.0,) * answer_tokens,
            ttft_s=0.1 + (len(prompt) - restored) / 100,
            total_s=1.0,
            device_tokens=0,
            restored_tokens=restored,
            restored_by_tier={"ram": restored} if restored else {},
        )


def run(**engine):
    FakeEngine.disks = {}
    return run_demo(
        DemoOptions(model="none", sessions=PLANS, answer_tokens=4),
        Listener(),
        open_engine=lambda options: FakeEngine(options, **engine),
        encode=lambda text: [ord(letter) for letter in text],
        clock=lambda: 0.0,
    )


def test_a_good_run_is_ok_and_says_what_was_restored():
    """Returning turns are restored, also after the restart; the JSON has the promised fields."""
    report = run()
    data = json.loads(json.dumps(report.as_dict()))
    assert data["ok"] is True
    assert data["problems"] == []
    assert data["outputs_equal"] is True
    assert [t["restored_tokens"] for t in data["turns"]] == [0, 0, 300, 200]
    assert data["restored_tokens"] == 500
    assert data["restored_share"] == round(200 / 240, 4)
    assert data["after_restart"]["restored_tokens"] == 339 + 239
    for turn in data["turns"]:
        assert turn["ttft_s"] > 0
        assert turn["ttft_baseline_s"] > 0
        assert (turn["speedup"] is None) == (turn["restored_tokens"] == 0)


def test_a_different_token_is_a_problem():
    """One answer with another token makes the run not ok, and the report names the turn."""
    report = run(wrong_at=4)  # the warm-up is the first request
    assert not report.as_dict()["ok"]
    assert not report.outputs_equal
    assert any("session a turn 2" in problem for problem in report.problems)


@pytest.mark.parametrize(
    ("logprob", "equal"), [(-1.0, True), (-1.0005, True), (-1.02, False), (math.nan, False)]
)
def test_logprobs_count_beside_tokens(logprob, equal):
    """Equal tokens with other logprobs are not equal answers; NaN never is."""
    assert run(logprob=logprob).outputs_equal is equal


def test_nothing_restored_means_no_speedup_and_not_ok():
    """Whatever the times were: without a restore there is no speedup to print."""
    report = run(restores=False)
    text = "\n".join(summary_lines(report))
    assert not report.as_dict()["ok"]
    assert "nothing was restored, so there is no speedup" in text
    assert "x)" not in text
    assert all(turn_line(outcome).count("x") == 0 for outcome in report.turns)
    assert all(turn["speedup"] is None for turn in report.as_dict()["turns"])


@pytest.mark.parametrize(
    ("engine", "code"), [({}, 0), ({"wrong_at": 4}, 1), ({"restores": False}, 1)]
)
def test_the_exit_code_tells(monkeypatch, engine, code):
    """`kvtier demo` exits 1 when outputs differ or nothing was restored; stdout is one object."""
    report = run(**engine)
    monkeypatch.setattr(demo_module, "run_demo", lambda *_: report)
    result = CliRunner().invoke(cli.app, ["demo", "--json"])
    assert result.exit_code == code
    assert json.loads(result.stdout)["ok"] is (code == 0)


def test_the_sessions_figures_are_the_returning_turns():
    """First turns do not count; the share is the least of all returning prompts."""
    report = run()
    data = figures(report.turns)
    returning = [t for t in data["turns"] if t["turn"] > 1]
    assert data["restored_share"] == round(200 / 240, 4)
    assert data["outputs_equal"] is True
    assert data["mean_s"] == pytest.approx(sum(t["ttft_s"] for t in returning) / 2)
    assert data["baseline_mean_s"] == pytest.approx(
        sum(t["ttft_baseline_s"] for t in returning) / 2
    )
    assert data["restored_by_tier"] == {"ram": 500}


@pytest.mark.parametrize(
    ("args", "redis"),
    [
        ([], None),
        (["--redis"], "start"),
        (["--redis", "--json"], "start"),
        (["--redis", "redis://h", "--json"], "redis://h"),
        (["--redis=unix:///s"], "unix:///s"),
    ],
)
def test_redis_may_be_given_with_or_without_an_address(monkeypatch, args, redis):
    """A bare --redis means a server of the demo's own, whatever stands after it."""
    seen = []

    def noted(options, listener):
        seen.append(options.redis)
        return run()

    monkeypatch.setattr(demo_module, "run_demo", noted)
    result = CliRunner().invoke(cli.app, ["demo", *args])
    assert result.exit_code == 0, result.output
    assert seen == [redis]


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (["demo", "--dtype", "banana"], 2, "no dtype 'banana'; there are float32, "),
        (["soak", "--dtype", "banana"], 2, "no dtype 'banana'; there are float32, "),
        (["demo", "--model", "/nowhere/at/all"], 2, "--model /nowhere/at/all: no such folder"),
        (["soak", "--model", "./no-model"], 2, "--model ./no-model: no such folder"),
        (["bench", "engine", "--model", "/nowhere"], 2, "no such folder"),
        (["bench", "sessions", "--model", "/nowhere"], 2, "no such folder"),
        (["bench", "outage", "--model", "/nowhere"], 2, "no such folder"),
        (["soak", "--minutes", "nan"], 2, "--minutes"),
        (["soak", "--minutes", "inf"], 2, "--minutes"),
        (["bench", "tiers", "--folder", "/nowhere"], 2, "--folder /nowhere: no such folder"),
        (["bench", "engine", "--folder", "/nowhere"], 2, "--folder /nowhere: no such folder"),
        (["bench", "sessions", "--folder", "/nowhere"], 2, "--folder /nowhere: no such folder"),
        (["bench", "store", "--folder", "/nowhere"], 2, "--folder /nowhere: no such folder"),
        (["demo", "--model", "."], 2, "has no config.json"),
        (["demo", "--redis", "banana"], 3, "redis"),
        (["demo", "--disk", "/dev/null"], 3, "disk"),
    ],
)
def test_what_no_engine_starts_with_is_told_at_once(monkeypatch, tmp_path, command, code, words):
    """One line and no traceback, before a model is made or an engine started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "smollm2", lambda *_: pytest.fail("a model was made"))
    result = CliRunner().invoke(cli.app, command)
    assert (result.exit_code, len(result.stderr.splitlines())) == (code, 1), result.output
    assert words in result.stderr


@pytest.mark.parametrize("kind", [TypeError, ValueError, RuntimeError])
def test_what_vllm_refuses_is_an_engine_error(monkeypatch, kind):
    """An argument that vLLM does not take ends in one line, whichever way vLLM says so."""

    def refuse(**_arguments):
        raise kind("no argument 'banana'")

    fake = SimpleNamespace(LLM=refuse, SamplingParams=None)
    monkeypatch.setattr(engine_module, "_import_vllm", lambda: fake)
    with pytest.raises(EngineError, match="vLLM does not start: no argument 'banana'"):
        engine_module.Engine(EngineOptions("none", more={"banana": 1}))


def test_dtypes_are_those_of_vllm():
    """Every name that vLLM takes, and none that it refuses, has weights and a tolerance."""
    pytest.importorskip("vllm")
    from vllm.config.model import ModelDType

    assert set(engine_choice.DTYPES) == set(get_args(ModelDType))


@pytest.mark.parametrize("redis", ["redis://h:1/0", demo_module.OWN_SERVER])
def test_redis_takes_the_place_of_the_disk(redis):
    """Engines over one address are restored from it after the restart; no disk is used."""
    FakeEngine.disks = {}
    seen = []

    def opened(options):
        seen.append(options.kvtier)
        return FakeEngine(options)

    report = run_demo(
        DemoOptions(model="none", sessions=PLANS, answer_tokens=4, redis=redis),
        Listener(),
        open_engine=opened,
        encode=lambda text: [ord(letter) for letter in text],
        clock=lambda: 0.0,
    )
    assert not report.problems
    assert seen[0] is None
    assert seen[1] == seen[2]
    assert "disk" not in seen[1]
    assert (seen[1]["redis"] == redis) == (redis != demo_module.OWN_SERVER)
    assert seen[1]["redis"].startswith("redis://")
