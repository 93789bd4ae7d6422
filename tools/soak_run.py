"""The time with kvtier: traffic, faults, samples, rests."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from .redis_server import RedisServer
from .soak_driver import DriverOptions, Result, Traffic
from .soak_faults import (
    DiskCorrupt,
    EngineKill,
    Fault,
    FaultRunner,
    InEngine,
    RedisFault,
    plan_faults,
)
from .soak_host import Host
from .soak_judge import KVTIER
from .soak_listener import Listener
from .soak_options import SoakOptions
from .soak_parties import warm_up
from .soak_record import Record
from .soak_types import Script, SoakError
from .soak_watch import Watch, engine_source, redis_used_bytes, rest

TICK_S = 0.2
BACK_TIMEOUT_S = 45.0  # breakers try again every 30 s at the latest


def play(
    traffic: Traffic,
    listener: Listener,
    stopped: threading.Event,
    most_s: float,
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Let traffic run until its end, the time's, or Ctrl-C. Blocking.

    Raises:
        SoakError: a user could not go on.
    """
    began_s = time.monotonic()
    traffic.start()
    try:
        while traffic.running and not stopped.is_set():
            done_s = time.monotonic() - began_s
            if done_s >= most_s:
                break
            tally = traffic.tally
            text = f"{tally.answered} answers, {tally.wrong} wrong"
            listener.progress(done_s, most_s, text)
            tick()
            stopped.wait(TICK_S)
    finally:
        traffic.stop()
    if traffic.failure is not None:
        raise traffic.failure


class KVTierRun:
    """The time with kvtier: traffic, faults, samples, rests."""

    def __init__(
        self,
        options: SoakOptions,
        record: Record,
        script: Script,
        host: Host,
        limit: float,
        folder: str | None,
        server: RedisServer | None,
    ) -> None:
        self._options = options
        self._record = record
        self._host = host
        self._began_s = time.monotonic()
        self._next_rest_s = 0.0
        self._rest_every_s = options.quiet_s or max(15.0, options.duration_s / 20)
        self.corrupt = DiskCorrupt(folder) if folder is not None else None
        self._watch = Watch(
            engine_source(
                host, folder, (lambda: redis_used_bytes(server)) if server is not None else None
            ),
            self.clock,
            options.sample_s or min(30.0, max(0.5, options.duration_s / 300)),
        )
        kinds = self._kinds(server)
        self._faults = FaultRunner(
            plan_faults(options.faults, options.duration_s, options.seed),
            kinds,
            host.sample,
            self.clock,
            options.seed,
        )
        self._traffic = Traffic(
            script,
            host.client,
            DriverOptions(options.users, options.abort_share, None, options.seed),
            limit,
            self._note,
        )

    def clock(self) -> float:
        """Seconds from the start."""
        return time.monotonic() - self._began_s

    def _kinds(self, server: RedisServer | None) -> dict[str, Fault]:
        kinds: dict[str, Fault] = {"engine-kill": EngineKill(self._host)}
        if self.corrupt is not None:
            kinds["disk-corrupt"] = self.corrupt
        for kind, words in (
            ("disk-full", "every write to the disk says ENOSPC"),
            ("disk-slow", "every read and write of a record takes half a second more"),
        ):
            kinds[kind] = InEngine(kind, self._host.client, words)
        if server is not None:
            for kind in ("redis-kill", "redis-hang", "redis-evict"):
                kinds[kind] = RedisFault(kind, server)
        missing = [kind for kind in self._options.faults if kind not in kinds]
        if missing:
            raise SoakError(f"{missing[0]} needs a tier that the settings do not have")
        return kinds

    def _note(self, result: Result) -> None:
        self._faults.note(result.at_s, result.difference is None)
        self._record.answer(KVTIER, result, self._faults.active(result.at_s))

    def run(self, listener: Listener, stopped: threading.Event) -> None:
        """Run it all. Blocking."""
        self._next_rest_s = self._rest_every_s
        self._watch.start()
        self._faults.start()
        try:
            play(self._traffic, listener, stopped, self._options.duration_s, self._maybe_rest)
        finally:
            self._faults.stop()
            self._watch.stop()
            self._collect()

    def _maybe_rest(self) -> None:
        if self._watch.failure is not None:
            raise self._watch.failure
        if self.clock() < self._next_rest_s or self._faults.active(self.clock()):
            return
        self._rest()
        self._next_rest_s = self.clock() + self._rest_every_s

    def _rest(self) -> None:
        held = rest(self._traffic, self._host)
        self._record.rests += held is not None
        self._record.held += held or []

    def _collect(self) -> None:
        record = self._record
        record.tally = self._traffic.tally
        record.faults = self._faults.rows
        record.duration_s = self.clock()
        with contextlib.suppress(SoakError):
            self._wait_until_back()
            self._rest()
            self._watch.look()
        record.samples = self._watch.samples
        record.counters = self._host.counters()
        record.damaged = set(self.corrupt.damaged) if self.corrupt is not None else set()

    def _wait_until_back(self) -> None:
        """After the last fault every tier must come back by itself."""
        end_s = time.monotonic() + BACK_TIMEOUT_S
        while True:
            warm_up(self._host.client())  # a tier is tried again while the engine steps
            told = self._host.sample() or {}
            off = [
                name.rpartition(".")[2]
                for name, value in told.items()
                if name.startswith("gauge.tier_online.") and value < 1
            ]
            if not off or time.monotonic() > end_s:
                self._record.off = off
                return
            time.sleep(0.5)
