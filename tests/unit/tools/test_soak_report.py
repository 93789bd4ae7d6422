from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvtier.tools.soak_commands import Progress
from kvtier.tools.soak_driver import Result
from kvtier.tools.soak_html import PLOTS, details, page, steadiness_table
from kvtier.tools.soak_judge import charge, steadiness_findings
from kvtier.tools.soak_options import SoakOptions
from kvtier.tools.soak_record import HitTimeline, Record, Times
from kvtier.tools.soak_storage_html import PLOTS as STORAGE_PLOTS
from kvtier.tools.soak_storage_html import storage_page
from kvtier.tools.soak_svg import Line, lines_over_time, n_bytes, number, seconds, ticks
from kvtier.tools.soak_truth import Noise, compare
from kvtier.tools.soak_types import ChunkUse, Reply

from .soak_fakes import answer_of, script
from .stores import golden

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
NASTY = '"><script>document.title="broken"</script>'


def record(tmp_path, wrong=True):
    """A record of a soak that had everything: faults, samples, a wrong answer."""
    made = script()
    options = SoakOptions(minutes=2, report=tmp_path, model="m", faults=("disk-full",))
    out = Record(options)
    out.script(made, Noise(1e-6, 2e-6, 0, 6), 9, 9)
    out.settings({"ram": 1 << 20, "disk": "d", "disk_capacity": 1 << 30}, made, None)
    out.caps["disk_bytes"] = 1 << 30
    for i, turn in enumerate(made.turns):
        right = made.truth[turn.session, turn.number]
        load = ChunkUse(f"key-{i}", 0, 128, "disk")
        reply = Reply(right.tokens, right.top, right.prompt_tokens, 0.05, 0.1, 0, {"disk": 128},
                      (load,))  # fmt: skip
        out.answer("vllm", Result(float(i), 1, turn, "s", reply, None), [])
        if wrong and i == 4:
            bad = answer_of((*turn.prompt, NASTY), 4)
            reply = Reply(bad.tokens, bad.top, right.prompt_tokens, 0.05, 0.1, 0, {"disk": 128},
                          (ChunkUse("bad-key", 128, 256, "disk"),))  # fmt: skip
        difference = compare(right, reply, 1e-3)
        out.answer("kvtier", Result(float(i), 1, turn, "s", reply, difference), ["disk-full"])
    out.tally.answered, out.tally.wrong = 9, len(out.mismatches)
    out.own_cache(out.tally, {})
    out.faults = [{"kind": "disk-full", "at_s": 2.0, "until_s": 4.0, "what": NASTY, "followed":
                   {"save_dropped_chunks.disk.refused": 3.0}, "answers": {"right": 5, "wrong": 1},
                   "failed": None}]  # fmt: skip
    out.samples = [
        {"at_s": float(i), "incarnation": 1, "rss_bytes": 8e8, "fds": 60, "threads": 50,
         "free_device_blocks": 40 - i % 9, "pinned_device_blocks": i % 3, "pinned_ram_pages": 3,
         "free_ram_pages": 9, "waiting": 0, "save_queue_bytes": 0, "disk_bytes": 1e6 * i}
        for i in range(60)
    ]  # fmt: skip
    out.duration_s = 60.0
    out.counters = {"hits": 8.0}
    charge(out.mismatches, made, 1e-3, None, None)
    return out


def storage_report():
    life = {
        "life": 1,
        "roomy": True,
        "at_s": 0.0,
        "until_s": 9.0,
        "killed": True,
        "operations": 900,
        "flipped": 1,
        "there": 5,
        "missing": 2,
        "damaged": 1,
        "chunks": 3,
        "wrong": 0,
    }
    return {
        "format": "kvtier-soak-storage", "version": 1, "ok": True, "verdict": "nothing was wrong",
        "interrupted": False, "began_unix_s": 1.0, "duration_s": 20.0,
        "setup": {"tier": "disk", "minutes": 1, "seed": 1, "faults": [], "keys": 10, "threads": 2,
                  "record_bytes": 16384},
        "findings": [], "operations": {"all": 900, "put": 900},
        "lives": [life, {**life, "life": 2, "at_s": 10.0, "until_s": 20.0}],
        "steadiness": {"growth": [], "caps": []},
        "samples": [{"at_s": float(i), "incarnation": 1 + i // 10, "operations": 90 * i,
                     "rss_bytes": 4e7, "fds": 9, "threads": 8, "disk_bytes": 1e6}
                    for i in range(20)],
    }  # fmt: skip


def test_the_fields_of_the_report_are_kept(tmp_path):
    """Programs read report.json: its names and types change only on purpose."""
    found = record(tmp_path).finish(interrupted=False)
    json.dumps(found, allow_nan=False)
    golden("soak", {**found, "counters": {}, "traffic": {**found["traffic"], "tokens": {}}})


def test_a_wrong_answer_is_a_finding_with_its_chunk_and_party(tmp_path):
    """The verdict names the party; the finding turn, position and the one suspected chunk."""
    found = record(tmp_path).finish(interrupted=False)
    assert not found["ok"]
    assert found["verdict"] == "kvtier: 1 finding"
    (row,) = found["findings"]
    assert "session-2 turn 2, position 200" in row["text"]
    assert "bad-key" in row["text"]
    assert "key-1" not in row["text"]


def test_nothing_wrong_is_ok_and_nothing_restored_is_not(tmp_path):
    """A soak in which kvtier did nothing has proved nothing."""
    good = record(tmp_path, wrong=False)
    assert good.finish(interrupted=False)["ok"]
    idle = record(tmp_path, wrong=False)
    idle.hits = HitTimeline()
    assert [f["kind"] for f in idle.finish(interrupted=False)["findings"]] == ["nothing_restored"]
    assert idle.finish(interrupted=True)["ok"]


def test_what_else_is_wrong_fails_too(tmp_path):
    """An engine that ended, a tier that stays off, a fault that failed, what is held, silence."""
    bad = record(tmp_path, wrong=False)
    bad.crashes, bad.off, bad.held = ["Killed"], ["redis"], ["3 pages"]
    bad.failures = [("vllm", "the engine ended")]
    bad.faults[0]["failed"] = "no"
    bad.tally.answered = 0
    bad.noise = Noise(alone=0.4)
    kinds = {f["kind"] for f in bad.finish(interrupted=False)["findings"]}
    assert kinds == {
        "engine_ended", "cut_short", "tier_off", "held_at_rest", "fault_failed", "no_answers",
    }  # fmt: skip


def test_damage_that_no_fault_made_is_found_in_the_store(tmp_path):
    """Every record left on disk is verified at the end; those damaged on purpose are expected."""
    from .stores import Folder, put

    store = Folder(tmp_path / "store")
    put(store.tier(), range(3))
    files = sorted((tmp_path / "store").rglob("*.kvt"))
    for file in files[:2]:
        data = bytearray(file.read_bytes())
        data[5000] ^= 1
        file.write_bytes(data)
    made = record(tmp_path, wrong=False)
    made.folder, made.damaged = str(tmp_path / "store"), {files[0].name}
    found = made.finish(interrupted=False)
    assert [f["kind"] for f in found["findings"]] == ["damaged_record"]
    assert files[1].name in found["findings"][0]["text"]
    assert found["store"]["damaged_by_us"] == 1


def test_long_soaks_keep_bounded_figures():
    """Buckets get wider, tokens stay; times are a fair sample."""
    hits = HitTimeline()
    for i in range(5000):
        hits.add(float(i), {"disk": 2, "computed": 1})
    rows = hits.rows()
    assert len(rows) <= 120
    assert sum(row["tokens"].get("disk", 0) for row in rows) == 10_000
    times = Times()
    for i in range(20_000):
        times.add(1, i / 20_000)
    assert times.median(1) == pytest.approx(0.5, abs=0.1)
    assert times.median(2) is None


GROWTH = {
    "name": "rss_bytes", "verdict": "flat", "samples": 60, "growth": 3 << 20, "allowed": 48 << 20,
    "slope_per_h": 2.0 * 2**30, "first": 2.0 * 2**30, "last": 2.0 * 2**30, "watched_s": 120.0,
}  # fmt: skip


def test_figures_of_the_page_have_names_and_units():
    """Two minutes tell nothing about an hour; bytes say their unit; what is not set is left out."""
    text = steadiness_table({"growth": [GROWTH], "caps": []})
    assert "<td>resident memory</td><td>flat</td>" in text
    assert "<td>3 MiB</td><td>48 MiB</td><td>120 s</td><td>-</td>" in text
    text = steadiness_table({"growth": [{**GROWTH, "watched_s": 7200.0}], "caps": []})
    assert "<td>2 GiB</td></tr>" in text
    cap = {"name": "disk_bytes", "verdict": "held", "most": 3 << 20, "cap": 4 << 20}
    assert "<td>4 MiB</td>" in steadiness_table({"growth": [], "caps": [cap]})
    rows = {"loaded_bytes.disk": 382239000.0, "hits": 1234567.0, "url": None, "seed": 1234}
    text = details("Counters", rows.items())
    assert "364.5 MiB" in text
    assert "1,234,567" in text
    assert "<td>1234</td>" in text
    assert "url" not in text


def test_findings_about_growth_read_like_the_table():
    """A finding says what grows, with units, and only what was seen."""
    grown = {**GROWTH, "verdict": "grows", "last": 3.0 * 2**30}
    over = {"name": "disk_bytes", "verdict": "over_cap", "most": 3 << 20, "cap": 2 << 20}
    found = [f["text"] for f in steadiness_findings([grown], [over], [])]
    assert found == [
        "resident memory grows: 2 GiB to 3 GiB in 120 s (allowed 48 MiB in all)",
        "disk: 3 MiB, the cap is 2 MiB",
    ]


def test_a_cap_is_told_from_its_series_in_the_legend():
    """Both are of one colour at times: a dashed line has a dashed mark."""
    lines = [Line("disk", [(0, 1), (1, 2)]), Line("disk's cap", [(0, 3), (1, 3)], dashed=True)]
    legend = lines_over_time("x", "x", lines).partition("<svg")[0]
    assert legend.count('<i class="dashed"') == 1
    assert '<i class="dashed" style="border-color:#e69f00"></i>disk&#x27;s cap' in legend


def test_a_soak_into_a_file_says_a_line_a_minute(capsys):
    """Where stderr is no terminal nobody sees a line that is rewritten."""
    now_s = [0.0]
    progress = Progress(False, lambda: now_s[0])
    progress.phase("soaking")
    for second in range(150):
        now_s[0] = float(second)
        progress.progress(second, 300.0, f"{second} answers")
    assert capsys.readouterr().err.splitlines() == [
        "soaking: 1:00 of 5:00, 4:00 left; 60 answers",
        "soaking: 2:00 of 5:00, 3:00 left; 120 answers",
    ]


def test_axes_are_round():
    """Ticks cover the largest value in round steps, bytes in powers of two."""
    assert ticks(93) == [0, 25, 50, 75, 100]
    assert ticks(3 * 2**30, binary=True)[-1] == 3 * 2**30
    assert ticks(0) == [0, 1]
    assert [number(v) for v in (0.25, 950, 12_000, 3.4e6)] == ["0.25", "950", "12 k", "3.4 M"]
    assert n_bytes(1.5 * 2**20) == "1.5 MiB"
    assert [seconds(v) for v in (0.25, 5, 600, 9000)] == ["250 ms", "5 s", "10 min", "2.5 h"]


PAGES = [("soak", PLOTS), ("storage", STORAGE_PLOTS)]


@pytest.fixture(params=PAGES, ids=[name for name, _ in PAGES])
def made(request, tmp_path):
    """A page and the names of its plots."""
    name, plots = request.param
    if name == "soak":
        return page(record(tmp_path).finish(interrupted=False)), plots
    return storage_page(storage_report()), plots


def test_the_page_needs_nothing_else(made):
    """No script, no address, no file; what the soak was told is text in it."""
    text, plots = made
    assert not re.search(r"<script|<link|<img|src=|href=|url\(|@import|https?:", text)
    for name in plots:
        assert f'id="plot-{name}"' in text


def test_an_empty_soak_still_has_a_page(tmp_path):
    """Ended before the first answer, the report opens all the same."""
    empty = Record(SoakOptions(minutes=1, report=tmp_path))
    text = page(empty.finish(interrupted=True))
    assert "ended early" in text
    for name in PLOTS:
        assert f'id="plot-{name}"' in text


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here; .ci/run installs Debian's")
def test_chromium_draws_the_page(made, tmp_path):
    """In a real browser: no error in its console, every plot has a size and something drawn."""
    text, plots = made
    file = tmp_path / "report.html"
    probe = """<script>window.onload=()=>{let out=[];for(const f of document.querySelectorAll(
    'figure')){const b=f.querySelector('svg').getBoundingClientRect();out.push([f.id,b.width,
    b.height,f.querySelectorAll('svg polyline, svg rect:not(.fault)').length])}
    document.body.dataset.plots=JSON.stringify(out)}</script></body>"""
    file.write_text(text.replace("</body>", probe), encoding="utf-8")
    shot = tmp_path / "shot.png"
    done = chromium(tmp_path, "--dump-dom", file)
    assert not re.search(r"CONSOLE|Uncaught|ERR_", done.stderr)
    drawn = json.loads(re.search(r'data-plots="([^"]*)"', done.stdout)[1].replace("&quot;", '"'))
    assert [row[0] for row in drawn] == [f"plot-{name}" for name in plots]
    for name, width, height, shapes in drawn:
        assert width > 400, name
        assert height > 100, name
        assert shapes > 0, name
    chromium(tmp_path, f"--screenshot={shot}", file)
    assert shot.stat().st_size > 20_000


def chromium(tmp_path, what, file: Path):
    """Run the browser without a network, a profile of its own, on one page."""
    return subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu",
            "--disable-dev-shm-usage", "--enable-logging=stderr",
            "--window-size=980,2400", f"--user-data-dir={tmp_path / 'profile'}", what,
            file.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
