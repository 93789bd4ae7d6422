"""``kvtier bench redis``: the Redis tier against plain sockets and against redis-py.

One server over loopback, the same bytes, as many connections. Three ways take
turns, round after round, so that what else the machine does hits all alike:

* kvtier: `RedisTier.put` and `get`, records verified;
* sockets: the same bytes as one value with ``sendall`` and ``recv_into`` and
  nothing else;
* redis-py: its ``set`` and ``get``.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import statistics
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..storage.redis import RedisTier
from ..storage.redis_url import parse_redis_url
from ..storage.redis_wire import command
from ..storage.tier import PutResult, RecordSpec
from .redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MIB = 1 << 20
NAMESPACE = b"kvtier bench    "


@dataclass(frozen=True)
class Load:
    """What every way moves.

    Attributes:
        record_bytes: payload of one record.
        records: records of one connection and round.
        connections: threads, each with its own connection.
        rounds: measured rounds, after one that is not.
    """

    record_bytes: int = 8 * MIB
    records: int = 4
    connections: int = 2
    rounds: int = 15


class Sockets:
    """One value a record over plain sockets."""

    def __init__(self, server: RedisServer, load: Load) -> None:
        self._socks = [
            socket.create_connection(("127.0.0.1", server.port)) for _ in range(load.connections)
        ]
        for sock in self._socks:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def put(self, thread: int, number: int, data: memoryview) -> None:
        """Set one value."""
        sock, name = self._socks[thread], b"sockets:%d:%d" % (thread, number)
        sock.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, len(data)))
        sock.sendall(data)
        sock.sendall(b"\r\n")
        if sock.recv(5, socket.MSG_WAITALL) != b"+OK\r\n":
            raise RuntimeError("the server refused a value")

    def get(self, thread: int, number: int, into: memoryview) -> None:
        """Get one value."""
        sock = self._socks[thread]
        sock.sendall(command(b"GET", b"sockets:%d:%d" % (thread, number)))
        before = b"$%d\r\n" % len(into)
        if sock.recv(len(before), socket.MSG_WAITALL) != before:
            raise RuntimeError("a value is missing")
        at = 0
        while at < len(into):
            at += sock.recv_into(into[at:])
        sock.recv(2, socket.MSG_WAITALL)

    def close(self) -> None:
        """Close the connections."""
        for sock in self._socks:
            sock.close()


class RedisPy:
    """One value a record with redis-py's own calls."""

    def __init__(self, server: RedisServer, load: Load) -> None:
        self._clients = [server.client() for _ in range(load.connections)]

    def put(self, thread: int, number: int, data: memoryview) -> None:
        """Set one value."""
        self._clients[thread].set(b"redis-py:%d:%d" % (thread, number), data)

    def get(self, thread: int, number: int, into: memoryview) -> None:
        """Get one value; its bytes stay where redis-py put them."""
        value = self._clients[thread].get(b"redis-py:%d:%d" % (thread, number))
        if value is None or len(value) != len(into):
            raise RuntimeError("a value is missing")

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients:
            client.close()


class Tier:
    """Verified records through the tier."""

    def __init__(self, server: RedisServer, load: Load) -> None:
        settings = parse_redis_url(server.url, connections=load.connections)
        self.tier = RedisTier(settings, NAMESPACE, 0)

    @staticmethod
    def _spec(thread: int, number: int, size: int) -> RecordSpec:
        return RecordSpec(bytes((thread, number)) * 16 + b"\0", 0, 256, size)

    def put(self, thread: int, number: int, data: memoryview) -> None:
        """Put one record."""
        if self.tier.put(self._spec(thread, number, len(data)), [data]) is not PutResult.STORED:
            raise RuntimeError("the record was there already")

    def get(self, thread: int, number: int, into: memoryview) -> None:
        """Get one record."""
        self.tier.get(self._spec(thread, number, len(into)), [into])

    def close(self) -> None:
        """Close the tier."""
        self.tier.close()


def timed(
    work: Callable[[int, int, memoryview], None], pages: Sequence[mmap.mmap], load: Load
) -> float:
    """Return the seconds that all threads together take for all their records."""
    errors: list[BaseException] = []

    def body(thread: int) -> None:
        try:
            view = memoryview(pages[thread])
            for number in range(load.records):
                work(thread, number, view)
        except Exception as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=body, args=(i,)) for i in range(load.connections)]
    start_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took_s = time.perf_counter() - start_s
    if errors:
        raise errors[0]
    return took_s


NAMES = ("kvtier", "sockets", "redis_py")
Times = dict[str, dict[str, list[float]]]


def measure(load: Load) -> dict[str, Any]:
    """Run all ways in turns on one server of our own; return figures and ratios."""
    source = [mmap.mmap(-1, load.record_bytes) for _ in range(load.connections)]
    target = [mmap.mmap(-1, load.record_bytes) for _ in range(load.connections)]
    for page in source:
        page[:] = os.urandom(load.record_bytes)
    for page in target:
        page[:] = bytes(load.record_bytes)  # no page faults while measuring
    took: Times = {act: {name: [] for name in NAMES} for act in ("put", "get")}
    ok = True
    with RedisServer() as server, server.client() as client:
        made = (Tier(server, load), Sockets(server, load), RedisPy(server, load))
        ways: dict[str, Any] = dict(zip(NAMES, made, strict=True))
        for index in range(load.rounds + 1):
            client.flushall()  # our own server: every put finds it empty
            for act, pages in (("put", source), ("get", target)):
                for name in NAMES[index % 3 :] + NAMES[: index % 3]:
                    seconds = timed(getattr(ways[name], act), pages, load)
                    if index:  # the first round warms up
                        took[act][name].append(seconds)
                    if act == "get" and name == "kvtier":
                        ok &= all(a[:] == b[:] for a, b in zip(source, target, strict=True))
        for way in made:
            way.close()
    return {"ok": ok, **figures(took, load)}


def figures(took: Times, load: Load) -> dict[str, Any]:
    """Return ratios (medians of each round's) and speeds."""
    total_bytes = load.record_bytes * load.records * load.connections
    result: dict[str, Any] = {}
    for act in ("get", "put"):
        for other in NAMES[1:]:
            pairs = zip(took[act][other], took[act]["kvtier"], strict=True)
            result[f"{act}_ratio_to_{other}"] = round(statistics.median(a / b for a, b in pairs), 3)
    for act in ("get", "put"):
        for name in NAMES:
            seconds = statistics.median(took[act][name])
            result[f"{act}_{name}_gb_per_s"] = round(total_bytes / seconds / 1e9, 3)
    return {**result, "record_bytes": load.record_bytes, "connections": load.connections}


def run(as_json: bool, load: Load | None = None) -> int:
    """Measure and print; return 0, or 1 when bytes came back wrong."""
    result = measure(load or Load())
    if as_json:
        print(json.dumps(result))
    else:
        print(
            f"{'':8}{'kvtier':>10}{'sockets':>10}{'redis-py':>10}   GB/s, records of "
            f"{result['record_bytes'] // MIB} MiB, {result['connections']} connections"
        )
        for way in ("get", "put"):
            rates = [result[f"{way}_{name}_gb_per_s"] for name in ("kvtier", "sockets", "redis_py")]
            print(
                f"{way:8}"
                + "".join(f"{rate:10.2f}" for rate in rates)
                + f"   {result[f'{way}_ratio_to_sockets']:.2f} of sockets, "
                f"{result[f'{way}_ratio_to_redis_py']:.2f} times redis-py"
            )
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    import sys

    raise SystemExit(run("--json" in sys.argv))
