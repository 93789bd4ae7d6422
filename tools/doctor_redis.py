"""What `kvtier doctor` looks at in a Redis server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..storage.errors import KVTierError, TierUnavailable
from .doctor import Finding, hint, ok, problem
from .reporting import size

if TYPE_CHECKING:
    from ..connector.config import Config
    from ..storage.redis_store import ServerMemory

_SLOW_S = 0.005


def redis(config: Config) -> Iterator[Finding]:
    """Reach the server, write and delete one small record, look at its memory."""
    from ..storage.redis_store import RedisStore, Shard

    assert config.redis is not None
    settings = config.redis_settings()
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
        yield _memory(memory, settings.ttl_s)
    except TierUnavailable as error:
        yield problem(
            "redis", settings.scrub(str(error)), "start the server, or correct the setting 'redis'"
        )
    except KVTierError as error:
        yield problem("redis", settings.scrub(str(error)), "see the message")
    finally:
        store.close()


def _memory(memory: ServerMemory, ttl_s: float | None) -> Finding:
    """Judge what the server does when it is full."""
    name, limit = "redis memory", memory.limit_bytes
    # volatile: what has no time to live (the number that clears raise, pins) stays
    todo = "set maxmemory-policy volatile-lru"
    if limit is None:
        text = "no maxmemory: the server grows until its machine is full"
        return hint(name, text, f"set maxmemory, and {todo}")
    policy = memory.policy or ""
    text = f"maxmemory {size(limit)}, {policy}"
    if policy == "noeviction":
        return hint(name, f"{text}: saves are refused when it is full", todo)
    if "volatile" in policy and ttl_s is None:
        text += (
            ": records without a time to live are not evicted, saves are refused when it is full"
        )
        return hint(name, text, "set 'redis_ttl'")
    if "allkeys" in policy:
        text += ": it may evict the number that clears raise, and pinned records"
        return hint(name, text, todo)
    return ok(name, text)


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
