"""Which server holds a key, and the connections to it.

redis-py finds the servers (Sentinel, cluster topology) and opens connections;
here they are kept: per server a bounded lane for payloads and a small one for
questions, so that a lookup never queues behind a transfer. Nothing connects
before the first call, and all waiting is bounded.

redis-py is imported with the first connection, not with this module.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from .errors import TierError, TierUnavailable
from .redis_url import Mode, RedisSettings
from .redis_wire import Wire

T = TypeVar("T")
_QUESTION_CONNECTIONS = 2
_REFRESH_S = 1.0  # topology is not asked for more often, unless it is known to be wrong


class Lane:
    """At most ``size`` connections of one kind to one server.

    Thread-safe; a thread waits for a free one at most ``wait_s``.
    """

    def __init__(self, connect: Callable[[], Wire], size: int, wait_s: float) -> None:
        self._connect = connect
        self._free = threading.BoundedSemaphore(size)
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._idle: list[Wire] = []
        self._used: set[Wire] = set()
        self._closed = False

    def call(self, work: Callable[[Wire], T]) -> T:
        """Return ``work(wire)``; made once more where a kept connection proves closed."""
        with self.use() as wire:
            try:
                return work(wire)
            except TierUnavailable:
                if not wire.stale:
                    raise
        self.drop_idle()  # a restarted server closed them all
        with self.use() as wire:
            return work(wire)

    @contextlib.contextmanager
    def use(self) -> Iterator[Wire]:
        """Lend a connection, kept afterwards only if no answer is owed on it."""
        if not self._free.acquire(timeout=self._wait_s):
            raise TierUnavailable("redis: all connections are busy")
        try:
            wire = self._take()
            try:
                yield wire
            finally:
                self._give(wire)
        finally:
            self._free.release()

    def _take(self) -> Wire:
        with self._lock:
            if self._closed:
                raise TierUnavailable("redis: closed")
            wire = self._idle.pop() if self._idle else None
            if wire is not None:
                wire.reused = True
                self._used.add(wire)
                return wire
        wire = self._connect()
        if self._lent(wire):
            return wire
        wire.close()
        raise TierUnavailable("redis: closed")

    def _lent(self, wire: Wire) -> bool:
        with self._lock:
            if not self._closed:
                self._used.add(wire)
            return not self._closed

    def _give(self, wire: Wire) -> None:
        with self._lock:
            self._used.discard(wire)
            if not wire.broken and wire.pending == 0 and not self._closed:
                self._idle.append(wire)
                return
        wire.close()

    def drop_idle(self) -> None:
        """Close the connections that nobody uses now."""
        with self._lock:
            idle, self._idle = self._idle, []
        for wire in idle:
            wire.close()

    def close(self) -> None:
        """Close all; threads that wait on one are woken. Idempotent."""
        with self._lock:
            self._closed = True
            for wire in self._used:
                wire.shutdown()
        self.drop_idle()


class Node:
    """One server: ``payloads`` and ``questions`` are its lanes."""

    def __init__(self, where: str, settings: RedisSettings, connect: Callable[[], Wire]) -> None:
        self.where = where
        wait_s = settings.timeout_s
        self.payloads = Lane(connect, settings.connections, wait_s)
        self.questions = Lane(connect, _QUESTION_CONNECTIONS, wait_s)

    def drop_idle(self) -> None:
        """Close the connections that nobody uses now."""
        self.payloads.drop_idle()
        self.questions.drop_idle()

    def close(self) -> None:
        """Close both lanes. Idempotent."""
        self.payloads.close()
        self.questions.close()


class Servers:
    """All servers of one tier. Thread-safe; connects only when asked for a node."""

    def __init__(
        self, settings: RedisSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()  # the nodes
        self._asking = threading.Lock()  # one thread asks for the topology
        self._nodes: dict[tuple[str, int], Node] = {}
        self._cluster: Any = None
        self._sentinel: Any = None
        self._suspect = False
        self._asked_s = float("-inf")
        self._closed = False
        if settings.mode is not Mode.CLUSTER:
            self._only = Node(settings.safe_url, settings, self._connect_only)

    @property
    def is_cluster(self) -> bool:
        """Whether keys are spread over several servers."""
        return self._settings.mode is Mode.CLUSTER

    def node_of(self, key: bytes) -> Node:
        """Return the server that holds ``key``.

        Raises:
            TierUnavailable: no node of the cluster answers.
        """
        if not self.is_cluster:
            return self._only
        cluster = self._topology()
        with self._translated():
            found = cluster.get_node_from_key(key)
        return self._node(found.host, found.port)

    def nodes(self) -> list[Node]:
        """Return every server that holds keys (a cluster's primaries), in a fixed order."""
        if not self.is_cluster:
            return [self._only]
        cluster = self._topology()
        with self._translated():
            found = sorted({(node.host, node.port) for node in cluster.get_primaries()})
        return [self._node(host, port) for host, port in found]

    def moved(self) -> None:
        """Forget the topology: a node said that it is wrong."""
        self._suspect = True
        self._asked_s = float("-inf")

    def failed(self) -> None:
        """Note that a server failed: the next call looks where the keys are now."""
        self._suspect = True
        if not self.is_cluster:
            self._only.drop_idle()

    def close(self) -> None:
        """Close every connection; threads that wait on one are woken. Idempotent."""
        with self._lock:
            self._closed = True
            nodes, self._nodes = list(self._nodes.values()), {}
            cluster, self._cluster = self._cluster, None
            sentinel, self._sentinel = self._sentinel, None
        if not self.is_cluster:
            nodes.append(self._only)
        for node in nodes:
            node.close()
        if cluster is not None:
            cluster.close()
        if sentinel is not None:
            for client in sentinel.sentinels:
                client.close()

    # -- finding servers ---------------------------------------------------

    def _node(self, host: str, port: int) -> Node:
        with self._lock:
            if self._closed:
                raise TierUnavailable("redis: closed")
            node = self._nodes.get((host, port))
            if node is None:
                node = Node(f"{host}:{port}", self._settings, lambda: self._connect(host, port))
                self._nodes[host, port] = node
            return node

    def _topology(self) -> Any:
        """Return redis-py's cluster client, asked again when it is suspect."""
        with self._asking:
            due = self._suspect and self._clock() - self._asked_s >= _REFRESH_S
            if self._cluster is not None and not due:
                return self._cluster
            if self._closed:
                raise TierUnavailable("redis: closed")
            self._asked_s = self._clock()
            cluster = self._ask_cluster()
            old, self._cluster = self._cluster, cluster
            self._suspect = False
        if old is not None:
            old.close()
        with self._translated():
            current = {(node.host, node.port) for node in cluster.get_primaries()}
        with self._lock:
            gone = [self._nodes.pop(at) for at in list(self._nodes) if at not in current]
        for node in gone:
            node.close()
        return cluster

    def _ask_cluster(self) -> Any:
        from redis.cluster import ClusterNode, RedisCluster  # noqa: PLC0415 - see module

        make_node: Any = ClusterNode
        options = {**self._login(), **self._manners(), **self._tls_client()}
        known = {*self._settings.hosts}
        if self._cluster is not None:
            known |= {(node.host, node.port) for node in self._cluster.get_nodes()}
        with self._translated():
            return RedisCluster(
                startup_nodes=[make_node(host, port) for host, port in sorted(known)],
                require_full_coverage=False,
                **options,
            )

    def _connect_only(self) -> Wire:
        settings = self._settings
        if settings.mode is Mode.UNIX:
            from redis.connection import UnixDomainSocketConnection  # noqa: PLC0415

            return self._open(UnixDomainSocketConnection, settings.path, path=settings.path)
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

    def _connect(self, host: str, port: int) -> Wire:
        from redis.connection import Connection, SSLConnection  # noqa: PLC0415

        kind = SSLConnection if self._settings.tls else Connection
        return self._open(kind, f"{host}:{port}", host=host, port=port, **self._tls())

    def _open(self, kind: Any, where: str, **place: Any) -> Wire:
        with self._translated():
            connection = kind(db=self._settings.db, **place, **self._login(), **self._manners())
            connection.connect()
        try:
            return Wire(connection, where, self._settings.timeout_s)
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
        except Exception as error:  # noqa: BLE001 - its cluster errors share no base class
            text = self._settings.scrub(f"{type(error).__name__}: {error}")[:300]
            # "from None": redis-py's frames hold the login
            raise TierUnavailable(f"redis {self._settings.safe_url}: {text}") from None
