"""A Redis store as tools see it: which namespaces and ranks are there, and their records' heads.

Reads only; to delete or to read payloads, open a `RedisTier` with `RedisStore.tier`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .redis import RedisTier
from .redis_ask import Question, ask
from .redis_layout import Names, escape_glob
from .redis_scan import FoundHead, head_names, heads_of
from .redis_servers import Servers
from .redis_wire import command

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .redis_url import RedisSettings


@dataclass(frozen=True)
class Shard:
    """One namespace and rank that has records."""

    namespace: bytes
    rank: int


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

    def tier(self, shard: Shard, **options: Any) -> RedisTier:
        """Open the tier of one shard; the caller closes it."""
        return RedisTier(self.settings, shard.namespace, shard.rank, **options)

    def forget_namespace(self, namespace: bytes) -> None:
        """Delete a namespace's words (its records are cleared through their tiers)."""
        name = Names(self.settings.prefix, namespace, 0).description
        ask(self._servers, [Question(name, command(b"UNLINK", name))])

    def close(self) -> None:
        """Close all connections. Idempotent."""
        self._servers.close()

    def _names(self, pattern: bytes) -> Iterator[bytes]:
        for node in self._servers.nodes():
            for names in head_names(self._servers, node, pattern):
                yield from names
