"""Which server holds a key, and the connections to it.

redis-py asks the Sentinels and opens connections (login, TLS); `redis_node`
keeps them. Nothing connects before the first call, and all waiting is bounded.

redis-py is imported with the first connection, not with this module.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from .errors import TierError, TierUnavailable
from .redis_node import Node
from .redis_topology import Address, Topology, parse_topology
from .redis_url import Mode, RedisSettings
from .redis_wire import ServerError, Wire, command

_REFRESH_S = 1.0  # topology is not asked for more often, unless it is known to be wrong


class Servers:
    """All servers of one tier. Thread-safe; connects only when asked for a node."""

    def __init__(
        self, settings: RedisSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()  # the nodes
        self._asking = threading.Lock()  # one thread asks where things are
        self._nodes: dict[Address, Node] = {}
        self._topology: Topology | None = None
        self._sentinel: Any = None
        self._suspect = False  # it may be wrong
        self._wrong = False  # it is
        self._trouble = ""  # why nobody could say where keys are
        self._asked_s = float("-inf")
        self._closed = False
        if settings.mode is not Mode.CLUSTER:
            self._only = Node(settings.safe_url, settings, self._connect_only, clock)

    @property
    def is_cluster(self) -> bool:
        """Whether keys are spread over several servers."""
        return self._settings.mode is Mode.CLUSTER

    def node_of(self, key: bytes) -> Node:
        """Return the server that holds ``key``.

        Raises:
            TierUnavailable: no node of the cluster answers, or none serves the key.
        """
        if not self.is_cluster:
            return self._only
        owner = self._current().owner(key)
        if owner is None:
            self._suspect = True
            text = "no node of the cluster serves this key's slot"
            raise TierUnavailable(f"redis {self._settings.safe_url}: {text}")
        return self.node_at(owner)

    def nodes(self) -> list[Node]:
        """Return every server that holds keys (a cluster's primaries), in a fixed order."""
        if not self.is_cluster:
            return [self._only]
        return [self.node_at(address) for address in self._current().primaries]

    def node_at(self, address: Address) -> Node:
        """Return the node of a cluster at an address."""
        with self._lock:
            if self._closed:
                raise TierUnavailable("redis: closed")
            node = self._nodes.get(address)
            if node is None:
                node = Node(
                    f"{address[0]}:{address[1]}",
                    self._settings,
                    lambda: self._connect(*address),
                    self._clock,
                )
                self._nodes[address] = node
            return node

    def usable(self, node: Node) -> bool:
        """Whether to ask a node now; see `Node.usable`."""
        if node.usable():
            return True
        self._suspect = True  # another may have taken over meanwhile
        return False

    def others_answer(self, node: Node) -> bool:
        """Whether another node of the cluster is fine, as far as is known."""
        if not self.is_cluster or self._topology is None:
            return False
        with self._lock:
            nodes = [self._nodes.get(address) for address in self._topology.primaries]
        return any(other is not node and not (other and other.is_off) for other in nodes)

    def moved(self) -> None:
        """Forget the topology: a node said that it is wrong."""
        self._suspect = self._wrong = True
        self._asked_s = float("-inf")

    def failed(self, node: Node, reason: str) -> None:
        """Note that a server failed: the next call looks where the keys are now."""
        self._suspect = True
        if self.is_cluster and not self._closed:
            node.failed(reason)
        node.drop_idle()

    def close(self) -> None:
        """Close every connection; threads that wait on one are woken. Idempotent."""
        with self._lock:
            self._closed = True
            nodes, self._nodes = list(self._nodes.values()), {}
            sentinel, self._sentinel = self._sentinel, None
        if not self.is_cluster:
            nodes.append(self._only)
        for node in nodes:
            node.close()
        if sentinel is not None:
            for client in sentinel.sentinels:
                client.close()

    # -- finding servers ---------------------------------------------------

    def _current(self) -> Topology:
        """Return the topology, asked for again when it is suspect."""
        known = self._topology
        if known is None:
            with self._asking:
                if self._topology is not None:
                    return self._topology
                if self._trouble and self._clock() - self._asked_s < _REFRESH_S:
                    raise TierUnavailable(self._trouble)  # another thread has just found out
                return self._ask_again(None)
        if not self._suspect or self._clock() - self._asked_s < _REFRESH_S:
            return known
        # Whoever asks may have to wait for a node; others go on with what they know,
        # unless that is known to be wrong.
        if not self._asking.acquire(blocking=self._wrong):
            return known
        try:
            return self._ask_again(known) if self._topology is known else self._topology or known
        except TierUnavailable:
            return known
        finally:
            self._asking.release()

    def _ask_again(self, known: Topology | None) -> Topology:
        if self._closed:
            raise TierUnavailable("redis: closed")
        self._asked_s = self._clock()
        self._suspect = self._wrong = False
        with self._lock:
            off = {address for address, node in self._nodes.items() if node.is_off}
        places = list(dict.fromkeys((*(known.primaries if known else ()), *self._settings.hosts)))
        places.sort(key=lambda place: place in off)  # those that answer first
        for place in places:
            try:
                topology = self._ask_slots(place)
            except TierUnavailable as error:
                self._trouble = str(error)
                continue
            self._topology, self._trouble = topology, ""
            self._forget_but(topology.primaries)
            return topology
        self._suspect, self._asked_s = True, self._clock()
        raise TierUnavailable(self._trouble)

    def _ask_slots(self, place: Address) -> Topology:
        wire = self._connect(*place, self._settings.connect_timeout_s)
        try:
            wire.begin(0)
            wire.send([command(b"CLUSTER", b"SLOTS")], 1)
            answer = wire.answer()
        finally:
            wire.close()
        if isinstance(answer, ServerError):
            text = f"{answer.text}; a server that is no cluster's has a URL with redis://"
            raise TierUnavailable(f"redis {place[0]}:{place[1]}: {text}")
        return parse_topology(answer, place)

    def _forget_but(self, current: list[Address]) -> None:
        with self._lock:
            gone = [self._nodes.pop(at) for at in list(self._nodes) if at not in current]
        for node in gone:
            node.close()

    def _connect_only(self) -> Wire:
        settings = self._settings
        if settings.mode is Mode.UNIX:
            from redis.connection import UnixDomainSocketConnection  # noqa: PLC0415

            return self._open(UnixDomainSocketConnection, settings.path, None, path=settings.path)
        if settings.mode is Mode.SENTINEL:
            return self._connect(*self._master())
        return self._connect(*settings.hosts[0])

    def _master(self) -> tuple[str, int]:
        """Ask the Sentinels who the master is now."""
        from redis.sentinel import Sentinel  # noqa: PLC0415

        settings = self._settings
        with self._asking, self._translated():
            if self._closed:
                raise TierUnavailable("redis: closed")
            if self._sentinel is None:
                make_sentinel: Any = Sentinel
                options = {
                    "username": settings.sentinel_user,
                    "password": settings.sentinel_password,
                    **self._manners(),
                    **self._tls_client(),
                }
                self._sentinel = make_sentinel(settings.hosts, sentinel_kwargs=options)
            host, port = self._sentinel.discover_master(settings.master)
        return str(host), int(port)

    # -- connecting --------------------------------------------------------

    def _connect(self, host: str, port: int, timeout_s: float | None = None) -> Wire:
        from redis.connection import Connection, SSLConnection  # noqa: PLC0415

        kind = SSLConnection if self._settings.tls else Connection
        where = f"{host}:{port}"
        return self._open(kind, where, timeout_s, host=host, port=port, **self._tls())

    def _open(self, kind: Any, where: str, timeout_s: float | None = None, **place: Any) -> Wire:
        with self._translated():
            connection = kind(db=self._settings.db, **place, **self._login(), **self._manners())
            connection.connect()
        try:
            return Wire(connection, where, timeout_s or self._settings.timeout_s)
        except OSError as error:
            connection.disconnect()
            raise TierUnavailable(f"redis {where}: connection lost: {error}") from error

    def _login(self) -> dict[str, Any]:
        return {"username": self._settings.user, "password": self._settings.password}

    def _manners(self) -> dict[str, Any]:
        from redis.backoff import NoBackoff  # noqa: PLC0415
        from redis.retry import Retry  # noqa: PLC0415

        # redis-py's default waits up to 10 s between tries; a cache would rather miss
        return {
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
            "socket_timeout": self._settings.connect_timeout_s,
            "socket_connect_timeout": self._settings.connect_timeout_s,
        }

    def _tls(self) -> dict[str, Any]:
        settings = self._settings
        if not settings.tls:
            return {}
        return {
            "ssl_ca_certs": settings.tls_ca,
            "ssl_certfile": settings.tls_cert,
            "ssl_keyfile": settings.tls_key,
            "ssl_cert_reqs": "required" if settings.tls_verify else "none",
            "ssl_check_hostname": settings.tls_verify,
        }

    def _tls_client(self) -> dict[str, Any]:
        return {"ssl": True, **self._tls()} if self._settings.tls else {}

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Map what redis-py raises; the one place where its exceptions are met."""
        try:
            yield
        except TierError:
            raise
        except Exception as error:  # noqa: BLE001 - OSError, ValueError and its own
            text = self._settings.scrub(f"{type(error).__name__}: {error}")[:300]
            # "from None": redis-py's frames hold the login
            raise TierUnavailable(f"redis {self._settings.safe_url}: {text}") from None
