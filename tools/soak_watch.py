"""Looks at the engine now and then while a soak runs, and waits for rest in between."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from .soak_driver import Traffic
from .soak_host import GAUGE, Host
from .soak_steady import folder_bytes, process_sample
from .soak_types import EngineGone

MAX_SAMPLES = 4000
PAUSE_TIMEOUT_S = 120.0
NAMES = {
    "save_queue_bytes": "save_queue_bytes",
    "ram_pages.pinned": "pinned_ram_pages",
    "ram_pages.free": "free_ram_pages",
    "pinned_device_blocks": "pinned_device_blocks",
    "free_device_blocks": "free_device_blocks",
    "running": "running",
    "waiting": "waiting",
}


def tidy(told: Mapping[str, float]) -> dict[str, float]:
    """Return the gauges of a sample under the report's names."""
    out = {}
    for name, value in told.items():
        if not name.startswith(GAUGE):
            continue
        bare = name.removeprefix(GAUGE)
        if bare in NAMES:
            out[NAMES[bare]] = value
        elif bare.startswith(("resident_bytes.", "tier_online.")):
            out[bare] = value
    return out


class Watch:
    """Samples every so often, on a thread of its own. A long soak is sampled more thinly.

    Args:
        sources: each adds to a sample: memory, gauges, bytes on tiers.
        clock: seconds from the soak's start.
        every_s: between two samples.
    """

    def __init__(
        self,
        sources: Callable[[], Mapping[str, float] | None],
        clock: Callable[[], float],
        every_s: float,
    ) -> None:
        self.samples: list[dict[str, float]] = []
        self.failure: Exception | None = None
        self._sources = sources
        self._clock = clock
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soak-watch")

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End. Blocking."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._every_s):
                self.look()
        except Exception as error:  # noqa: BLE001 - the soak raises it
            self.failure = error

    def look(self) -> None:
        """Take one sample."""
        at_s = round(self._clock(), 2)
        found = self._sources()
        if found is not None:
            self.samples.append({"at_s": at_s, **found})
        if len(self.samples) > MAX_SAMPLES:
            self.samples = self.samples[::2]
            self._every_s *= 2


def engine_source(
    host: Host, folder: str | None, redis_bytes: Callable[[], float | None] | None
) -> Callable[[], Mapping[str, float] | None]:
    """Return what samples an engine of the soak's own."""

    def source() -> Mapping[str, float] | None:
        told = host.sample()
        if told is None:
            return None
        found: dict[str, float] = {"incarnation": host.incarnation, **tidy(told)}
        found.update(process_sample(host.engine.pid))
        if folder is not None:
            found["disk_bytes"] = folder_bytes(folder)
        used = redis_bytes() if redis_bytes is not None else None
        if used is not None:
            found["redis_bytes"] = used
        return found

    return source


def rest(traffic: Traffic, host: Host) -> list[str] | None:
    """Hold the users off, let everything end, return what is still held; None if it never rests."""
    try:
        if not traffic.pause(PAUSE_TIMEOUT_S):
            return None
        return host.client().quiet()
    except EngineGone:
        return None
    finally:
        traffic.resume()


def redis_used_bytes(server: Any) -> float | None:
    """Return what a Redis holds; None while it does not answer."""
    import redis

    try:
        with server.client(socket_timeout=1) as client:
            return float(client.info("memory")["used_memory"])
    except (redis.RedisError, OSError):
        return None
