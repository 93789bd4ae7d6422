"""The verbs that change a store: prune, rm, copy; on a folder and on a real server."""

from __future__ import annotations

import fcntl
import json
import os
import time

import pytest

from kvtier.storage.key import key_name
from kvtier.tools.exit_codes import ExitCode
from kvtier.tools.redis_server import RedisServer
from kvtier.tools.store_base import Capacity

from ...redis_server import eventually
from .stores import (
    NAMESPACES,
    RAW_BYTES,
    Folder,
    Server,
    golden,
    here,
    key,
    kvtier,
    put,
    words,
)


@pytest.fixture(scope="module")
def server():
    with RedisServer() as started:
        yield started


@pytest.fixture(params=["disk", "redis"])
def store(request, tmp_path):
    """Two namespaces, two ranks: 3 + 3 + 2 records."""
    if request.param == "disk":
        (tmp_path / "store").mkdir()
        made = Folder(tmp_path / "store")
    else:
        started = request.getfixturevalue("server")
        with started.client() as client:
            client.flushall()
            client.set("mine", "x")
        made = Server(started)
    put(made.tier(), range(3))
    put(made.tier(rank=1), range(3))
    put(made.tier(NAMESPACES[1], description=words("other")), range(5, 7))
    return made


def names(store):
    return sorted(store.content())


def test_nothing_is_deleted_without_being_asked(store):
    """No condition, no answer, or --dry-run: all is there afterwards."""
    before = store.content()
    for code, arguments in (
        (2, ["prune", store.target]),
        (2, ["prune", store.target, "--unused", "0s"]),
        (0, ["prune", store.target, "--unused", "0s", "--dry-run"]),
        (2, ["rm", store.target]),
        (2, ["rm", store.target, "--all"]),
        (2, ["rm", store.target, "--namespace", "61"]),
        (0, ["rm", store.target, "--all", "--dry-run"]),
        (0, ["rm", store.target, key_name(key(1)), "--dry-run"]),
        (2, ["rm", store.target, "--all", key_name(key(1)), "--yes"]),
        (2, ["prune", store.target, "--unused", "soon", "--yes"]),
        (2, ["prune", store.target, "--to-size", "much", "--yes"]),
    ):
        found, _, err = kvtier(*arguments, input="")
        assert found == code, (arguments, err)
        assert store.content() == before


def test_prune_by_namespace_and_prefix(store):
    """Every condition must hold."""
    code, out, _ = kvtier(
        *("prune", store.target, "--namespace", "61", "--prefix", key_name(key(1))[:6]),
        *("--yes", "--json"),
    )
    data = json.loads(out)
    golden("prune", data)
    assert code == 0
    assert (data["deleted"], data["records"], data["dry_run"]) == (2, 2, False)
    left = names(store)
    assert len(left) == 6
    assert not any(name == key_name(key(1)) for _, _, name in left)


def test_prune_to_a_size_takes_what_was_used_least(tmp_path):
    """The oldest go, no more than is needed, and with --unused only those old enough."""
    store = Folder(tmp_path)
    put(store.tier(), range(4))
    now_s = time.time()
    paths = {}
    for number in range(4):
        name = key_name(key(number))
        (path,) = tmp_path.rglob(f"{name}.kvt")
        paths[number] = path
        age_s = (4 - number) * 3600
        os.utime(path, (now_s - age_s, now_s - age_s))
    each = 4096 + RAW_BYTES
    code, out, _ = kvtier("prune", store.target, "--to-size", 3 * each, "--yes", "--json")
    assert (code, json.loads(out)["deleted"]) == (0, 1)
    assert [n for n, path in paths.items() if path.exists()] == [1, 2, 3]
    kvtier("prune", store.target, "--unused", "150m", "--yes")
    assert [n for n, path in paths.items() if path.exists()] == [2, 3]
    kvtier("prune", store.target, "--unused", "1d", "--yes")
    assert [n for n, path in paths.items() if path.exists()] == [2, 3]


def test_prune_by_age_needs_a_server_that_tells_ages():
    """Under an LFU policy all records look as if just used: said, and nothing is deleted."""
    with RedisServer("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lfu") as server:
        store = Server(server)
        put(store.tier(), range(3))
        for condition in (["--unused", "0s"], ["--to-size", "0"]):
            code, out, err = here("prune", store.target, *condition, "--yes")
            assert (code, out) == (1, "")
            assert "allkeys-lfu" in err
        assert len(names(store)) == 3
        assert here("prune", store.target, "--namespace", "61", "--yes")[0] == 0
        assert names(store) == []


def test_an_engine_hears_of_what_a_command_deletes(tmp_path):
    """A tier that is open meanwhile finds the record gone, and its counter stays right."""
    store = Folder(tmp_path)
    put(store.tier(), range(3))
    engine = store.tier(poll_s=0.02)
    assert engine.wait_complete(10)
    engine.changes()
    assert kvtier("rm", store.target, key_name(key(1)))[0] == 0
    end_s = time.monotonic() + 10
    removed = ()
    while not removed and time.monotonic() < end_s:
        time.sleep(0.02)
        removed = engine.changes().removed
    assert removed == (key(1),)
    assert engine._usage.used_bytes() == 2 * (4096 + RAW_BYTES)
    engine.close()


def test_rm_takes_a_key_a_namespace_or_all(store):
    """Just what is named; of an emptied namespace nothing is left; foreign keys stay."""
    code, out, _ = kvtier("rm", store.target, key_name(key(2))[:10], "--json")
    data = json.loads(out)
    golden("rm", data)
    assert (code, data["deleted"]) == (0, 2)
    assert len(names(store)) == 6
    assert kvtier("rm", store.target, "--namespace", "62", "--yes")[0] == 0
    assert {name[0] for name in names(store)} == {NAMESPACES[0].hex()}
    spaces = json.loads(kvtier("stat", store.target, "--json")[1])["namespaces"]
    assert [space["namespace"] for space in spaces] == [NAMESPACES[0].hex()]
    assert kvtier("rm", store.target, "--all", "--yes")[0] == 0
    assert names(store) == []
    if store.kind == "redis":
        with store.server.client() as client:
            assert client.keys() == [b"mine"]


def test_rm_of_many_asks_a_server_few_times(server):
    """Hundreds of records are deleted in batches, by UNLINK, not in a round trip or three each."""
    store = Server(server)
    with server.client() as client:
        client.flushall()
        put(store.tier(), range(300))
        client.config_resetstat()
        before = client.info("stats")["total_reads_processed"]
        code, out, err = here("rm", store.target, "--all", "--yes", "--json")
        assert (code, json.loads(out)["deleted"]) == (0, 300), err
        assert client.dbsize() == 0
        assert client.info("stats")["total_reads_processed"] - before < 150
        given = {name.removeprefix("cmdstat_") for name in client.info("commandstats")}
        assert not given & {"keys", "flushdb", "del"}


def test_rm_of_everything_leaves_no_part_of_a_damaged_record(server):
    """A head that cannot be read does not tell its stripes: they go with the namespace."""
    store = Server(server)
    with server.client() as client:
        client.flushall()
        put(store.tier(), range(3))
        put(store.tier(NAMESPACES[1], description=words("other")), range(5, 7))
        for name in client.scan_iter("kvtier:*:h"):
            client.set(name, b"0123456789") if name[7:9] == b"61" else None
        assert here("rm", store.target, "--namespace", "61", "--yes")[0] == 0
        left = list(client.scan_iter("*"))
        assert left
        assert not [name for name in left if NAMESPACES[0].hex().encode() in name]
        client.set(next(client.scan_iter("kvtier:*:h")), b"")
        assert here("rm", store.target, "--all", "--yes")[0] == 0
        assert client.dbsize() == 0


def test_rm_on_a_replica_says_that_nothing_was_deleted(server):
    """A server that takes no writes: an error in one line, and all is there afterwards."""
    store = Server(server)
    with server.client() as client:
        client.flushall()
    put(store.tier(), range(3))
    with RedisServer("--replicaof", "127.0.0.1", str(server.port)) as replica:
        with replica.client() as client:
            eventually(lambda: client.dbsize() >= 7)
        code, out, err = here("rm", replica.url, "--all", "--yes")
        assert code != 0
        assert "READONLY" in err
        assert " deleted" not in out
        assert json.loads(here("stat", replica.url, "--json")[1])["records"] == 3


def test_an_empty_name_means_nothing(store):
    """An empty variable in a script deletes nothing, also where one thing alone could be meant."""
    assert kvtier("rm", store.target, "--namespace", "61", "--yes")[0] == 0
    left = [row["key"] for row in json.loads(here("ls", store.target, "--json")[1])["records"]]
    assert here("rm", store.target, left[0])[0] == 0
    for verb, *more in (
        ("rm", ""),
        ("show", ""),
        ("rm", "--namespace", "", "--yes"),
        ("prune", "--namespace", "", "--yes"),
        ("prune", "--prefix", "", "--yes"),
        ("stat", "--namespace", ""),
        ("unpin", ""),
    ):
        assert here(verb, store.target, *more)[0] == 2, (verb, more)
    assert len(names(store)) == len(left) - 1 == 1


def test_rm_of_what_is_not_there_is_an_error(store):
    """1, and all is there afterwards."""
    assert kvtier("rm", store.target, "f" * 20)[0] == 1
    assert len(names(store)) == 8


def test_a_name_that_nothing_has_ends_with_1_everywhere(store):
    """A key, a pin, a namespace: nothing begins so; 2 is for names that say too little."""
    for verb, *more in (
        ("show", "f" * 20),
        ("rm", "f" * 20),
        ("unpin", "f" * 20),
        ("stat", "--namespace", "ff"),
        ("ls", "--namespace", "ff"),
        ("rm", "--namespace", "ff", "--yes"),
    ):
        assert here(verb, store.target, *more)[0] == 1, (verb, more)
    assert len(names(store)) == 8


def test_one_record_is_not_called_records(tmp_path):
    """What people read counts as people do: 1 record, 2 records."""
    store = Folder(tmp_path / "store")
    put(store.tier(), [1])
    name = key_name(key(1))
    assert here("stat", store.target)[1].startswith(f"{store.target}: 1 record, ")
    assert "1 of rank 0\n" in here("stat", store.target)[1]
    assert "would delete 1 record, " in here("rm", store.target, name, "--dry-run")[1]
    assert "would copy 1 record, " in here("copy", store.target, tmp_path / "to", "--dry-run")[1]
    copied = here("copy", store.target, tmp_path / "to")[1]
    assert copied.startswith("1 record copied, ")
    assert "other keys" not in copied  # nothing is encrypted here
    assert "1 record checked, " in here("verify", store.target)[1]
    assert here("rm", store.target, name)[1].endswith("\n1 record deleted\n")
    assert here("prune", store.target, "--prefix", "f")[1] == "0 records deleted\n"


@pytest.mark.parametrize("to", ["disk", "redis"])
def test_copy_moves_records_between_any_two_stores(store, to, tmp_path):
    """Every record with every byte; twice changes nothing; both stores verify."""
    other = RedisServer() if to == "redis" else None
    try:
        target = Server(other) if other else Folder(tmp_path / "new")
        code, out, _ = kvtier("copy", store.target, target.target, "--dry-run", "--json")
        assert (code, json.loads(out)["copied"]) == (0, 0)
        code, out, err = kvtier("copy", store.target, target.target, "--json")
        data = json.loads(out)
        assert code == 0, err
        golden("copy", data)
        assert (data["copied"], data["there"], data["complete"]) == (8, 0, True)
        assert len(names(target)) == 8
        code, out, _ = kvtier("copy", store.target, target.target, "--json")
        assert (json.loads(out)["copied"], json.loads(out)["there"]) == (0, 8)
        assert kvtier("verify", target.target)[0] == 0
        spaces = json.loads(kvtier("stat", target.target, "--json")[1])["namespaces"]
        assert [space["words"]["model"] for space in spaces] == ["tiny", "other"]
        tier = target.tier()
        read = bytearray(RAW_BYTES)
        from kvtier.storage.tier import RecordSpec

        tier.get(RecordSpec(key(2), 512, 768, RAW_BYTES), [memoryview(read)])
        tier.close()
        assert int.from_bytes(read[:8], "little") == 2
    finally:
        if other:
            other.close()


def test_copy_keeps_last_use_compression_and_seal(tmp_path):
    """A record goes as it is stored: the same codec, the same seal without the key, its age."""
    from kvtier.storage.keyring import Key, KeyRing

    secret = KeyRing((Key(bytes(range(32))),))
    old, new = Folder(tmp_path / "old"), Folder(tmp_path / "new")
    put(old.tier(codec="zstd"), range(2), compressible=True)
    put(old.tier(NAMESPACES[1], keys=secret), range(2, 4))
    old_s = time.time() - 86400
    for path in (tmp_path / "old").rglob("*.kvt"):
        os.utime(path, (old_s, old_s))
    assert kvtier("copy", old.target, new.target)[0] == 0
    assert new.content() == old.content()
    for path in (tmp_path / "new").rglob("*.kvt"):
        assert abs(path.stat().st_mtime - old_s) < 0.01


def test_a_copy_that_was_ended_goes_on_though_little_room_is_left(store, tmp_path, monkeypatch):
    """What the target has already needs no room in it: a second run copies the rest."""
    from kvtier.tools import store_copy, store_disk

    target = tmp_path / "new"
    stop = store_copy._copy_one

    def stopping(*arguments, **options):
        if arguments[4].copied == 5:
            raise KeyboardInterrupt
        stop(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(store_copy, "_copy_one", stopping)
        code, out, _ = here("copy", store.target, target, "--json")
    assert (code, json.loads(out)["copied"], json.loads(out)["complete"]) == (130, 5, False)
    one = json.loads(here("ls", store.target, "--json")[1])["records"][0]["stored_bytes"]
    for room, expected in ((2.5, (1, 0)), (3.5, (0, 3))):
        monkeypatch.setattr(
            store_disk.DiskStore,
            "capacity",
            lambda _, room=room: Capacity(None, None, int(room * one), None),
        )
        code, out, err = here("copy", store.target, target, "--json")
        assert (code, json.loads(out)["copied"]) == expected, err
    assert len(names(Folder(target))) == 8


def test_copy_leaves_damaged_records_behind(store, tmp_path):
    """They are named, the rest is copied, and the exit code says that something was found."""
    store.damage(1, rank=1)
    code, out, _ = kvtier("copy", store.target, tmp_path / "new", "--json")
    data = json.loads(out)
    assert code == 3
    assert (data["copied"], data["damaged_records"]) == (7, 1)
    assert data["damaged"][0]["key"] == key_name(key(1))
    assert len(names(Folder(tmp_path / "new"))) == 7


def test_copy_onto_itself_is_wrong_use(store):
    """2, and nothing happens."""
    assert kvtier("copy", store.target, store.target)[0] == 2
    assert len(names(store)) == 8


OLD_KEY, NEW_KEY, OTHER_KEY = ("11" * 32, "22" * 32, "33" * 32)


def ring(*keys):
    from kvtier.storage.keyring import Key, KeyRing

    return KeyRing(Key(bytes.fromhex(key)) for key in keys)


def key_file(tmp_path, *keys):
    path = tmp_path / "keys"
    path.write_text("\n".join(keys))
    return path


def opened_with(store, keys, numbers):
    """What an engine with these keys reads of records."""
    from kvtier.storage.errors import RecordError
    from kvtier.storage.tier import RecordSpec

    tier, got = store.tier(keys=keys), []
    for number in numbers:
        read = bytearray(RAW_BYTES)
        spec = RecordSpec(key(number), 256 * number, 256 * number + 256, RAW_BYTES)
        try:
            tier.get(spec, [memoryview(read)])
            got.append(int.from_bytes(read[:8], "little"))
        except RecordError:
            got.append(None)
    tier.close()
    return got


@pytest.fixture(params=["disk", "redis"])
def sealed_store(request, tmp_path):
    """Two records sealed with an old key, one with another's, one without a seal."""
    server = RedisServer() if request.param == "redis" else None
    made = Server(server) if server else Folder(tmp_path / "store")
    put(made.tier(keys=ring(OLD_KEY)), [0, 1])
    put(made.tier(keys=ring(OTHER_KEY)), [2])
    put(made.tier(), [3])
    yield made
    if server:
        server.close()


def test_copy_changes_the_encryption_key_in_place(sealed_store, tmp_path):
    """Old and plain records get the new key; then the old key is needed, and opens, no more."""
    store, keys = sealed_store, key_file(tmp_path, NEW_KEY, OLD_KEY)
    command = ("copy", store.target, store.target, "--encryption-key-file", keys, "--json")
    code, out, err = kvtier(*command, "--dry-run")
    assert (code, json.loads(out)["copied"]) == (0, 0), err
    code, out, err = kvtier(*command)
    data = json.loads(out)
    assert code == 3, err  # one record is locked
    assert (data["copied"], data["sealed"], data["there"]) == (3, 3, 0)
    assert (data["locked_records"], data["damaged_records"], data["unlike"]) == (1, 0, [])
    assert data["locked"][0]["key"] == key_name(key(2))
    assert opened_with(store, ring(NEW_KEY), range(4)) == [0, 1, None, 3]
    assert opened_with(store, ring(OLD_KEY), range(4)) == [None] * 4
    assert kvtier("verify", store.target)[0] == 0
    code, out, _ = kvtier(*command)
    assert (json.loads(out)["copied"], json.loads(out)["there"]) == (0, 3)
    assert opened_with(store, ring(OTHER_KEY), [2]) == [2]
    assert not any(key in out for key in (OLD_KEY, NEW_KEY))


def test_copy_to_another_store_with_another_key(sealed_store, tmp_path):
    """The new store has the new key, the old one stays what it was."""
    new = Folder(tmp_path / "new")
    environment = {**os.environ, "KVTIER_TEST_KEYS": f"{NEW_KEY},{OLD_KEY},{OTHER_KEY}"}
    code, out, err = kvtier(
        "copy", sealed_store.target, new.target, "--encryption-key-env", "KVTIER_TEST_KEYS",
        env=environment,
    )  # fmt: skip
    assert code == 0, err
    assert "4 records copied (4 encrypted anew)" in out
    assert opened_with(new, ring(NEW_KEY), range(4)) == [0, 1, 2, 3]
    assert opened_with(sealed_store, ring(OLD_KEY), range(4)) == [0, 1, None, None]


def test_copy_in_place_keeps_last_use(tmp_path):
    """A record that was sealed anew is not younger for it; nothing else is left in the folder."""
    store = Folder(tmp_path / "store")
    put(store.tier(keys=ring(OLD_KEY)), range(3))
    old_s = time.time() - 86400
    for path in (tmp_path / "store").rglob("*.kvt"):
        os.utime(path, (old_s, old_s))
    keys = key_file(tmp_path, NEW_KEY, OLD_KEY)
    # By another way to the same place: it is the place that counts.
    os.symlink(tmp_path / "store", tmp_path / "link")
    done = kvtier("copy", store.target, tmp_path / "link", "--encryption-key-file", keys)
    assert done[0] == 0, done[2]
    files = list((tmp_path / "store").rglob("*.kvt"))
    assert len(files) == 3
    assert all(abs(path.stat().st_mtime - old_s) < 0.01 for path in files)
    assert opened_with(store, ring(NEW_KEY), range(3)) == [0, 1, 2]
    assert list((tmp_path / "store").rglob("*.tmp")) == []


def test_copy_with_keys_that_are_none(store, tmp_path):
    """Wrong use is told in one line, before anything is read, and never shows the key."""
    code, out, err = kvtier(
        "copy", store.target, tmp_path / "new", "--encryption-key-file", key_file(tmp_path, "zz")
    )
    assert code != 0
    assert out == ""
    assert len(err.splitlines()) == 1
    assert "zz" not in err
    assert not (tmp_path / "new").exists()


def test_a_target_that_another_process_keeps_locked_is_told_as_such(store, tmp_path):
    """Exit code 6 after a few seconds, and a line that names the lock."""
    target = Folder(tmp_path / "target")
    put(target.tier(), [7])
    with open(tmp_path / "target" / ".kvtier" / "usage", "r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, _, err = kvtier("copy", store.target, target.target)
    assert code == ExitCode.LOCKED == 6
    assert "usage stays locked by another process" in err
    assert kvtier("copy", store.target, target.target)[0] == 0


def test_a_server_without_room_stops_a_copy(store):
    """What was copied stays; one line says that the target takes no more."""
    with RedisServer("--maxmemory", "1mb", "--maxmemory-policy", "noeviction") as full:
        code, _, err = kvtier("copy", store.target, full.url)
        assert code == 1
        assert len(err.splitlines()) == 1
