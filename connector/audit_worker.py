"""The worker's part of an audit: read both, compare, report.

Guarantees: each job reports `AuditCopied` and `AuditDone` exactly once, in this
order, at shutdown too; one thread of low priority, pages of its own, a short
queue; a job that finds it full is given up at once. Nothing waits for an audit.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..storage.device import COPY_TIMEOUT_S, Pages
from ..storage.jobs import (
    AuditCopied,
    AuditDone,
    AuditJob,
    ChunkStatus,
    Event,
    Ids,
    LayerDifference,
)
from ..storage.lanes import Lane
from ..storage.link import TierLink
from ..storage.tier import RecordSpec
from .audit_compare import Layer, compare
from .mover import Mover

logger = logging.getLogger("kvtier.audit")

QUEUE_CHUNKS = 16
NICE = 10


@dataclass(frozen=True, slots=True)
class AuditSetup:
    """What a worker's audits need.

    Attributes:
        computed_pages, stored_pages: page ids (slot_pages,), nobody else's.
        layers: for each group id, where its layers lie in a page.
        tolerance: mean relative difference taken for noise; None: by dtype.
    """

    computed_pages: Ids
    stored_pages: Ids
    layers: Mapping[int, tuple[Layer, ...]]
    tolerance: float | None = None


class AuditRunner:
    """Runs one rank's audits, one after another.

    Args:
        block_bytes: for each group id, bytes of a block in a page (padded).
        links: returns the links in use, by tier name.
        generation: returns the namespace's generation in use.
    """

    def __init__(
        self,
        setup: AuditSetup,
        pages: Pages,
        block_bytes: Mapping[int, int],
        mover: Mover,
        links: Callable[[], Mapping[str, TierLink]],
        generation: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self._setup = setup
        self._pages = pages
        self._block_bytes = block_bytes
        self._mover = mover
        self._links = links
        self._generation = generation
        self._clock = clock
        self._events: deque[Event] = deque()
        self._closed = False
        self._nice = threading.local()
        # Two threads would share the pages, so a stuck one is not replaced.
        self._lane = Lane("audit", 1, clock, max_bytes=QUEUE_CHUNKS, hang_s=float("inf"))

    def submit(self, job: AuditJob, after: Any = None) -> None:
        """Start an audit of blocks that are valid once ``after`` (a fence) has passed."""
        if not self._lane.offer(partial(self._run, job, after), 1):
            self._events += (AuditCopied(job.job_id), AuditDone(job.job_id, ChunkStatus.CANCELLED))

    def take_events(self) -> list[Event]:
        """Return what happened since the last call. Never blocks."""
        events: list[Event] = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def close(self, stop_s: float) -> None:
        """Give up what has not begun, wait for the rest until the clock shows ``stop_s``."""
        self._closed = True
        for task in self._lane.close():
            task()
        self._lane.join(stop_s)

    # -- on the lane's thread -------------------------------------------------

    def _run(self, job: AuditJob, after: Any) -> None:
        status = ChunkStatus.COPY_FAILED
        layers: tuple[LayerDifference, ...] = ()
        try:
            try:
                status = self._copy_out(job, after)
            finally:
                self._events.append(AuditCopied(job.job_id))
            if status is ChunkStatus.OK:
                status, layers = self._compare(job)
        except Exception:
            status = ChunkStatus.COPY_FAILED
            logger.exception("kvtier: an audit failed; nothing follows from it")
        finally:
            self._events.append(AuditDone(job.job_id, status, layers))

    def _copy_out(self, job: AuditJob, after: Any) -> ChunkStatus:
        """Copy the device blocks; on return no byte of the copy can move any more."""
        if self._closed or job.generation != self._generation():
            return ChunkStatus.CANCELLED
        self._yield_to_others()
        pages = self._setup.computed_pages[: len(job.blocks)]
        ticket = self._mover.save(job.group, job.blocks, pages, after)
        try:
            ticket.wait(COPY_TIMEOUT_S)
        finally:
            while not ticket.fenced():
                time.sleep(0.01)
        return ChunkStatus.OK

    def _compare(self, job: AuditJob) -> tuple[ChunkStatus, tuple[LayerDifference, ...]]:
        used_bytes = self._block_bytes[job.group]
        pages = job.pages
        if pages is None:
            link = self._links().get(job.source)
            if link is None:
                return ChunkStatus.TIER_DOWN, ()
            pages = self._setup.stored_pages[: job.n_blocks]
            spec = RecordSpec(job.key, job.start_tokens, job.end_tokens, job.n_blocks * used_bytes)
            status = link.load(spec, self._pages.buffers(pages, used_bytes))
            if status is not ChunkStatus.OK:
                return status, ()
        n = len(job.blocks)
        stored = pages[job.offset_blocks : job.offset_blocks + n]
        computed = self._setup.computed_pages[:n]
        layers = compare(
            self._views(computed, used_bytes),
            self._views(stored, used_bytes),
            self._setup.layers[job.group],
            self._setup.tolerance,
        )
        return ChunkStatus.OK, layers

    def _views(self, pages: Ids, used_bytes: int) -> list[memoryview]:
        return [self._pages.buffers([page], used_bytes)[0] for page in pages.tolist()]

    def _yield_to_others(self) -> None:
        """Let this thread run when nobody else wants to; best effort."""
        if not getattr(self._nice, "done", False):
            self._nice.done = True
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
