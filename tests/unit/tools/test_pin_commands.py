"""`kvtier pin` and `unpin`, and who honours a pin: evictors, prune, rm, Redis itself."""

from __future__ import annotations

import json
import os
import random
import stat
import time

import pytest

from kvtier.storage.disk import DiskTier
from kvtier.storage.key import chunk_key, key_name
from kvtier.storage.redis import RedisTier
from kvtier.storage.redis_url import parse_redis_url
from kvtier.tools.redis_server import RedisServer

from .stores import NAMESPACES, RAW_BYTES, Folder, Server, golden, here, key, put
from .test_explain import chain, described, record, save

EACH = 4096 + RAW_BYTES
TOKENS = random.Random(11).choices(range(32000), k=300)


@pytest.fixture(scope="module")
def server():
    with RedisServer() as started:
        yield started


@pytest.fixture(params=["disk", "redis"])
def store(request, tmp_path):
    if request.param == "disk":
        (tmp_path / "store").mkdir()
        return Folder(tmp_path / "store")
    started = request.getfixturevalue("server")
    with started.client() as client:
        client.flushall()
    return Server(started)


@pytest.fixture
def prompt(tmp_path):
    path = tmp_path / "prompt.json"
    path.write_text(json.dumps(TOKENS))
    return path


def run(*arguments, code=0):
    found, out, err = here(*arguments)
    assert found == code, err
    return out if code == 0 else err


def pinned(store, *arguments):
    return json.loads(run("pin", store.target, *arguments, "--capacity", "1MiB", "--json"))


def test_pin_is_seen_everywhere_and_goes_again(store, prompt, tmp_path):
    """A prompt's records are marked in ls, show and stat until they are unpinned."""
    save(store, TOKENS, [64, 128, 192, 256, 288])
    save(store, TOKENS[:64] + TOKENS[100:164], [128])
    record(tmp_path / "rec", [("r-1-ab", TOKENS, 0)])
    made = pinned(store, "--request", "r-1", "--recording", tmp_path / "rec", "--up-to", 200)
    golden("pin", made)
    assert (made["tokens"], made["records"], made["limit_bytes"]) == (192, 3, 512 << 10)
    again = pinned(store, prompt, "--up-to", 192, "--note", "the tools")
    assert again["pin"] == made["pin"]
    rows = json.loads(run("ls", store.target, "--json"))["records"]
    ends = chain(TOKENS)
    names = {key_name(chunk_key(ends[end], 0)) for end in (64, 128, 192)}
    assert {row["key"] for row in rows if row["pinned"]} == names
    assert run("ls", store.target).count("  pinned\n") == 3
    shown = json.loads(run("show", store.target, min(names), "--json", "--no-neighbours"))
    assert shown["records"][0]["pins"] == [made["pin"]]
    (listed,) = json.loads(run("stat", store.target, "--json"))["pins"]
    assert {k: again[k] for k in listed} == listed
    assert "the tools" in run("stat", store.target)
    run("unpin", store.target, "0000", code=1)
    out = json.loads(run("unpin", store.target, made["pin"][:5], "--json"))
    golden("unpin", out)
    assert [p["pin"] for p in out["unpinned"]] == [made["pin"]]
    assert json.loads(run("stat", store.target, "--json"))["pins"] == []
    assert run("ls", store.target).count("pinned") == 0
    assert len(rows) == 6  # nothing was deleted


def test_prune_and_rm_leave_what_is_pinned(store):
    """They say so; --pinned takes it, and the pin with it."""
    put(store.tier(), range(6))
    put(store.tier(NAMESPACES[1]), range(2))
    made = pinned(store, "--all", "--namespace", NAMESPACES[1].hex())
    assert (made["records"], made["tokens"]) == (2, 0)
    for said, *arguments in (
        ("2 pinned records stay", "prune", store.target, "--to-size", 0, "--yes"),
        ("2 pinned records stay", "rm", store.target, "--all", "--yes"),
        ("1 pinned record stays", "rm", store.target, key_name(key(1)), "--namespace",
         NAMESPACES[1].hex()),
    ):  # fmt: skip
        assert said in run(*arguments)
        assert {place[0] for place in store.content()} == {NAMESPACES[1].hex()}
    out = json.loads(run("prune", store.target, "--to-size", 0, "--yes", "--json"))
    assert (out["deleted"], out["pinned"]) == (0, 2)
    out = json.loads(run("rm", store.target, "--all", "--pinned", "--yes", "--json"))
    assert (out["deleted"], out["pinned"]) == (2, 0)
    assert json.loads(run("stat", store.target, "--json"))["pins"] == []


def test_pins_are_bounded(store, prompt):
    """One line for what would fill half the store, what is not stored, and half a question."""
    save(store, TOKENS, [64, 128, 192, 256])
    before = store.content()
    for code, words, arguments in (
        (1, "more than", (prompt, "--capacity", "20KiB")),
        *([(2, "give --capacity", (prompt,))] if store.kind == "redis" else []),
        (2, "give token ids", ()),
        (2, "give token ids", (prompt, "--all", "--namespace", "61")),
        (2, "--all needs --namespace", ("--all", "--capacity", "1GiB")),
        (1, "nothing of this prompt", (prompt, "--up-to", 60, "--capacity", "1GiB")),
        (2, "is no size", (prompt, "--capacity", "much")),
    ):
        err = run("pin", store.target, *arguments, code=code)
        assert words in err, arguments
        assert err.count("\n") == 1
    assert json.loads(run("stat", store.target, "--json"))["pins"] == []
    first = pinned(store, prompt, "--up-to", 64)
    held = first["stored_bytes"]
    err = run("pin", store.target, prompt, "--up-to", 128, "--capacity", 5 * held, code=1)
    assert "beside" in err  # 2 chunks beside 1, of 2.5
    run("pin", store.target, prompt, "--capacity", "1GiB", "--dry-run")
    assert len(json.loads(run("stat", store.target, "--json"))["pins"]) == 1
    assert store.content() == before


# -- a folder ----------------------------------------------------------------------------


def there(folder, numbers, namespace=NAMESPACES[0]):
    names = {path.stem for path in folder.glob(f"{namespace.hex()}/r*/*/*/*.kvt")}
    return [n for n in numbers if key_name(key(n)) in names]


def test_engines_evict_around_pins(tmp_path):
    """Whoever evicts, the owner of a record or another namespace's engine, pinned files stay."""
    store = Folder(tmp_path)
    capacity = 10 * EACH
    old = DiskTier(store.target, NAMESPACES[0], 0, capacity, description=described())
    put(old, range(4))
    run("pin", store.target, "--all", "--namespace", NAMESPACES[0].hex())
    tier = DiskTier(store.target, NAMESPACES[0], 0, capacity)
    assert tier.wait_complete(10)  # what is written during the first count may be counted twice
    put(tier, range(10, 26))
    assert there(tmp_path, range(4)) == [0, 1, 2, 3]
    assert len(there(tmp_path, range(10, 26))) == 6
    put(DiskTier(store.target, NAMESPACES[1], 0, capacity), range(100, 130))
    assert there(tmp_path, range(4)) == [0, 1, 2, 3]
    assert there(tmp_path, range(100, 130), NAMESPACES[1])
    assert len(there(tmp_path, range(10, 26))) < 6
    put(DiskTier(store.target, NAMESPACES[0], 0, capacity), range(30, 60))
    assert there(tmp_path, range(4)) == [0, 1, 2, 3]
    used = sum(path.stat().st_size for path in tmp_path.rglob("*.kvt"))
    assert used <= capacity
    (file,) = (tmp_path / "pins").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_running_engine_hears_of_pins(tmp_path):
    """Pinned or unpinned while a tier is open: its next eviction goes by it."""
    store = Folder(tmp_path)
    tier = DiskTier(store.target, NAMESPACES[0], 0, 6 * EACH, description=described())
    assert tier.wait_complete(10)

    def add(numbers):
        closing, tier.close = tier.close, lambda: None
        put(tier, numbers)
        tier.close = closing

    add(range(3))
    deadline_s = time.monotonic() + 10
    while not (tmp_path / ".kvtier/capacity").exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert (tmp_path / ".kvtier/capacity").read_text() == f"{6 * EACH}\n"
    name = json.loads(
        run("pin", store.target, "--all", "--namespace", NAMESPACES[0].hex(), "--json")
    )["pin"]
    add(range(3, 9))
    assert there(tmp_path, range(3)) == [0, 1, 2]
    assert 0 < len(there(tmp_path, range(3, 9))) <= 3
    run("unpin", store.target, name)
    time.sleep(1.0)  # a chunk far from its prompt's start looks older than it is
    add(range(9, 17))
    assert there(tmp_path, range(3)) == []
    tier.close()


def test_pins_never_fill_a_store(tmp_path, caplog):
    """With a smaller capacity than when they were made, pins beyond half of it do not bind."""
    store = Folder(tmp_path)
    put(store.tier(), range(2))
    put(store.tier(NAMESPACES[1]), range(6))
    pinned(store, "--all", "--namespace", NAMESPACES[0].hex())
    pinned(store, "--all", "--namespace", NAMESPACES[1].hex())
    tier = DiskTier(store.target, NAMESPACES[0], 0, 6 * EACH)
    assert tier.wait_complete(10)
    put(tier, range(10, 20))
    assert there(tmp_path, range(2)) == [0, 1]
    assert len(there(tmp_path, range(6), NAMESPACES[1])) < 4
    assert there(tmp_path, range(10, 20))
    assert "the newest ones are not kept" in caplog.text


def test_only_pinned_records_are_left(tmp_path):
    """Where nothing else is left to evict a save is refused at once, and nothing spins."""
    store = Folder(tmp_path)
    put(store.tier(), range(4))
    pinned(store, "--all", "--namespace", NAMESPACES[0].hex())
    tier = DiskTier(store.target, NAMESPACES[0], 0, 8 * EACH)
    assert tier.wait_complete(10)
    began_s = time.monotonic()
    assert not tier._evictor.make_room(5 * EACH, 8 * EACH)
    assert time.monotonic() - began_s < 5
    assert there(tmp_path, range(4)) == [0, 1, 2, 3]
    tier.close()


def test_what_is_no_pin_is_left_out(tmp_path):
    """Broken, foreign and hidden files among the pins change nothing."""
    store = Folder(tmp_path)
    put(store.tier(), range(2))
    made = pinned(store, "--all", "--namespace", NAMESPACES[0].hex())
    good = (tmp_path / "pins" / f"{made['pin']}.json").read_bytes()
    os.mkfifo(tmp_path / "pins" / ("a" * 12 + ".json"))
    for number, data in enumerate((b"", b"[]", b"{}", good[:-9], good.replace(b"1", b"2", 1))):
        (tmp_path / "pins" / f"{number:012x}.json").write_bytes(data)
    (tmp_path / "pins" / "readme").write_bytes(good)
    assert [p["pin"] for p in json.loads(run("stat", store.target, "--json"))["pins"]] == [
        made["pin"]
    ]
    run("unpin", store.target, "--all")
    assert run("ls", store.target).count("pinned") == 0


# -- Redis ----------------------------------------------------------------------------------


def lives(server):
    """Seconds to live of every value of a record, -1 for ever."""
    with server.client() as client:
        return {name: client.ttl(name) for name in client.scan_iter("kvtier:*:r*")}


def open_redis(store):
    return RedisTier(parse_redis_url(store.target, stripe=8192, ttl=1000.0), NAMESPACES[0], 0)


def test_pinned_records_have_no_time_to_live(server):
    """No stripe of a pinned record has one, its use gives it none; unpinned, it has one again."""
    store = Server(server)
    with server.client() as client:
        client.flushall()
    put(open_redis(store), range(4))
    assert {0 < ttl <= 1600 for ttl in lives(server).values()} == {True}
    put(store.tier(NAMESPACES[1]), [9])  # another namespace is not touched
    made = json.loads(
        run(
            *("pin", store.target, "--all", "--namespace", NAMESPACES[0].hex(), "--json"),
            *("--capacity", "1GiB"),
        )
    )
    held = {n: ttl for n, ttl in lives(server).items() if NAMESPACES[0].hex().encode() in n}
    assert set(held.values()) == {-1}
    assert len(held) == 8
    tier = open_redis(store)
    tier.touch([key(n) for n in range(4)])
    assert {lives(server)[name] for name in held} == {-1}
    put(open_redis(store), [20])
    tier.touch([key(20)])
    assert sum(ttl > 0 for n, ttl in lives(server).items() if n not in held) == 4
    run("unpin", store.target + "?ttl=500", made["pin"])
    assert {0 < lives(server)[name] <= 1100 for name in held} == {True}
    tier.close()


def test_policies_that_evict_pinned_records_are_named(server):
    """Under allkeys-* a pin is made, and it is said that the server will not keep it."""
    store = Server(server)
    put(store.tier(), range(2))
    with server.client() as client:
        client.config_set("maxmemory", "100mb")
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            code, out, err = here("pin", store.target, "--all", "--namespace", "61", "--json")
            data = json.loads(out)
            assert (code, data["limit_bytes"]) == (0, 50 << 20)
            assert "allkeys-lru" in data["warning"]
            code, _, err = here("pin", store.target, "--all", "--namespace", "61")
            assert (code, err.count("\n")) == (0, 1)
            client.config_set("maxmemory-policy", "volatile-lru")
            out = run("pin", store.target, "--all", "--namespace", "61", "--json")
            assert json.loads(out)["warning"] is None
        finally:
            client.config_set("maxmemory", "0")
            client.config_set("maxmemory-policy", "noeviction")


@pytest.mark.parametrize("verb", ["pin", "warm"])
def test_empty_and_foreign_stores(tmp_path, server, prompt, verb):
    """Nothing to pin or to warm, no store, nobody there: one line and the code that says so."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("mine")
    with server.client() as client:
        client.flushall()
    for target, code in (
        (tmp_path / "empty", 1),
        (server.url, 1),
        (tmp_path / "foreign", 5),
        (tmp_path / "none", 4),
        ("redis://127.0.0.1:9", 4),
    ):
        found, _, err = here(verb, target, prompt)
        assert (found, err.count("\n")) == (code, 1), (target, err)
    assert os.listdir(tmp_path / "empty") == []
    assert here("unpin", tmp_path / "empty", "--all")[0] == 0
    assert here("unpin", tmp_path / "empty", "ab")[0] == 1


def test_a_damaged_record_is_pinned_by_its_key(tmp_path, prompt):
    """Pinning reads no payload; what is bad is quarantined all the same, its repair is pinned."""
    (tmp_path / "store").mkdir()
    store = Folder(tmp_path / "store")
    put(store.tier(), range(2))
    pinned(store, "--all", "--namespace", NAMESPACES[0].hex())
    store.damage(1)
    code, out, _ = here("verify", store.target, "--fix")
    assert (code, "1 quarantined" in out) == (0, True)
    assert there(tmp_path / "store", range(2)) == [0]
    put(store.tier(), [1])
    rows = json.loads(run("ls", store.target, "--json"))["records"]
    assert [row["pinned"] for row in rows] == [True, True]
