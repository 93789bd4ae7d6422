"""Reading traces: every format by hand, and what is said of broken ones."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from kvtier.tools.traces import TraceError, seat
from kvtier.tools.traces_read import read_trace

SESSION = {
    "id": "a",
    "block_size": 64,
    "tool_tokens": 64,
    "system_tokens": 70,
    "requests": [
        {"t": 0.0, "in": 200, "out": 5, "hash_runs": [[1, 3]]},
        {"t": 9.0, "in": 270, "out": 6, "hash_runs": [[1, 2], [7, 2]]},
        {"t": 10.0, "type": "subagent", "requests": [
            {"t": 1.5, "in": 64, "out": 1, "hash_runs": [[20, 1]]},
        ]},
    ],
}  # fmt: skip
MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 9, "hash_ids": [0, 1, 2]},
    {"timestamp": 1500, "input_length": 1024, "output_length": 1, "hash_ids": [0, 3]},
]
RECORDING = [
    {"format": "kvtier-recording", "version": 1, "block_tokens": 16},
    {"t": 1.0, "prompt_tokens": 40, "output_tokens": 8, "hashes": ["aa", "bb"], "session": "x"},
    {"t": 0.5, "prompt_tokens": 20, "output_tokens": 0, "hashes": ["aa"]},
]


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def chains(trace):
    return [request.nodes.tolist() for request in trace.requests]


def test_agent_sessions_are_read_with_sub_agents(tmp_path):
    """Runs are expanded, sub-agents' calls count from their own start, all by arrival."""
    trace = read_trace(write(tmp_path / "t.jsonl", [SESSION]))
    assert trace.block_tokens == 64
    assert [r.at_s for r in trace.requests] == [0.0, 9.0, 11.5]
    assert [r.prompt_tokens for r in trace.requests] == [200, 270, 64]
    first, second, third = chains(trace)
    assert len(first) == 3
    assert second[:2] == first[:2]
    assert not set(second[2:]) & set(first)
    assert len(third) == 1
    assert trace.distinct_blocks() == 6
    assert trace.prompt_tokens == 534


def test_sessions_share_nothing_unless_told(tmp_path):
    """Equal hash ids of two sessions differ; with share_prefix tools and system prompt agree."""
    path = write(tmp_path / "t.jsonl", [SESSION, SESSION])
    a, b = read_trace(path, n_users=2), read_trace(path, n_users=2, share_prefix=True)
    assert a.distinct_blocks() == 12
    assert b.distinct_blocks() == 10  # (64 + 70) // 64 = 2 blocks are the same
    prompts = [c for r, c in zip(b.requests, chains(b), strict=True) if r.prompt_tokens == 200]
    assert prompts[0][:2] == prompts[1][:2]
    assert prompts[0][2] != prompts[1][2]


def test_users_run_sessions_one_after_another(tmp_path):
    """With one user the second session starts where the first ended; seats are taken in order."""
    path = write(tmp_path / "t.jsonl", [SESSION, SESSION])
    one = read_trace(path, n_users=1)
    assert sorted(r.at_s for r in one.requests) == [0.0, 9.0, 11.5, 11.5, 20.5, 23.0]
    assert seat([5, 3, 4, 1], 2) == [0.0, 0.0, 3.0, 5.0]


def test_mooncake_is_read(tmp_path):
    """Milliseconds become seconds, and the last block, which is not whole, is left out."""
    path = tmp_path / "m.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, MOONCAKE)).encode()))
    trace = read_trace(str(path))
    assert trace.block_tokens == 512
    assert [r.at_s for r in trace.requests] == [0.0, 1.5]
    assert chains(trace) == [[0, 1], [0, 3]]


def test_recordings_are_read(tmp_path):
    """Hashes are text, requests may come in any order, a session is optional."""
    trace = read_trace(write(tmp_path / "r.jsonl", RECORDING))
    assert trace.block_tokens == 16
    short, long = trace.requests
    assert (short.at_s, short.prompt_tokens) == (0.5, 20)
    assert long.nodes.tolist()[0] == short.nodes.tolist()[0]
    assert short.session != long.session


def test_recordings_refer_to_requests_before(tmp_path):
    """`base` names a request of the same part and how much of its chain is shared."""
    more = {"t": 2, "prompt_tokens": 48, "output_tokens": 1, "base": [0, 1], "hashes": ["dd", "ee"]}
    again = {**RECORDING[1], "t": 3, "prompt_tokens": 48, "hashes": ["aa", "bb", "cc"]}
    lines = [*RECORDING, more, RECORDING[0], again]
    lines.append({**more, "t": 4, "prompt_tokens": 80, "base": [0, 3], "hashes": ["ff", "gg"]})
    found = chains(read_trace(write(tmp_path / "r.jsonl", lines)))
    (aa, bb), (dd, ee), (cc, ff, gg) = found[1], found[2][1:], found[4][2:]
    assert found == [[aa], [aa, bb], [aa, dd, ee], [aa, bb, cc], [aa, bb, cc, ff, gg]]
    assert len({aa, bb, cc, dd, ee, ff, gg}) == 7


def changed(line, **values):
    return {**line, **values}


def call(**values):
    return changed(SESSION, requests=[{"t": 0, "in": 64, "out": 1, "hash_runs": [[1, 1]]} | values])


BROKEN = {
    "empty": ([], "no request in it"),
    "unknown": ([{"hello": 1}], "line 1 is of no known trace"),
    "no requests": ([changed(SESSION, requests=[])], "no request in it"),
    "requests": ([changed(SESSION, requests=7)], "line 1: requests is no list"),
    "time": ([call(t="now")], "line 1: t = now is no number"),
    "negative": ([call(t=-1)], "line 1: t = -1 is no number"),
    "tokens": ([call(**{"in": 1.5})], "line 1: in = 1.5 is no number of tokens"),
    "runs": ([call(hash_runs=[[1]])], "hash_runs is no list of [start, count]"),
    "huge run": ([call(hash_runs=[[0, 1 << 40]])], "hash_runs is no list of [start, count]"),
    "too few": ([call(**{"in": 640})], "1 blocks of 64 tokens do not fit a prompt of 640"),
    "block size": ([SESSION, changed(SESSION, block_size=32)], "line 2: another block_size"),
    "ids": ([changed(MOONCAKE[0], hash_ids=["x", 1, 2])], "hash_ids is no list"),
    "huge id": ([changed(MOONCAKE[0], hash_ids=[0, 1 << 40, 2])], "hash_ids is no list"),
    "no prefix hash": (
        [MOONCAKE[0], changed(MOONCAKE[1], hash_ids=[3, 1])],
        "line 2: block 1 has followed another block before",
    ),
    "version": ([changed(RECORDING[0], version=9)], "recording of version 9"),
    "hashes": ([RECORDING[0], changed(RECORDING[1], hashes=[1, 2])], "line 2: hashes is no list"),
    "base": ([*RECORDING, changed(RECORDING[1], base=[2, 1])], "line 4: base is no [request"),
    "other block": (
        [*RECORDING, changed(RECORDING[0], block_tokens=32)],
        "line 4: another block_tokens than in line 1",
    ),
    "no time": ([RECORDING[0], {"prompt_tokens": 1}], "line 2: hashes is no list"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_traces_say_what_and_where(name, tmp_path):
    """A broken trace gives one line with the file's name, the place and the reason."""
    lines, reason = BROKEN[name]
    with pytest.raises(TraceError) as caught:
        read_trace(write(tmp_path / "bad.jsonl", lines))
    text = str(caught.value)
    assert text.startswith("bad.jsonl: ")
    assert reason in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "line 1 is no JSON"),
        (b"[1]\n", "line 1 is no JSON object"),
        (b"\xff\xfe\n", "line 1 is no JSON"),
        (gzip.compress(b'{"hash_ids": []}' * 100)[:40], "broken gzip file"),
        (b"[" * 100_000, "line 1 is no JSON"),
    ],
)
def test_other_files_are_refused(content, reason, tmp_path):
    """Files that are no traces at all are refused the same way."""
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=reason):
        read_trace(str(path))


def test_the_command_ends_with_one_line(tmp_path):
    """`kvtier replay` of a broken trace prints one line and the code of a wrong format."""
    path = write(tmp_path / "bad.jsonl", [{"hello": 1}])
    command = [str(Path(sys.executable).parent / "kvtier"), "replay", path, "--jobs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 5
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("kvtier: bad.jsonl: line 1")


def test_the_packaged_sessions_are_whole():
    """The packaged trace has all calls of all sessions, and its licence lies beside it."""
    trace = read_trace("agent-sessions")
    assert len(trace.requests) == 24_015
    assert len(trace.longest_tokens()) == 355
    assert trace.longest_tokens()[177] == 148_558
    folder = files("kvtier.tools") / "data" / "agent-sessions"
    assert "Apache License" in (folder / "LICENSE").read_text()
