"""The Redis tier over a cluster that is not whole: a node gone or replaced, slots that move."""

import contextlib
import logging
import random
import re
import threading
import time
from pathlib import Path

import pytest
from redis.crc import key_slot

import kvtier.storage.redis_node as redis_node
from kvtier.storage.counts import Counts
from kvtier.storage.errors import ConfigError, RecordMissing, RecordRefused, TierUnavailable
from kvtier.storage.jobs import ChunkStatus
from kvtier.storage.link import LinkLimits, TierLink
from kvtier.storage.redis import RedisTier
from kvtier.storage.redis_epoch import raise_epoch, read_epoch
from kvtier.storage.redis_lookup import RedisLookup
from kvtier.storage.redis_store import RedisStore
from kvtier.storage.redis_topology import parse_topology
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

from ...redis_server import Cluster, eventually, make_certificates, settings_of

N = 30
PATIENCE_S = 0.3


@pytest.fixture
def cluster():
    cluster = Cluster()
    yield cluster
    cluster.close()


@pytest.fixture
def tier(cluster, monkeypatch):
    monkeypatch.setattr(redis_node, "_MIN_BACKOFF_S", 0.5)
    monkeypatch.setattr(redis_node, "_MAX_BACKOFF_S", 0.5)
    options = {"timeout": f"{PATIENCE_S}s", "connect_timeout": f"{PATIENCE_S}s"}
    tier = RedisTier(settings_of(cluster.url, **options), NAMESPACE, 0)
    for number in range(N):
        tier.put(spec_of(number), payload_of(number))
    yield tier
    tier.close()


def numbers_on(node):
    """Which test records lie on a node, asked of the node."""
    with node.client() as client:
        heads = list(client.scan_iter("*:h"))
    return {n for n in range(N) if any(key_of(n)[:-1].hex().encode() in head for head in heads)}


@pytest.mark.parametrize("fault", ["freeze", "kill"])
def test_a_node_that_is_gone_takes_its_own_chunks_and_no_time_of_others(
    cluster, tier, caplog, fault
):
    """Its chunks are misses, the others are read and written as ever, and it comes back."""
    lost = numbers_on(cluster.nodes[2])
    assert 0 < len(lost) < N
    settings = tier.settings
    index = RedisLookup(settings, NAMESPACE, 1)
    assert all(index.held([key_of(n) for n in range(N)]))
    caplog.set_level(logging.INFO, "kvtier")
    getattr(cluster.nodes[2], fault)()
    try:
        with pytest.raises(RecordMissing):
            read_back(tier, min(lost))
        begin_s = time.monotonic()
        for number in range(N):
            if number in lost:
                with contextlib.suppress(RecordMissing):
                    read_back(tier, number)
                with pytest.raises(RecordRefused):
                    tier.put(spec_of(number), payload_of(number), replace=True)
            else:
                assert read_back(tier, number) == joined(payload_of(number))
                assert tier.put(spec_of(number), payload_of(number)) is PutResult.EXISTS
        there = [n not in lost for n in range(N)]
        assert tier.contains_many([key_of(n) for n in range(N)]) == there
        assert index.held([key_of(n) for n in range(N)]) == there
        # one caller now and then tries again; before, every call to it waited
        assert time.monotonic() - begin_s < len(lost) * PATIENCE_S
        with pytest.raises(TierUnavailable, match="not cleared"):
            tier.clear()
    finally:
        getattr(cluster.nodes[2], {"freeze": "thaw", "kill": "start"}[fault])()
    eventually(lambda: tier.put(spec_of(min(lost)), payload_of(min(lost))))
    assert read_back(tier, min(lost)) == joined(payload_of(min(lost)))
    eventually(lambda: index.held([key_of(min(lost))]) == [True])
    told = [r.getMessage() for r in caplog.records if "of the cluster" in r.getMessage()]
    assert len(told) == 4  # off and on, the tier and the lookup
    index.close()


def test_a_link_over_what_is_left_of_a_cluster_stays_on(cluster, tier):
    """With one node of three gone the tier is no outage: its breaker stays closed."""
    lost = numbers_on(cluster.nodes[0])
    cluster.nodes[0].freeze()
    try:
        link = TierLink(tier, Counts(), time.monotonic, LinkLimits())
        ended = {n: link.load(spec_of(n), [aligned(4 * 4096)]) for n in [*range(N), *range(N)]}
        assert {n for n, status in ended.items() if status is ChunkStatus.OK} == {*range(N)} - lost
        assert {ended[n] for n in lost} == {ChunkStatus.MISSING}
        saved = {n for n in range(N) if link.save(spec_of(n), payload_of(n))}
        assert saved == {*range(N)} - lost
        assert link.breaker.closed
        assert link.write_breaker.closed
        link.close(time.monotonic() + 5)
    finally:
        cluster.nodes[0].thaw()


def test_a_cluster_that_is_gone_is_an_outage_until_any_node_answers(cluster, tier):
    """With all nodes gone calls say unavailable; the first node that is back ends that."""
    for node in cluster.nodes:
        node.kill()
    for number in range(N):
        with contextlib.suppress(RecordMissing, TierUnavailable):
            read_back(tier, number)
    with pytest.raises(TierUnavailable):
        read_back(tier, 0)
    with pytest.raises(TierUnavailable):
        tier.contains_many([key_of(0)])
    cluster.nodes[(node_of_record(0) + 1) % 3].start()
    eventually(lambda: tier.contains_many([key_of(0)]) == [False])


def node_of_slot(slot):
    return 0 if slot < 5461 else 1 if slot < 10923 else 2


def node_of_record(number):
    return node_of_slot(key_slot(key_of(number)[:-1].hex().encode()))


def test_a_tier_that_closes_or_is_busy_accuses_no_node(cluster, caplog):
    """Calls that its own end wakes, or that find no free connection, say nothing of a node."""
    settings = settings_of(cluster.url, timeout="300ms", connections=1)
    tier = RedisTier(settings, NAMESPACE, 0)
    tier.put(spec_of(1), payload_of(1))
    node = tier._servers.node_of(tier._names.head(key_of(1)))
    with node.payloads.use(), pytest.raises((RecordMissing, TierUnavailable)):
        read_back(tier, 1)
    assert read_back(tier, 1) == joined(payload_of(1))
    waiting = threading.Thread(target=lambda: outcomes.append(failing(lambda: read_back(tier, 1))))
    outcomes = []
    cluster.nodes[node_of_record(1)].freeze()
    try:
        waiting.start()
        time.sleep(0.1)
        tier.close()
        waiting.join(5)
    finally:
        cluster.nodes[node_of_record(1)].thaw()
    assert outcomes[0] is not None
    assert not caplog.records


def failing(call):
    try:
        call()
    except (RecordMissing, TierUnavailable) as error:
        return error
    return None


def start_moving(cluster, name):
    """Let the slot of ``name`` be on its way to the next node; return both nodes' clients."""
    clients = [node.client() for node in cluster.nodes]
    slot = clients[0].execute_command("CLUSTER", "KEYSLOT", name)
    source = node_of_slot(slot)
    target = (source + 1) % 3
    ids = [client.execute_command("CLUSTER", "MYID").decode() for client in clients]
    clients[target].execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
    clients[source].execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
    return clients[source], clients[target], cluster.nodes[target].port


def test_the_epoch_is_read_while_its_slot_moves(cluster):
    """A number that clears raised is never taken for 0: old records would be served again."""
    settings = settings_of(cluster.url)
    assert raise_epoch(settings, "model", 3) == 3
    source, _, port = start_moving(cluster, b"t:epoch:model")
    assert read_epoch(settings, "model") == 3
    source.execute_command("MIGRATE", "127.0.0.1", port, "t:epoch:model", 0, 5000)
    assert read_epoch(settings, "model") == 3
    assert raise_epoch(settings, "model") == 4
    assert read_epoch(settings, "model") == 4


def test_records_whose_slot_moves_are_found_and_deleted(cluster, tier):
    """What has moved already is seen at its new place, and a delete says what it did."""
    names = tier._names
    source, _, port = start_moving(cluster, names.head(key_of(1)))
    keys = [k for k in source.scan_iter("*") if key_of(1)[:-1].hex().encode() in k]
    assert len(keys) == 2
    for key in keys:
        source.execute_command("MIGRATE", "127.0.0.1", port, key, 0, 5000)
    assert tier.contains_many([key_of(1), key_of(2)]) == [True, True]
    store = RedisStore(tier.settings)
    assert store.loose_stripes() == []
    store.close()
    with contextlib.suppress(RecordMissing):
        assert read_back(tier, 1) == joined(payload_of(1))
    with pytest.raises(RecordRefused):
        tier.put(spec_of(1), payload_of(1), replace=True)
    assert tier.delete([key_of(1)]) == 1
    assert tier.contains_many([key_of(1)]) == [False]


def test_what_moved_to_a_node_that_is_gone_is_not_known(cluster, tier):
    """Then an epoch is no 0, a delete has not deleted, and a lookup does not count on it."""
    settings, name = tier.settings, tier._names.head(key_of(1))
    epoch = "{" + key_of(1)[:-1].hex() + "}"  # in the same slot
    assert raise_epoch(settings, epoch, 3) == 3
    source, target, port = start_moving(cluster, name)
    for key in [k for k in source.scan_iter("*") if key_of(1)[:-1].hex().encode() in k]:
        source.execute_command("MIGRATE", "127.0.0.1", port, key, 0, 5000)
    target.close()
    next(node for node in cluster.nodes if node.port == port).kill()
    with pytest.raises(TierUnavailable):
        read_epoch(settings, epoch)
    with pytest.raises(TierUnavailable, match="not all deleted"):
        tier.delete([key_of(1)])
    assert tier.contains_many([key_of(1)]) == [False]
    store = RedisStore(settings)
    with pytest.raises(TierUnavailable):
        store.loose_stripes()
    store.close()


def knows_replica(client):
    return any(len(part) > 3 for part in client.execute_command("CLUSTER SLOTS"))


def test_a_replica_takes_over(cluster, tier):
    """When a node dies and its replica is made primary, its chunks are served again."""
    first, dying = cluster.nodes[0], cluster.nodes[2]
    replica = RedisServer(
        *("--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf"),
        *("--cluster-port", str(free_port()), "--cluster-node-timeout", "2000"),
        *("--cluster-require-full-coverage", "no"),
    )
    try:
        lost = numbers_on(dying)
        with replica.client() as client, dying.client() as old:
            bus = int(first.options[first.options.index("--cluster-port") + 1])
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", first.port, bus)
            node_id = old.execute_command("CLUSTER", "MYID").decode()
            eventually(lambda: client.execute_command("CLUSTER", "REPLICATE", node_id))
            eventually(lambda: client.info("replication")["master_link_status"] == "up")
            eventually(lambda: client.dbsize() == old.dbsize())
            for node in cluster.nodes:
                with node.client() as other:  # they vote only for a replica that they know
                    eventually(lambda other=other: knows_replica(other))
        dying.kill()
        served = {}

        def all_back():
            for number in lost - served.keys():
                with contextlib.suppress(RecordMissing, TierUnavailable):
                    served[number] = read_back(tier, number)
            return served.keys() == lost

        eventually(all_back, 30)
        assert all(found == joined(payload_of(n)) for n, found in served.items())
        assert tier.put(spec_of(min(lost)), payload_of(1), replace=True) is PutResult.STORED
    finally:
        replica.close()


def test_the_rights_that_the_documentation_names_are_enough(cluster):
    """A user who may do no more than that keeps records, looks them up and raises an epoch."""
    page = (Path(__file__).parents[3] / "docs/operations.md").read_text()
    named = re.search(r"commands `(GET [^`]*)`, in a cluster also `([^`]*)`", page)
    for node in cluster.nodes:
        with node.client() as client:
            client.acl_setuser(
                "kv",
                enabled=True,
                passwords=["+p@ss"],
                keys=["t:*"],
                commands=[f"+{name.lower()}" for part in named.groups() for name in part.split()],
            )
    url = cluster.url.replace("//", "//kv:p%40ss@")
    tier = RedisTier(settings_of(url), NAMESPACE, 0, description={"model": "tiny"})
    for number in range(N):
        tier.put(spec_of(number), payload_of(number))
        tier.put(spec_of(number), payload_of(number), replace=True)
        assert read_back(tier, number) == joined(payload_of(number))
    assert all(tier.contains_many([key_of(number) for number in range(N)]))
    tier.touch([key_of(1)])
    assert tier.persist([key_of(1)]) == tier.expire([key_of(1)]) == 1
    assert len(list(tier.scan())) == N
    assert tier.delete([key_of(1)]) == 1
    assert raise_epoch(tier.settings, "model") == 1
    start_moving(cluster, tier._names.head(key_of(2)))
    for _ in range(2):
        assert tier.contains_many([key_of(2), key_of(1)]) == [True, False]
    tier.clear()
    tier.close()


def test_a_cluster_over_tls(tmp_path):
    """The nodes that a cluster names are spoken to as the first one is: over TLS."""
    try:
        cluster = Cluster(make_certificates(str(tmp_path)))
    except ConfigError as error:
        pytest.skip(f"no server with TLS here: {error}")
    try:
        tier = RedisTier(settings_of(cluster.url), NAMESPACE, 0)
        for number in range(N):
            tier.put(spec_of(number), payload_of(number))
            assert read_back(tier, number) == joined(payload_of(number))
        assert all(numbers_on(node) for node in cluster.nodes)
        assert all(tier.contains_many([key_of(number) for number in range(N)]))
        tier.close()
    finally:
        cluster.close()


def test_a_server_that_is_no_clusters_says_so(cluster):
    """A cluster's URL for a server alone ends in words."""
    with RedisServer() as server:
        tier = RedisTier(settings_of(f"redis+cluster://127.0.0.1:{server.port}"), NAMESPACE, 0)
        with pytest.raises(TierUnavailable, match="redis://"):
            tier.contains_many([key_of(1)])
        tier.close()


@pytest.mark.parametrize("seed", range(3))
def test_topologies_that_make_no_sense(seed):
    """Whatever a server says of its slots: a topology, or an error of ours."""
    print("seed", seed)
    rng = random.Random(seed)
    pieces = [None, 0, 1, 5460, 16383, 1 << 40, b"h", b"", b"\xff", b"?", [], [b"h", 1], [None, 6]]

    def some(depth):
        if depth == 0 or rng.random() < 0.4:
            return rng.choice(pieces)
        return [some(depth - 1) for _ in range(rng.randrange(5))]

    for _ in range(500):
        with contextlib.suppress(TierUnavailable):
            found = parse_topology(some(3), ("asked", 1))
            assert found.primaries
            for key in (b"a", b"{b}c", b""):
                owner = found.owner(key)
                assert owner is None or owner in found.primaries


def test_a_topology_in_words():
    """Ranges in any order; a node that does not know its own address is where it was asked."""
    found = parse_topology(
        [[5461, 16383, [b"", 2, b"id"], [b"r", 3, b"id", []]], [0, 5460, [b"::1", 1, b"id"]]],
        ("asked", 9),
    )
    assert found.primaries == [("::1", 1), ("asked", 2)]
    assert {found.owner(b"%d" % n) for n in range(100)} == {("::1", 1), ("asked", 2)}
