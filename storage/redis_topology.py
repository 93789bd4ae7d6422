"""Which node of a cluster holds which keys, as ``CLUSTER SLOTS`` tells it."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import TierUnavailable

if TYPE_CHECKING:
    from .redis_wire import Answer

Address = tuple[str, int]


@dataclass(frozen=True)
class Topology:
    """Who serves which slots.

    Attributes:
        firsts: first slot of each range, ascending.
        lasts: last slot of each.
        owners: primary of each.
    """

    firsts: tuple[int, ...]
    lasts: tuple[int, ...]
    owners: tuple[Address, ...]

    @property
    def primaries(self) -> list[Address]:
        """Every node that serves slots, in a fixed order."""
        return sorted(set(self.owners))

    def owner(self, key: bytes) -> Address | None:
        """Return who serves the slot of ``key``; None when nobody does."""
        from redis.crc import key_slot  # noqa: PLC0415 - redis-py comes with the first call

        slot = key_slot(key)
        at = bisect.bisect_right(self.firsts, slot) - 1
        return self.owners[at] if at >= 0 and slot <= self.lasts[at] else None


def parse_topology(answer: Answer, asked: Address) -> Topology:
    """Read the answer to ``CLUSTER SLOTS``.

    Args:
        answer: as it came.
        asked: who gave it; a node that does not know its own address leaves it out.

    Raises:
        TierUnavailable: it is none, or no slot is served; no other exception, for any answer.
    """
    ranges = sorted(filter(None, (_range(item, asked) for item in _list(answer))))
    if not ranges:
        raise TierUnavailable(f"redis {asked[0]}:{asked[1]}: no node of the cluster serves keys")
    firsts, lasts, owners = zip(*ranges, strict=True)
    return Topology(firsts, lasts, owners)


def _range(item: Answer, asked: Address) -> tuple[int, int, Address] | None:
    """Return first slot, last slot and primary of one range; None for one that does not parse."""
    first, last, primary = [*_list(item), None, None, None][:3]
    host, port = [*_list(primary), None, None][:2]
    if not (isinstance(first, int) and isinstance(last, int) and isinstance(port, int)):
        return None
    name = host.decode("utf-8", "replace") if isinstance(host, bytes) else ""
    return first, last, (asked[0] if name in {"", "?"} else name, port)


def _list(answer: Answer) -> list[Answer]:
    return answer if isinstance(answer, list) else []


def address_of(text: str) -> Address | None:
    """Return where an error like ``ASK 3999 127.0.0.1:6381`` points to; None: it does not say."""
    host, colon, port = text.rpartition(" ")[2].rpartition(":")
    if not host or not colon or not port.isdigit() or len(port) > 5:
        return None
    return host, int(port)
