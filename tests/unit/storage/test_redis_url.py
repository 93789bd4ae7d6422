"""Redis URLs: what they mean, what is refused, and that secrets stay secret."""

import logging
import traceback

import pytest

from kvtier.storage.errors import ConfigError, TierUnavailable
from kvtier.storage.redis import RedisTier
from kvtier.storage.redis_url import Mode, parse_redis_url
from kvtier.storage.testing import NAMESPACE, aligned, joined, payload_of, read_back, spec_of
from kvtier.tools.redis_server import RedisServer, free_port

from ...redis_server import TlsServer, make_certificates, settings_of

SECRET = "p@ss/w%?:#d"
QUOTED = "p%40ss%2Fw%25%3F%3A%23d"


def test_one_server():
    """Host, port, database and login come out of the URL, percent-decoded."""
    settings = parse_redis_url(f"redis://us%40er:{QUOTED}@db.example:6380/3")
    assert settings.mode is Mode.SINGLE
    assert settings.hosts == (("db.example", 6380),)
    assert (settings.user, settings.password, settings.db) == ("us@er", SECRET, 3)
    assert not settings.tls
    assert parse_redis_url("redis://").hosts == (("localhost", 6379),)
    assert parse_redis_url("redis://:pw@h").password == "pw"
    assert parse_redis_url("redis://[::1]:1").hosts == (("::1", 1),)


def test_unquoted_login():
    """An @ or / left as it is in a password is understood."""
    assert parse_redis_url("redis://u:a@b/c@h:1/2").password == "a@b/c"


def test_other_kinds():
    """Sockets, Sentinels, clusters and TLS have their schemes."""
    unix = parse_redis_url("unix://u:p@/run/my%20redis.sock?db=2")
    assert (unix.mode, unix.path, unix.db, unix.user) == (Mode.UNIX, "/run/my redis.sock", 2, "u")
    watched = parse_redis_url("redis+sentinel://:p@a,b:2/main/4?sentinel_password=s")
    assert watched.hosts == (("a", 26379), ("b", 2))
    assert (watched.master, watched.db, watched.sentinel_password) == ("main", 4, "s")
    cluster = parse_redis_url("rediss+cluster://a:1,b:2?tls_ca=/ca.pem&tls_verify=no")
    assert (cluster.mode, cluster.tls, cluster.tls_ca) == (Mode.CLUSTER, True, "/ca.pem")
    assert not cluster.tls_verify


def test_options():
    """Options come from the query or as arguments, which win; units are understood."""
    settings = parse_redis_url(
        "redis://h?prefix=x&ttl=2h&stripe=4MiB&connections=8&timeout=500ms", prefix="y", ttl=None
    )
    assert (settings.prefix, settings.ttl_s, settings.stripe_bytes) == ("y", 7200.0, 4 << 20)
    assert (settings.connections, settings.timeout_s) == (8, 0.5)
    assert parse_redis_url("redis://h?ttl=none").ttl_s is None
    assert parse_redis_url("redis://h?ssl_cert_reqs=none&socket_timeout=3").timeout_s == 3
    assert parse_redis_url("redis://h", stripe_bytes=8192, timeout_s=1).stripe_bytes == 8192


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://h", "redis://"),
        ("h:6379", "redis://"),
        ("redis+ring://h", "ring"),
        ("redis://h:99999", "PORT"),
        ("redis://h:x", "PORT"),
        ("redis://h/three", "db"),
        ("redis://h/3/4", "database"),
        ("redis://a,b", "cluster"),
        ("redis+sentinel://a", "master"),
        ("redis+cluster://a/1", "db"),
        ("unix://relative", "absolute"),
        ("redis://h?conections=3", "'connections'"),
        ("redis://h?stripe=3xx", "stripe"),
        ("redis://h?stripe=1", "stripe"),
        ("redis://h?ttl=soon", "ttl"),
        ("redis://h?connections=0", "connections"),
        ("redis://h?timeout=0", "timeout"),
        ("redis://h?timeout=0.0000001", "timeout"),  # a socket would wait for ever
        ("redis://h?connect_timeout=0.0000001", "timeout"),
        ("redis://h?timeout=99999999999999999999", "timeout"),
        ("redis://h?ttl=99999999999999d", "ttl"),
        ("redis://h?prefix=a%7Bb", "prefix"),
        ("redis://h?prefix=", "prefix"),
        ("redis://h?tls_ca=/x", "rediss"),
        ("rediss://h?tls_key=/x", "tls_cert"),
        ("rediss://h?tls_verify=maybe", "tls_verify"),
    ],
)
def test_what_is_wrong_is_named(url, says):
    """A wrong URL ends in one line that names the setting."""
    with pytest.raises(ConfigError) as caught:
        parse_redis_url(url)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://u:{}@h",
        "redis://u:{}@h:99999",
        "redis://u:{}@h?what=1",
        "redis://:{}@h/x",
        "redis+sentinel://:{}@h",
        "redis://u:{}",
        "redis://u:a?{}@h:1",
        "redis://u:1?{}=x@h:1",
        "redis://{}@h",
    ],
)
@pytest.mark.parametrize("secret", ["S3CRET", "S3CRET?S3CRET", "S3CRET/x", "a:S3CRET"])
def test_no_secret_in_a_config_error(url, secret):
    """Whatever is wrong with a URL, its password is not repeated."""
    said = ""
    try:
        settings = parse_redis_url(url.format(secret))
        said = repr(settings) + settings.safe_url
    except ConfigError as refused:
        said = str(refused)
    assert said
    assert "S3CRET" not in said


def test_a_misspelt_option_is_named_unless_it_may_be_a_password():
    """The right name is proposed; with a stray @ it is said how a ? is written."""
    with pytest.raises(ConfigError, match="did you mean 'connections'"):
        parse_redis_url("redis://u:p@h?conections=3")
    with pytest.raises(ConfigError, match="%3F"):
        parse_redis_url("redis://u:1?conections=3@h")
    assert parse_redis_url("redis://h?password=a@b").password == "a@b"


def test_no_secret_when_the_login_is_refused(caplog):
    """Neither messages, nor tracebacks, nor logs, nor reprs hold the password."""
    caplog.set_level(logging.DEBUG)
    with RedisServer("--requirepass", "other") as server:
        settings = settings_of(
            f"redis://:{QUOTED}@127.0.0.1:{server.port}", sentinel_password="s3ntinel"
        )
        tier = RedisTier(settings, NAMESPACE, 0)
        with pytest.raises(TierUnavailable) as caught:
            tier.put(spec_of(1), payload_of(1))
        tier.close()
    said = "".join(traceback.format_exception(caught.value)) + caplog.text
    said += repr(settings) + repr(tier) + settings.safe_url + repr(tier.stat())
    for secret in (SECRET, QUOTED, "s3ntinel"):
        assert secret not in said
    assert "WRONGPASS" in said or "AuthenticationError" in said


def test_scrub_blots_out_secrets():
    """Text from elsewhere loses our secrets, however they are spelt."""
    settings = parse_redis_url(f"redis://u:{QUOTED}@h")
    assert settings.scrub(f"a {SECRET} b {QUOTED} c") == "a *** b *** c"


@pytest.mark.parametrize(
    "url",
    ["redis://127.0.0.1:{}", "redis+sentinel://127.0.0.1:{}/m", "redis+cluster://127.0.0.1:{}"],
)
def test_nobody_there(url):
    """Every kind of set-up says unavailable when no server is there."""
    tier = RedisTier(settings_of(url.format(free_port())), NAMESPACE, 0)
    with pytest.raises(TierUnavailable):
        tier.contains_many([b"x" * 33])
    with pytest.raises(TierUnavailable):
        tier.put(spec_of(1), payload_of(1))
    tier.close()


def test_tls_is_checked(tmp_path):
    """The server's certificate is checked, and ours is shown; big values pass whole."""
    certificates = make_certificates(str(tmp_path))
    server = TlsServer(certificates)
    try:
        tier = RedisTier(settings_of(server.url, stripe="1MiB"), NAMESPACE, 0)
        tier.put(spec_of(1, 5 << 20), payload_of(1, 5 << 20))
        assert read_back(tier, 1, 5 << 20) == joined(payload_of(1, 5 << 20))
        tier.close()
        mine = f"tls_cert={certificates['client_cert']}&tls_key={certificates['client_key']}"
        for query in (mine, f"tls_ca={certificates['ca']}"):  # unknown authority; no certificate
            tier = RedisTier(settings_of(f"rediss://127.0.0.1:{server.port}?{query}"), NAMESPACE, 0)
            with pytest.raises(TierUnavailable):
                tier.get(spec_of(1), [aligned(16384)])
            tier.close()
        tier = RedisTier(
            settings_of(f"rediss://127.0.0.1:{server.port}?tls_verify=no&{mine}"), NAMESPACE, 0
        )
        assert read_back(tier, 1, 5 << 20) == joined(payload_of(1, 5 << 20))
        tier.close()
    finally:
        server.close()


def test_no_redis_client_is_imported_before_it_is_used():
    """The module of the tier does not import redis-py."""
    import subprocess
    import sys

    code = (
        "import sys; import kvtier.storage.redis as m; from kvtier.storage.redis_url import *;"
        "t = m.RedisTier(parse_redis_url('redis://h'), bytes(16), 0); t.close();"
        "assert 'redis' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
