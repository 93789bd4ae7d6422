"""The verbs over a disk store, as a person runs them: another process, real folders."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.storage.disk import DiskTier
from kvtier.storage.key import chunk_key, key_name
from kvtier.storage.tier import RecordSpec

RAW_BYTES = 16384
NAMESPACES = (b"a" * 16, b"b" * 16)


def kvtier(*arguments):
    """Run the command; return (exit code, stdout, stderr)."""
    done = subprocess.run(
        [str(Path(sys.executable).parent / "kvtier"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def key(number):
    return chunk_key(hashlib.sha256(str(number).encode()).digest(), number % 2)


def fill(root, namespace, rank, numbers):
    payload = mmap.mmap(-1, RAW_BYTES)
    tier = DiskTier(str(root), namespace, rank, 1 << 30, description={"model": {"name": "tiny"}})
    for number in numbers:
        payload[:8] = number.to_bytes(8, "little")
        with memoryview(payload) as view:
            tier.put(RecordSpec(key(number), 0, 256, RAW_BYTES), [view])
    tier.close()


@pytest.fixture
def store(tmp_path):
    """Two namespaces, two ranks: 3 + 3 + 2 records."""
    root = tmp_path / "store"
    fill(root, NAMESPACES[0], 0, range(3))
    fill(root, NAMESPACES[0], 1, range(3))
    fill(root, NAMESPACES[1], 0, range(5, 7))
    return root


def files(root):
    return sorted(root.rglob("*/r*/*/*/*.kvt"))


def damage(path):
    with open(path, "r+b") as file:
        file.seek(4096 + 100)
        byte = file.read(1)
        file.seek(4096 + 100)
        file.write(bytes([byte[0] ^ 1]))


def test_ls_lists_every_record(store):
    """One row a record and rank, in a table and in JSON."""
    code, out, _ = kvtier("ls", store, "--json")
    rows = json.loads(out)["records"]
    assert code == 0
    assert len(rows) == 8
    assert {row["key"] for row in rows} == {key_name(key(n)) for n in (0, 1, 2, 5, 6)}
    assert {row["stored_bytes"] for row in rows} == {4096 + RAW_BYTES}
    code, out, _ = kvtier("ls", store, "--namespace", "62")
    assert code == 0
    assert len(out.splitlines()) == 1 + 2


def test_ls_of_a_closed_pipe_ends_quietly(store):
    """`kvtier ls | head` shows no traceback."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [str(Path(sys.executable).parent / "kvtier"), "ls", str(store)],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(write)
    assert "Traceback" not in done.stderr


def test_stat_sums_up_each_namespace(store):
    """Model in plain words, records by group and rank, bytes as on disk."""
    code, out, _ = kvtier("stat", store, "--json")
    data = json.loads(out)
    assert code == 0
    assert data["records"] == 8
    assert data["stored_bytes"] == 8 * (4096 + RAW_BYTES)
    first, second = data["namespaces"]
    assert first["namespace"] == NAMESPACES[0].hex()
    assert first["description"] == {"model": {"name": "tiny"}}
    assert first["records_by_rank"] == {"0": 3, "1": 3}
    assert first["records_by_group"] == {"0": 4, "1": 2}
    assert second["records"] == 2
    code, out, _ = kvtier("stat", store)
    assert code == 0
    assert "tiny" in out


def test_show_tells_the_header_and_checks_the_payload(store):
    """By a key or the beginning of one, each rank's record; 3 when one is damaged."""
    name = key_name(key(1))
    code, out, _ = kvtier("show", store, name[:12], "--json")
    records = json.loads(out)["records"]
    assert code == 0
    assert sorted(record["rank"] for record in records) == [0, 1]
    assert all(record["ok"] and record["end_tokens"] == 256 for record in records)
    damage(Path(records[0]["path"]))
    code, out, _ = kvtier("show", store, name, "--json")
    assert code == 3
    assert [record["ok"] for record in json.loads(out)["records"]].count(False) == 1


def test_verify_finds_damage_and_fix_quarantines_just_that(store):
    """Exit 3 and the command that repairs; --fix moves the bad record away and ends with 0."""
    assert kvtier("verify", store)[0] == 0
    bad = files(store)[2]
    damage(bad)
    code, out, _ = kvtier("verify", store)
    assert code == 3
    assert str(bad) in out
    assert "verify --fix" in out
    assert bad.exists()
    code, out, _ = kvtier("verify", store, "--fix", "--json")
    data = json.loads(out)
    assert code == 0
    assert data["quarantined"] == 1
    assert [item["path"] for item in data["damaged"]] == [str(bad)]
    assert data["damaged"][0]["reason"] == "payload_checksum"
    assert not bad.exists()
    assert len(files(store)) == 7
    assert json.loads(kvtier("stat", store, "--json")[1])["quarantine"]["files"] == 1
    assert kvtier("verify", store)[0] == 0


@pytest.mark.parametrize("how", ["empty", "truncated", "folder", "swapped", "garbage"])
def test_verify_knows_every_kind_of_damage(store, how):
    """A record that is empty, cut, a folder, another's, or rubbish is found and repaired."""
    bad, other = files(store)[:2]
    content = bad.read_bytes()
    if how == "empty":
        bad.write_bytes(b"")
    elif how == "truncated":
        bad.write_bytes(content[:-4096])
    elif how == "folder":
        bad.unlink()
        bad.mkdir()
    elif how == "swapped":
        bad.write_bytes(other.read_bytes())
    else:
        bad.write_bytes(os.urandom(len(content)))
    code, out, _ = kvtier("verify", store, "--json")
    assert code == 3
    assert [item["path"] for item in json.loads(out)["damaged"]] == [str(bad)]
    assert kvtier("verify", store, "--fix")[0] == 0
    assert kvtier("verify", store)[0] == 0


def test_verify_stops_in_time(store):
    """With no time at all it checks nothing, and says that it is not complete."""
    code, out, _ = kvtier("verify", store, "--max-seconds", "0", "--json")
    assert code == 0
    assert json.loads(out)["complete"] is False


@pytest.mark.parametrize("verb", ["ls", "stat", "verify"])
def test_an_empty_folder_is_an_empty_store(tmp_path, verb):
    """Before the first engine has run there is nothing, and that is no error."""
    code, out, err = kvtier(verb, tmp_path, "--json")
    assert code == 0, err
    json.loads(out)


@pytest.mark.parametrize("verb", ["ls", "stat", "verify"])
def test_what_is_no_store_is_refused_in_one_line(tmp_path, verb):
    """Nothing there: 4. A file, or a folder of other things: 5. A URL: 2."""
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    for target, expected in (
        (tmp_path / "none", 4),
        (foreign / "notes.txt", 5),
        (foreign, 5),
        ("redis://127.0.0.1:1", 2),
    ):
        code, out, err = kvtier(verb, target)
        assert (code, out) == (expected, "")
        assert len(err.splitlines()) == 1
        assert "Traceback" not in err
    assert (foreign / "notes.txt").read_text() == "mine"


def test_rubbish_inside_a_store_raises_nothing(store):
    """Strange names, a namespace without description, a FIFO: listed around, never a traceback."""
    (store / "c" / "d").mkdir(parents=True)
    (store / ("0" * 32) / "r0" / "zz").mkdir(parents=True)
    (files(store)[0].parent / "notes.kvt").write_text("x")
    os.mkfifo(store / ("0" * 32) / "namespace.json")
    for verb in ("ls", "stat", "verify"):
        code, _, err = kvtier(verb, store)
        assert (code, err) == (0, "")


def test_show_of_an_unknown_or_ambiguous_key_says_so(store):
    """1 for a key that is not there, 2 for a beginning that several keys have."""
    assert kvtier("show", store, "ffffffffffffffffffff")[0] == 1
    assert kvtier("show", store, "")[0] == 2
