"""One record over one connection: read it into pages, write it from pages.

Blocking, on the calling thread; both bound what is in flight to a window of
stripes, so that neither side piles up more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import xxhash

from .errors import DamageReason, RecordDamaged, RecordMissing, TierError, TierRefused
from .pieces import cut
from .record import check
from .redis_layout import HEAD_BYTES, Head, Names, parse_head
from .redis_wire import ServerError, command, raise_error
from .tier import PutResult

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from .payload import PayloadFormat
    from .redis_wire import Answer, Wire
    from .tier import Buffers, RecordSpec

WINDOW_STRIPES = 3
PIECE_BYTES = 1 << 20  # hashed while the processor's cache holds it
_GRACE_MS = 5_000  # a replaced record's stripes stay for those who read it just now
_UNFINISHED_MS = 600_000  # stripes whose head never came vanish by themselves


class StripeGoneError(Exception):
    """A stripe that the head promises is not there (the record may just have been replaced)."""

    def __init__(self, generation: bytes, text: str) -> None:
        super().__init__(text)
        self.generation = generation


@dataclass(frozen=True)
class Place:
    """Whose records are read and written, and how they are written."""

    names: Names
    namespace: bytes
    rank: int
    where: str
    ttl_s: float | None
    stripe_bytes: int
    form: PayloadFormat


@dataclass(frozen=True)
class Written:
    """How a write ended.

    Attributes:
        result: STORED, or EXISTS and nothing changed.
        replaced_bytes: what the record took whose place this one took; 0 for
            one that does not parse, None when there was none.
    """

    result: PutResult
    replaced_bytes: int | None = None


def read_record(wire: Wire, place: Place, spec: RecordSpec, into: Buffers) -> int:
    """Read, verify and decode the record of ``spec`` into ``into``; return bytes read.

    Raises:
        RecordMissing, RecordDamaged, TierUnavailable: as `Tier.get` does.
        StripeGoneError: the head's stripes are not all there.
    """
    wire.begin(spec.raw_bytes)
    wire.send([command(b"GET", place.names.head(spec.key))], 1)
    size = wire.bulk_bytes()
    if isinstance(size, ServerError):
        raise_error(size, place.where, hops=True)
    if size is None:
        raise RecordMissing("no such record")
    raw_head = bytearray(min(HEAD_BYTES, size))
    wire.read_into([memoryview(raw_head)])
    head = parse_head(raw_head)
    check(head.header, spec, place.namespace, place.rank)
    place.form.admit(head.header)
    _check_size(size - HEAD_BYTES, head.bytes_of(0))
    stored_bytes = head.header.stored_bytes
    if place.form.as_is(head.header):
        _read_stripes(wire, place, head, into)
    else:
        stored = memoryview(bytearray(stored_bytes))
        _read_stripes(wire, place, head, [stored])
        place.form.unpack(head.header, stored, into)
    return HEAD_BYTES + stored_bytes


def _read_stripes(wire: Wire, place: Place, head: Head, into: Buffers) -> None:
    """Fill ``into`` with the stored payload, hashed as it arrives."""
    key = head.header.key
    names = place.names.stripes(key, head)
    first = names[: WINDOW_STRIPES - 1]
    if first:
        wire.send([b"".join(command(b"GET", name) for name in first)], len(first))
    digest = xxhash.xxh3_128()
    for number, views in enumerate(cut(into, head.stripe_bytes)):
        if number:
            size = wire.bulk_bytes()
            if isinstance(size, ServerError):
                raise_error(size, place.where, hops=True)
            if size is None:
                text = f"stripe {number} of {head.stripes} is gone"
                raise StripeGoneError(head.generation, text)
            _check_size(size, head.bytes_of(number))
        for piece in cut(views, PIECE_BYTES):
            wire.read_into(piece)
            for view in piece:
                digest.update(view)
        wire.bulk_end()
        ahead = number + WINDOW_STRIPES
        if ahead < head.stripes:
            wire.send([command(b"GET", names[ahead - 1])], 1)
    if digest.digest() != head.header.payload_checksum:
        raise RecordDamaged(DamageReason.PAYLOAD, "payload checksum differs")


def _check_size(found: int, wanted: int) -> None:
    if found != wanted:
        reason = DamageReason.TRUNCATED if found < wanted else DamageReason.LENGTHENED
        raise RecordDamaged(reason, f"a stripe of {found} bytes, wanted {wanted}")


def write_record(
    wire: Wire,
    place: Place,
    spec: RecordSpec,
    head: Head,
    parts: Sequence[bytes | memoryview],
    *,
    overwrite: bool,
) -> Written:
    """Write ``parts`` as the record that ``head`` describes, unless an intact one is there.

    The payload's checksum is taken on the way; that of ``head`` is not looked at.

    Raises:
        TierRefused, TierUnavailable: nothing of it can be seen; what was
            written is deleted now, or by its time to live.
    """
    names = place.names
    wire.begin(head.header.stored_bytes)
    wire.send([command(b"GETRANGE", names.head(spec.key), 0, HEAD_BYTES - 1)], 1)
    stripes = cut(parts, head.stripe_bytes)
    first = next(stripes)
    digest = xxhash.xxh3_128()
    for view in first:
        digest.update(view)  # while the answer is on its way
    found = wire.answer()
    if isinstance(found, ServerError) and found.code != "WRONGTYPE":
        raise_error(found, place.where, writing=True, hops=True)
    if not overwrite and isinstance(found, bytes) and _looks_intact(wire, place, spec, found):
        return Written(PutResult.EXISTS)
    try:
        refusal, lead = _send_stripes(wire, place, head, stripes, digest)
        header = replace(head.header, payload_checksum=digest.digest())
        head = replace(head, header=header)
        fresh = found == b"" and not overwrite
        return _send_head(wire, place, head, [lead, *first], refusal, fresh=fresh)
    except TierError:
        if not wire.broken:
            _drop(wire, names.stripes(spec.key, head))
        raise


def _looks_intact(wire: Wire, place: Place, spec: RecordSpec, found: bytes) -> bool:
    """Whether the bytes of a head are that of ``spec`` and all its stripes have their length."""
    try:
        head = parse_head(found)
        check(head.header, spec, place.namespace, place.rank)
    except RecordDamaged:
        return False
    names = place.names.stripes(spec.key, head)
    found_bytes = _ask(wire, [command(b"STRLEN", name) for name in names])
    return found_bytes == [head.bytes_of(i) for i in range(1, head.stripes)]


def _send_head(
    wire: Wire,
    place: Place,
    head: Head,
    parts: Sequence[bytes | memoryview],
    refusal: ServerError | None,
    *,
    fresh: bool,
) -> Written:
    """Send the head, from where on the record is there, and read all answers.

    ``parts`` are what goes before it and the first stripe; after a ``refusal``
    nothing is sent. A ``fresh`` head yields to a writer that was quicker; any
    other takes the place of what is there.
    """
    owed, asked = wire.pending, 0
    if refusal is None:
        before, after, asked = _head_commands(place, head, fresh=fresh)
        lead, *first = parts
        wire.send([bytes(lead) + before, head.pack(), *first, after], asked)
    answers = [wire.answer() for _ in range(owed + asked)]
    last = answers[-1] if answers else None
    every = [refusal, *answers, *(last if isinstance(last, list) else [])]
    # the head that MULTI read may be of a foreign type, which is why it is replaced
    errors = [error for error in map(_error, every) if error and error.code != "WRONGTYPE"]
    kept = answers[owed:][: head.stripes - 1] if place.ttl_s is None else []
    written = last == b"OK" or (isinstance(last, list) and last[-1:] == [b"OK"])
    if asked and written and (errors or any(answer != 1 for answer in kept)):
        _drop(wire, [place.names.head(head.header.key)])
    if errors:
        raise_error(errors[0], place.where, writing=True, hops=True)
    if any(answer != 1 for answer in kept):
        raise TierRefused(f"redis {place.where}: evicts stripes before their record is whole")
    if fresh and last is None:
        _drop(wire, place.names.stripes(head.header.key, head))
        return Written(PutResult.EXISTS)
    old = last[0] if isinstance(last, list) and last else b""
    if old == b"":
        return Written(PutResult.STORED)
    return Written(PutResult.STORED, _drop_replaced(wire, place, head, old))


def _send_stripes(
    wire: Wire, place: Place, head: Head, stripes: Iterator[list[memoryview]], digest: Any
) -> tuple[ServerError | None, bytes]:
    """Send all stripes but the first, hashing on the way; end at the first refusal.

    Returns that refusal, and the bytes to send next: the end of the last stripe.
    """
    # stripes outlive their head, never the other way round
    life_ms = _UNFINISHED_MS + (int(place.ttl_s * 1000) if place.ttl_s is not None else 0)
    after = b"\r\n" + _bulk(b"PX") + _bulk(b"%d" % life_ms)
    lead = b""
    for number, views in enumerate(stripes, 1):
        name = place.names.stripe(head.header.key, head.generation, number)
        lead += b"*5\r\n$3\r\nSET\r\n%b$%d\r\n" % (_bulk(name), head.bytes_of(number))
        for piece in cut(views, PIECE_BYTES):
            for view in piece:
                digest.update(view)
            wire.send([lead, *piece], 0)
            lead = b""
        wire.pending += 1
        lead = after
        if wire.pending > WINDOW_STRIPES:
            refusal = _error(wire.answer())
            if refusal is not None:
                wire.send([lead], 0)
                return refusal, b""
    return None, lead


def _head_commands(place: Place, head: Head, *, fresh: bool) -> tuple[bytes, bytes, int]:
    """Return what is sent before and after the head's value, and how many answers it asks for."""
    key = head.header.key
    name = place.names.head(key)
    keep = place.names.stripes(key, head) if place.ttl_s is None else []
    options = [b"NX"] if fresh else []
    if place.ttl_s is not None:
        options += [b"PX", b"%d" % int(place.ttl_s * 1000)]
    before = [command(b"PERSIST", stripe) for stripe in keep]
    if not fresh:
        before += [command(b"MULTI"), command(b"GETRANGE", name, 0, HEAD_BYTES - 1)]
    value_bytes = HEAD_BYTES + head.bytes_of(0)
    before.append(b"*%d\r\n$3\r\nSET\r\n%b$%d\r\n" % (3 + len(options), _bulk(name), value_bytes))
    after = b"\r\n" + b"".join(_bulk(option) for option in options)
    if not fresh:
        after += command(b"EXEC")
    return b"".join(before), after, len(keep) + (1 if fresh else 4)


def _drop_replaced(wire: Wire, place: Place, head: Head, old: Answer) -> int:
    """Let go of the record whose place ``head`` took; return what it took.

    Its stripes stay for a moment, for those who read them just now.
    """
    try:
        replaced = parse_head(old if isinstance(old, bytes) else b"")
    except RecordDamaged:
        return 0  # its stripes cannot be known; their time to live ends them
    if replaced.generation != head.generation:
        names = place.names.stripes(head.header.key, replaced)
        _ask(wire, [command(b"PEXPIRE", name, _GRACE_MS) for name in names])
    return HEAD_BYTES + replaced.header.stored_bytes


def _drop(wire: Wire, names: Sequence[bytes]) -> None:
    """Delete values that nobody refers to; best effort."""
    if names:
        _ask(wire, [command(b"UNLINK", *names)])


def _ask(wire: Wire, commands: Sequence[bytes]) -> list[Answer]:
    """Send small commands in one go and return their answers."""
    if commands:
        wire.send([b"".join(commands)], len(commands))
    return [wire.answer() for _ in commands]


def _bulk(text: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(text), text)


def _error(answer: Answer) -> ServerError | None:
    return answer if isinstance(answer, ServerError) else None
