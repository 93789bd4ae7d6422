"""Pins in Redis: what is pinned has no time to live, and a pin's words lie beside it.

Records without a time to live are what ``volatile-*`` policies never evict; under
``allkeys-*`` a server evicts them like anything else, and no client can keep it from that.
Pins are values ``PREFIX:pin:NAME`` without a time to live.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .errors import KVTierError
from .pins import Pin, is_pin_name, parse_pin
from .redis_ask import Question, ask
from .redis_wire import ServerError, command, raise_error

if TYPE_CHECKING:
    from .redis_servers import Servers
    from .redis_wire import Answer


def pin_name(prefix: str, name: str) -> bytes:
    """Return the Redis key of a pin."""
    return f"{prefix}:pin:{name}".encode()


def read_pins(servers: Servers, prefix: str, names: Iterable[bytes]) -> list[Pin]:
    """Return the pins among values of these names, the oldest first.

    Raises:
        TierUnavailable: the server does not answer.
    """
    start = pin_name(prefix, "")
    wanted = sorted({n for n in names if is_pin_name(n[len(start) :].decode("utf-8", "replace"))})
    found = []
    for answer in ask(servers, [Question(name, command(b"GET", name)) for name in wanted]):
        if isinstance(answer, bytes):
            with contextlib.suppress(KVTierError):
                found.append(parse_pin(answer))
    return sorted(found, key=lambda pin: (pin.created_at_s, pin.name))


def write_pin(servers: Servers, prefix: str, pin: Pin, where: str) -> None:
    """Keep a pin's words.

    Raises:
        TierRefused, TierUnavailable.
    """
    name = pin_name(prefix, pin.name)
    _checked(ask(servers, [Question(name, command(b"SET", name, pin.pack()))]), where)


def drop_pin(servers: Servers, prefix: str, name: str, where: str) -> bool:
    """Drop a pin's words; return whether they were there.

    Raises:
        TierRefused, TierUnavailable.
    """
    key = pin_name(prefix, name)
    return _checked(ask(servers, [Question(key, command(b"UNLINK", key))]), where) == [1]


def _checked(answers: list[Answer], where: str) -> list[Answer]:
    for answer in answers:
        if isinstance(answer, ServerError):
            raise_error(answer, where, writing=True)
    return answers
