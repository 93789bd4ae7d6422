"""The cache epoch that engines on one Redis share: a number that every clear raises.

It lies under ``PREFIX:epoch:<name>``, without a time to live, and is part of the
namespace of what the engines keep there: what was stored before a clear has
another name and cannot be found again.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from .errors import TierUnavailable
from .redis_ask import Question, ask
from .redis_servers import Servers
from .redis_wire import ServerError, command, raise_error

if TYPE_CHECKING:
    from .redis_url import RedisSettings
    from .redis_wire import Answer

_MOST_S = 0.5  # for a connection and for an answer: nobody waits long for a number


def read_epoch(settings: RedisSettings, name: str) -> int:
    """Return the epoch kept for ``name``; 0 when there is none. Blocking.

    Raises:
        TierUnavailable: no answer, or what lies there is no number.
    """
    key = _key(settings, name)
    answer = _ask(settings, key, command(b"GET", key))
    if answer is None:
        return 0
    if isinstance(answer, bytes) and answer.isdigit() and len(answer) < 19:
        return int(answer)
    raise TierUnavailable(f"redis {settings.safe_url}: {key.decode()} holds no number; delete it")


def raise_epoch(settings: RedisSettings, name: str, by: int = 1) -> int:
    """Add to the epoch and return the new one. Blocking.

    Raises:
        TierUnavailable, TierRefused: it may not have been raised.
    """
    key = _key(settings, name)
    answer = _ask(settings, key, command(b"INCRBY", key, b"%d" % by))
    if isinstance(answer, int):
        return answer
    raise TierUnavailable(f"redis {settings.safe_url}: INCRBY answered no number")


def _key(settings: RedisSettings, name: str) -> bytes:
    return f"{settings.prefix}:epoch:{name}".encode()


def _ask(settings: RedisSettings, key: bytes, line: bytes) -> Answer:
    hasty = replace(
        settings,
        timeout_s=min(settings.timeout_s, _MOST_S),
        connect_timeout_s=min(settings.connect_timeout_s, _MOST_S),
    )
    with closing(Servers(hasty)) as servers:
        (answer,) = ask(servers, [Question(key, line)])
    if isinstance(answer, ServerError):
        raise_error(answer, settings.safe_url, writing=True)
    return answer
