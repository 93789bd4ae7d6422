"""Which records a person wants to be rid of."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .exit_codes import ExitCode
from .reporting import CommandError
from .store_verify import stale_spaces

if TYPE_CHECKING:
    from .store_base import Record, Store

_TIMES_S = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def seconds(text: str) -> float:
    """Return an age like ``12h`` or ``7d`` in seconds.

    Raises:
        CommandError: not understood.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text.lower())
    if match is None or match[2] not in _TIMES_S:
        raise CommandError(f"{text!r} is no age; give one like 30m, 12h or 7d", ExitCode.USAGE)
    return float(match[1]) * _TIMES_S[match[2]]


def n_bytes(text: str) -> int:
    """Return a size like ``100GiB`` in bytes.

    Raises:
        CommandError: not understood.
    """
    from ..connector.values import Setting
    from ..storage.errors import ConfigError

    try:
        return int(Setting("size", "size", "size", 0, "").parse(text))
    except ConfigError:
        raise CommandError(f"{text!r} is no size; give one like 100GiB", ExitCode.USAGE) from None


class Pinned:
    """Tells pinned records from others, and counts them.

    Attributes:
        spared: how many were asked about and must stay.
    """

    def __init__(self, store: Store, *, included: bool) -> None:
        self._keys = {} if included else store.pinned()
        self.spared = 0

    def __call__(self, record: Record) -> bool:
        """Whether a record must stay."""
        held = record.key in self._keys.get(record.namespace, ())
        self.spared += held
        return held


def drop_pins(store: Store, deleted: Iterable[Record]) -> int:
    """Drop the pins that hold any of these records; return how many."""
    gone: dict[bytes, set[bytes]] = {}
    for record in deleted:
        gone.setdefault(record.namespace, set()).add(record.key)
    pins = [p for p in store.pins() if not gone.get(p.namespace, set()).isdisjoint(p.keys)]
    for pin in pins:
        store.unpin(pin)
    return len(pins)


@dataclass(frozen=True, slots=True)
class Selection:
    """What to prune: records that meet every condition that is given.

    Attributes:
        unused_s: not used for so long.
        to_bytes: the least recently used, until so much is left.
        namespace: only this one.
        prefix: only keys whose name begins so.
        stale: only of namespaces that no engine asks for any more.
    """

    unused_s: float | None = None
    to_bytes: int | None = None
    namespace: bytes | None = None
    prefix: str = ""
    stale: bool = False

    @property
    def says_nothing(self) -> bool:
        """Whether it would select a whole store without anybody having said so."""
        return (
            self.unused_s is None
            and self.to_bytes is None
            and self.namespace is None
            and not self.prefix
            and not self.stale
        )

    def find(
        self,
        store: Store,
        progress: Callable[[int], None],
        now_s: float | None = None,
        spare: Callable[[Record], bool] = lambda _: False,
    ) -> list[Record]:
        """Return the records, the least recently used first, but for those to ``spare``.

        Walks the store.
        """
        now_s = time.time() if now_s is None else now_s
        old = stale_spaces(store, store.spaces()) if self.stale else {}
        found: dict[tuple[str, str, str], Record] = {}
        for number, record in enumerate(store.records(self.namespace, self.prefix), 1):
            progress(number)
            if self.stale and record.namespace.hex() not in old:
                continue
            found[record.order] = record
        every = sorted(found.values(), key=lambda r: (r.used_at_s, r.order))
        if self.unused_s is not None:
            # A server tells ages while we look: a record may seem used after now.
            every = [r for r in every if max(0.0, now_s - r.used_at_s) >= self.unused_s]
        every = [r for r in every if not spare(r)]
        if self.to_bytes is not None:
            every = _oldest(every, sum(r.stored_bytes for r in found.values()) - self.to_bytes)
        return every


def _oldest(records: list[Record], surplus_bytes: int) -> list[Record]:
    """Return as many records from the beginning as hold ``surplus_bytes``."""
    chosen = []
    for record in records:
        if surplus_bytes <= 0:
            break
        surplus_bytes -= record.stored_bytes
        chosen.append(record)
    return chosen


def outcome(
    store: Store,
    chosen: Iterable[Record],
    *,
    deleted: int,
    dry_run: bool,
    swept: int = 0,
    pinned: int = 0,
) -> dict[str, Any]:
    """Return what a deletion did, for ``--json``."""
    chosen = list(chosen)
    spaces: dict[str, dict[str, int]] = {}
    for record in chosen:
        part = spaces.setdefault(record.namespace.hex(), {"records": 0, "stored_bytes": 0})
        part["records"] += 1
        part["stored_bytes"] += record.stored_bytes
    return {
        "store": store.name,
        "kind": store.kind,
        "dry_run": dry_run,
        "records": len(chosen),
        "stored_bytes": sum(record.stored_bytes for record in chosen),
        "deleted": deleted,
        "swept": swept,
        "pinned": pinned,
        "namespaces": [{"namespace": name, **part} for name, part in sorted(spaces.items())],
    }
