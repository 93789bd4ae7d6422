"""Faults at random times from a seed, and what followed each of them.

Every fault has a stretch of the soak to itself, so that what is counted there is its doing. None
of them may change an answer; each must be over, and the tier back, some time after its end.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..storage.disk_layout import iter_record_files

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .redis_server import RedisServer
    from .soak_client import ChildEngine
    from .soak_host import Host

BEGIN_SHARE, END_SHARE = 0.12, 0.85  # of the soak, in which faults begin and end
SLOT_S = 60.0
MAX_FAULT_S = 25.0
FILES_AT_ONCE = 3
COUNTED = (
    "loads_failed",
    "load_failed_chunks",
    "load_deadline_missed",
    "save_failed_chunks",
    "save_dropped_chunks",
    "quarantine_failed",
    "breaker_opened",
    "breaker_closed",
    "refusal_began",
    "refusal_ended",
)
"""Counters that tell what a fault did."""


class Fault(Protocol):
    """One kind of fault."""

    def begin(self, rng: random.Random) -> str:
        """Make it; return what was done, in words."""

    def end(self) -> None:
        """Undo it. Called once after each `begin`."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A fault to come: seconds from the soak's start."""

    kind: str
    at_s: float
    for_s: float


def plan_faults(kinds: Sequence[str], duration_s: float, seed: int) -> list[Planned]:
    """Return when faults begin: each kind at least once, one at a time, all from the seed."""
    if not kinds:
        return []
    rng = random.Random(f"{seed}/faults")  # noqa: S311
    room_s = (END_SHARE - BEGIN_SHARE) * duration_s
    rounds = max(1, int(room_s / (SLOT_S * len(kinds))))
    order: list[str] = []
    for _ in range(rounds):
        once = list(kinds)
        rng.shuffle(once)
        order += once
    slot_s = room_s / len(order)
    planned = []
    for i, kind in enumerate(order):
        at_s = BEGIN_SHARE * duration_s + slot_s * (i + 0.3 * rng.random())
        planned.append(Planned(kind, at_s, min(MAX_FAULT_S, slot_s * rng.uniform(0.2, 0.4))))
    return planned


# -- kinds -----------------------------------------------------------------------


@dataclass(slots=True)
class DiskCorrupt:
    """A byte of a few record files is changed."""

    folder: str
    damaged: set[str] = field(default_factory=set)

    def begin(self, rng: random.Random) -> str:
        """Flip a bit somewhere in up to three files."""
        files = sorted((f.path, f.file_bytes) for f in iter_record_files(self.folder))
        done = []
        for path, n_bytes in rng.sample(files, min(FILES_AT_ONCE, len(files))):
            at = rng.randrange(n_bytes)
            try:
                with open(path, "r+b") as file:
                    file.seek(at)
                    old = file.read(1)
                    file.seek(at)
                    file.write(bytes((old[0] ^ 1 << rng.randrange(8),)))
            except (OSError, IndexError):
                continue  # evicted meanwhile
            self.damaged.add(os.path.basename(path))
            done.append(os.path.basename(path).rpartition(".")[0])
        return f"a bit flipped in {len(done)} of {len(files)} records: {', '.join(done) or 'none'}"

    def end(self) -> None:
        """Nothing: kvtier heals it."""


@dataclass(slots=True)
class InEngine:
    """A fault below the disk tier, inside the engine's process."""

    kind: str
    engine: Callable[[], ChildEngine]
    words: str

    def begin(self, rng: random.Random) -> str:  # noqa: ARG002
        """Switch it on."""
        self.engine().fault(self.kind, True)
        return self.words

    def end(self) -> None:
        """Switch it off."""
        self.engine().fault(self.kind, False)


@dataclass(slots=True)
class RedisFault:
    """Something happens to the soak's own Redis."""

    kind: str
    server: RedisServer

    def begin(self, rng: random.Random) -> str:
        """Do it."""
        if self.kind == "redis-kill":
            self.server.kill()
            return "the server was killed"
        if self.kind == "redis-hang":
            self.server.freeze()
            return "the server was stopped with SIGSTOP"
        with self.server.client() as client:
            keys = sorted(client.scan_iter(count=1000))
            some = rng.sample(keys, len(keys) // 2)
            if some:
                client.delete(*some)
        return f"{len(some)} of {len(keys)} values were evicted"

    def end(self) -> None:
        """Bring it back."""
        if self.kind == "redis-kill":
            self.server.start()
        elif self.kind == "redis-hang":
            self.server.thaw()


@dataclass(slots=True)
class EngineKill:
    """The engine ends without a word; the next request starts another."""

    host: Host

    def begin(self, rng: random.Random) -> str:  # noqa: ARG002
        """Kill it."""
        self.host.kill()
        return f"SIGKILL ({signal.SIGKILL.value}) to the engine"

    def end(self) -> None:
        """Start the next one."""
        self.host.client()


# -- running them ----------------------------------------------------------------


class FaultRunner:
    """Makes planned faults, on a thread of its own, and notes what followed.

    Args:
        planned: when.
        kinds: how.
        counters: of the engine, now; None while there is none.
        clock: seconds from the soak's start.
        seed: of what each does.
    """

    def __init__(
        self,
        planned: Sequence[Planned],
        kinds: Mapping[str, Fault],
        counters: Callable[[], Mapping[str, float] | None],
        clock: Callable[[], float],
        seed: int,
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        self._planned = planned
        self._kinds = kinds
        self._counters = counters
        self._clock = clock
        self._rng = random.Random(f"{seed}/what faults do")  # noqa: S311
        self._stop = threading.Event()
        self._before: Mapping[str, float] = {}
        self._thread = threading.Thread(target=self._run, name="soak-faults")

    def start(self) -> None:
        """Let them come."""
        self._thread.start()

    def stop(self) -> None:
        """No more; what is on is undone. Blocking."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._close_row()

    def active(self, at_s: float, after_s: float = 5.0) -> list[str]:
        """Return the faults that were on, or had just been, at a time."""
        return [
            row["kind"]
            for row in self.rows
            if row["at_s"] <= at_s <= (row["until_s"] or at_s) + after_s
        ]

    def _run(self) -> None:
        for planned in self._planned:
            if self._stop.wait(max(0.0, planned.at_s - self._clock())):
                return
            self._close_row()
            self._before = self._counters() or self._before
            row: dict[str, Any] = {
                "kind": planned.kind,
                "at_s": round(self._clock(), 2),
                "until_s": None,
                "what": "",
                "followed": {},
                "answers": {"right": 0, "wrong": 0},
                "failed": None,
            }
            self.rows.append(row)
            fault = self._kinds[planned.kind]
            try:
                row["what"] = fault.begin(self._rng)
                try:
                    self._stop.wait(planned.for_s)
                finally:
                    fault.end()
            except Exception as error:  # noqa: BLE001 - a fault that cannot be made is told
                row["failed"] = f"{type(error).__name__}: {error}"
            row["until_s"] = round(self._clock(), 2)

    def _close_row(self) -> None:
        """Count what followed the last fault, up to now."""
        if not self.rows or self.rows[-1]["followed"]:
            return
        now = self._counters() or {}
        self.rows[-1]["followed"] = {
            name: round(now[name] - self._before.get(name, 0.0), 3)
            for name in sorted(now)
            if name.split(".")[0] in COUNTED and now[name] > self._before.get(name, 0.0)
        }

    def note(self, at_s: float, right: bool) -> None:
        """Count an answer to the fault whose stretch it fell into."""
        for row in reversed(self.rows):
            if row["at_s"] <= at_s:
                row["answers"]["right" if right else "wrong"] += 1
                return
