"""Where a Redis tier lives, and how it is spoken to: one URL into one checked object.

::

    redis://USER:PASSWORD@HOST:PORT/DB?OPTIONS          one server
    rediss://...                                        the same over TLS
    unix://USER:PASSWORD@/path/to.sock?db=DB
    redis+sentinel://USER:PASSWORD@H1:P1,H2:P2/MASTER/DB?sentinel_password=...
    redis+cluster://USER:PASSWORD@H1:P1,H2:P2
    rediss+sentinel://...  rediss+cluster://...

User, password and paths are percent-decoded. Every option of `RedisSettings`
may be given in the query or as an argument; an argument wins.

A password is never part of a ``repr``, of `RedisSettings.safe_url` or of a
`ConfigError`.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, unquote

from .errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MIB = 1 << 20
DEFAULT_PORT = 6379
DEFAULT_SENTINEL_PORT = 26379
DEFAULT_TTL_S = 7 * 86400.0
_MIN_WAIT_S, _MAX_WAIT_S = 0.01, 600.0  # a socket takes what rounds to 0 for "for ever"
_MAX_TTL_S = 100 * 365 * 86400.0  # Redis counts milliseconds in 63 bits
_MIN_STRIPE_BYTES = 4 << 10
_MAX_STRIPE_BYTES = 256 << 20  # Redis ends at 512 MiB a value
_QUESTION_MARK = "a ? inside user or password is written %3F"
_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
_TIMES = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Mode(str, Enum):
    """How the server that holds a key is found."""

    SINGLE = "single"
    UNIX = "unix"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True)
class RedisSettings:
    """Everything that a Redis tier needs to know about its server.

    Attributes:
        mode: how the server of a key is found.
        hosts: servers, Sentinels or any nodes of the cluster.
        path: the socket (``unix``).
        master: name of the master (``sentinel``).
        tls: speak TLS; `tls_ca`, `tls_cert` and `tls_key` are files in PEM.
        tls_verify: check certificate and host name of the server.
        prefix: first part of every key; nothing outside it is ever touched.
        ttl_s: records not used for this long vanish; None keeps them.
        stripe_bytes: longest value written; a longer record is several values.
        connections: bulk transfers at once to one server; bounds bytes in flight.
        timeout_s: longest silence of a server in the middle of an answer.
        connect_timeout_s: longest wait for a connection and its greeting.
    """

    mode: Mode
    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""
    master: str = ""
    db: int = 0
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    sentinel_user: str | None = field(default=None, repr=False)
    sentinel_password: str | None = field(default=None, repr=False)
    tls: bool = False
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_verify: bool = True
    prefix: str = "kvtier"
    ttl_s: float | None = DEFAULT_TTL_S
    stripe_bytes: int = 4 * MIB
    connections: int = 4
    timeout_s: float = 2.0
    connect_timeout_s: float = 1.0

    @property
    def safe_url(self) -> str:
        """The URL without secrets, for logs and messages."""
        login = f"{quote(self.user or '')}:***@" if self.password else ""
        if not login and self.user:
            login = "***@"  # a password whose colon was forgotten, more likely than a name
        if self.mode is Mode.UNIX:
            return f"unix://{login}{self.path}" + (f"?db={self.db}" if self.db else "")
        scheme = "rediss" if self.tls else "redis"
        if self.mode is not Mode.SINGLE:
            scheme += f"+{self.mode.value}"
        hosts = ",".join(_host_text(host, port) for host, port in self.hosts)
        path = f"/{quote(self.master)}" if self.master else ""
        return f"{scheme}://{login}{hosts}{path}" + (f"/{self.db}" if self.db else "")

    def scrub(self, text: str) -> str:
        """Return ``text`` with every secret of these settings blotted out."""
        for secret in (self.password, self.sentinel_password):
            for spelt in {secret, quote(secret, safe="")} if secret else ():
                text = text.replace(spelt, "***")
        return text


def parse_redis_url(url: str, **options: Any) -> RedisSettings:
    """Return the settings that ``url`` and ``options`` (named as in `RedisSettings`) spell.

    Options that are None are as if not given.

    Raises:
        ConfigError: names what is wrong and never contains a password.
    """
    scheme, sep, rest = url.partition("://")
    base, _, kind = scheme.lower().partition("+")
    if not sep or base not in {"redis", "rediss", "unix"} or (base == "unix" and kind):
        raise ConfigError(
            f"redis: {_no_login(url)!r} is no Redis URL; expected redis://, rediss://, unix://, "
            "redis+sentinel:// or redis+cluster://"
        )
    if kind not in {"", "sentinel", "cluster"}:
        raise ConfigError(f"redis: unknown kind {kind!r}; expected sentinel or cluster")
    rest, _, query = rest.partition("?")
    if "@" not in rest and "@" in query.partition("=")[0]:
        raise ConfigError(f"redis: {_QUESTION_MARK}")
    login, _, place = rest.rpartition("@")
    user, _, password = login.partition(":")
    mode = Mode.UNIX if base == "unix" else Mode(kind or "single")
    settings = RedisSettings(
        mode=mode,
        tls=base == "rediss",
        user=unquote(user) or None,
        password=unquote(password) or None,
        **_place(mode, place),
    )
    given: dict[str, Any] = dict(parse_qsl(query, keep_blank_values=True))
    given.update({name: value for name, value in options.items() if value is not None})
    try:
        return _checked(_with_options(settings, given))
    except ConfigError:
        if "@" not in rest and "@" in query:  # what is called an option may be the password
            raise ConfigError(f"redis: an option is not understood; {_QUESTION_MARK}") from None
        raise


def _place(mode: Mode, place: str) -> dict[str, Any]:
    """Return the fields that the part after the login gives."""
    if mode is Mode.UNIX:
        return {"path": unquote(place)}
    hosts, _, path = place.partition("/")
    parts = [unquote(part) for part in path.split("/") if part]
    found: dict[str, Any] = {}
    if mode is Mode.SENTINEL:
        if not parts:
            raise ConfigError(
                "redis: a redis+sentinel:// URL names the master after the hosts, "
                "as in redis+sentinel://h1:26379,h2:26379/mymaster"
            )
        found["master"] = parts.pop(0)
    if parts:
        found["db"] = _whole("db", parts.pop(0))
    if parts:
        raise ConfigError(f"redis: nothing is expected after the database, not {parts[0]!r}")
    port = DEFAULT_SENTINEL_PORT if mode is Mode.SENTINEL else DEFAULT_PORT
    found["hosts"] = tuple(_host(text, port) for text in hosts.split(","))
    if mode is Mode.SINGLE and len(found["hosts"]) > 1:
        raise ConfigError("redis: several hosts need redis+cluster:// or redis+sentinel://")
    return found


def _host(text: str, default_port: int) -> tuple[str, int]:
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%]+\]|[^:\[\]]*)(?::([0-9]{1,5}))?", text)
    if not match or (match[2] and not 0 < int(match[2]) < 65536):
        # not quoted: in a URL without its @ this may be the password
        raise ConfigError("redis: what stands for a host is no HOST:PORT (port 1 to 65535)")
    return unquote(match[1].strip("[]")) or "localhost", int(match[2] or default_port)


def _host_text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _no_login(text: str) -> str:
    """Return a URL, even one that does not parse, without what may be its login."""
    scheme, sep, rest = text.rpartition("://")
    return scheme + sep + rest.rpartition("@")[2].partition("?")[0]


def _whole(name: str, value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"redis {name}: {value!r} is no whole number") from None


def _quantity(name: str, value: Any, units: Mapping[str, float], example: str) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", str(value).lower())
    unit = match[2] if match else "?"
    if units is _SIZES:
        unit = unit.removesuffix("b")
    if match is None or unit not in units:
        raise ConfigError(f"redis {name}: {value!r} is not understood; expected e.g. {example}")
    return float(match[1]) * units[unit]


def _size(name: str, value: Any) -> int:
    size = _quantity(name, value, _SIZES, "4MiB")
    return _whole(name, size)


def _time(name: str, value: Any) -> float:
    return float(_quantity(name, value, _TIMES, "2s or 500ms"))


def _life(name: str, value: Any) -> float | None:
    if str(value).lower() in {"none", "never", "0", "0.0"}:
        return None
    return float(_quantity(name, value, _TIMES, "7d, 12h or none"))


def _flag(name: str, value: Any) -> bool:
    text = str(value).lower()
    if text in {"1", "true", "yes", "on", "required"}:
        return True
    if text in {"0", "false", "no", "off", "none"}:
        return False
    raise ConfigError(f"redis {name}: {value!r} is neither true nor false")


def _text(_name: str, value: Any) -> str:
    return str(value)


_OPTIONS: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
    # option in the URL or argument: (field, reader)
    "db": ("db", _whole),
    "user": ("user", _text),
    "password": ("password", _text),
    "sentinel_user": ("sentinel_user", _text),
    "sentinel_password": ("sentinel_password", _text),
    "tls": ("tls", _flag),
    "tls_ca": ("tls_ca", _text),
    "tls_cert": ("tls_cert", _text),
    "tls_key": ("tls_key", _text),
    "tls_verify": ("tls_verify", _flag),
    "prefix": ("prefix", _text),
    "ttl": ("ttl_s", _life),
    "stripe": ("stripe_bytes", _size),
    "connections": ("connections", _whole),
    "timeout": ("timeout_s", _time),
    "connect_timeout": ("connect_timeout_s", _time),
    # the names that redis-py's own URLs use
    "ssl_ca_certs": ("tls_ca", _text),
    "ssl_certfile": ("tls_cert", _text),
    "ssl_keyfile": ("tls_key", _text),
    "ssl_cert_reqs": ("tls_verify", _flag),
    "username": ("user", _text),
    "socket_timeout": ("timeout_s", _time),
    "socket_connect_timeout": ("connect_timeout_s", _time),
}
OPTION_NAMES = tuple(name for name in _OPTIONS if not name.startswith(("ssl_", "socket_")))
_FIELD_NAMES = {item.name for item in fields(RedisSettings)}


def _with_options(settings: RedisSettings, given: Mapping[str, Any]) -> RedisSettings:
    changes: dict[str, Any] = {}
    for name, value in given.items():
        option = name if name in _OPTIONS else re.sub(r"_(s|bytes)$", "", name)
        if option not in _OPTIONS:
            near = difflib.get_close_matches(name, OPTION_NAMES, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(OPTION_NAMES)}"
            raise ConfigError(f"redis: unknown option {name!r}; {hint}")
        to, read = _OPTIONS[option]
        changes[to] = read(name, value)
    assert changes.keys() <= _FIELD_NAMES
    return replace(settings, **changes)


def _checked(settings: RedisSettings) -> RedisSettings:
    """Return ``settings``; raise when its fields do not fit together."""
    prefix_help = "must not be empty nor hold braces (they would move the hash tag) or spaces"
    wrong: list[tuple[bool, str]] = [
        (settings.mode is Mode.UNIX and not settings.path.startswith("/"),
         "unix:// is followed by an absolute path, as in unix:///run/redis.sock"),
        (settings.mode is Mode.CLUSTER and settings.db != 0, "db: a cluster has only database 0"),
        (settings.db < 0, f"db: {settings.db} is negative"),
        (not settings.prefix or bool(re.search(r"[{}\s]", settings.prefix)),
         f"prefix: {settings.prefix!r} {prefix_help}"),
        (not _MIN_STRIPE_BYTES <= settings.stripe_bytes <= _MAX_STRIPE_BYTES,
         f"stripe: {settings.stripe_bytes} bytes; expected 4KiB to 256MiB"),
        (not 1 <= settings.connections <= 64,
         f"connections: {settings.connections}; expected 1 to 64"),
        (not _MIN_WAIT_S <= settings.timeout_s <= _MAX_WAIT_S,
         f"timeout: {settings.timeout_s} s; expected 10ms to 10m"),
        (not _MIN_WAIT_S <= settings.connect_timeout_s <= _MAX_WAIT_S,
         f"connect_timeout: {settings.connect_timeout_s} s; expected 10ms to 10m"),
        (settings.ttl_s is not None and not 1 <= settings.ttl_s <= _MAX_TTL_S,
         f"ttl: {settings.ttl_s} s; expected 1s to 100 years, or none"),
        (bool(settings.tls_key) and not settings.tls_cert, "tls_key: needs tls_cert beside it"),
        (not settings.tls and bool(settings.tls_ca or settings.tls_cert),
         "tls_ca and tls_cert need rediss://"),
    ]  # fmt: skip
    for bad, text in wrong:
        if bad:
            raise ConfigError(f"redis {text}")
    return settings
