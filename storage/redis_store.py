"""A Redis store as tools see it: which namespaces and ranks are there, and their records' heads.

Reads only; to delete or to read payloads, open a `RedisTier` with `RedisStore.tier`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import DamageReason, RecordDamaged, RecordMissing
from .key import chunk_key
from .redis import RedisTier
from .redis_ask import Question, ask, ask_node
from .redis_layout import HEAD_BYTES, Head, Names, escape_glob, head_of, parse_head
from .redis_pins import drop_pin, pin_name, read_pins, write_pin
from .redis_scan import FoundHead, head_names, heads_of, unlink_all
from .redis_servers import Servers
from .redis_wire import ServerError, command, raise_error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .pins import Pin
    from .redis_url import RedisSettings


_VALUE = re.compile(
    rb"(?P<namespace>[0-9a-f]{32}):r(?P<rank>\d{1,9}):"
    rb"\{(?P<hash>(?:[0-9a-f]{2}){8,64})\}-(?P<group>g(?:0|[1-9]\d{0,2})):(?:h|(?P<generation>[0-9a-f]{16}):\d{1,5})"
)
_LOOSE_AFTER_S = 60  # a record's stripes come before its head
_BATCH = 64


@dataclass(frozen=True)
class Shard:
    """One namespace and rank that has records."""

    namespace: bytes
    rank: int


@dataclass(frozen=True)
class ServerMemory:
    """What the servers hold, all keys together; None where a server does not say.

    Attributes:
        used_bytes: of all servers.
        limit_bytes: ``maxmemory`` of all servers; None also where there is none.
        policy: what happens at the limit.
        keys: of the database, other people's included.
    """

    used_bytes: int | None
    limit_bytes: int | None
    policy: str | None
    keys: int


class RedisStore:
    """Everything under one prefix. Blocking; raises `TierUnavailable` when a server is silent."""

    def __init__(self, settings: RedisSettings) -> None:
        self.settings = settings
        self._servers = Servers(settings)

    def namespaces(self) -> dict[bytes, Any]:
        """Return the words kept for each namespace that has any; None where they do not parse."""
        start = f"{self.settings.prefix}:ns:".encode()
        found: dict[bytes, Any] = {}
        for name in self._names(escape_glob(start) + b"*"):
            text = name[len(start) :]
            if re.fullmatch(rb"[0-9a-f]{32}", text) is None:
                continue
            answer = ask(self._servers, [Question(name, command(b"GET", name))])[0]
            try:
                words = json.loads(answer) if isinstance(answer, bytes) else None
            except ValueError:
                words = None
            found[bytes.fromhex(text.decode())] = words
        return found

    def shards(self) -> list[Shard]:
        """Return every namespace and rank that has a record: one walk over all our keys."""
        start = f"{self.settings.prefix}:".encode()
        found = set()
        for name in self._names(escape_glob(start) + b"*:h"):
            match = re.match(rb"([0-9a-f]{32}):r(\d{1,9}):\{", name[len(start) :])
            if match is not None:
                found.add(Shard(bytes.fromhex(match[1].decode()), int(match[2])))
        return sorted(found, key=lambda shard: (shard.namespace, shard.rank))

    def heads(self, shard: Shard) -> Iterator[tuple[bytes, FoundHead]]:
        """Yield (key, head) of each record; one that does not parse has ``head.head`` None.

        A record may come twice while the server rehashes.
        """
        names = Names(self.settings.prefix, shard.namespace, shard.rank)
        for node in self._servers.nodes():
            for batch in head_names(self._servers, node, names.heads_pattern):
                for found in heads_of(self._servers, node, batch):
                    key = names.key_of(found.name)
                    if key is not None:
                        yield key, found

    def all_heads(
        self, namespace: bytes | None = None, start: str = ""
    ) -> Iterator[tuple[Shard, bytes, FoundHead]]:
        """Yield (shard, key, head) of every record, in one walk over the servers.

        A record may come twice while a server rehashes.

        Args:
            namespace: only this one, or None for all.
            start: only keys whose hash, in hex, begins so.
        """
        for node in self._servers.nodes():
            for batch in head_names(self._servers, node, self._heads_pattern(namespace, start)):
                for found in heads_of(self._servers, node, batch):
                    place = self._place_of(found.name)
                    if place is not None:
                        yield (*place, found)

    def all_names(self, namespace: bytes | None = None) -> Iterator[tuple[Shard, bytes]]:
        """Yield (shard, key) of every record and read nothing of them; quicker than `all_heads`."""
        for name in self._names(self._heads_pattern(namespace, "")):
            place = self._place_of(name)
            if place is not None:
                yield place

    def some_heads(
        self, wanted: list[tuple[Shard, bytes]]
    ) -> Iterator[tuple[Shard, bytes, FoundHead]]:
        """Yield what the heads of these records say; those that are gone are left out."""
        names = [Names(self.settings.prefix, s.namespace, s.rank).head(key) for s, key in wanted]
        by_node: dict[Any, list[bytes]] = {}
        for name in names:
            by_node.setdefault(self._servers.node_of(name), []).append(name)
        for node, own in by_node.items():
            for at in range(0, len(own), _BATCH):
                for found in heads_of(self._servers, node, own[at : at + _BATCH]):
                    place = self._place_of(found.name)
                    assert place is not None
                    yield (*place, found)

    def head(self, shard: Shard, key: bytes) -> Head:
        """Return one record's head.

        Raises:
            RecordMissing: no such record.
            RecordDamaged: it is no head.
        """
        name = Names(self.settings.prefix, shard.namespace, shard.rank).head(key)
        question = Question(name, command(b"GETRANGE", name, 0, HEAD_BYTES - 1))
        answer = ask(self._servers, [question])[0]
        if isinstance(answer, ServerError):
            if answer.code == "WRONGTYPE":
                raise RecordDamaged(DamageReason.NOT_A_FILE, "a Redis value of another type")
            raise_error(answer, self.settings.safe_url)
        if not answer or not isinstance(answer, bytes):
            raise RecordMissing("no such record")
        return parse_head(answer)

    def loose_stripes(self) -> list[bytes]:
        """Return the names of stripes that no head refers to and nobody is just writing."""
        stripes: dict[bytes, list[bytes]] = {}  # by the name of their head
        for name in self._names(escape_glob(f"{self.settings.prefix}:".encode()) + b"*:{*}-g*:*:*"):
            match = self._value(name)
            if match is not None and match["generation"]:
                chunk = name[: len(name) - len(match.group()) + match.end("group")]
                stripes.setdefault(chunk + b":h", []).append(name)
        heads = [Question(name, command(b"GETRANGE", name, 0, HEAD_BYTES - 1)) for name in stripes]
        loose = []
        for names, answer in zip(stripes.values(), ask(self._servers, heads), strict=True):
            current = _generation(answer)
            loose += [n for n in names if n.split(b":")[-2] != current and self._is_old(n)]
        return loose

    def unlink(self, names: list[bytes]) -> int:
        """Delete values by name; return how many were there."""
        answers = ask(self._servers, [Question(name, command(b"UNLINK", name)) for name in names])
        return sum(answer == 1 for answer in answers)

    def memory(self) -> ServerMemory:
        """Return what the servers say about their memory."""
        used: list[int | None] = []
        limits: list[int | None] = []
        policies: set[str] = set()
        keys = 0
        for node in self._servers.nodes():
            info, count = ask_node(
                self._servers, node, [command(b"INFO", b"memory"), command(b"DBSIZE")]
            )
            text = info.decode("utf-8", "replace") if isinstance(info, bytes) else ""
            said = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
            used.append(_number(said.get("used_memory")))
            limits.append(_number(said.get("maxmemory")) or None)
            policies |= {said["maxmemory_policy"]} if "maxmemory_policy" in said else set()
            keys += count if isinstance(count, int) else 0
        return ServerMemory(_total(used), _total(limits), ", ".join(sorted(policies)) or None, keys)

    def tier(self, shard: Shard, **options: Any) -> RedisTier:
        """Open the tier of one shard; the caller closes it."""
        return RedisTier(self.settings, shard.namespace, shard.rank, **options)

    def forget_namespace(self, namespace: bytes) -> None:
        """Delete a namespace's words, and all that lies beside its records, if there are any.

        That is stripes whose head could not be read when it was deleted.
        """
        prefix = self.settings.prefix
        for node in self._servers.nodes():
            unlink_all(
                self._servers, node, escape_glob(f"{prefix}:{namespace.hex()}:r".encode()) + b"*"
            )
        name = Names(prefix, namespace, 0).description
        ask(self._servers, [Question(name, command(b"UNLINK", name))])

    def pins(self) -> list[Pin]:
        """Return all pins, the oldest first."""
        prefix = self.settings.prefix
        start = pin_name(prefix, "")
        return read_pins(self._servers, prefix, self._names(escape_glob(start) + b"*"))

    def add_pin(self, pin: Pin) -> None:
        """Keep a pin's words; the records' lives are changed through their tiers."""
        write_pin(self._servers, self.settings.prefix, pin, self.settings.safe_url)

    def remove_pin(self, name: str) -> bool:
        """Drop a pin's words; return whether they were there."""
        return drop_pin(self._servers, self.settings.prefix, name, self.settings.safe_url)

    def close(self) -> None:
        """Close all connections. Idempotent."""
        self._servers.close()

    def _heads_pattern(self, namespace: bytes | None, start: str) -> bytes:
        which = b"*" if namespace is None else namespace.hex().encode()
        prefix = escape_glob(f"{self.settings.prefix}:".encode())
        return prefix + which + b":r*:{" + escape_glob(start.encode()) + b"*}-g*:h"

    def _value(self, name: bytes) -> re.Match[bytes] | None:
        """Match the part of a value's name that follows our prefix."""
        start = f"{self.settings.prefix}:".encode()
        return _VALUE.fullmatch(name[len(start) :]) if name.startswith(start) else None

    def _place_of(self, name: bytes) -> tuple[Shard, bytes] | None:
        match = self._value(name)
        if match is None or match["generation"]:
            return None
        group = int(match["group"][1:])
        if group > 255:
            return None
        key = chunk_key(bytes.fromhex(match["hash"].decode()), group)
        return Shard(bytes.fromhex(match["namespace"].decode()), int(match["rank"])), key

    def _is_old(self, name: bytes) -> bool:
        idle = ask(self._servers, [Question(name, command(b"OBJECT", b"IDLETIME", name))])[0]
        return isinstance(idle, int) and idle >= _LOOSE_AFTER_S

    def _names(self, pattern: bytes) -> Iterator[bytes]:
        for node in self._servers.nodes():
            for names in head_names(self._servers, node, pattern):
                yield from names


def _generation(answer: object) -> bytes | None:
    """Return the generation, in hex, that the bytes of a head name."""
    head = head_of(answer)
    return None if head is None else head.generation.hex().encode()


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isdigit() else None


def _total(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
