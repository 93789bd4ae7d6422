"""A server behind a proxy that lets a fault happen in the middle of a load or a save."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

from kvtier.tools.redis_server import RedisServer


class Wall:
    """Stands before a server; `arm` makes something happen once so many bytes have passed.

    ``fault`` is how it treats what passes: "none", "silent" (takes everything, says
    nothing), "slow" (every answer ``delay_s`` late).
    """

    def __init__(self, port):
        self._to = port
        self.fault = "none"
        self.delay_s = 2.0
        self._lock = threading.Lock()
        self._armed = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._socks = set()
        self._accept_in_thread()

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}"

    def arm(self, way, n_bytes, action):
        """Run ``action`` after ``n_bytes`` have gone "up" (to the server) or "down"."""
        with self._lock:
            self._armed = [way, n_bytes, action]

    @property
    def armed(self):
        return self._armed is not None

    def _accept_in_thread(self):
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener):
        with contextlib.suppress(OSError):
            while True:
                front, _ = listener.accept()
                try:
                    back = socket.create_connection(("127.0.0.1", self._to))
                except OSError:
                    front.close()
                    continue
                self._socks |= {front, back}
                for args in ((front, back, "up"), (back, front, "down")):
                    threading.Thread(target=self._pass, args=args, daemon=True).start()

    def _pass(self, source, sink, way):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 14):
                self._count(way, len(data))
                if self.fault == "slow" and way == "down":
                    time.sleep(self.delay_s)
                if self.fault != "silent":
                    sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        self._socks -= {source, sink}

    def _count(self, way, n_bytes):
        action = None
        with self._lock:
            if self._armed is not None and self._armed[0] == way:
                self._armed[1] -= n_bytes
                if self._armed[1] <= 0:
                    action, self._armed = self._armed[2], None
        if action is not None:
            action()

    def cut(self):
        """Close every connection."""
        for sock in list(self._socks):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def refuse(self):
        """Close everything and listen no more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def listen_again(self):
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._accept_in_thread()


class Fault:
    """What happens, and how it is undone."""

    def __init__(self, store):
        self.store = store

    def strike(self):
        raise NotImplementedError

    def mend(self):
        pass


class Killed(Fault):
    """The server dies and comes back empty."""

    def strike(self):
        self.store.server.kill()

    def mend(self):
        self.store.server.start()


class ClientKill(Fault):
    """An operator ends all connections in the middle of a value."""

    def strike(self):
        with self.store.server.client() as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


class Refused(Fault):
    """Connections end and new ones are refused."""

    def strike(self):
        self.store.wall.refuse()

    def mend(self):
        self.store.wall.listen_again()


class Silent(Fault):
    """The host takes every packet and says nothing."""

    def strike(self):
        self.store.wall.fault = "silent"

    def mend(self):
        self.store.wall.fault = "none"
        self.store.wall.cut()


class Slow(Silent):
    """Every answer comes two seconds late."""

    def strike(self):
        self.store.wall.fault = "slow"


class Evicting(Fault):
    """Room for a tenth of what is in use; the server drops what it likes."""

    policy = "allkeys-lru"

    def strike(self):
        with self.store.server.client() as client:
            used = client.info("memory")["used_memory"]
            kept = sum(client.memory_usage(key) or 0 for key in client.scan_iter("kvtier:*"))
            client.config_set("maxmemory-policy", self.policy)
            client.config_set("maxmemory", max(1, used - kept * 9 // 10))

    def mend(self):
        with self.store.server.client() as client:
            client.config_set("maxmemory", 0)
            client.config_set("maxmemory-policy", "noeviction")


class Full(Evicting):
    """No room, and nothing may go."""

    policy = "noeviction"


class Damage(Fault):
    """One record is spoilt by somebody else."""

    def strike(self):
        with self.store.server.client() as client:
            heads = sorted(client.scan_iter("kvtier:*:h"))
            stripes = sorted(client.scan_iter("kvtier:*:[1-9]*"))
            self.spoil(client, heads, stripes)

    def spoil(self, client, heads, stripes):
        raise NotImplementedError


class TenBytes(Damage):
    """Heads become ten bytes."""

    def spoil(self, client, heads, stripes):
        for head in heads:
            client.set(head, b"x" * 10)


class AList(Damage):
    """Heads become lists."""

    def spoil(self, client, heads, stripes):
        for head in heads:
            client.delete(head)
            client.rpush(head, "a", "b")


class RandomBytes(Damage):
    """The end of every value becomes random bytes of the same length."""

    def spoil(self, client, heads, stripes):
        for key in heads + stripes:
            n = client.strlen(key)
            client.setrange(key, n // 2, os.urandom(n - n // 2))


class StripeGone(Damage):
    """A stripe of every record is deleted."""

    def spoil(self, client, heads, stripes):
        for stripe in stripes:
            if stripe.endswith(b":3"):
                client.delete(stripe)


class Store:
    """A server of the test's own and the wall before it."""

    def __init__(self):
        self.server = RedisServer()
        self.wall = Wall(self.server.port)

    def empty(self):
        """Forget everything, the epoch too; as a test, not as kvtier would."""
        with self.server.client() as client:
            client.flushall()
            client.config_resetstat()

    def forbidden(self):
        """Which commands the server has been given since `empty` that must never be."""
        with self.server.client() as client:
            given = {name.removeprefix("cmdstat_") for name in client.info("commandstats")}
        return given & {"keys", "flushall", "flushdb"}

    def close(self):
        self.wall.refuse()
        self.server.close()
