"""Replays of small traces through the real catalog and index, by hand and against plain models."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvtier.tools.replay import Replay
from kvtier.tools.replay_bounds import bound, device_hits
from kvtier.tools.replay_chunks import ChunkedTrace, Shape
from kvtier.tools.replay_results import Setup
from kvtier.tools.replay_run import Job, ReplayError, run_all
from kvtier.tools.replay_tiers import POLICIES, Sizes, Speeds
from kvtier.tools.traces import Request, Trace

from .test_replay_bounds import lru_by_list, random_trace

PAGE = 4096
FAST = Speeds(1e15, 1e15, 1e15, 0.0, 1e6, 1 << 40)


def trace_of(*chains, block_tokens=4, every_s=1000.0, past_blocks=1):
    """Prompts given as words: a letter is a block, equal beginnings are equal prefixes."""
    names: dict[str, int] = {}
    requests = []
    for i, chain in enumerate(chains):
        prefixes = [chain[: n + 1] for n in range(len(chain))]
        nodes = np.array([names.setdefault(p, len(names)) for p in prefixes], dtype=np.int32)
        tokens = len(chain) * block_tokens + past_blocks
        requests.append(Request(i * every_s, i, tokens, 1, nodes))
    return Trace("t", block_tokens, tuple(requests), max(1, len(names)))


def replay(trace, ram_blocks, disk_blocks=0, policy="lru", *, chunk_blocks=1, merge=1, **more):
    """Replay with one page a block; returns the result and each request's computed tokens."""
    speeds = more.pop("speeds", FAST)
    device = more.pop("device_blocks", 0) * trace.block_tokens
    chunk_tokens = chunk_blocks * trace.block_tokens
    gated = more.pop("gated", False)
    per_token = PAGE // trace.block_tokens
    shape = Shape(per_token, per_token, chunk_tokens=chunk_tokens, **more)
    setup = Setup(shape, speeds, device, gated=gated)
    sizes = Sizes(ram_blocks * PAGE, disk_blocks * 2 * PAGE)  # a record of a page has a header
    one = Replay(
        ChunkedTrace(trace, shape, merge), setup, sizes, POLICIES[policy], device_hits(trace, setup)
    )
    return one.run()


def blocks(result, trace):
    return {tier: n // trace.block_tokens for tier, n in result.hit_tokens.items()}


def test_a_prefix_comes_back_from_ram():
    """The second turn hits the first one's blocks; the third is another session."""
    trace = trace_of("abc", "abcde", "xy")
    result = replay(trace, 100)
    assert blocks(result, trace) == {"device": 0, "ram": 3, "disk": 0}
    assert result.saved_chunks == 7
    assert result.loaded_bytes == {"ram": 3 * PAGE, "disk": 0}
    assert result.hit_rate == 12 / (13 + 21 + 9)


def test_least_recently_used_keeps_what_fifo_drops():
    """Room for two sessions of three: the one used again stays, first-in goes."""
    trace = trace_of("aa", "bb", "aa", "cc", "aa")
    assert blocks(replay(trace, 4), trace)["ram"] == 4
    # First in, first out: cc pushes aa out although it was just used.
    assert blocks(replay(trace, 4, policy="fifo"), trace)["ram"] == 2
    optimum = bound(
        ChunkedTrace(trace, Shape(PAGE // 4, PAGE // 4, chunk_tokens=4)),
        Setup(Shape(PAGE // 4, PAGE // 4)),
        [Sizes(2 * PAGE), Sizes(PAGE, PAGE), Sizes(4 * PAGE)],
        POLICIES["optimum"],
    )
    found = [blocks(one, trace) for one in optimum]
    assert [one["ram"] for one in found] == [4, 2, 4]
    assert [one["disk"] for one in found] == [0, 2, 0]


def test_a_prefix_loses_its_end_first():
    """One block too few: the hit is one block shorter, not gone."""
    trace = trace_of("abcdef", "xy", "abcdef")
    assert blocks(replay(trace, 7), trace)["ram"] == 5


def test_disk_serves_what_ram_lost():
    """Written behind, evicted from RAM, loaded from disk and kept in RAM again."""
    trace = trace_of("aaa", "bbb", "aaa", "aaa")
    result = replay(trace, 3, 100)
    assert blocks(result, trace) == {"device": 0, "ram": 3, "disk": 3}
    assert result.disk_written_bytes == 6 * PAGE
    assert result.loaded_bytes == {"ram": 3 * PAGE, "disk": 3 * PAGE}


def test_disk_evicts_the_least_recently_used():
    """A full disk of six records makes room for two at a time, the end of a prefix first."""
    trace = trace_of("aaa", "bbb", "aaa", "cc", "bbb", "aaa")
    result = replay(trace, 0, 6)
    # aaa whole; cc pushes two of bbb out, of which one is left; they push two of aaa out.
    assert blocks(result, trace) == {"device": 0, "ram": 0, "disk": 3 + 1 + 1}


def test_saved_only_when_met_twice():
    """min_uses 2: the second turn computes all again, the third hits."""
    trace = trace_of("ab", "ab", "ab")
    result = replay(trace, 10, policy="twice")
    assert blocks(result, trace)["ram"] == 2
    assert (result.skipped_chunks, result.saved_chunks) == (2, 2)


def test_written_back_only_when_room_gets_short():
    """Write-back leaves the disk alone while RAM has room, and then fills it before RAM evicts."""
    trace = trace_of("aaaa", "bbbb", "cccc", "dddd", "aaaa")
    assert replay(trace, 100, 100, "back").disk_written_bytes == 0
    result = replay(trace, 13, 100, "back")
    assert result.disk_written_bytes > 0
    assert blocks(result, trace)["disk"] > 0


def test_tails_restore_to_the_block():
    """With chunks of four blocks a turn that ended inside one is restored to its end."""
    trace = trace_of("abcdef", "abcdefgh")
    assert blocks(replay(trace, 100, chunk_blocks=4), trace)["ram"] == 6


def test_a_hit_leaves_a_token_to_compute():
    """A prompt of whole blocks that is all stored computes its last block."""
    trace = trace_of("abcd", "abcd", past_blocks=0)
    result = replay(trace, 100)
    assert blocks(result, trace)["ram"] == 3
    assert result.saved_chunks == 4


def test_a_full_queue_drops_writes():
    """A disk that takes nothing in time gets only what the queue holds."""
    slow = Speeds(1e15, 1e15, 1.0, 0.0, 1e9, 2 * PAGE)
    result = replay(trace_of("abcdef"), 100, 100, speeds=slow)
    assert (result.disk_written_bytes, result.dropped_writes) == (2 * PAGE, 4)


def test_the_gate_computes_what_loads_too_slowly():
    """From a disk slower than prefill nothing is loaded once that is known, but for trials."""
    slow = Speeds(1e15, 100.0, 1e15, 0.0, 1000.0, 1 << 40)
    # Three prompts to learn the speed of prefill from, then one prompt again and again.
    trace = trace_of("x" * 64, "y" * 64, "z" * 64, *["a" * 64] * 40, every_s=1e6)
    free = replay(trace, 0, 1000, speeds=slow)
    gated = replay(trace, 0, 1000, speeds=slow, gated=True)
    assert blocks(free, trace)["disk"] == 39 * 64
    assert blocks(gated, trace)["disk"] < 10 * 64
    assert gated.gate_cut_tokens > 0
    assert gated.load_s + gated.prefill_s < free.load_s + free.prefill_s


def test_the_device_is_asked_first():
    """What the engine's own cache has is not loaded from kvtier."""
    trace = trace_of("abcd", "abcdef")
    assert blocks(replay(trace, 100, device_blocks=4), trace) == {"device": 4, "ram": 0, "disk": 0}
    assert blocks(replay(trace, 100, device_blocks=3), trace) == {"device": 3, "ram": 1, "disk": 0}


STATES = {"state_bytes": 2 * PAGE, "state_every_tokens": 8, "loaded_bytes": 2 * PAGE}


def test_recurrent_states_are_only_where_prompts_ended():
    """A hit ends at a boundary with a state, even where attention reaches further."""
    trace = trace_of("abcdef", "abcdefgh", "abcdxyz")
    result = replay(trace, 100, **STATES)
    # The second turn finds the state at 6; the third has attention to 4 and no state there.
    assert blocks(result, trace)["ram"] == 6
    assert result.loaded_bytes["ram"] == 6 * PAGE + 2 * PAGE


def test_a_junction_keeps_a_state():
    """Where a prompt left what was known the engine kept a state: the next one hits there."""
    trace = trace_of("abcdef", "abcdxyz", "abcduvw")
    assert blocks(replay(trace, 100, **STATES), trace)["ram"] == 4


def test_states_take_room():
    """A state of two pages pushes attention out of a RAM that would hold it alone."""
    trace = trace_of("abcdef", "xy", "abcdef")
    assert blocks(replay(trace, 8), trace)["ram"] == 6
    assert blocks(replay(trace, 8, **STATES), trace)["ram"] == 0


@pytest.mark.parametrize("seed", range(15))
def test_ram_alone_is_least_recently_used(seed):
    """Chunks of a block in RAM alone: each request hits what a plain list says."""
    print("seed", seed)
    trace = random_trace(seed, n_requests=60, depth=8, n_branches=2)
    for capacity in (8, 11, 20):  # no prompt is longer than RAM
        result = replay(trace, capacity)
        assert result.hit_tokens["ram"] == sum(lru_by_list(trace, capacity)), capacity


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("policy", ["lru", "fifo", "back", "twice"])
def test_no_policy_beats_the_optimum(seed, policy):
    """Whatever the sizes and the chunks, the bound is not passed."""
    print("seed", seed)
    trace = random_trace(seed, n_requests=60, depth=10, n_branches=2)
    for ram, disk, chunk in ((4, 0, 1), (6, 8, 2), (3, 20, 4), (0, 12, 1)):
        result = replay(trace, ram, disk, policy, chunk_blocks=chunk)
        shape = Shape(PAGE, PAGE, chunk_tokens=chunk)
        chunked = ChunkedTrace(trace, shape)
        sizes = [Sizes(ram * PAGE, disk * 2 * PAGE)]
        (best,) = bound(chunked, Setup(shape), sizes, POLICIES["optimum"])
        assert result.hit_rate <= best.hit_rate


@pytest.mark.parametrize("seed", range(5))
def test_merging_chunks_changes_nothing_while_all_fits(seed):
    """Chunks that no request tells apart may be moved as one: the hits stay."""
    print("seed", seed)
    trace = random_trace(seed, n_requests=60, depth=20, n_branches=2)
    plain, merged = (replay(trace, 500, merge=merge) for merge in (1, 4))
    assert plain.hit_tokens == merged.hit_tokens
    assert merged.saved_chunks < plain.saved_chunks
    assert merged.disk_written_bytes == plain.disk_written_bytes


def test_merged_chunks_are_bounded_and_cut_where_prompts_part():
    """At most so many chunks are one record, and a record ends where some prompt ends."""
    trace = trace_of("abcdefghij", "abcdef", "abx")
    chains = ChunkedTrace(trace, Shape(1, 1, chunk_tokens=4), merge=3).chains
    assert [chain.ends for chain in chains] == [[2, 5, 6, 9, 10], [2, 5, 6], [2, 3]]
    assert chains[0].keys[:3] == chains[1].keys


def write_sessions(path, n):
    """Sessions of three growing turns, a minute apart."""
    lines = []
    for _ in range(n):
        turns = [
            {"t": 60.0 * i, "in": 640 * (i + 1) + 1, "out": 5, "hash_runs": [[0, 10 * (i + 1)]]}
            for i in range(3)
        ]
        lines.append({"block_size": 64, "tool_tokens": 0, "system_tokens": 0, "requests": turns})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_processes_give_the_same_results_in_order(tmp_path):
    """Two processes and one give equal results, by policy and then by size."""
    job = Job(write_sessions(tmp_path / "s.jsonl", 4), Setup(Shape(1024, 1024)), n_users=2)
    sizes = [Sizes(1 << 20), Sizes(1 << 21, 1 << 22)]
    policies = [POLICIES[name] for name in ("lru", "optimum")]
    told = []
    alone = run_all(job, sizes, policies, 1)
    both = run_all(job, sizes, policies, 2, lambda done, of: told.append((done, of)))
    assert alone == both
    assert [(r.policy, r.ram_bytes) for r in both] == [
        (policy, one.ram_bytes) for policy in ("lru", "optimum") for one in sizes
    ]
    assert told[-1] == (4, 4)


def kvtier(*arguments):
    done = subprocess.run(
        [str(Path(sys.executable).parent / "kvtier"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


RESULT_KEYS = {
    "policy", "ram_bytes", "disk_bytes", "requests", "prompt_tokens", "hit_tokens",
    "loaded_bytes", "gate_cut_tokens", "disk_written_bytes", "saved_chunks", "skipped_chunks",
    "dropped_writes", "ram_evicted_chunks", "disk_evicted_chunks", "load_s", "prefill_s",
    "first_token_p50_s", "first_token_p90_s", "hit_rate",
}  # fmt: skip


def test_the_command(tmp_path):
    """`kvtier replay`: a table, the same as JSON, and a picture of every policy."""
    path, png = write_sessions(tmp_path / "s.jsonl", 3), tmp_path / "c.png"
    common = ("replay", path, "--jobs", 1, "--sizes", "64MiB,128MiB+1GiB", "--policies",
              "lru,optimum")  # fmt: skip
    code, out, err = kvtier(*common, "--png", png)
    assert (code, err) == (0, "")
    # Of 3 x (641 + 1281 + 1921) tokens, 3 x (640 + 1280) were there before.
    assert "s.jsonl: 9 requests, 11,529 prompt tokens" in out
    assert out.splitlines()[-1].split()[:6] == ["optimum", "128.0", "MiB", "1.0", "GiB", "50.0"]
    assert png.read_bytes().startswith(b"\x89PNG")
    code, out, _ = kvtier(*common, "--json")
    assert code == 0
    results = json.loads(out)["results"]
    assert [set(one) for one in results] == [RESULT_KEYS] * 4
    assert [sum(one["hit_tokens"].values()) for one in results] == [0, 5760, 1024, 5760]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--policies", "lfu"], "policy 'lfu' is not known"),
        (["--sizes", "many"], "--sizes 'many' is no size"),
        (["--sizes", "0"], "has neither RAM nor disk"),
        (["--model", "gpt-oss-21b"], "did you mean 'openai/gpt-oss-20b'"),
        (["--load-policy", "maybe"], "is not auto or always"),
        (["--device", "-3"], "--device '-3' is no size"),
    ],
)
def test_wrong_options_are_one_line(options, reason):
    """What is wrong with an option is said in one line, with the code of wrong use."""
    code, out, err = kvtier("replay", *options)
    assert (code, out) == (2, "")
    assert reason in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "code", "reason"),
    [(None, 2, "No such file"), ('{"a": 1}\n', 5, "of no known trace"), ("x", 5, "is no JSON")],
)
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_trace_that_cannot_be_read_ends_the_command(tmp_path, jobs, content, code, reason):
    """One line, also when it is worker processes that read it."""
    path = tmp_path / "t.jsonl"
    if content is not None:
        path.write_text(content)
    got, out, err = kvtier("replay", path, "--jobs", jobs, "--sizes", "1GiB,2GiB")
    assert (got, out, reason in err, err.count("\n")) == (code, "", True, 1), err


def test_a_process_that_is_killed_ends_the_replay(tmp_path):
    """As the kernel does when memory is short: an error that says so, and nothing is left."""
    job = Job(write_sessions(tmp_path / "s.jsonl", 4), Setup(Shape(1024, 1024)), n_users=2)

    def kill(*_):
        for child in multiprocessing.active_children():
            child.kill()

    with pytest.raises(ReplayError, match="--jobs 1"):
        run_all(job, [Sizes(n << 20) for n in range(1, 41)], [POLICIES["lru"]], 2, kill)
    assert not multiprocessing.active_children()
