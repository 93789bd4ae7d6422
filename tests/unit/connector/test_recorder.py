"""The recording of a running engine: what is written, what is dropped, how large it gets."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
import random
import stat
import threading
import time
from types import SimpleNamespace

import pytest

from kvtier.connector import recorder as recorder_module
from kvtier.connector.lookup import MissReason
from kvtier.connector.plan import NamespaceInfo
from kvtier.connector.prefix_chains import Chains
from kvtier.connector.recorder import Recorder
from kvtier.connector.recording_files import make_room
from kvtier.connector.request_options import RequestOptions, SaltedHashes
from kvtier.tools.traces_read import read_trace

from .halves import Half, request_of

BLOCK = 16
SPACE = NamespaceInfo(b"n" * 16, 0, {"hash_algorithm": "sha256", "root_hash": "00ff"})


class Clock:
    now_s = 1_800_000_000.0

    def __call__(self):
        return self.now_s


def hashes_of(*parts):
    """A chain: (name, number of blocks) after one another, told by everything before."""
    out, before = [], b""
    for name, n in parts:
        for i in range(n):
            before = hashlib.sha256(before + f"{name} {i}".encode()).digest()
            out.append(before)
    return out


def request(name, hashes, *, output=5, at_s=0.0, extra=3):
    prompt_tokens = len(hashes) * BLOCK + extra
    return SimpleNamespace(
        request_id=name,
        arrival_time=Clock.now_s + at_s,
        num_prompt_tokens=prompt_tokens,
        num_tokens=prompt_tokens + output,
        block_hashes=[*hashes, b"answer" * 6],
        status=SimpleNamespace(name="FINISHED_STOPPED"),
    )


def tracker(salt=b""):
    return SimpleNamespace(
        options=RequestOptions(salt=salt),
        local_tokens=16,
        hits={"disk": 32},
        reason=MissReason.GATE,
    )


def lines_of(folder):
    return [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(folder.glob("*.jsonl"))
    ]


def record(folder, requests, limit=4 << 20, clock=None, **more):
    made = Recorder(str(folder), limit, BLOCK, clock or Clock())
    for one in requests:
        made.finished(one, tracker(**more), SPACE)
    made.close()
    return made


def test_a_request_is_one_line_without_tokens(tmp_path):
    """Times, lengths, hashes, what was restored and why not more; nobody else may read the file."""
    chain = hashes_of(("a", 3))
    made = record(tmp_path / "rec", [request("r-1", chain, at_s=1.5)])
    ((header, line),) = lines_of(tmp_path / "rec")
    assert header == {
        "format": "kvtier-recording",
        "version": 1,
        "block_tokens": BLOCK,
        "started_at_s": Clock.now_s,
        "hash_algorithm": "sha256",
        "root_hash": "00ff",
    }
    assert line == {
        "t": 1.5,
        "request": "r-1",
        "session": "1",
        "prompt_tokens": 51,
        "output_tokens": 5,
        "hashes": [h.hex() for h in chain],
        "device_tokens": 16,
        "hit_tokens": {"disk": 32},
        "miss": "gate",
        "end": "stopped",
        "namespace": SPACE.digest.hex(),
    }
    assert made.counts.take() == {"recorded_requests": 1}
    (path,) = (tmp_path / "rec").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "rec").stat().st_mode) == 0o700


def test_hashes_are_those_of_the_keys(tmp_path):
    """A tenant's salt is in the recorded hashes, as it is in the keys of the records."""
    chain = hashes_of(("a", 3))
    record(tmp_path, [request("r", chain)], salt=b"s" * 32)
    ((_, line),) = lines_of(tmp_path)
    assert line["hashes"] == [h.hex() for h in SaltedHashes(chain, b"s" * 32)]


@pytest.mark.parametrize("seed", range(4))
def test_what_was_written_before_is_not_written_again(tmp_path, seed):
    """Turns, branches and repeats of sessions: short lines, and replay reads the same chains."""
    rng = random.Random(seed)
    sessions = [[("system", 40), (f"s{i}", 1)] for i in range(4)]
    chains = []
    for n in range(60):
        session = rng.choice(sessions)
        if rng.random() < 0.8:
            session.append((f"turn{n}", rng.randrange(1, 9)))
        elif len(session) > 2:
            session.pop()  # another branch
        chains.append(hashes_of(*session))
    record(tmp_path, [request(f"r{i}", c, at_s=i) for i, c in enumerate(chains)])
    ((_, *lines),) = lines_of(tmp_path)
    written = sum(len(line["hashes"]) for line in lines)
    assert written < 0.5 * sum(map(len, chains))
    trace = read_trace(str(next(tmp_path.glob("*.jsonl"))))
    names = {}
    for chain, found in zip(chains, trace.requests, strict=True):
        assert len(found.nodes) == len(chain)
        for block_hash, node in zip(chain, found.nodes.tolist(), strict=True):
            assert names.setdefault(block_hash, node) == node
    assert len(set(names.values())) == len(names)


def test_the_folder_stays_below_its_limit(tmp_path):
    """Old parts go, a part that another engine writes stays, and what is left replays."""
    (tmp_path / "20200101T000000Z-1-abcd-0001.jsonl").write_bytes(b"x" * (3 << 20))
    other = tmp_path / "20200101T000000Z-2-abcd-0001.jsonl"
    other.write_bytes(b"y" * 1000)
    (tmp_path / "notes.txt").write_bytes(b"z" * (5 << 20))
    limit = 4 << 20
    with other.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for i in range(12):
            record(tmp_path, [request(f"r{i}", hashes_of((f"s{i}", 3000)))] * 5, limit)
        made = Recorder(str(tmp_path), limit, BLOCK, Clock(), start=False)
        for i in range(40):
            made.finished(request(f"l{i}", hashes_of((f"l{i}", 3000)), at_s=i), tracker(), SPACE)
            made.write(made._queue.get())
        made._drop_part()
        assert other.exists()
    assert (tmp_path / "notes.txt").exists()
    assert not (tmp_path / "20200101T000000Z-1-abcd-0001.jsonl").exists()
    sizes = [path.stat().st_size for path in tmp_path.glob("*.jsonl")]
    assert sum(sizes) < 1.1 * limit
    trace = read_trace(str(tmp_path))
    assert 2 < len(trace.requests) <= 40
    assert max(r.at_s for r in trace.requests) == 39.0


def test_a_full_queue_drops_and_counts(tmp_path):
    """The scheduler thread never waits for the writer: what does not fit is dropped."""
    made = Recorder(str(tmp_path), 4 << 20, BLOCK, Clock(), start=False)
    for i in range(recorder_module.MAX_QUEUED + 7):
        made.finished(request(f"r{i}", []), tracker(), SPACE)
    assert made.counts.take() == {"recording_dropped_requests": 7}


def test_a_folder_that_cannot_be_written(tmp_path, caplog):
    """One line in the log, drops counted, and the recording goes on once it can."""
    folder = tmp_path / "rec"
    folder.write_text("no folder")
    clock = Clock()
    made = Recorder(str(folder), 4 << 20, BLOCK, clock, start=False)

    def one(name):
        made.finished(request(name, hashes_of(("a", 3))), tracker(), SPACE)
        made.write(made._queue.get())

    one("a")
    one("b")
    clock.now_s += recorder_module.RETRY_S
    one("b2")
    assert made.counts.take() == {"recording_dropped_requests": 3}
    folder.unlink()
    clock.now_s += recorder_module.RETRY_S
    one("c")
    made._drop_part()
    assert made.counts.take() == {"recorded_requests": 1}
    assert [line[1]["request"] for line in lines_of(folder)] == ["c"]
    assert [r.getMessage().partition(":")[0] for r in caplog.records] == ["kvtier", "kvtier"]


def test_a_bug_does_not_end_the_writer(tmp_path, caplog, monkeypatch):
    """Whatever is raised while a request is written, the thread lives and records later ones."""
    clock = Clock()
    made = Recorder(str(tmp_path), 4 << 20, BLOCK, clock)
    with monkeypatch.context() as patch:
        patch.setattr(made, "_write", lambda _: 1 // 0)
        for name in "ab":
            made.finished(request(name, hashes_of(("a", 3))), tracker(), SPACE)
        deadline_s = time.monotonic() + 10
        while not made._queue.empty() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        time.sleep(0.05)
    clock.now_s += recorder_module.RETRY_S
    made.finished(request("c", hashes_of(("a", 3))), tracker(), SPACE)
    made.close()
    assert made.counts.take() == {"recording_dropped_requests": 2, "recorded_requests": 1}
    assert [line[1]["request"] for line in lines_of(tmp_path)] == ["c"]
    assert len(caplog.records) == 2


def test_a_part_refers_to_no_other(tmp_path):
    """A session that goes on over many parts: each part alone, and all together, read alike."""
    chain, chains = [("s", 5)], []
    for n in range(40):
        chain.append((f"turn{n}", 2))
        chains.append(hashes_of(*chain))
    record(tmp_path, [request(f"r{i}", c, at_s=i) for i, c in enumerate(chains)], 40_000)
    parts = sorted(tmp_path.glob("*.jsonl"))
    assert len(parts) > 1
    done = 0
    for part in parts:
        for found in read_trace(str(part)).requests:
            assert len(found.nodes) == len(chains[done])
            done += 1
    assert done == 40
    requests = read_trace(str(tmp_path)).requests
    for before, after in itertools.pairwise(requests):
        assert after.nodes.tolist()[: len(before.nodes)] == before.nodes.tolist()
    assert len({r.session for r in requests}) == 1


def test_memory_of_chains_is_bounded():
    """However many prompts there were, only so many blocks are remembered."""
    chains = Chains(max_blocks=100)
    for i in range(50):
        chains.add(hashes_of((f"s{i}", 30)))
    assert chains._blocks <= 100
    assert len(chains._by_first) == len(chains._by_last) <= 4


def test_make_room_races_with_removal(tmp_path):
    """Parts that vanish meanwhile are nobody's problem."""
    names = [tmp_path / f"20200101T000000Z-{i}-abcd-0001.jsonl" for i in range(3)]
    for path in names:
        path.write_bytes(b"x" * 10)
    os.unlink(names[0])
    make_room(str(tmp_path), 0)
    assert list(tmp_path.iterdir()) == []


def test_the_scheduler_half_records_what_finishes(tmp_path):
    """Every finished request is one line, the thread ends with the half."""
    made = Recorder(str(tmp_path), 4 << 20, BLOCK)
    half = Half(recorder=made)
    one = request_of("a", 200, n_prompt=180)
    one.status.name = "FINISHED_ABORTED"
    half.half.on_new_request(one)
    half.half.lookup(one, 0)
    half.half.finished(one, half.table(one, 200))
    half.half.shutdown()
    ((_, line),) = lines_of(tmp_path)
    assert (line["request"], line["prompt_tokens"], line["output_tokens"]) == ("a", 180, 20)
    assert len(line["hashes"]) == 180 // BLOCK
    assert line["end"] == "aborted"
    assert half.half.take_counts()["recorded_requests"] == 1
    assert not [t for t in threading.enumerate() if t.name == "kvtier-record"]
