"""What `kvtier doctor` looks at in a Redis server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..storage.errors import ConfigError, KVTierError, TierUnavailable
from ..storage.redis_url import parse_redis_url
from .doctor import Finding, hint, ok, problem
from .reporting import size

if TYPE_CHECKING:
    from ..connector.config import Config

_SLOW_S = 0.005


def redis(config: Config) -> Iterator[Finding]:
    """Reach the server, write and delete one small record, look at its memory."""
    from ..storage.redis_store import RedisStore, Shard

    assert config.redis is not None
    try:
        settings = parse_redis_url(config.redis)
    except ConfigError as error:
        yield problem("redis", str(error), "correct the URL")
        return
    store = RedisStore(settings)
    try:
        began_s = time.perf_counter()
        memory = store.memory()
        connected_s = time.perf_counter() - began_s
        began_s = time.perf_counter()
        store.memory()
        trip_s = (time.perf_counter() - began_s) / 2
        text = f"{settings.safe_url} answers in {trip_s * 1000:.2f} ms"
        if trip_s > _SLOW_S:
            yield hint("redis", text, "a server nearer by makes lookups and loads faster")
        else:
            yield ok("redis", f"{text}, the first time in {connected_s * 1000:.0f} ms")
        yield _write(store, Shard(b"kvtier-doctor..."[:16], 0))
        limit = memory.limit_bytes
        if limit is None:
            yield hint(
                "redis memory",
                "no maxmemory: the server grows until its machine is full",
                "set maxmemory and maxmemory-policy allkeys-lru",
            )
        elif memory.policy == "noeviction":
            yield hint(
                "redis memory",
                f"maxmemory {size(limit)} with noeviction: saves are refused when it is full",
                "set maxmemory-policy allkeys-lru",
            )
        else:
            yield ok("redis memory", f"maxmemory {size(limit)}, {memory.policy}")
    except TierUnavailable as error:
        yield problem(
            "redis", settings.scrub(str(error)), "start the server, or correct the setting 'redis'"
        )
    except KVTierError as error:
        yield problem("redis", settings.scrub(str(error)), "see the message")
    finally:
        store.close()


def _write(store: object, shard: object) -> Finding:
    """Write one record into a namespace of our own, read it, delete it."""
    import mmap

    from ..storage.redis_store import RedisStore, Shard
    from ..storage.tier import RecordSpec

    assert isinstance(store, RedisStore)
    assert isinstance(shard, Shard)
    tier = store.tier(shard)
    page = memoryview(mmap.mmap(-1, 4096))
    spec = RecordSpec(b"kvtier-doctor" + bytes(20), 0, 1, 4096)
    try:
        tier.put(spec, [page], replace=True)
        tier.get(spec, [page])
        tier.delete([spec.key])
    except KVTierError as error:
        return problem(
            "redis writes",
            store.settings.scrub(str(error)),
            "let this user write under the prefix, on the master",
        )
    finally:
        tier.close()
    return ok("redis writes", "a record was written, read and deleted")
