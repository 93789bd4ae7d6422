"""What is written to which lower tier, and the chunks that RAM is about to lose.

Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..storage.catalog import Catalog
from ..storage.entry import Entry
from ..storage.jobs import SaveChunk, SaveJob
from .ledger import Ledger

NO_BLOCKS = np.empty(0, dtype=np.int64)
WRITE_BACK_SHARE = 0.25  # of RAM that can be given away without losing a chunk
WRITE_BACK_CHUNKS = 8  # written back at once
WRITE_BACK_RETRY_S = 5.0  # after a write-back that brought nothing to every rank


@dataclass(frozen=True, slots=True)
class WritePolicy:
    """What is written below RAM.

    Attributes:
        through: tiers written behind every save.
        back: tiers written before RAM evicts a chunk that no lower tier holds.
        min_uses: how often a chunk must have been met before it is saved.
    """

    through: tuple[str, ...] = ()
    back: tuple[str, ...] = ()
    min_uses: int = 1


class WriteBack:
    """Plans writes of chunks that only RAM holds, before their pages are needed.

    Args:
        next_job_id: source of job ids.
        generation: the namespace's.
    """

    def __init__(
        self,
        catalog: Catalog,
        ledger: Ledger,
        policy: WritePolicy,
        next_job_id: Callable[[], int],
        generation: Callable[[], int],
    ) -> None:
        self._catalog = catalog
        self._ledger = ledger
        self._policy = policy
        self._next_job_id = next_job_id
        self._generation = generation

    def plan(self) -> SaveJob | None:
        """Return a job for the oldest chunks that only RAM holds, if RAM is short of others."""
        tiers = self._policy.through + self._policy.back
        if not tiers or self._catalog.room_without_loss() >= WRITE_BACK_SHARE:
            return None
        if self._ledger.clock() < self._ledger.unwritten_at_s + WRITE_BACK_RETRY_S:
            return None
        chunks: list[SaveChunk] = []
        entries: list[Entry] = []
        for entry in self._catalog.oldest_only(WRITE_BACK_CHUNKS):
            span = entry.span
            if span is None or entry.pages is None:
                continue
            self._catalog.pin(entry)
            entries.append(entry)
            group = entry.key[-1]
            chunks.append(SaveChunk(entry.key, group, *span, NO_BLOCKS, entry.pages, tiers))
        if not chunks:
            return None
        job = SaveJob(self._next_job_id(), self._generation(), tuple(chunks))
        self._ledger.open_save(job, entries)
        return job
