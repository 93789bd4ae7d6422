"""Redis (or Valkey) as the shared tier: one store for many engines.

A record lies as `kvtier.storage.redis_layout` says; `redis_wire` moves its
bytes, `redis_servers` knows where. Nothing connects before the first call.

Commands used, for those who write ACLs: ``GET GETRANGE STRLEN EXISTS SET
UNLINK EXPIRE PEXPIRE PERSIST MULTI EXEC SCAN OBJECT|IDLETIME``. Never ``KEYS`` nor
``FLUSH*``; nothing outside our prefix is read or written.
"""

from __future__ import annotations

import json
import os
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

import xxhash

from .codec import codec_of
from .errors import (
    DamageReason,
    RecordDamaged,
    RecordMissing,
    RecordRefused,
    TierError,
    TierUnavailable,
)
from .key import NAMESPACE_BYTES
from .payload import PayloadFormat
from .redis_ask import Question, any_answers, ask, suspecting
from .redis_layout import GENERATION_BYTES, HEAD_BYTES, Head, Names, head_of
from .redis_node import NodeGoneError
from .redis_record import Place, StripeGoneError, read_record, write_record
from .redis_scan import head_names, heads_of, unlink_all
from .redis_servers import Servers
from .redis_wire import MigratingError, MovedError, ServerError, command, raise_error
from .throttle import Throttle
from .tier import PutResult, RecordInfo, Tier, TierCapabilities, TierChanges, TierStat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from .keyring import KeyRing
    from .redis_url import RedisSettings
    from .redis_wire import Answer, Wire
    from .tier import Buffers, RecordSpec

T = TypeVar("T")
_MAX_CHANGES = 1 << 16
_HOPS = 3
_TRIES = 8  # of a record that is replaced again and again while it is read
_BATCH_KEYS = 256
_DESCRIBE_EVERY_S = 3600.0
_TOUCH_SHARE = 0.1  # of the time to live, before a record is given it anew


class RedisTier(Tier):
    """Records of one namespace and rank in Redis. Thread-safe; every call blocks.

    A server that is silent for ``settings.timeout_s`` makes a call raise
    `TierUnavailable`; nothing is retried here but a kept connection that
    proves to be closed.

    Args:
        settings: server and manners (`kvtier.storage.redis_url`).
        namespace: 16 bytes, the fingerprint of what changes the bytes.
        rank: whose bytes these are.
        codec: what to try on payloads: raw, lz4 or zstd.
        item_bytes: bytes of one value, for the codec.
        description: plain words about the namespace, kept beside it for tools.
        keys: seals records with their first, reads those of all; None: not sealed.
        form: instead of codec, item_bytes and keys.
        clock: Unix time.
        draw: returns so many random bytes.
    """

    capabilities = TierCapabilities(persistent=True, shared=True, evicts=False)

    def __init__(
        self,
        settings: RedisSettings,
        namespace: bytes,
        rank: int,
        *,
        codec: str = "raw",
        item_bytes: int = 2,
        description: Mapping[str, Any] | None = None,
        keys: KeyRing | None = None,
        form: PayloadFormat | None = None,
        name: str = "redis",
        clock: Callable[[], float] = time.time,
        draw: Callable[[int], bytes] = os.urandom,
    ) -> None:
        assert len(namespace) == NAMESPACE_BYTES
        self.name = name
        self.settings = settings
        self._namespace = namespace
        self._rank = rank
        self._format = form or PayloadFormat(codec_of(codec), item_bytes, keys, draw)
        self._description = json.dumps(description, sort_keys=True) if description else ""
        self._clock = clock
        self._draw = draw
        self._servers = Servers(settings)
        self._names = Names(settings.prefix, namespace, rank)
        self._place = Place(
            self._names,
            namespace,
            rank,
            settings.safe_url,
            settings.ttl_s,
            settings.stripe_bytes,
            self._format,
        )
        self._lock = threading.Lock()  # what is below
        self._changed: dict[bytes, bool] = {}
        self._records = self._stored_bytes = 0
        self._described_s = float("-inf")
        self._renewals = Throttle((settings.ttl_s or 0.0) * _TOUCH_SHARE, clock)
        self._expire_xx = True  # until the server says that it does not know it

    def __repr__(self) -> str:
        return f"RedisTier({self.settings.safe_url!r}, rank={self._rank})"

    # -- payloads ----------------------------------------------------------

    def put(self, spec: RecordSpec, payload: Buffers, *, replace: bool = False) -> PutResult:
        """Store a record; see `Tier.put`. Bytes go from ``payload`` to the socket."""
        packed = self._format.pack(spec, self._namespace, self._rank, self._clock(), payload)
        head = Head(
            packed.header,  # its checksum is taken on the way
            self._draw(GENERATION_BYTES),
            self.settings.stripe_bytes,
        )
        try:
            written = self._transfer(
                spec.key,
                lambda wire: write_record(
                    wire, self._place, spec, head, packed.parts, overwrite=replace
                ),
            )
        except (MigratingError, NodeGoneError) as error:
            raise RecordRefused(f"redis: {error}") from None
        if written.result is PutResult.STORED:
            with self._lock:
                self._records -= written.replaced_bytes is not None
                self._stored_bytes -= written.replaced_bytes or 0
            self._note(spec.key, there=True, stored_bytes=HEAD_BYTES + packed.header.stored_bytes)
            self._describe()
        return written.result

    def get(self, spec: RecordSpec, into: Buffers) -> int:
        """Read a record; see `Tier.get`. Bytes of a raw record go from the socket to ``into``."""
        gone: StripeGoneError | None = None
        try:
            for _try in range(_TRIES):
                try:
                    return self._transfer(
                        spec.key, lambda wire: read_record(wire, self._place, spec, into)
                    )
                except StripeGoneError as error:
                    if gone is not None and gone.generation == error.generation:
                        break
                    gone = error  # replaced while we read, perhaps: look again
            raise RecordDamaged(DamageReason.TRUNCATED, str(gone))
        except (MigratingError, NodeGoneError) as error:
            raise RecordMissing(str(error)) from None
        except RecordMissing:
            self._note(spec.key, there=False)
            raise

    def _transfer(self, key: bytes, work: Callable[[Wire], T]) -> T:
        """Run ``work`` on a payload connection to the server of ``key``."""
        head_name = self._names.head(key)
        for _hop in range(_HOPS):
            node = self._servers.node_of(head_name)
            try:
                with suspecting(self._servers, node):
                    return node.payloads.call(work)
            except MovedError:
                self._servers.moved()
            except TierUnavailable as error:
                if self._servers.others_answer(node):
                    raise NodeGoneError(str(error)) from None
                raise
        raise TierUnavailable("redis: keys keep moving; a cluster needs redis+cluster://")

    # -- questions ---------------------------------------------------------

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which keys have a head: one round trip (one to every node, all at once).

        Of a cluster whose nodes do not all answer, what the others say counts.
        """
        try:
            found = self._ask_each(keys, lambda name: command(b"EXISTS", name))
        except TierUnavailable:
            if not any_answers(self._servers, self._names.description):
                raise
            return [False] * len(keys)
        return [answer == 1 for answer in found]

    def delete(self, keys: Iterable[bytes]) -> int:
        """Delete records, heads first; return how many were there.

        Raises:
            TierUnavailable, TierRefused: not all could be deleted.
        """
        wanted = list(dict.fromkeys(keys))
        deleted = 0
        for start in range(0, len(wanted), _BATCH_KEYS):
            batch = wanted[start : start + _BATCH_KEYS]
            heads = self._heads(batch)
            gone = self._ask_each(batch, lambda name: command(b"UNLINK", name))
            self._ask(
                Question(names[0], command(b"UNLINK", *names))
                for key, head in zip(batch, heads, strict=True)
                if head is not None and (names := self._names.stripes(key, head))
            )
            deleted += sum(answer == 1 for answer in gone)
            for key, head, answer in zip(batch, heads, gone, strict=True):
                if answer == 1:
                    stored_bytes = HEAD_BYTES + head.header.stored_bytes if head else 0
                    self._note(key, there=False, stored_bytes=stored_bytes)
            if None in gone:
                raise TierUnavailable(
                    "redis: not all deleted: a node of the cluster does not answer, or keys are "
                    "just moving between two"
                )
        return deleted

    def touch(self, keys: Iterable[bytes]) -> None:
        """Give records their whole time to live again; best effort, nothing without one.

        A record that was given it within the last tenth of that time is passed over.
        What has no time to live (it is pinned) gets none, where the server knows ``XX``.
        """
        ttl_s = self.settings.ttl_s
        if ttl_s is None:
            return
        due = self._renewals.due(keys)
        try:
            if not self._expire(due, ttl_s, only_living=self._expire_xx):
                self._expire_xx = False  # a server before Redis 7
                self._expire(due, ttl_s, only_living=False)
        except TierError:
            self._renewals.forget(due)  # the next use tries again

    def persist(self, keys: Iterable[bytes]) -> int:
        """Take the time to live off records; return how many are there.

        Raises:
            TierUnavailable, TierRefused.
        """
        return self._change_lives(keys, lambda name, _: command(b"PERSIST", name))[0]

    def expire(self, keys: Iterable[bytes]) -> int:
        """Give records their time to live (back); return how many are there.

        Raises:
            TierUnavailable, TierRefused.
        """
        ttl_s = self.settings.ttl_s
        if ttl_s is None:
            return self.persist(keys)
        return self._change_lives(
            keys, lambda name, margin_s: command(b"EXPIRE", name, int(ttl_s) + margin_s)
        )[0]

    def _expire(self, keys: Iterable[bytes], ttl_s: float, *, only_living: bool) -> bool:
        """Give records their time to live; False where the server does not know ``XX``."""
        more = (b"XX",) if only_living else ()
        _, answers = self._change_lives(
            keys, lambda name, margin_s: command(b"EXPIRE", name, int(ttl_s) + margin_s, *more)
        )
        return not any(isinstance(a, ServerError) and a.code == "ERR" for a in answers)

    def _change_lives(
        self, keys: Iterable[bytes], make: Callable[[bytes, int], bytes]
    ) -> tuple[int, list[Answer]]:
        """Ask ``make(name, margin)`` of each value of records, stripes before their head."""
        wanted = list(dict.fromkeys(keys))
        answers: list[Answer] = []
        n_found = 0
        for start in range(0, len(wanted), _BATCH_KEYS):
            batch = wanted[start : start + _BATCH_KEYS]
            heads = zip(batch, self._heads(batch), strict=True)
            found = [(key, head) for key, head in heads if head is not None]
            n_found += len(found)
            answers += self._ask(
                (
                    Question(name, make(name, margin_s))
                    for key, head in found
                    for name, margin_s in (
                        *((stripe, 600) for stripe in self._names.stripes(key, head)),
                        (self._names.head(key), 0),
                    )
                ),
                tolerated=("ERR",),
            )
        return n_found, answers

    def _heads(self, keys: Sequence[bytes]) -> list[Head | None]:
        found = self._ask_each(keys, lambda name: command(b"GETRANGE", name, 0, HEAD_BYTES - 1))
        return [head_of(answer) for answer in found]

    def _ask_each(self, keys: Sequence[bytes], make: Callable[[bytes], bytes]) -> list[Answer]:
        names = [self._names.head(key) for key in keys]
        return self._ask(Question(name, make(name)) for name in names)

    def _ask(self, questions: Iterable[Question], tolerated: tuple[str, ...] = ()) -> list[Answer]:
        answers = ask(self._servers, list(questions), some=True)
        for answer in answers:
            if isinstance(answer, ServerError) and answer.code not in {"WRONGTYPE", *tolerated}:
                raise_error(answer, self.settings.safe_url)
        return answers

    # -- the whole namespace ---------------------------------------------

    def scan(self) -> Iterator[RecordInfo]:
        """Yield all records; read from the server in batches as the caller goes on."""
        seen: set[int] = set()
        records = stored_bytes = 0
        for node in self._servers.nodes():
            for names in head_names(self._servers, node, self._names.heads_pattern):
                for found in heads_of(self._servers, node, names):
                    key, mark = self._names.key_of(found.name), xxhash.xxh3_64_intdigest(found.name)
                    if key is None or mark in seen:
                        continue
                    seen.add(mark)
                    records += 1
                    stored_bytes += found.stored_bytes
                    yield RecordInfo(key, found.stored_bytes, self._clock() - found.idle_s)
        with self._lock:
            self._records, self._stored_bytes = records, stored_bytes

    def changes(self) -> TierChanges:
        """Return what this tier object itself stored, deleted or missed since the last call."""
        with self._lock:
            changed, self._changed = self._changed, {}
        return TierChanges(
            added=tuple(key for key, there in changed.items() if there),
            removed=tuple(key for key, there in changed.items() if not there),
        )

    def stat(self) -> TierStat:
        """Return the last whole scan's count and what was stored and deleted here since."""
        with self._lock:
            return TierStat(max(self._records, 0), max(self._stored_bytes, 0), None)

    def clear(self) -> None:
        """Delete every record of this namespace and rank; see `Tier.clear`."""
        trouble: list[str] = []
        deleted = 0
        for node in self._servers.nodes():
            try:
                deleted += unlink_all(self._servers, node, self._names.all_pattern)
            except TierError as error:
                trouble.append(str(error))
        if trouble:
            raise TierUnavailable(
                f"redis: {deleted} values deleted, the rest not cleared: {'; '.join(trouble)}"
            )
        with self._lock:
            self._records = self._stored_bytes = 0

    def close(self) -> None:
        """Close all connections; calls that wait on one raise. Idempotent."""
        self._servers.close()

    # -- bookkeeping -------------------------------------------------------

    def _note(self, key: bytes, *, there: bool, stored_bytes: int = 0) -> None:
        with self._lock:
            self._changed.pop(key, None)
            self._changed[key] = there
            if len(self._changed) > _MAX_CHANGES:
                del self._changed[next(iter(self._changed))]
            if stored_bytes:
                self._records += 1 if there else -1
                self._stored_bytes += stored_bytes if there else -stored_bytes

    def _describe(self) -> None:
        """Keep the namespace's words beside it, as long as there are records; best effort."""
        now_s = self._clock()
        with self._lock:
            due = now_s - self._described_s >= _DESCRIBE_EVERY_S and self._description
            if due:
                self._described_s = now_s
        if not due:
            return
        name, text = self._names.description, self._description.encode()
        life = () if self.settings.ttl_s is None else (b"EX", int(self.settings.ttl_s) + 7200)
        try:
            ask(self._servers, [Question(name, command(b"SET", name, text, *life))])
        except TierError:
            return  # the record is stored; the words come with a later one
