"""The verbs over a store, as a person runs them: another process, a real folder, a real server."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import ANY

import pytest

from kvtier.storage.disk_layout import pack_namespace
from kvtier.storage.key import key_name
from kvtier.storage.redis_url import parse_redis_url
from kvtier.tools import store_verify
from kvtier.tools.redis_server import RedisServer

from .stores import NAMESPACES, RAW_BYTES, Folder, Server, golden, here, key, kvtier, put, words

OVERHEAD = {"disk": 4096, "redis": 544}
VERBS = ("ls", "stat", "du", "verify")


@pytest.fixture(scope="module")
def server():
    with RedisServer() as started:
        yield started


@pytest.fixture(params=["disk", "redis"])
def empty(request, tmp_path):
    """A store that no engine has used yet."""
    if request.param == "disk":
        (tmp_path / "store").mkdir()
        return Folder(tmp_path / "store")
    started = request.getfixturevalue("server")
    with started.client() as client:
        client.flushall()
    return Server(started)


@pytest.fixture
def store(empty):
    """Two namespaces, two ranks: 3 + 3 + 2 records."""
    put(empty.tier(), range(3))
    put(empty.tier(rank=1), range(3))
    put(empty.tier(NAMESPACES[1], description=words("other")), range(5, 7))
    return empty


def stored_bytes(store):
    return OVERHEAD[store.kind] + RAW_BYTES


def test_ls_lists_every_record(store):
    """One row a record and rank, in a table and in JSON."""
    code, out, _ = kvtier("ls", store.target, "--json")
    data = json.loads(out)
    rows = data["records"]
    golden("ls", data)
    assert code == 0
    assert len(rows) == 8
    assert {row["key"] for row in rows} == {key_name(key(n)) for n in (0, 1, 2, 5, 6)}
    assert {row["stored_bytes"] for row in rows} == {stored_bytes(store)}
    assert all(abs(time.time() - row["used_at_s"]) < 120 for row in rows)
    code, out, _ = kvtier("ls", store.target, "--namespace", "62")
    assert code == 0
    assert len(out.splitlines()) == 1 + 2
    code, out, _ = kvtier("ls", store.target, "--prefix", key_name(key(1))[:5], "--json")
    assert {row["key"] for row in json.loads(out)["records"]} == {key_name(key(1))}


def test_ls_prints_before_it_has_seen_all(store):
    """The first lines come while the walk goes on: a reader that stops ends it quietly."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [str(Path(sys.executable).parent / "kvtier"), "ls", store.target],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(write)
    assert "Traceback" not in done.stderr


def test_stat_sums_up_each_namespace(store):
    """Model in plain words, records by group and rank, tokens once for all ranks, bytes."""
    code, out, _ = kvtier("stat", store.target, "--json")
    data = json.loads(out)
    assert code == 0
    golden("stat", {**data, "capacity": dict.fromkeys(data["capacity"], "any")})
    assert data["records"] == 8
    assert data["stored_bytes"] == 8 * stored_bytes(store)
    first, second = data["namespaces"]
    assert first["namespace"] == NAMESPACES[0].hex()
    assert first["words"] == {"model": "tiny", "dtype": "bfloat16"}
    assert first["description"] == words()
    assert first["records_by_rank"] == {"0": 3, "1": 3}
    assert first["records_by_group"] == {"0": 4, "1": 2}
    assert (first["chunks"], first["tokens"], first["compression"]) == (3, 512, 1.0)
    assert first["records_by_last_use"] == {"minute": 6}
    assert first["records_by_size"] == {"64 KiB": 6}
    assert second["records"] == 2
    code, out, _ = kvtier("stat", store.target)
    assert code == 0
    assert "tiny" in out
    assert "512" in out


def test_stat_tells_how_much_the_store_may_take(store):
    """A folder's `disk_capacity` beside what it holds, or the server's limit; both in --json."""
    code, out, _ = kvtier("stat", store.target, "--json")
    room = json.loads(out)["capacity"]
    first = kvtier("stat", store.target)[1].splitlines()[0]
    assert code == 0
    if store.kind == "redis":
        assert room["store_limit_bytes"] is None
        assert "disk_capacity" not in first
        return
    assert room["store_limit_bytes"] == 1 << 30
    assert " of 1.0 GiB (disk_capacity); " in first
    assert first.endswith(" free on the file system")
    os.unlink(f"{store.target}/.kvtier/capacity")
    assert json.loads(kvtier("stat", store.target, "--json")[1])["capacity"] == {
        **room, "store_limit_bytes": None, "free_bytes": ANY, "used_bytes": ANY,
    }  # fmt: skip
    first, second = kvtier("stat", store.target)[1].splitlines()[:2]
    assert "disk_capacity" not in first
    assert second.startswith("free: ")
    assert second.endswith("(the whole file system)")


def test_stat_measures_compression(empty):
    """What a codec gained, from the headers."""
    put(empty.tier(codec="lz4"), range(2), compressible=True)
    data = json.loads(kvtier("stat", empty.target, "--json")[1])
    assert data["namespaces"][0]["compression"] > 10
    assert data["namespaces"][0]["codecs"] == {"lz4": 2}


def test_du_sums_up_by_namespace_and_rank(store):
    """Bytes and records of each part, and of all."""
    code, out, _ = kvtier("du", store.target, "--json")
    data = json.loads(out)
    golden("du", data)
    assert code == 0
    assert data["stored_bytes"] == 8 * stored_bytes(store)
    assert [(p["namespace"], p["rank"], p["records"]) for p in data["parts"]] == [
        (NAMESPACES[0].hex(), 0, 3),
        (NAMESPACES[0].hex(), 1, 3),
        (NAMESPACES[1].hex(), 0, 2),
    ]
    assert kvtier("du", store.target)[1].splitlines()[-1].endswith("total")


def test_show_tells_header_check_and_neighbours(store):
    """By the beginning of a key, each rank's record; the chunks before and after by their range."""
    name = key_name(key(2))
    code, out, _ = kvtier("show", store.target, name[:12], "--json")
    data = json.loads(out)
    records = data["records"]
    golden("show", data)
    assert code == 0
    assert sorted(record["rank"] for record in records) == [0, 1]
    assert all(record["ok"] and record["end_tokens"] == 768 for record in records)
    put(store.tier(), [4])  # group 0 again: tokens 1024 to 1280, which touch nothing
    neighbours = records[0]["neighbours"]
    assert (neighbours["before"], neighbours["after"]) == ([], [])  # chunk 1 is of group 1
    assert neighbours["complete"]
    store.damage(2, rank=1)
    code, out, _ = kvtier("show", store.target, name, "--json")
    assert code == 3
    assert [r["ok"] for r in json.loads(out)["records"]] == [True, False]
    code, out, _ = kvtier("show", store.target, name)
    assert code == 3
    assert "payload checksum differs" in out


def test_show_names_the_one_record_that_ends_where_this_begins(empty):
    """Of group 0, chunk 2 follows chunk 0 when the ranges touch."""
    import mmap

    from kvtier.storage.key import chunk_key
    from kvtier.storage.tier import RecordSpec

    tier = empty.tier()
    boundary = b"h" * 32
    specs = [
        RecordSpec(chunk_key(b"g" * 32, 0), 0, 256, 4096),
        RecordSpec(chunk_key(boundary, 0), 256, 512, 4096),
        RecordSpec(chunk_key(boundary, 1), 256, 512, 4096),
        RecordSpec(chunk_key(b"i" * 32, 0), 512, 768, 4096),
    ]
    for spec in specs:
        tier.put(spec, [memoryview(mmap.mmap(-1, 4096))])
    tier.close()
    code, out, _ = kvtier("show", empty.target, key_name(specs[1].key), "--json")
    found = json.loads(out)["records"][0]["neighbours"]
    assert code == 0
    assert [n["key"] for n in found["before"]] == [key_name(specs[0].key)]
    assert [n["key"] for n in found["after"]] == [key_name(specs[3].key)]
    assert [n["key"] for n in found["same_boundary"]] == [key_name(specs[2].key)]
    assert "one record ends where this begins" in found["note"]


def test_show_reads_like_stat_and_ls(store):
    """For people: sizes, times and checks in words; no field's name as --json has it."""
    put(store.tier(), [9])
    code, out, _ = here("show", store.target, key_name(key(9)), "--no-neighbours")
    assert code == 0
    rows = {line[:18].strip(): line[18:].strip() for line in out.splitlines()}
    assert rows["check"] == "ok"
    assert rows["raw size"] == "16.0 KiB (16,384 bytes)"
    assert rows["tokens"] == "2,304 to 2,560"
    assert rows["encrypted"] == "no"
    assert re.fullmatch(r"\d+ s ago \(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\)", rows["last use"])
    assert "_" not in out.replace(rows["path"], "")


def test_show_of_an_unknown_or_ambiguous_key_says_so(store):
    """1 for a key that is not there, 2 for a beginning that several keys have."""
    assert kvtier("show", store.target, "ffffffffffffffffffff")[0] == 1
    assert kvtier("show", store.target, "")[0] == 2


def test_verify_finds_damage_and_fix_removes_just_that(store):
    """Exit 3 and the command that repairs; --fix takes the bad record away and ends with 0."""
    assert kvtier("verify", store.target)[0] == 0
    before = store.content()
    bad = store.damage(1, rank=1)
    code, out, _ = kvtier("verify", store.target)
    assert code == 3
    assert bad in out
    words = "move them out of the way" if store.kind == "disk" else "delete them"
    assert f"to {words}: kvtier verify --fix" in out
    assert len(store.content()) == 8
    code, out, _ = kvtier("verify", store.target, "--fix", "--json")
    data = json.loads(out)
    golden("verify", data)
    assert code == 0
    assert data["quarantined"] == data["damaged_records"] == 1
    assert [item["path"] for item in data["damaged"]] == [bad]
    assert data["damaged"][0]["reason"] == "payload_checksum"
    gone = (NAMESPACES[0].hex(), "r1", key_name(key(1)))
    after = store.content()
    assert after == {name: value for name, value in before.items() if name != gone}
    assert kvtier("verify", store.target)[0] == 0
    if store.kind == "disk":
        assert json.loads(kvtier("stat", store.target, "--json")[1])["quarantine"]["files"] == 1


def test_fix_says_what_it_did(store):
    """On disk a damaged record is kept to be looked at; a server's is deleted."""
    store.damage(1, rank=1)
    code, out, _ = here("verify", store.target, "--fix")
    assert code == 0
    assert f"1 damaged, 1 {'quarantined' if store.kind == 'disk' else 'deleted'}" in out


def test_verify_finds_a_description_that_cannot_be_read(store):
    """Exit 3; the records are whole; --fix takes the words away, and a save brings them back."""
    place = _break_description(store)
    code, out, _ = here("verify", store.target)
    assert code == 3
    assert place in out
    assert "0 damaged" in out
    assert "kvtier verify --fix" in out
    assert here("verify", store.target, "--namespace", NAMESPACES[1].hex())[0] == 0
    code, out, _ = here("verify", store.target, "--json")
    data = json.loads(out)
    assert (code, data["damaged_records"]) == (3, 0)
    assert [(d["namespace"], d["path"]) for d in data["descriptions"]] == [
        (NAMESPACES[0].hex(), place)
    ]
    before = store.content()
    code, out, _ = here("verify", store.target, "--fix", "--json")
    assert (code, json.loads(out)["dropped_descriptions"]) == (0, 1)
    code, out, _ = here("verify", store.target, "--json")
    assert (code, json.loads(out)["descriptions"]) == (0, [])
    assert store.content() == before
    put(store.tier(), [7])
    (first, _) = json.loads(here("stat", store.target, "--json")[1])["namespaces"]
    assert first["words"]["model"] == "tiny"


def test_fix_leaves_a_description_that_was_written_meanwhile(store, monkeypatch):
    """What an engine has written between the look and the repair stays."""
    _break_description(store)
    good = words()

    def repair(opened, result, repair=store_verify.repair):
        _describe(store, good)
        repair(opened, result)

    monkeypatch.setattr(store_verify, "repair", repair)
    code, out, _ = here("verify", store.target, "--fix", "--json")
    data = json.loads(out)
    assert (code, data["descriptions"], data["dropped_descriptions"]) == (0, [], 0)
    (first, _) = json.loads(here("stat", store.target, "--json")[1])["namespaces"]
    assert first["words"]["model"] == "tiny"


def _break_description(store):
    """Put rubbish in the place of a namespace's description; return the place."""
    name = NAMESPACES[0].hex()
    if store.kind == "disk":
        path = Path(store.target, name, "namespace.json")
        path.write_text("{nothing")
        return str(path)
    with store.server.client() as client:
        client.set(f"kvtier:ns:{name}", "{nothing")
    return f"kvtier:ns:{name}"


def test_verify_goes_on_where_it_stopped(store, tmp_path):
    """With no time it checks nothing and says so; --resume after a part checks only the rest."""
    env = {**os.environ, "KVTIER_CACHE": str(tmp_path / "cache")}
    code, out, _ = kvtier("verify", store.target, "--max-seconds", "0", "--json", env=env)
    data = json.loads(out)
    assert (code, data["complete"], data["records"]) == (0, False, 0)
    out = kvtier("verify", store.target, "--max-seconds", "0", env=env)[1]
    assert "nothing was read" in out
    assert "--resume" not in out  # there is nothing to go on from
    saved = _stop_after(store, 3, env)
    out = kvtier("verify", store.target, "--resume", "--max-seconds", "0", env=env)[1]
    assert "kvtier verify --resume" in out
    store.damage(6, NAMESPACES[1])
    code, out, _ = kvtier("verify", store.target, "--resume", "--json", env=env)
    data = json.loads(out)
    assert code == 3
    assert data["resumed"]
    assert data["complete"]
    assert data["records"] == 8
    assert not saved.exists()
    _, _, err = kvtier("verify", store.target, "--resume", env=env)
    assert "nothing to go on from" in err


def _stop_after(store, n_records, env):
    """Leave the state of a run that ended after so many records, damage before it unseen."""
    code = (
        "import sys\n"
        "from kvtier.tools.store import open_store\n"
        "from kvtier.tools.store_verify import SavedState, Verification, verify\n"
        "opened = open_store(sys.argv[1])\n"
        "result = Verification()\n"
        "verify(opened, opened.ordered(), result, lambda r: None, lambda: result.records == 3)\n"
        "state = SavedState(opened.name, None)\n"
        "state.save(result, now=True)\n"
        "print(state.path)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, store.target],
        capture_output=True,
        text=True,
        check=True,
        env=env,
        timeout=60,
    )
    path = Path(done.stdout.strip())
    assert json.loads(path.read_text())["records"] == n_records
    return path


def test_verify_of_a_sample_checks_so_many(store):
    """A number or a share; anything else is wrong use."""
    data = json.loads(kvtier("verify", store.target, "--sample", "3", "--json")[1])
    assert (data["records"], data["sampled"]) == (3, True)
    assert (
        json.loads(kvtier("verify", store.target, "--sample", "100%", "--json")[1])["records"] == 8
    )
    assert kvtier("verify", store.target, "--sample", "some")[0] == 2


def test_verify_tells_stale_from_damaged(empty):
    """What a clear has left behind is stale: no finding, and the command that deletes it."""
    fields = {"fields_format": 1, "hash_algorithm": "sha256", **words()}
    put(empty.tier(description={**fields, "cache_epoch": 0}), range(3))
    put(empty.tier(NAMESPACES[1], description={**fields, "cache_epoch": 1}), range(2))
    assert json.loads(kvtier("verify", empty.target, "--json")[1])["stale"] == []
    _clear(empty, fields)
    code, out, _ = kvtier("verify", empty.target, "--json")
    data = json.loads(out)
    assert code == 0
    assert [(s["namespace"], s["records"]) for s in data["stale"]] == [(NAMESPACES[0].hex(), 3)]
    out = kvtier("verify", empty.target)[1]
    assert "prune" in out
    assert "--stale" in out
    code, out, _ = kvtier("prune", empty.target, "--stale", "--yes", "--json")
    assert (code, json.loads(out)["deleted"]) == (0, 3)
    assert {name[0] for name in empty.content()} == {NAMESPACES[1].hex()}


def _clear(store, fields):
    """Raise the epoch, as an engine's reset does; its name is the digest of what has no root."""
    from kvtier.connector.epoch import raise_epoch
    from kvtier.connector.namespace import digest_of
    from kvtier.storage import redis_epoch

    name = digest_of({k: v for k, v in fields.items() if k != "hash_algorithm"}).hex()
    if store.kind == "disk":
        raise_epoch(store.target, name)
    else:
        redis_epoch.raise_epoch(parse_redis_url(store.target), name)


@pytest.mark.parametrize("verb", VERBS)
def test_an_empty_store_is_no_error(empty, verb):
    """Before the first engine has run there is nothing."""
    code, out, err = kvtier(verb, empty.target, "--json")
    assert code == 0, err
    json.loads(out)
    assert kvtier(verb, empty.target)[0] == 0


def test_verbs_that_change_do_nothing_to_an_empty_store(empty, tmp_path):
    """prune, rm and copy of nothing end with 0."""
    assert kvtier("prune", empty.target, "--unused", "1d")[0] == 0
    assert kvtier("rm", empty.target, "--all", "--yes")[0] == 0
    assert kvtier("copy", empty.target, tmp_path / "new")[0] == 0


@pytest.mark.parametrize("verb", [*VERBS, "show", "prune", "rm", "copy"])
def test_what_is_no_store_is_refused_in_one_line(tmp_path, verb):
    """Nothing there: 4. A file, or a folder of other things: 5. No server: 4. No URL of ours: 2."""
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    more = {
        "show": ["abc"],
        "prune": ["--unused", "0s", "--yes"],
        "rm": ["--all", "--yes"],
        "copy": [tmp_path / "to"],
    }.get(verb, [])
    for target, expected in (
        (tmp_path / "none", 4),
        (foreign / "notes.txt", 5),
        (foreign, 5),
        ("redis://user:s3cret@127.0.0.1:1/0", 4),
        ("http://127.0.0.1:8000", 2),
        ("ftp://x:s3cret@host/", 2),
    ):
        code, out, err = kvtier(verb, target, *more)
        assert (code, out) == (expected, ""), err
        assert len(err.splitlines()) == 1
        assert "Traceback" not in err
        assert "s3cret" not in err
    assert (foreign / "notes.txt").read_text() == "mine"


def test_a_password_is_never_printed(tmp_path):
    """Neither in results nor in errors nor in commands to run."""
    with RedisServer("--requirepass", "s3cret") as server:
        target = f"redis://:s3cret@127.0.0.1:{server.port}"
        store = Server(server)
        store.target = target
        put(store.tier(), range(2))
        for arguments in (
            ["ls", target],
            ["stat", target, "--json"],
            ["show", target, key_name(key(1))],
            ["verify", target, "--max-seconds", "0"],
            ["copy", target, tmp_path / "new"],
            ["rm", target, "--all"],
            ["ls", target.replace("s3cret", "wr0ng")],
        ):
            code, out, err = kvtier(*arguments)
            assert "s3cret" not in out + err, arguments
            assert "wr0ng" not in out + err, arguments
            if "wr0ng" in str(arguments[1]):
                assert code == 4


def test_rubbish_inside_a_folder_raises_nothing(tmp_path):
    """Strange names, a namespace without description, a FIFO: listed around, never a traceback."""
    store = Folder(tmp_path)
    put(store.tier(), range(3))
    (tmp_path / "c" / "d").mkdir(parents=True)
    (tmp_path / ("0" * 32) / "r0" / "zz").mkdir(parents=True)
    (next(tmp_path.rglob("*.kvt")).parent / "notes.kvt").write_text("x")
    os.mkfifo(tmp_path / ("0" * 32) / "namespace.json")
    for verb in VERBS:
        code, _, err = kvtier(verb, store.target)
        assert (code, err) == (0, "")


def test_rubbish_inside_redis_raises_nothing(server):
    """Foreign keys, keys that look like ours, lists under a record's name: never a traceback."""
    store = Server(server)
    with server.client() as client:
        client.flushall()
        put(store.tier(), range(3))
        client.set("kvtier:ns:" + "0" * 32, b"\xff not json")
        client.set("kvtier:garbage", "x")
        client.set(f"kvtier:{'0' * 32}:r0:{{zz}}-g0:h", "x")
        client.set(f"kvtier:{'0' * 32}:r99999999999:{{{'ab' * 32}}}-g0:h", "x")
        client.set("mine", "x")
        for verb in VERBS:
            code, _, err = kvtier(verb, store.target)
            assert (code, err) == (0, ""), verb
        bad = f"kvtier:{NAMESPACES[0].hex()}:r0:{{{'ab' * 32}}}-g0:h"
        client.rpush(bad, "x")
        for verb in VERBS:
            code, _, err = kvtier(verb, store.target)
            assert (code, err) == (3 if verb == "verify" else 0, "")
        assert bad in kvtier("verify", store.target)[1]
        assert kvtier("verify", store.target, "--fix")[0] == 0
        assert not client.exists(bad)
        assert client.get("mine") == b"x"
        assert client.get("kvtier:garbage") == b"x"


@pytest.mark.parametrize("how", ["empty", "truncated", "folder", "swapped", "garbage"])
def test_verify_knows_every_kind_of_damage_to_a_file(tmp_path, how):
    """A record that is empty, cut, a folder, another's, or rubbish is found and repaired."""
    store = Folder(tmp_path)
    put(store.tier(), range(3))
    bad, other = sorted(tmp_path.rglob("*/r*/*/*/*.kvt"))[:2]
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
    code, out, _ = kvtier("verify", store.target, "--json")
    assert code == 3
    assert [item["path"] for item in json.loads(out)["damaged"]] == [str(bad)]
    assert kvtier("verify", store.target, "--fix")[0] == 0
    assert kvtier("verify", store.target)[0] == 0


@pytest.mark.parametrize("how", ["stripe", "short", "swapped", "garbage"])
def test_verify_knows_every_kind_of_damage_in_redis(server, how):
    """A stripe that is gone, ten bytes, another's head, or rubbish is found and deleted."""
    store = Server(server)
    with server.client() as client:
        client.flushall()
        put(store.tier(), range(3))
        bad, other = sorted(client.scan_iter("kvtier:*:h"))[:2]
        if how == "stripe":
            (stripe, *_) = client.scan_iter(bad[:-1] + b"*:1")
            client.delete(stripe)
        elif how == "short":
            client.set(bad, b"0123456789")
        elif how == "swapped":
            client.set(bad, client.get(other))
        else:
            client.set(bad, os.urandom(client.strlen(bad)))
        code, out, _ = kvtier("verify", store.target, "--json")
        assert code == 3
        assert [item["path"] for item in json.loads(out)["damaged"]] == [bad.decode()]
        assert kvtier("verify", store.target, "--fix")[0] == 0
        assert kvtier("verify", store.target)[0] == 0
        assert client.exists(other)


def test_verify_finds_what_a_dead_writer_left(tmp_path):
    """A temporary file of a process that ended is orphaned; one of a living writer is not."""
    store = Folder(tmp_path)
    put(store.tier(), range(2))
    folder = tmp_path / NAMESPACES[0].hex() / "r0" / "tmp"
    dead = folder / "99999-deadbeef-1.tmp"
    dead.write_bytes(b"half")
    living = store.tier(description={})
    with contextlib.closing(living):
        living.wait_complete(10)
        dead.write_bytes(b"half")  # the tier that just opened has swept the first one
        own = folder / f"{living._owner.tmp_name()}.tmp"
        own.write_bytes(b"being written")
        data = json.loads(kvtier("verify", store.target, "--json")[1])
        assert [item["path"] for item in data["orphaned"]] == [str(dead)]
        assert kvtier("prune", store.target, "--orphaned", "--dry-run")[0] == 0
        assert dead.exists()
        code, out, _ = kvtier("prune", store.target, "--orphaned", "--yes", "--json")
        assert (code, json.loads(out)["swept"]) == (0, 1)
        assert not dead.exists()
        assert own.exists()


def test_redis_stripes_without_a_head_are_orphaned(server, monkeypatch):
    """Once they are too old to be of a write under way they are found and deleted."""
    import kvtier.storage.redis_store as reader
    from kvtier.tools.store import open_store

    store = Server(server)
    with server.client() as client:
        client.flushall()
        put(store.tier(), range(2))
        gone = min(client.scan_iter("kvtier:*:h"))
        stripes = set(client.scan_iter(gone[:-1] + b"*:*"))
        client.delete(gone)
        with open_store(store.target) as opened:
            assert opened.loose() == []
            monkeypatch.setattr(reader, "_LOOSE_AFTER_S", 0)
            found = opened.loose()
            assert {item.place.encode() for item in found} == stripes
            assert opened.sweep(found) == len(stripes)
        assert len(store.content()) == 1
        assert kvtier("verify", store.target)[0] == 0


@pytest.mark.parametrize("kind", ["disk", "redis"])
def test_ls_json_is_whole_whatever_ends_it(kind, tmp_path, server, monkeypatch):
    """A store that stops in the middle: one JSON object, which says that it is not all."""
    from kvtier.storage.errors import TierUnavailable
    from kvtier.tools.store_disk import DiskStore
    from kvtier.tools.store_redis import RedisServerStore

    store = Folder(tmp_path) if kind == "disk" else Server(server)
    if kind == "redis":
        with server.client() as client:
            client.flushall()
    put(store.tier(), range(4))
    code, out, _ = here("ls", store.target, "--json")
    assert (code, json.loads(out)["complete"], len(json.loads(out)["records"])) == (0, True, 4)
    kept = DiskStore if kind == "disk" else RedisServerStore
    records = kept.records

    def broken(self, *arguments, error):
        yield from itertools.islice(records(self, *arguments), 2)
        raise error

    for error, expected in ((TierUnavailable("gone"), 4), (KeyboardInterrupt(), 130)):
        monkeypatch.setattr(kept, "records", functools.partialmethod(broken, error=error))
        code, out, err = here("ls", store.target, "--json")
        assert code == expected
        assert (json.loads(out)["complete"], len(json.loads(out)["records"])) == (False, 2)
        assert len(err.splitlines()) == 1


def test_fix_leaves_alone_what_was_healed_meanwhile(tmp_path, monkeypatch):
    """What a run that was cut short found, and an engine saved anew, is no damage any more."""
    monkeypatch.setenv("KVTIER_CACHE", str(tmp_path / "cache"))
    store = Folder(tmp_path / "store")
    put(store.tier(), range(6))
    bad = sorted(range(6), key=lambda n: key_name(key(n)))[:2]
    for number in bad:
        store.damage(number)
    from kvtier.tools.store_disk import DiskStore

    check, seen = DiskStore.check, []

    def checked(self, record):
        seen.append(record)
        if len(seen) > 3:
            raise KeyboardInterrupt
        return check(self, record)

    with monkeypatch.context() as patch:
        patch.setattr(DiskStore, "check", checked)
        code, out, _ = here("verify", store.target, "--json")
    assert (code, json.loads(out)["damaged_records"]) == (130, 2)
    with contextlib.closing(store.tier()) as tier:
        tier.quarantine(key(bad[0]), "found")
        tier.quarantine(key(bad[1]), "found")
    put(store.tier(), bad[:1])  # saved anew
    code, out, _ = here("verify", store.target, "--resume", "--fix", "--json")
    assert (code, json.loads(out)["damaged_records"], json.loads(out)["resumed"]) == (0, 0, True)
    assert json.loads(out)["records"] == 6
    assert len(store.content()) == 5


def test_fix_looks_again_before_it_acts(tmp_path, monkeypatch):
    """What an engine healed while the rest was verified stays."""
    from kvtier.tools import store_verify

    store = Folder(tmp_path)
    put(store.tier(), range(3))
    store.damage(1)
    verify = store_verify.verify

    def healed(*arguments):
        verify(*arguments)
        with contextlib.closing(store.tier()) as tier:
            tier.quarantine(key(1), "found")
        put(store.tier(), [1])

    monkeypatch.setattr(store_verify, "verify", healed)
    code, out, _ = here("verify", store.target, "--fix", "--json")
    assert (code, json.loads(out)["quarantined"]) == (0, 0)
    assert len(store.content()) == 3


SAID = {
    "cache_epoch": [None, "x", [1], 1e300, -5],
    "fields_format": [None, {}],
    "root_hash": [None, 5, "zz", "abc", {}],
    "hash_algorithm": [None, 5, "md5", {}],
    "cache": [None, 5, [], {"hash_block_tokens": 0}, {"hash_block_tokens": -16, "chunk_tokens": 4},
              {"hash_block_tokens": 16, "chunk_tokens": 0},
              {"hash_block_tokens": True, "chunk_tokens": 256},
              {"hash_block_tokens": 16, "chunk_tokens": "256"}],
    "groups": [5, "x", [5], [{}], [{"group": -1}], [{"group": 300}], [{"group": "0"}],
               [{"group": 0, "window_tokens": "x"}], [{"group": 0, "window_tokens": -1}]],
    "parallel": [5, {"tensor_parallel_size": 0}, {"tensor_parallel_size": "2"},
                 {"tensor_parallel_size": 10**9}, {"pipeline_parallel_size": 1.5}],
    "model": [5, [], "name", {"path": {}}, None],
    "speculation": [5, []],
    "attention": ["x"],
}  # fmt: skip


@pytest.mark.parametrize("kind", ["disk", "redis"])
def test_a_description_that_no_engine_wrote_raises_nothing(kind, tmp_path, server):
    """A namespace whose description is JSON of any shape: every verb says something, none falls."""
    store = Folder(tmp_path / "store") if kind == "disk" else Server(server)
    tokens = tmp_path / "tokens"
    tokens.write_text(json.dumps(list(range(600))))
    good = {
        **words(), "cache_epoch": 0, "fields_format": 1, "root_hash": "ab" * 32,
        "hash_algorithm": "sha256", "cache": {"hash_block_tokens": 16, "chunk_tokens": 256},
        "groups": [{"group": 0, "kind": "full"}],
    }  # fmt: skip
    if kind == "redis":
        with server.client() as client:
            client.flushall()
    put(store.tier(description=good), range(3))
    verbs = (["stat"], ["verify"], ["explain", tokens], ["pin", tokens],
             ["prune", "--stale", "--dry-run"])  # fmt: skip
    for name, values in SAID.items():
        for value in values:
            _describe(store, {**good, name: value})
            assert here("stat", store.target, "--fields")[0] == 0
            assert here("explain", store.target, tokens)[0] == 0
            for verb, *more in verbs:
                code, _, err = here(verb, store.target, *more, "--json")
                assert code in ((1,) if verb == "pin" else (0,)), (name, value, verb, err)


def _describe(store, description):
    if store.kind == "disk":
        content = pack_namespace(NAMESPACES[0], description)
        Path(store.target, NAMESPACES[0].hex(), "namespace.json").write_bytes(content)
    else:
        with store.server.client() as client:
            (name,) = client.keys(f"kvtier:ns:{NAMESPACES[0].hex()}")
            client.set(name, json.dumps(description))
