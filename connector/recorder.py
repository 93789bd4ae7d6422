"""The recording of a running engine: one line for each finished request, for `kvtier replay`.

The scheduler thread hands over a request's block hashes and lengths and goes on: it copies a list
of references and nothing else. A thread of the recorder spells, counts and writes. At most
`MAX_QUEUED` requests wait for it; more are dropped, and counted. No token is ever written: the
prefix hashes say which prompts began alike, and nothing else of them.

A recording is a run of files (parts), each complete in itself, in a folder that engines share.
All parts together stay below a limit; the oldest that nobody is writing go first.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..storage.counts import Counts
from .plan import NamespaceInfo
from .prefix_chains import Chains
from .recording_files import Part, PartWriter
from .request_options import SaltedHashes
from .tracker import Tracker

logger = logging.getLogger("kvtier.recorder")

FORMAT = "kvtier-recording"
VERSION = 1
MAX_QUEUED = 256  # a prompt of 100,000 tokens in blocks of 16 takes 50 kB
RETRY_S = 10.0
CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class _Finished:
    """What one request was, as the scheduler thread knew it at its end."""

    request_id: str
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    hashes: Sequence[bytes]
    local_tokens: int
    hits: dict[str, int]
    reason: str
    how: str
    namespace: NamespaceInfo | None


class Recorder:
    """Writes one engine's recording.

    Args:
        folder: where; created when missing, for its owner only.
        limit_bytes: of all recordings in the folder together.
        block_tokens: tokens that each prefix hash stands for.
        clock: Unix time.
        start: False leaves the thread out; the caller runs `work` (tests).
    """

    def __init__(
        self,
        folder: str,
        limit_bytes: int,
        block_tokens: int,
        clock: Callable[[], float] = time.time,
        *,
        start: bool = True,
    ) -> None:
        self.counts = Counts()
        self._block_tokens = block_tokens
        self._clock = clock
        self._started_s = clock()
        self._writer = PartWriter(folder, limit_bytes, self._started_s)
        self._queue: queue.Queue[_Finished | None] = queue.Queue(MAX_QUEUED)
        self._chains = Chains()
        self._part: Part | None = None
        self._retry_at_s = 0.0
        self._thread: threading.Thread | None = None
        if start:
            self._thread = threading.Thread(target=self.work, name="kvtier-record", daemon=True)
            self._thread.start()

    # -- scheduler thread --------------------------------------------------

    def finished(self, request: Any, tracker: Tracker, namespace: NamespaceInfo | None) -> None:
        """Take in a request that is over. Scheduler thread; never blocks."""
        prompt_tokens = int(request.num_prompt_tokens)
        hashes: Sequence[bytes] = request.block_hashes[: prompt_tokens // self._block_tokens]
        salt = tracker.options.salt
        item = _Finished(
            str(request.request_id),
            float(getattr(request, "arrival_time", 0.0)) or self._clock(),
            prompt_tokens,
            max(0, int(request.num_tokens) - prompt_tokens),
            SaltedHashes(hashes, salt) if salt else hashes,
            tracker.local_tokens,
            tracker.hits,
            tracker.reason.value,
            str(getattr(getattr(request, "status", None), "name", "")).lower(),
            namespace,
        )
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self.counts.add("recording_dropped_requests")

    # -- the writer's thread -----------------------------------------------

    def work(self) -> None:
        """Write what comes, until `close`."""
        while (item := self._queue.get()) is not None:
            self.write(item)
        self._drop_part()

    def write(self, item: _Finished) -> None:
        """Write one request; what cannot be written is counted."""
        if self._clock() < self._retry_at_s:
            self.counts.add("recording_dropped_requests")
            return
        try:
            self._write(item)
        except Exception as error:
            self._drop_part()
            if not self._retry_at_s:
                logger.warning(
                    "kvtier: the recording stops until it can be written: %s",
                    error,
                    exc_info=not isinstance(error, OSError),  # else a bug of ours
                )
            self._retry_at_s = self._clock() + RETRY_S
            self.counts.add("recording_dropped_requests")
            return
        if self._retry_at_s:
            self._retry_at_s = 0.0
            logger.warning("kvtier: the recording goes on")
        self.counts.add("recorded_requests")

    def _write(self, item: _Finished) -> None:
        if self._part is None or self._part.full:
            self._drop_part()
            self._part = self._writer.open(_pack(self._header(item.namespace)))
            self._chains.new_part()
        place = self._chains.add(list(item.hashes))
        line: dict[str, Any] = {
            "t": round(max(0.0, item.arrived_s - self._started_s), 6),
            "request": item.request_id,
            "session": place.session,
            "prompt_tokens": item.prompt_tokens,
            "output_tokens": item.output_tokens,
        }
        if place.shared_blocks:
            line["base"] = [place.base_line, place.shared_blocks]
        line["hashes"] = [h.hex() for h in place.new_hashes]
        line["device_tokens"] = item.local_tokens
        line["hit_tokens"] = item.hits
        line["miss"] = item.reason
        line["end"] = item.how.removeprefix("finished_")
        line["namespace"] = None if item.namespace is None else item.namespace.digest.hex()
        self._part.write(_pack(line))

    def _header(self, namespace: NamespaceInfo | None) -> dict[str, Any]:
        words = {} if namespace is None else namespace.description
        return {
            "format": FORMAT,
            "version": VERSION,
            "block_tokens": self._block_tokens,
            "started_at_s": round(self._started_s, 3),
            "hash_algorithm": words.get("hash_algorithm"),
            "root_hash": words.get("root_hash"),
        }

    def _drop_part(self) -> None:
        if self._part is not None:
            with contextlib.suppress(OSError):
                self._part.close()
            self._part = None

    def close(self) -> None:
        """Write what waits, for a bounded time, and stop. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            self._queue.put(None, timeout=CLOSE_S)
        except queue.Full:
            return  # the disk hangs; the thread dies with the process
        thread.join(CLOSE_S)


def _pack(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"
