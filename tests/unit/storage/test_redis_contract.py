"""The Redis tier passes the contract, however the server is reached."""

import re

import pytest

import kvtier.storage.redis as redis_tier
from kvtier.storage.keyring import Key, KeyRing
from kvtier.storage.redis import RedisTier
from kvtier.storage.testing import NAMESPACE, OTHER_NAMESPACE, TierContract
from kvtier.tools.redis_server import RedisServer

from ...redis_server import Cluster, TlsServer, Watched, make_certificates, settings_of


def opener(url, **options):
    """Return what opens tiers at ``url``, emptied of what tests keep there."""
    settings = settings_of(url, **{"timeout": "10s", "connect_timeout": "5s", **options})

    def open_tier(namespace=NAMESPACE, rank=0, **more):
        return RedisTier(settings, namespace, rank, **more)

    for namespace, rank in ((NAMESPACE, 0), (NAMESPACE, 1), (OTHER_NAMESPACE, 0)):
        tier = open_tier(namespace, rank)
        tier.clear()
        tier.close()
    return open_tier


@pytest.fixture(scope="module")
def plain():
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def locked():
    """A server that lets in one user, who may do what the tier's module says it needs."""
    commands = re.search("``(GET .*?)``", redis_tier.__doc__, re.DOTALL)[1]
    with RedisServer() as server, server.client() as client:
        client.acl_setuser(
            "kv",
            enabled=True,
            passwords=["+p@ss/w%?d"],
            keys=["t:*"],
            commands=[f"+{name.lower()}" for name in commands.split()],
        )
        client.acl_setuser("default", enabled=False)
        yield server


@pytest.fixture(scope="module")
def over_tls(tmp_path_factory):
    server = TlsServer(make_certificates(str(tmp_path_factory.mktemp("tls"))))
    yield server
    server.close()


@pytest.fixture(scope="module")
def cluster():
    cluster = Cluster()
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def watched():
    watched = Watched()
    yield watched
    watched.close()


class TestPlain(TierContract):
    @pytest.fixture(params=["stripes of one page", "one stripe"])
    def open_tier(self, request, plain):
        return opener(plain.url, stripe=4096 if "page" in request.param else "64MiB", ttl="none")


class TestCodec(TierContract):
    @pytest.fixture(params=["lz4", "zstd"])
    def open_tier(self, request, plain):
        open_tier = opener(plain.url)
        return lambda *args, **kwargs: open_tier(*args, codec=request.param, **kwargs)


class TestSealed(TierContract):
    @pytest.fixture(params=["raw", "zstd"])
    def open_tier(self, request, plain):
        open_tier, keys = opener(plain.url, stripe="64KiB"), KeyRing([Key(bytes(32))])
        return lambda *args, **more: open_tier(*args, codec=request.param, keys=keys, **more)


class TestUnixSocket(TierContract):
    @pytest.fixture
    def open_tier(self, plain):
        return opener(f"unix://{plain.socket_path}?db=3")


class TestUserAndPassword(TierContract):
    @pytest.fixture
    def open_tier(self, locked):
        return opener(f"redis://kv:p%40ss%2Fw%25%3Fd@127.0.0.1:{locked.port}")


class TestTls(TierContract):
    @pytest.fixture
    def open_tier(self, over_tls):
        return opener(over_tls.url)


class TestCluster(TierContract):
    @pytest.fixture
    def open_tier(self, cluster):
        return opener(cluster.url)


class TestSentinel(TierContract):
    @pytest.fixture
    def open_tier(self, watched):
        return opener(watched.url)
