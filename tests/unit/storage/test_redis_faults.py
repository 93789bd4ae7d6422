"""The Redis tier when the server, the network or the data give way: a miss, and it heals."""

import contextlib
import os
import random
import socket
import threading
import time

import pytest

import kvtier.storage.redis_record as redis_record
from kvtier.storage.errors import (
    DamageReason,
    KVTierError,
    RecordDamaged,
    RecordError,
    RecordMissing,
    TierError,
    TierRefused,
    TierUnavailable,
)
from kvtier.storage.redis import RedisTier
from kvtier.storage.redis_store import RedisStore
from kvtier.storage.testing import (
    NAMESPACE,
    aligned,
    joined,
    key_of,
    payload_of,
    read_back,
    spec_of,
)
from kvtier.storage.tier import PutResult
from kvtier.tools.redis_server import RedisServer, free_port

from ...redis_server import Cluster, Proxy, Watched, eventually, settings_of

BIG = 8 << 20


def tier_at(url, **options):
    return RedisTier(settings_of(url, **options), NAMESPACE, 0)


@pytest.fixture(scope="module")
def shared():
    with RedisServer() as server:
        yield server


@pytest.fixture
def server(shared):
    """A server that runs and is empty."""
    with shared.client() as client:
        client.flushall()
    return shared


@pytest.fixture
def client(server):
    with server.client() as client:
        yield client


@pytest.fixture
def tier(server):
    tier = tier_at(server.url)
    yield tier
    tier.close()


@pytest.fixture
def proxy(server):
    proxy = Proxy(server.port)
    yield proxy
    proxy.close()


def heals(tier, number=1):
    """The tier works: a record goes in and comes out."""
    tier.put(spec_of(number), payload_of(number), replace=True)
    return read_back(tier, number) == joined(payload_of(number))


# -- the server ----------------------------------------------------------------


def test_nobody_listens_takes_no_time_and_nothing_connects_before():
    """A tier over a dead address opens at once; every call says unavailable, quickly."""
    tier = tier_at(f"redis://127.0.0.1:{free_port()}")
    start_s = time.monotonic()
    for call in (
        lambda: tier.put(spec_of(1), payload_of(1)),
        lambda: read_back(tier, 1),
        lambda: tier.contains_many([key_of(1)]),
        lambda: tier.delete([key_of(1)]),
        lambda: list(tier.scan()),
        tier.clear,
    ):
        with pytest.raises(TierUnavailable):
            call()
    tier.touch([key_of(1)])
    assert tier.stat().records == 0
    assert time.monotonic() - start_s < 5
    tier.close()


def test_killed_and_restarted_empty():
    """After a crash the records are missing, not wrong, and the same tier goes on."""
    with RedisServer() as server:
        tier = tier_at(server.url)
        tier.put(spec_of(1), payload_of(1))
        server.kill()
        with pytest.raises(TierUnavailable):
            read_back(tier, 1)
        server.start()
        with pytest.raises(RecordMissing):
            read_back(tier, 1)
        assert tier.contains_many([key_of(1)]) == [False]
        assert heals(tier)
        tier.close()


def test_restart_between_calls_is_not_felt(server, tier, client):
    """Connections that were closed while idle are made anew without an error."""
    tier.put(spec_of(1), payload_of(1))
    tier.contains_many([key_of(1)])
    client.client_kill_filter(skipme=True)
    assert read_back(tier, 1) == joined(payload_of(1))
    client.client_kill_filter(skipme=True)
    assert tier.contains_many([key_of(1)]) == [True]


@pytest.mark.parametrize("act", ["get", "put"])
def test_client_kill_in_the_middle_of_a_value(server, client, act):
    """Connections killed while values pass: whole records or an error of ours, then it goes on."""
    tier = tier_at(server.url, stripe="1MiB")
    payload = payload_of(1, BIG)
    tier.put(spec_of(1, BIG), payload)
    done = threading.Event()

    def kill():
        while not done.is_set():
            with contextlib.suppress(Exception):
                client.client_kill_filter(skipme=True)
            time.sleep(0.002)

    killer = threading.Thread(target=kill)
    killer.start()
    failed = 0
    for _ in range(40):
        try:
            if act == "put":
                tier.put(spec_of(1, BIG), payload, replace=True)
            else:
                assert read_back(tier, 1, BIG) == joined(payload)
        except (TierUnavailable, RecordMissing):
            failed += 1
    done.set()
    killer.join()
    assert failed > 0
    tier.put(spec_of(1, BIG), payload, replace=True)
    assert read_back(tier, 1, BIG) == joined(payload)
    tier.close()


@pytest.mark.parametrize("cut_bytes", [0, 3, 200, 544, 600, 9000, 12000, 16500])
def test_cut_anywhere_in_a_record(proxy, cut_bytes):
    """A connection that ends at any byte of the answer never gives a record."""
    tier = tier_at(proxy.url)
    tier.put(spec_of(1), payload_of(1))
    tier.close()
    tier = tier_at(proxy.url)
    greeting = 10  # what redis-py asks for when it connects
    proxy.fault, proxy.cut_bytes = "cut", cut_bytes + greeting
    with pytest.raises(TierUnavailable):
        read_back(tier, 1)
    proxy.fault = "none"
    assert read_back(tier, 1) == joined(payload_of(1))
    tier.close()


@pytest.mark.parametrize("act", ["get", "put", "contains", "scan"])
def test_silence_ends_in_time(proxy, act):
    """A host that takes everything and says nothing costs one time-out, connected or not."""
    tier = tier_at(proxy.url, timeout="300ms", connect_timeout="300ms")
    tier.put(spec_of(1), payload_of(1))
    calls = {
        "get": lambda: read_back(tier, 1),
        "put": lambda: tier.put(spec_of(2), payload_of(2)),
        "contains": lambda: tier.contains_many([key_of(1)]),
        "scan": lambda: list(tier.scan()),
    }
    proxy.fault = "silent"
    for _ in ("on a kept connection", "on a new one"):
        start_s = time.monotonic()
        with pytest.raises(TierUnavailable):
            calls[act]()
        assert time.monotonic() - start_s < 1.5
    proxy.fault = "none"
    assert heals(tier)
    tier.close()


def test_a_frozen_server_ends_in_time(server, tier):
    """A stopped process, whose kernel still takes bytes, costs one time-out."""
    payload = payload_of(1, BIG)
    tier.put(spec_of(1), payload_of(1))
    server.freeze()
    try:
        start_s = time.monotonic()
        with pytest.raises(TierUnavailable):
            tier.put(spec_of(2, BIG), payload)
        assert time.monotonic() - start_s < 3
    finally:
        server.thaw()
    assert heals(tier)


def test_answers_after_two_seconds(proxy):
    """A server slower than the time-out is unavailable; one that is quicker again serves."""
    tier = tier_at(proxy.url, timeout="500ms", connect_timeout="500ms")
    tier.put(spec_of(1), payload_of(1))
    proxy.fault, proxy.delay_s = "slow", 2.0
    start_s = time.monotonic()
    with pytest.raises(TierUnavailable):
        read_back(tier, 1)
    assert time.monotonic() - start_s < 1
    proxy.fault = "none"
    assert read_back(tier, 1) == joined(payload_of(1))
    tier.close()


def test_a_trickle_ends_in_time():
    """A server that sends byte after byte, never silent for long, does not hold a call for ever."""
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def serve():
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                with sock, contextlib.suppress(OSError):
                    sock.settimeout(0.05)
                    while not stop.is_set():
                        with contextlib.suppress(TimeoutError):
                            data = sock.recv(65536)
                            sock.sendall(b"+OK\r\n" * data.count(b"SETINFO"))
                            if b"GET" in data:
                                sock.sendall(b"$100000\r\n")
                        sock.sendall(b"")
                        if stop.wait(0.02):
                            return
                        with contextlib.suppress(UnboundLocalError):
                            if b"GET" in data:
                                sock.sendall(b"x")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    tier = tier_at(f"redis://127.0.0.1:{listener.getsockname()[1]}", timeout="300ms")
    start_s = time.monotonic()
    with pytest.raises(TierUnavailable):
        read_back(tier, 1)
    assert time.monotonic() - start_s < 3
    tier.close()
    stop.set()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(5)


def test_close_wakes_who_waits(proxy):
    """Close does not wait for a silent server, and a call that does is woken."""
    tier = tier_at(proxy.url, timeout="30s")
    tier.put(spec_of(1), payload_of(1))
    proxy.fault = "silent"
    raised = []

    def wait():
        try:
            read_back(tier, 1)
        except TierError as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.2)
    tier.close()
    thread.join(5)
    assert not thread.is_alive()
    assert raised
    with pytest.raises(TierUnavailable):
        tier.contains_many([key_of(1)])


def test_connections_are_bounded(server, client):
    """Many threads share the given number of connections."""
    tier = tier_at(server.url, connections=2, timeout="20s")
    threads = [
        threading.Thread(target=lambda i=i: tier.put(spec_of(i), payload_of(i))) for i in range(16)
    ]
    before = client.info("clients")["connected_clients"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert client.info("clients")["connected_clients"] - before <= 2 + 2
    assert all(tier.contains_many([key_of(i) for i in range(16)]))
    tier.close()


# -- full, read-only -----------------------------------------------------------


def test_noeviction_full_refuses_saves_and_serves_reads():
    """A full server that evicts nothing refuses saves, keeps nothing of them, and serves reads."""
    with RedisServer("--maxmemory", "12mb", "--maxmemory-policy", "noeviction") as server:
        tier = tier_at(server.url, ttl="none", stripe="256KiB")
        refused = stored = 0
        for number in range(40):
            try:
                tier.put(spec_of(number, 1 << 20), payload_of(number, 1 << 20))
                stored = number
            except TierRefused:
                refused += 1
        assert refused > 20
        assert read_back(tier, stored, 1 << 20) == joined(payload_of(stored, 1 << 20))
        with server.client() as client:
            assert client.dbsize() == 4 * len(list(tier.scan()))  # no orphan stripes
        tier.clear()
        assert heals(tier)
        tier.close()


def test_allkeys_lru_at_a_tenth_of_the_working_set():
    """With most of it evicted every read is whole or a miss, and its remains go."""
    with RedisServer("--maxmemory", "6mb", "--maxmemory-policy", "allkeys-lru") as server:
        tier = tier_at(server.url, stripe="64KiB")
        hits = misses = 0
        for number in range(160):
            size = 256 << 10
            try:
                tier.put(spec_of(number, size), payload_of(number, size))
            except TierRefused:
                continue
            back = random.Random(number).randrange(number + 1)
            try:
                assert read_back(tier, back, size) == joined(payload_of(back, size))
                hits += 1
            except RecordError as error:
                misses += 1
                if isinstance(error, RecordDamaged):
                    tier.quarantine(key_of(back), "truncated")
        assert hits > 0
        assert misses > 0
        tier.close()


def test_a_replica_refuses_saves_and_serves_reads(server, tier):
    """READONLY is a refusal, not an outage."""
    tier.put(spec_of(1), payload_of(1))
    with RedisServer("--replicaof", "127.0.0.1", str(server.port)) as replica:
        reader = tier_at(replica.url)
        eventually(lambda: reader.contains_many([key_of(1)]) == [True])
        assert read_back(reader, 1) == joined(payload_of(1))
        with pytest.raises(TierRefused):
            reader.put(spec_of(2), payload_of(2))
        with pytest.raises(TierUnavailable, match="not cleared"):
            reader.clear()
        assert read_back(reader, 1) == joined(payload_of(1))
        reader.close()


# -- the data ------------------------------------------------------------------


def keys_of(client, number=1):
    """The Redis keys of a record, head first; keys are found as an operator would."""
    wanted = key_of(number)[:-1].hex().encode()
    keys = [key for key in client.scan_iter(count=1000) if wanted in key]
    return sorted(keys, key=lambda key: not key.endswith(b":h"))


DAMAGES = {
    "ten bytes": lambda client, key: client.set(key, b"0123456789"),
    "nothing": lambda client, key: client.set(key, b""),
    "random bytes": lambda client, key: client.set(key, os.urandom(client.strlen(key))),
    "a list": lambda client, key: (client.delete(key), client.rpush(key, "x")),
    "a hash": lambda client, key: (client.delete(key), client.hset(key, "x", "y")),
    "deleted": lambda client, key: client.delete(key),
    "one byte short": lambda client, key: client.set(key, client.get(key)[:-1]),
    "one byte long": lambda client, key: client.append(key, b"x"),
    "one bit": lambda client, key: client.setbit(
        key, 8 * client.strlen(key) - 5, 1 - client.getbit(key, 8 * client.strlen(key) - 5)
    ),
}


@pytest.mark.parametrize("which", ["head", "stripe"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_reads_as_a_miss_and_heals(tier, client, damage, which):
    """Whatever stands for a part of a record: no bytes of it, and a save puts it right."""
    tier.put(spec_of(1), payload_of(1))
    keys = keys_of(client)
    assert len(keys) == 2
    DAMAGES[damage](client, keys[0 if which == "head" else 1])
    wanted = (RecordDamaged, RecordMissing) if damage == "deleted" else RecordDamaged
    with pytest.raises(wanted) as caught:
        read_back(tier, 1)
    if damage in {"a list", "a hash"}:
        assert caught.value.reason is DamageReason.NOT_A_FILE
    tier.quarantine(key_of(1), "damaged")
    assert tier.contains_many([key_of(1)]) == [False]
    assert tier.put(spec_of(1), payload_of(1)) is PutResult.STORED
    assert read_back(tier, 1) == joined(payload_of(1))


@pytest.mark.parametrize("damage", ["ten bytes", "a list", "deleted"])
def test_a_save_replaces_a_broken_record_unasked(tier, client, damage):
    """A record that is not intact is no reason to say EXISTS."""
    for which in (0, 1):
        tier.put(spec_of(1), payload_of(1))
        DAMAGES[damage](client, keys_of(client)[which])
        assert tier.put(spec_of(1), payload_of(1)) is PutResult.STORED
        assert read_back(tier, 1) == joined(payload_of(1))
        client.flushall()


def test_another_records_bytes(tier, client):
    """Another record under this name, whole and intact, is not this record."""
    for number in (1, 2):
        tier.put(spec_of(number, 4096), payload_of(number, 4096))
    client.copy(keys_of(client, 2)[0], keys_of(client, 1)[0], replace=True)
    with pytest.raises(RecordDamaged) as caught:
        read_back(tier, 1, 4096)
    assert caught.value.reason is DamageReason.IDENTITY


def test_an_old_format(tier, client):
    """A record of another format version is damage of its own reason."""
    tier.put(spec_of(1), payload_of(1))
    client.setrange(keys_of(client)[0], 8, b"\x00")
    with pytest.raises(RecordDamaged) as caught:
        read_back(tier, 1)
    assert caught.value.reason is DamageReason.FORMAT


@pytest.mark.parametrize("seed", range(3))
def test_garbage_under_valid_keys(tier, client, seed):
    """Fuzzed heads and stripes never give bytes, and never an exception that is not ours."""
    print("seed", seed)
    rng = random.Random(seed)
    tier.put(spec_of(1), payload_of(1))
    keys = keys_of(client)
    good = [client.get(key) for key in keys]
    for _ in range(150):
        which = rng.randrange(2)
        data = bytearray(good[which])
        kind = rng.randrange(4)
        if kind == 0:
            data = bytearray(rng.randbytes(rng.randrange(3000)))
        elif kind == 1:
            del data[rng.randrange(len(data)) :]
        elif kind == 2:
            at = rng.randrange(min(len(data), 600) - 8)
            data[at : at + 8] = rng.randbytes(8)
        else:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        client.set(keys[which], bytes(data))
        if bytes(data) == good[which]:
            continue
        with pytest.raises(RecordError):
            read_back(tier, 1)
        list(tier.scan())
        assert tier.contains_many([key_of(1)]) == [True]
        client.set(keys[which], good[which])
    assert read_back(tier, 1) == joined(payload_of(1))


@pytest.mark.parametrize("seed", range(2))
def test_a_server_that_speaks_rubbish(seed):
    """Random answers to every call end in an error of ours, in time."""
    print("seed", seed)
    rng = random.Random(seed)
    listener = socket.create_server(("127.0.0.1", 0))
    pieces = [b"$", b"-1", b"\r\n", b"*", b":", b"+OK\r\n", b"-ERR x\r\n", b"9" * 30,
              b"*1048577\r\n",
              b"$544\r\n", b"*2\r\n", b"$-1\r\n", b"\x00" * 9, b"-MOVED 1 127.0.0.1:1\r\n",
              b"-ASK 1 127.0.0.1:1\r\n", b"x" * 70000, b"*-5\r\n", b":--1\r\n"]  # fmt: skip

    def serve():
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                with sock, contextlib.suppress(OSError):
                    data = sock.recv(65536)
                    while data:
                        said = data.count(b"SETINFO")
                        answer = b"+OK\r\n" * said
                        if not said:
                            answer = b"".join(rng.choices(pieces, k=rng.randrange(1, 8)))
                        sock.sendall(answer)
                        data = b"" if rng.random() < 0.7 and not said else sock.recv(65536)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    url = f"redis://127.0.0.1:{listener.getsockname()[1]}"
    tier = tier_at(url, timeout="100ms", connect_timeout="100ms")
    for number in range(25):
        for call in (
            lambda: read_back(tier, 1),
            lambda number=number: tier.put(spec_of(number), payload_of(number)),
            lambda: tier.contains_many([key_of(1), key_of(2)]),
            lambda: tier.delete([key_of(1)]),
            lambda: list(tier.scan()),
        ):
            with contextlib.suppress(KVTierError):
                call()
    tier.close()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(5)


# -- sharing -------------------------------------------------------------------


def test_monitor_shows_no_keys_and_no_flush_and_foreign_keys_survive(server, tier, client):
    """All that the tier does touches its own prefix only, in small steps."""
    client.set("foreign", "1")
    client.set("tt:" + NAMESPACE.hex(), "2")
    foreign_list = b"t:%b:r0:x" % (b"00" * 16)  # another namespace of ours
    client.rpush(foreign_list, "3")
    with client.monitor() as monitor:
        for number in range(5):
            tier.put(spec_of(number), payload_of(number))
        tier.put(spec_of(1), payload_of(1), replace=True)
        read_back(tier, 1)
        tier.contains_many([key_of(1)])
        tier.touch([key_of(1)])
        list(tier.scan())
        tier.delete([key_of(1)])
        tier.quarantine(key_of(2), "test")
        tier.clear()
        client.set("foreign:end", "1")
        seen = []
        while True:
            command = monitor.next_command()["command"]
            if "foreign:end" in command:
                break
            seen.append(command)
    verbs = {line.split()[0].upper() for line in seen}
    assert {"SET", "GET", "EXISTS", "UNLINK", "SCAN", "EXPIRE"} <= verbs
    assert not verbs & {"KEYS", "FLUSHALL", "FLUSHDB", "DEL", "EVAL"}
    assert all(len(line.split()) < 80 for line in seen)
    assert sorted(client.scan_iter()) == sorted(
        [
            b"foreign",
            b"foreign:end",
            b"tt:" + NAMESPACE.hex().encode(),
            b"t:" + b"00" * 16 + b":r0:x",
        ]
    )


def test_two_writers_of_one_key_never_mix(server, monkeypatch):
    """Engines that save a chunk at once: one record, of one of them, and no stripes left."""
    monkeypatch.setattr("kvtier.storage.redis_record._GRACE_MS", 100)
    tiers = [tier_at(server.url, stripe=4096) for _ in range(3)]
    for replace in (False, True):
        for round_ in range(5):
            number = round_ + 20 * replace
            threads = [
                threading.Thread(
                    target=lambda i=i, tier=tier, number=number, replace=replace: tier.put(
                        spec_of(number, 1 << 18), payload_of(i, 1 << 18), replace=replace
                    )
                )
                for i, tier in enumerate(tiers)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            found = read_back(tiers[0], number, 1 << 18)
            assert found in [joined(payload_of(i, 1 << 18)) for i in range(3)]
    with server.client() as client:
        eventually(lambda: client.dbsize() == 10 * 64)  # the replaced ones' are soon gone
    for tier in tiers:
        tier.close()


def test_readers_while_a_record_is_replaced(server):
    """A reader sees one whole record at every moment, and never a miss."""
    writer, reader = tier_at(server.url), tier_at(server.url)
    writer.put(spec_of(1, 1 << 18), payload_of(0, 1 << 18))
    done = threading.Event()

    def write():
        for i in range(60):
            writer.put(spec_of(1, 1 << 18), payload_of(i % 3, 1 << 18), replace=True)
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    whole = [joined(payload_of(i, 1 << 18)) for i in range(3)]
    while not done.is_set():
        assert read_back(reader, 1, 1 << 18) in whole
    thread.join()
    writer.close()
    reader.close()


def test_what_a_crashed_writer_leaves_vanishes(server, client, monkeypatch):
    """Stripes whose head never came are no record and have an end."""
    tier = tier_at(server.url, ttl="none", stripe=4096)

    def crash(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvtier.storage.redis_record._head_commands", crash)
    with pytest.raises(KeyboardInterrupt):
        tier.put(spec_of(1), payload_of(1))
    monkeypatch.undo()
    assert tier.contains_many([key_of(1)]) == [False]
    eventually(lambda: len(keys_of(client)) == 2, 2)
    assert all(0 < client.ttl(key) <= 600 for key in keys_of(client))
    tier.put(spec_of(1), payload_of(1))
    tier.close()


def test_time_to_live(server, client):
    """Records end in time, use renews them, stripes outlive heads; with none they stay."""
    tier = tier_at(server.url, ttl="100s")
    tier.put(spec_of(1), payload_of(1))
    head, stripe = keys_of(client)
    assert 90 < client.ttl(head) <= 100 < client.ttl(stripe)
    client.expire(head, 50)
    client.expire(stripe, 50)
    tier.touch([key_of(1)])
    assert 90 < client.ttl(head) <= 100 < client.ttl(stripe)
    tier.close()
    client.flushall()
    tier = tier_at(server.url, ttl="none")
    tier.put(spec_of(1), payload_of(1))
    assert [client.ttl(key) for key in keys_of(client)] == [-1, -1]
    tier.close()


def test_a_record_is_not_renewed_with_every_use(server, client):
    """A use within a tenth of the time to live costs no command; the next one after it does."""
    now_s = [1000.0]
    settings = settings_of(server.url, ttl="100s")
    tier = RedisTier(settings, NAMESPACE, 0, clock=lambda: now_s[0])
    for number in (1, 2):
        tier.put(spec_of(number), payload_of(number))
    tier.touch([key_of(1)])
    calls = client.info("commandstats")["cmdstat_expire"]["calls"]
    now_s[0] += 9.0
    tier.touch([key_of(1)])
    assert client.info("commandstats")["cmdstat_expire"]["calls"] == calls
    tier.touch([key_of(1), key_of(2)])
    per_record = client.info("commandstats")["cmdstat_expire"]["calls"] - calls
    now_s[0] += 1.0
    tier.touch([key_of(1), key_of(2)])
    assert client.info("commandstats")["cmdstat_expire"]["calls"] - calls == 2 * per_record
    tier.close()


def test_one_round_trip_for_a_lookup(server, client, tier):
    """Hundreds of keys are asked for in one write and one wait."""
    tier.put(spec_of(799), payload_of(799))
    tier.contains_many([key_of(1)])
    before = client.info("stats")["total_reads_processed"]
    found = tier.contains_many([key_of(number) for number in range(800)])
    assert found == [False] * 799 + [True]
    assert client.info("stats")["total_reads_processed"] - before < 20


def test_changes_and_stat_tell_own_doings(tier):
    """What was stored and deleted here is news once; stat follows."""
    tier.put(spec_of(1), payload_of(1))
    tier.put(spec_of(2), payload_of(2))
    assert set(tier.changes().added) == {key_of(1), key_of(2)}
    assert tier.stat().records == 2
    assert tier.stat().stored_bytes > 8 * 4096
    tier.put(spec_of(2), payload_of(3), replace=True)
    assert tier.stat().records == 2
    tier.delete([key_of(1), key_of(9)])
    changes = tier.changes()
    assert (changes.added, changes.removed) == ((key_of(2),), (key_of(1),))
    assert tier.stat().records == 1
    assert tier.changes().added == ()


def test_the_namespace_says_what_it_is(server, client):
    """The namespace's words lie beside its records, and clear leaves them to the other ranks."""
    tier = RedisTier(settings_of(server.url), NAMESPACE, 0, description={"model": "tiny"})
    tier.put(spec_of(1), payload_of(1))
    assert b"tiny" in client.get("t:ns:" + NAMESPACE.hex())
    tier.close()


# -- several servers -----------------------------------------------------------


def test_cluster_spreads_chunks_and_finds_moved_slots():
    """Chunks spread over the nodes, each on one; a slot that moves is found where it is now."""
    cluster = Cluster()
    try:
        tier = tier_at(cluster.url)
        for number in range(30):
            tier.put(spec_of(number), payload_of(number))
        clients = [node.client() for node in cluster.nodes]
        held = [{key[: key.rindex(b":h")] for key in c.scan_iter("*:h")} for c in clients]
        assert all(held)
        for client, mine in zip(clients, held, strict=True):
            for key in client.scan_iter():
                assert any(key.startswith(chunk) for chunk in mine)
        assert all(tier.contains_many([key_of(number) for number in range(30)]))
        # give an empty slot's owner away: keys of slot S move from its node to another
        name = next(iter(held[0])) + b":h"
        slot = clients[0].execute_command("CLUSTER", "KEYSLOT", name)
        number = next(n for n in range(30) if key_of(n)[:-1].hex().encode() in name)
        tier.delete([key_of(number)])
        new_id = clients[1].execute_command("CLUSTER", "MYID")
        for client in (clients[1], clients[0], clients[2]):
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", new_id)
        assert tier.put(spec_of(number), payload_of(number)) is PutResult.STORED
        assert read_back(tier, number) == joined(payload_of(number))
        assert clients[1].exists(name)
        # a node that dies takes its share along, not more
        cluster.nodes[2].kill()
        lost = 0
        for n in range(30):
            try:
                assert read_back(tier, n) == joined(payload_of(n))
            except RecordMissing:
                lost += 1
        assert 0 < lost < 30
        with pytest.raises(TierUnavailable):
            tier.clear()
        tier.close()
        for client in clients:
            client.close()
    finally:
        cluster.close()


def cluster_node_holds(node, number):
    """Whether the slot of a test record is one of a node's, asked of the node."""
    with node.client() as client:
        slot = client.cluster("KEYSLOT", key_of(number)[:-1].hex())
        return slot < 5461  # the first node's share


def test_a_cluster_node_by_a_plain_url_says_what_to_do():
    """MOVED from a URL that names no cluster ends in words, not in wrong answers."""
    cluster = Cluster()
    try:
        tier = tier_at(cluster.nodes[0].url)
        elsewhere = next(n for n in range(20) if not cluster_node_holds(cluster.nodes[0], n))
        with pytest.raises(TierUnavailable, match=r"redis\+cluster"):
            tier.put(spec_of(elsewhere), payload_of(elsewhere))
        with pytest.raises(TierUnavailable, match=r"redis\+cluster"):
            tier.contains_many([key_of(number) for number in range(20)])
        tier.close()
    finally:
        cluster.close()


def test_sentinel_failover_in_mid_traffic():
    """When the master dies the replica takes over: errors of ours for a while, then service."""
    watched = Watched()
    try:
        tier = tier_at(watched.url)
        tier.put(spec_of(1), payload_of(1))
        with watched.master.client() as client:
            client.wait(1, 5000)
        wrong, failed = [], []
        done = threading.Event()

        def traffic(seed):
            rng = random.Random(seed)
            while not done.is_set():
                number = rng.randrange(10)
                try:
                    tier.put(spec_of(number), payload_of(number))
                    if read_back(tier, number) != joined(payload_of(number)):
                        wrong.append(number)
                except (TierError, RecordMissing) as error:
                    failed.append(error)
                    time.sleep(0.02)

        threads = [threading.Thread(target=traffic, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        watched.master.kill()
        with watched.replica.client() as client:
            eventually(lambda: client.info("replication")["role"] == "master", 20)
            eventually(lambda: heals(tier, 50))
            done.set()
            for thread in threads:
                thread.join()
            assert wrong == []
            assert failed
            assert read_back(tier, 1) == joined(payload_of(1))
            assert any(key_of(50)[:-1].hex().encode() in key for key in client.scan_iter())
        tier.close()
    finally:
        watched.close()


def test_nothing_is_left_in_memory(server):
    """Thousands of saves and loads leave no buffers behind."""
    import tracemalloc

    tier = tier_at(server.url)
    into = aligned(4 * 4096)
    payload = payload_of(1)

    def work(times):
        for _ in range(times):
            tier.put(spec_of(1), payload, replace=True)
            tier.get(spec_of(1), [into])

    work(50)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    work(400)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 64 << 10
    tier.close()


def test_a_store_shows_what_is_there(server):
    """Tools find namespaces with their words, ranks, and each record's head."""
    settings = settings_of(server.url)
    other = bytes(range(2, 18))
    for namespace, rank, model in ((NAMESPACE, 0, "a"), (NAMESPACE, 1, "a"), (other, 0, "b")):
        tier = RedisTier(settings, namespace, rank, description={"model": model})
        tier.put(spec_of(1 + rank), payload_of(1))
        tier.close()
    store = RedisStore(settings)
    assert store.namespaces() == {NAMESPACE: {"model": "a"}, other: {"model": "b"}}
    shards = store.shards()
    assert [(s.namespace, s.rank) for s in shards] == [(NAMESPACE, 0), (NAMESPACE, 1), (other, 0)]
    ((key, found),) = store.heads(shards[1])
    assert key == key_of(2)
    assert found.head.header.end_tokens == spec_of(2).end_tokens
    assert found.stored_bytes > 4 * 4096
    tier = store.tier(shards[0])
    assert read_back(tier, 1) == joined(payload_of(1))
    tier.close()
    store.forget_namespace(other)
    assert other not in store.namespaces()
    store.close()


def test_a_record_replaced_in_the_middle_of_a_read(server, monkeypatch):
    """A reader whose stripes vanish under it looks again and gets the new record."""
    reader, writer = tier_at(server.url), tier_at(server.url)
    writer.put(spec_of(1), payload_of(1))
    check_size = redis_record._check_size
    monkeypatch.setattr(redis_record, "_GRACE_MS", 0)
    once = iter([True])

    def replace_then_check(found, wanted):
        if next(once, False):
            writer.put(spec_of(1), payload_of(2), replace=True)
        check_size(found, wanted)

    monkeypatch.setattr(redis_record, "_check_size", replace_then_check)
    assert read_back(reader, 1) == joined(payload_of(2))
    reader.close()
    writer.close()


@pytest.mark.parametrize("prefix", ["a*", "a?c", "[ab]", "a\\b"])
def test_a_prefix_is_no_pattern(server, client, prefix):
    """Characters that mean something to SCAN match only themselves in a prefix."""
    others = [tier_at(server.url, prefix=other) for other in ("abc", "a", "b", "ab", "axc")]
    for other in others:
        other.put(spec_of(1), payload_of(1))
    before = client.dbsize()
    tier = tier_at(server.url, prefix=prefix)
    tier.put(spec_of(1), payload_of(1))
    assert len(list(tier.scan())) == 1
    tier.clear()
    assert list(tier.scan()) == []
    assert client.dbsize() == before
    for each in (*others, tier):
        each.close()
