"""What a Redis server keeps under one prefix, as commands see it."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..storage.errors import (
    ConfigError,
    DamageReason,
    RecordDamaged,
    RecordMissing,
    TierError,
    TierUnavailable,
)
from ..storage.redis_layout import HEAD_BYTES, Names
from ..storage.redis_store import RedisStore, Shard
from ..storage.redis_url import RedisSettings, parse_redis_url
from .exit_codes import ExitCode
from .reporting import CommandError
from .store_base import Broken, Capacity, Loose, Record, Space, Store, Writer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ..storage.disk_verify import VerifyResult
    from ..storage.pins import Pin
    from ..storage.record import Header
    from ..storage.redis import RedisTier
    from ..storage.redis_scan import FoundHead

_NOT_OURS = "its description is not what kvtier writes"
_TIMEOUT_S = 5.0  # a person waits longer than an engine does


class RedisServerStore(Store):
    """One prefix of a server, a cluster, or what a Sentinel watches."""

    kind = "redis"
    to_fix = "delete them"
    fixed = "deleted"

    def __init__(self, url: str) -> None:
        """Connect.

        Raises:
            CommandError: the URL is none.
            TierUnavailable: nobody answers.
        """
        try:
            settings = _patient(parse_redis_url(url))
        except ConfigError as error:
            raise CommandError(str(error), ExitCode.USAGE) from None
        self.name = settings.safe_url
        if settings.prefix != "kvtier":
            self.name += f"?prefix={settings.prefix}"
        self._settings = settings
        self._store = RedisStore(settings)
        self._tiers: dict[Shard, tuple[Any, Any]] = {}
        try:
            self._memory = self._store.memory()
        except TierError as error:
            self.close()
            raise TierUnavailable(settings.scrub(str(error))) from None

    def described(self) -> list[Space]:
        """Return the namespaces in words; see `Store.described`."""
        return [
            Space(namespace, text) if isinstance(text, dict) else Space(namespace, None, _NOT_OURS)
            for namespace, text in sorted(self._store.namespaces().items())
        ]

    def spaces(self) -> list[Space]:
        """Return the namespaces; see `Store.spaces`. Walks over all names."""
        found = {space.namespace: space for space in self.described()}
        for shard, _ in self._store.all_names():
            if shard.namespace not in found:
                found[shard.namespace] = Space(shard.namespace, None, "no description is kept")
        return [found[namespace] for namespace in sorted(found)]

    def records(self, namespace: bytes | None = None, start: str = "") -> Iterator[Record]:
        """Yield records as the server tells them; see `Store.records`."""
        name, _, group = start.partition("-")
        for shard, key, head in self._store.all_heads(namespace, name):
            if not group or f"g{key[-1]}".startswith(group):
                yield self._record(shard, key, head)

    def ordered(self, namespace: bytes | None = None) -> Iterator[Record]:
        """Yield records in order; see `Store.ordered`. Keeps all names in memory."""
        found = {(s.namespace, s.rank, key) for s, key in self._store.all_names(namespace)}
        every = [self._record(Shard(space, rank), key, None) for space, rank, key in found]
        del found
        every.sort(key=lambda record: record.order)
        yield from every

    def count(self, namespace: bytes | None = None) -> Iterator[tuple[bytes, int, bytes]]:
        """Yield every record; see `Store.count`."""
        for shard, key in self._store.all_names(namespace):
            yield shard.namespace, shard.rank, key

    def headers(self, wanted: list[Record]) -> Iterator[tuple[Record, Header]]:
        """Yield headers; see `Store.headers`."""
        for record in wanted:
            found = record.source
            if found is None:
                with contextlib.suppress(RecordMissing, RecordDamaged):
                    shard = Shard(record.namespace, record.rank)
                    yield record, self._store.head(shard, record.key).header
            elif found.head is not None:
                yield record, found.head.header

    def sample(self, wanted: list[tuple[bytes, int, bytes]]) -> list[Record]:
        """Ask for the heads; see `Store.sample`."""
        asked = [(Shard(namespace, rank), key) for namespace, rank, key in wanted]
        return [self._record(*found) for found in self._store.some_heads(asked)]

    def _record(self, shard: Shard, key: bytes, found: FoundHead | None) -> Record:
        stored_bytes = found.stored_bytes if found else 0
        used_at_s = time.time() - found.idle_s if found else 0.0
        place = Names(self._settings.prefix, shard.namespace, shard.rank).head(key).decode()
        return Record(shard.namespace, shard.rank, key, stored_bytes, used_at_s, place, found)

    def check(self, record: Record) -> VerifyResult:
        """Read head and stripes; see `Store.check`."""
        from ..storage.disk_verify import VerifyResult

        header, n_bytes = None, 0
        try:
            header = self._head(record)
            n_bytes = HEAD_BYTES + header.stored_bytes
            self._payload(record, header)
        except RecordDamaged as damage:
            return VerifyResult(record.place, header, damage.reason, str(damage), n_bytes)
        return VerifyResult(record.place, header, None, "intact", n_bytes)

    def stored(self, record: Record) -> tuple[Header, memoryview]:
        """Read head and stripes; see `Store.stored`."""
        header = self._head(record)
        return header, self._payload(record, header)

    def _head(self, record: Record) -> Header:
        header = self._store.head(Shard(record.namespace, record.rank), record.key).header
        if header.namespace != record.namespace:
            raise RecordDamaged(DamageReason.NAMESPACE, f"of {header.namespace.hex()}")
        if (header.key, header.rank) != (record.key, record.rank):
            raise RecordDamaged(DamageReason.IDENTITY, "holds another record")
        return header

    def _payload(self, record: Record, header: Header) -> memoryview:
        import mmap

        from ..storage.direct_io import padded
        from ..storage.reseal import check_size
        from ..storage.tier import RecordSpec

        check_size(header)
        room = memoryview(mmap.mmap(-1, padded(header.stored_bytes)))[: header.stored_bytes]
        spec = RecordSpec(record.key, header.start_tokens, header.end_tokens, header.raw_bytes)
        self._verbatim(Shard(record.namespace, record.rank))[0].get(spec, [room])
        return room

    def _verbatim(self, shard: Shard, description: Any = None) -> tuple[RedisTier, Any]:
        from ..storage.payload import Verbatim

        if shard not in self._tiers:
            form = Verbatim()
            tier = self._store.tier(shard, form=form, description=description)
            self._tiers[shard] = (tier, form)
        return self._tiers[shard]

    def capacity(self) -> Capacity:
        """Return what the server says of its memory."""
        memory = self._memory
        free_bytes = None
        if memory.used_bytes is not None and memory.limit_bytes is not None:
            free_bytes = max(0, memory.limit_bytes - memory.used_bytes)
        note = f"the whole server, {memory.keys:,} keys; {memory.policy or 'policy not known'}"
        return Capacity(memory.used_bytes, memory.limit_bytes, free_bytes, note)

    def quarantined(self) -> tuple[int, int]:
        """Return nothing: what is damaged in Redis is deleted."""
        return 0, 0

    def loose(self) -> list[Loose]:
        """Return stripes without a head; see `Store.loose`."""
        return [
            Loose(name.decode("utf-8", "backslashreplace"), 0, "a stripe that no record names")
            for name in self._store.loose_stripes()
        ]

    def current_epoch(self, description: Mapping[str, Any]) -> int | None:
        """Ask for the epoch that a clear raised; see `Store.current_epoch`."""
        from ..storage.redis_epoch import read_epoch
        from .store_words import base_digest

        digest = base_digest(description)
        return None if digest is None else read_epoch(self._settings, digest)

    def tier(self, namespace: bytes, rank: int) -> RedisTier:
        """Open a tier; see `Store.tier`."""
        return self._store.tier(Shard(namespace, rank))

    @contextlib.contextmanager
    def writer(self, space: Space, rank: int) -> Iterator[Writer]:
        """Open a namespace and rank to write; see `Store.writer`."""
        from ..storage.payload import Verbatim

        form = Verbatim()
        tier = self._store.tier(
            Shard(space.namespace, rank), form=form, description=space.description
        )
        try:
            yield _RedisWriter(tier, form)
        finally:
            tier.close()

    def broken_descriptions(self) -> list[Broken]:
        """Look at each namespace's words; see `Store.broken_descriptions`."""
        return [
            Broken(namespace, self._description_name(namespace), _NOT_OURS)
            for namespace, text in sorted(self._store.namespaces().items())
            if not isinstance(text, dict) and self.has_records(namespace)
        ]

    def drop_description(self, broken: Broken) -> bool:
        """Delete the words; see `Store.drop_description`."""
        return self._store.unlink([self._description_name(broken.namespace).encode()]) > 0

    def _description_name(self, namespace: bytes) -> str:
        return Names(self._settings.prefix, namespace, 0).description.decode()

    def sweep(self, loose: list[Loose]) -> int:
        """Delete stripes; see `Store.sweep`."""
        return self._store.unlink([item.place.encode() for item in loose])

    def pins(self) -> list[Pin]:
        """Read the pins' values; see `Store.pins`."""
        return self._store.pins()

    def pin(self, pin: Pin, records: list[Record]) -> None:
        """Write a pin's words, and take the time to live off its records; see `Store.pin`."""
        self._store.add_pin(pin)
        for rank in sorted({record.rank for record in records}):
            with self._open(pin.namespace, rank) as tier:
                tier.persist(pin.keys)

    def unpin(self, pin: Pin) -> None:
        """Drop a pin's words and give its records their time to live back; see `Store.unpin`."""
        self._store.remove_pin(pin.name)
        held = self.pinned().get(pin.namespace, frozenset())
        free = [key for key in pin.keys if key not in held]
        for shard in self._store.shards():
            if shard.namespace == pin.namespace:
                with self._open(pin.namespace, shard.rank) as tier:
                    tier.expire(free)

    @contextlib.contextmanager
    def _open(self, namespace: bytes, rank: int) -> Iterator[RedisTier]:
        tier = self.tier(namespace, rank)
        try:
            yield tier
        finally:
            tier.close()

    def pin_limit_bytes(self) -> int | None:
        """Return a share of the server's ``maxmemory``."""
        from ..storage.pins import PIN_SHARE

        limit_bytes = self._memory.limit_bytes
        return None if limit_bytes is None else limit_bytes // PIN_SHARE

    def pin_warning(self) -> str | None:
        """Say what the server's policy does to what is pinned."""
        policy = self._memory.policy or ""
        if "allkeys" in policy:
            return (
                f"the server's maxmemory-policy is {policy}, which evicts pinned records like any "
                "other; only volatile-* and noeviction keep them"
            )
        return None

    def no_ages(self) -> str | None:
        """Name a policy under which a server counts uses instead of ages; see `Store.no_ages`."""
        policy = self._memory.policy or ""
        if "lfu" in policy:
            return (
                f"under maxmemory-policy {policy} this server does not tell when records were used"
            )
        return None

    def forget(self, namespace: bytes) -> None:
        """Delete a namespace's description and loose stripes; see `Store.forget`."""
        if next(self._store.all_names(namespace), None) is None:
            self._store.forget_namespace(namespace)

    def close(self) -> None:
        """Close all connections."""
        for tier, _ in self._tiers.values():
            tier.close()
        self._tiers.clear()
        self._store.close()


def _patient(settings: RedisSettings) -> RedisSettings:
    """Return settings that wait as a person does, where the URL does not say for how long."""
    default = RedisSettings(settings.mode)
    if settings.timeout_s == default.timeout_s:
        settings = replace(settings, timeout_s=_TIMEOUT_S)
    if settings.connect_timeout_s == default.connect_timeout_s:
        settings = replace(settings, connect_timeout_s=_TIMEOUT_S)
    return settings


class _RedisWriter(Writer):
    def __init__(self, tier: Any, form: Any) -> None:
        self._tier = tier
        self._form = form

    def put(
        self,
        header: Header,
        stored: memoryview,
        used_at_s: float,  # noqa: ARG002
        *,
        replace: bool = False,
    ) -> bool:
        from ..storage.tier import PutResult, RecordSpec

        spec = RecordSpec(header.key, header.start_tokens, header.end_tokens, header.raw_bytes)
        self._form.expect(header)
        return bool(self._tier.put(spec, [stored], replace=replace) is PutResult.STORED)
