"""Moves chunks between device blocks, RAM pages and the tiers below.

The worker half's engine, without anything of vLLM or torch: the device copies
come through a `BlockMover`. Nothing here decides what to move; jobs say so.

Guarantees:

- Every job reports exactly once for each of its two ends (see
  `kvtier.storage.jobs`), at shutdown too.
- `submit_*`, `poll` and `take_events` never block on I/O.
- Loads have lanes of their own and are never dropped; saves are dropped, and
  counted, when their lane is full.
- A tier's fault ends in a status, never in an exception.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from .counts import Counts
from .device import BlockMover, Pages
from .jobs import (
    ChunkStatus,
    Event,
    LoadDone,
    LoadJob,
    SaveJob,
    TierNews,
)
from .lanes import Lane
from .link import LinkLimits, TierLink
from .load_runner import LoadRunner
from .loading import LoadState
from .save_runner import SaveRunner
from .saving import SaveState
from .staging import Staging
from .tier import Tier

NEWS_EVERY_S = 0.1
STOP_S = 2.0


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """Threads and bounds.

    Attributes:
        copy_threads: threads that copy between RAM pages and the device, each way.
        hang_s: a copy that takes longer costs its thread, which is replaced.
        links: bounds of each tier, by name.
    """

    copy_threads: int = 1
    hang_s: float = 60.0
    links: dict[str, LinkLimits] = field(default_factory=dict)


class Transfer:
    """Runs load and save jobs of one rank.

    Args:
        pages: the RAM arena.
        block_bytes: for each group id, the bytes of one block in a page (a multiple of 4096).
        staging: slots for loads without pages.
        mover: the device copies.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        pages: Pages,
        block_bytes: dict[int, int],
        staging: Staging,
        mover: BlockMover,
        clock: Callable[[], float],
        limits: TransferLimits | None = None,
    ) -> None:
        self.limits = limits or TransferLimits()
        self.counts = Counts()
        self.staging = staging
        staging.share_among(len(self.limits.links))
        self._clock = clock
        self._links: dict[str, TierLink] = {}
        self._generation = 0
        self._online: dict[str, bool] = {}
        self._told_complete: set[str] = set()
        self._events: deque[Event] = deque()
        self._wake = threading.Condition()
        self._loads: dict[int, LoadState] = {}
        self._saves: dict[int, SaveState] = {}
        self._news_at_s = 0.0
        self._closed = False
        self._ram_lane = Lane(
            "ram-load", self.limits.copy_threads, clock, hang_s=self.limits.hang_s
        )
        self._copy_lane = Lane("copy", self.limits.copy_threads, clock, hang_s=self.limits.hang_s)
        self._load_runner = LoadRunner(
            pages, block_bytes, staging, mover, self._ram_lane, self.counts, clock
        )
        self._save_runner = SaveRunner(
            pages, block_bytes, mover, self._links_of, lambda: self._closed, self.counts, clock
        )

    # -- tiers -----------------------------------------------------------

    def set_tiers(self, tiers: Sequence[Tier], generation: int = 0) -> None:
        """Use these tiers from now on; those in use before are closed in the background.

        One that is in use already goes on as it is, where the generation is the same.
        A tier that has limits but is not among them counts as off.

        Jobs of another ``generation`` load nothing and write nothing from here on, and
        a load of one that is over but not told yet is told as failed.
        """
        old = dict(self._links)
        links = {}
        for tier in tiers:
            known = old.get(tier.name)
            if known is not None and known.tier is tier and generation == self._generation:
                links[tier.name] = old.pop(tier.name)
                continue
            self._told_complete.discard(tier.name)
            limits = self.limits.links.get(tier.name, LinkLimits())
            links[tier.name] = TierLink(tier, self.counts, self._clock, limits)
            self._online[tier.name] = True
            self._emit(TierNews(tier.name, complete=False, reset=True))
        for name in self.limits.links.keys() - links.keys():
            self._emit(TierNews(name, online=False, reset=True))
        self._generation, self._links = generation, links
        self._give_up_loads_of_old()
        for link in old.values():
            closing = partial(link.close, self._clock() + STOP_S)
            threading.Thread(target=closing, name="kvtier-close", daemon=True).start()

    def _give_up_loads_of_old(self) -> None:
        old = {
            job_id: state
            for job_id, state in self._loads.items()
            if state.job.generation != self._generation
        }
        for state in old.values():
            state.close(ChunkStatus.CANCELLED)
        with self._wake:
            self._events = deque(
                replace(event, ok=False)
                if isinstance(event, LoadDone) and event.job_id in old
                else event
                for event in self._events
            )

    @property
    def links(self) -> dict[str, TierLink]:
        """The links in use, by tier name."""
        return self._links

    def _links_of(self, generation: int) -> dict[str, TierLink]:
        links = self._links
        return links if generation == self._generation else {}  # checked after `links` was read

    # -- jobs ------------------------------------------------------------

    def submit_load(self, job: LoadJob, after: Any = None) -> None:
        """Start a load into blocks that are free once ``after`` (a fence) has passed."""
        state = LoadState(job, self._clock() + job.deadline_s, self._emit, after)
        self._loads[job.job_id] = state
        if job.doomed or job.generation != self._generation or not job.chunks:
            state.start(doomed=job.doomed or job.generation != self._generation)
            return
        if self._closed:
            self._fail_all(state)
            return
        self._load_runner.submit(state, self._links)

    def _fail_all(self, state: LoadState) -> None:
        state.close(ChunkStatus.CANCELLED)
        for i in range(len(state.job.chunks)):
            state.finish(i, ChunkStatus.CANCELLED)

    def cancel_load(self, job_id: int) -> None:
        """Nobody waits for this load any more; it still reports."""
        state = self._loads.get(job_id)
        if state is not None:
            state.close(ChunkStatus.CANCELLED)

    def submit_save(self, job: SaveJob, after: Any = None) -> None:
        """Start a save of blocks that are valid once ``after`` (the mover's fence) has passed."""
        state = SaveState(job, self._emit)
        self._saves[job.job_id] = state
        if not self._copy_lane.offer(partial(self._save_runner.run, state, after)):
            state.copied(bytes([ChunkStatus.CANCELLED] * len(job.chunks)))
            state.planned(0)

    # -- results -----------------------------------------------------------

    def _emit(self, event: Event) -> None:
        with self._wake:
            self._events.append(event)
            self._wake.notify_all()

    def poll(self) -> None:
        """Enforce deadlines, look after threads and tiers. Engine's thread, every step, no I/O."""
        now_s = self._clock()
        for job_id in [j for j, s in self._loads.items() if s.retired]:
            del self._loads[job_id]
        for state in self._loads.values():
            if now_s > state.deadline_at_s and state.close(ChunkStatus.DEADLINE):
                self.counts.add("load_deadline_missed")
                for link in set(state.reading.copy().values()):
                    link.late()
        for job_id in [j for j, s in self._saves.items() if s.retired]:
            del self._saves[job_id]
        if now_s >= self._news_at_s:
            self._news_at_s = now_s + NEWS_EVERY_S
            self._ram_lane.poll()
            self._copy_lane.poll()
            for link in self._links.values():
                link.poll()
                self._tell_news(link)

    def _tell_news(self, link: TierLink) -> None:
        news = link.changes()
        online = link.online
        if news.added or news.removed or online != self._online[link.name] or not news.complete:
            self._emit(TierNews(link.name, news.added, news.removed, news.complete, online))
        elif link.name not in self._told_complete:
            self._emit(TierNews(link.name, complete=True, online=online))
        if news.complete:
            self._told_complete.add(link.name)
        self._online[link.name] = online

    def take_events(self) -> list[Event]:
        """Return what happened since the last call. Never blocks."""
        events: list[Event] = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def wait(self, timeout_s: float) -> None:
        """Wait until there is an event, at most ``timeout_s``."""
        with self._wake:
            if not self._events:
                self._wake.wait(timeout_s)

    @property
    def loading(self) -> bool:
        """Whether a load has not reported yet."""
        return any(not state.done for state in self._loads.values())

    @property
    def busy(self) -> bool:
        """Whether any job has not reported all of its events."""
        return self.loading or any(not state.retired for state in self._saves.values())

    @property
    def queued_save_bytes(self) -> int:
        """Bytes waiting to be written to lower tiers."""
        return sum(link.save_lane.queued_bytes for link in self._links.values())

    # -- the end -----------------------------------------------------------

    def close(self, flush_s: float) -> None:
        """Write what is queued for up to ``flush_s``, then stop; every job reports."""
        with self._wake:
            self._wake.wait_for(lambda: not self.busy, max(0.0, flush_s))
        self._closed = True
        for state in list(self._loads.values()):
            state.close(ChunkStatus.CANCELLED)
        stop_s = self._clock() + STOP_S
        for lane in (self._ram_lane, self._copy_lane):
            for task in lane.close():
                task()  # of a closed transfer: only reports
        for lane in (self._ram_lane, self._copy_lane):
            lane.join(stop_s)
        for link in self._links.values():
            link.close(stop_s)
