"""Which chunks of a request to save, and when.

A chunk is planned in the step whose forward completes it (vLLM's rule for what
is valid, contract with `Request.num_tokens`: accepted tokens only), a tail when
its prompt is computed and another when its request finishes, a recurrent state
only when the engine hands it over.

The prompt's tail is for whoever sends the same prompt again, or goes on without
the answer as it was (a reasoning model's turns): such a request has no hash of
what came after the prompt's end.
Scheduler thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ..storage.catalog import Catalog
from ..storage.counts import Counts
from ..storage.entry import Entry, RamState
from ..storage.gone import Why
from ..storage.jobs import SaveChunk, SaveJob
from .geometry import Geometry, GroupGeometry, GroupKind
from .ledger import Ledger
from .save_tracker import SaveTracker
from .token_database import ChunkedTokenDatabase
from .write_back import WriteBack, WritePolicy

NULL_BLOCK = 0
MAX_SEEN = 200_000

Wanted = tuple[bytes, GroupGeometry, int, int, list[int]]
"""A chunk to save: key, group, start and end in tokens, device blocks."""


class SavePlanner:
    """Cuts valid blocks into chunks and reserves their RAM pages.

    Args:
        next_job_id: source of job ids, shared with loads.
        generation: the namespace's, when the blocks were computed.
        policy: what goes to which lower tier, and when.
    """

    def __init__(
        self,
        geometry: Geometry,
        catalog: Catalog,
        ledger: Ledger,
        counts: Counts,
        next_job_id: Callable[[], int],
        generation: Callable[[], int],
        policy: WritePolicy,
    ) -> None:
        self._geometry = geometry
        self._catalog = catalog
        self._ledger = ledger
        self._counts = counts
        self._next_job_id = next_job_id
        self._generation = generation
        self._policy = policy
        self._seen: OrderedDict[bytes, tuple[int, int]] = OrderedDict()  # requests, the last one
        self._database = ChunkedTokenDatabase(geometry)
        self._jobs: list[SaveJob] = []
        self._write_back = WriteBack(catalog, ledger, policy, next_job_id, generation)
        self._attention = [g for g in geometry.groups if g.kind is not GroupKind.RECURRENT]
        self._recurrent = {g.group_id: g for g in geometry.groups if g.kind is GroupKind.RECURRENT}
        self._windowed = any(g.window_tokens is not None for g in geometry.groups)
        # Pinned blocks cannot be given to requests; what does not fit waits a step.
        self._max_pinned = max(1, geometry.num_blocks * 3 // 4)

    @property
    def waiting(self) -> bool:
        """Whether saves are planned that no step has carried yet."""
        return bool(self._jobs)

    def take(self) -> tuple[SaveJob, ...]:
        """Return the saves for this step's plan."""
        jobs, self._jobs = tuple(self._jobs), []
        return jobs

    def plan_write_back(self) -> None:
        """Write out the oldest chunks that only RAM holds, before their pages are needed."""
        job = self._write_back.plan()
        if job is not None:
            self._jobs.append(job)

    def due(self, tracker: SaveTracker, valid_tokens: int, prompt_tokens: int) -> bool:
        """Say, quickly, whether a whole chunk or the prompt is complete and not planned."""
        tracker.saved_tokens = min(tracker.saved_tokens, valid_tokens)
        if tracker.blocked:
            return False
        chunk = self._geometry.chunk_tokens
        return valid_tokens // chunk * chunk > tracker.saved_tokens or self._prompt_due(
            tracker, valid_tokens, prompt_tokens
        )

    def _prompt_due(self, tracker: SaveTracker, valid_tokens: int, prompt_tokens: int) -> bool:
        return valid_tokens >= self._prompt_end(prompt_tokens) > tracker.prompt_tail_tokens

    def _prompt_end(self, prompt_tokens: int) -> int:
        """Return where the prompt's tail ends; 0 where there is to be none."""
        if self._recurrent:
            return 0  # an attention tail without a state at its end serves nothing
        # The same prompt is restored to a block before its end at most, and a windowed
        # tail serves no hit that ends before its own end.
        unit = self._geometry.scheduler_block_tokens
        spare = self._geometry.computed_tokens if self._windowed else 0
        return max(0, prompt_tokens - spare) // unit * unit

    def plan_chunks(
        self,
        hashes: Sequence[bytes],
        tracker: SaveTracker,
        table: Sequence[Sequence[int]],
        valid_tokens: int,
        *,
        final: bool = False,
    ) -> None:
        """Plan the whole chunks of the first ``valid_tokens`` that have not been planned.

        What finds no room now is planned with a later step, or dropped when ``final``.

        Args:
            hashes: the request's block hashes.
            tracker: how far it has been saved; moved on.
            table: block ids per engine group; 0 where the engine keeps none.
            valid_tokens: KV of so many tokens is valid once this step's forward has run.
            final: there is no later step.
        """
        chunk = self._geometry.chunk_tokens
        start = self._planned_tokens(hashes, tracker) // chunk * chunk
        hashed = len(hashes) * self._geometry.hash_block_tokens
        last = min(valid_tokens, hashed) // chunk * chunk
        spans = (
            (group, at, at + chunk) for at in range(start, last, chunk) for group in self._attention
        )
        refused = self._plan(hashes, table, spans, tracker, final=final)
        reached = last if refused is None else refused
        if reached > start:
            tracker.saved_tokens = reached
            tracker.saved_hash = self._database.hash_at(hashes, reached)

    def plan_prompt(
        self,
        hashes: Sequence[bytes],
        tracker: SaveTracker,
        table: Sequence[Sequence[int]],
        valid_tokens: int,
        prompt_tokens: int,
        *,
        final: bool = False,
    ) -> None:
        """Plan the prompt's tail once its blocks are valid; arguments as `plan_chunks`."""
        if self._prompt_due(tracker, valid_tokens, prompt_tokens):
            end = self._prompt_end(prompt_tokens)
            groups = self._attention
            if prompt_tokens % self._geometry.chunk_tokens == 0:
                # The other groups' whole chunk serves the hit a block before its end.
                groups = [g for g in groups if g.window_tokens is not None]
            if self._plan_tail(hashes, tracker, table, end, groups, final=final) is None:
                tracker.prompt_tail_tokens = end

    def _planned_tokens(self, hashes: Sequence[bytes], tracker: SaveTracker) -> int:
        """Return up to where this very prefix has been planned."""
        saved = tracker.saved_tokens // self._geometry.chunk_tokens * self._geometry.chunk_tokens
        n_hashes = saved // self._geometry.hash_block_tokens
        if saved and (len(hashes) < n_hashes or hashes[n_hashes - 1] != tracker.saved_hash):
            tracker.saved_tokens = 0
        return tracker.saved_tokens

    def _age(self, tracker: SaveTracker) -> int:
        if tracker.age is None:
            tracker.age = self._catalog.age()
        return tracker.age

    def plan_finish(
        self,
        request: Any,
        hashes: Sequence[bytes],
        tracker: SaveTracker,
        table: Sequence[Sequence[int]],
    ) -> None:
        """Plan the last whole chunks of a finished request and its tail.

        Everything kept of it counts as used now; `chain` gives the keys.
        """
        if tracker.blocked:
            return
        # The last sampled token was never fed to the model.
        valid = max(request.num_prompt_tokens, request.num_tokens - 1)
        valid = min(valid, request.num_computed_tokens)
        tracker.age = self._catalog.age()
        self.plan_chunks(hashes, tracker, table, valid, final=True)
        self.plan_prompt(hashes, tracker, table, valid, request.num_prompt_tokens, final=True)
        for key, end in self._chain(hashes, tracker.saved_tokens):
            entry = self._catalog.get(key)
            if entry is not None:
                entry.used = max(entry.used, tracker.age - end)
        if not self._recurrent:
            self._plan_tail(hashes, tracker, table, valid, self._attention)

    def chain(self, hashes: Sequence[bytes], tracker: SaveTracker) -> list[bytes]:
        """Return the keys of the chunks planned so far, from the prefix's end to its start."""
        return [key for key, _ in self._chain(hashes, tracker.saved_tokens)][::-1]

    def _chain(self, hashes: Sequence[bytes], n_tokens: int) -> list[tuple[bytes, int]]:
        ends = self._geometry.chunk_end_tokens(n_tokens)
        n = len(ends)
        columns = [self._database.chunk_keys(hashes, g.group_id, n) for g in self._attention]
        return [(keys[i], end) for i, end in enumerate(ends) for keys in columns]

    def _plan_tail(
        self,
        hashes: Sequence[bytes],
        tracker: SaveTracker,
        table: Sequence[Sequence[int]],
        valid: int,
        groups: Sequence[GroupGeometry],
        *,
        final: bool = True,
    ) -> int | None:
        unit = self._geometry.scheduler_block_tokens
        chunk = self._geometry.chunk_tokens
        hashed = len(hashes) * self._geometry.hash_block_tokens
        end = min(valid, hashed) // unit * unit
        start = end // chunk * chunk
        spans = [(group, start, end) for group in groups if end > start]
        return self._plan(hashes, table, spans, tracker, final=final)

    def plan_states(
        self,
        hashes: Sequence[bytes],
        tracker: SaveTracker,
        table: Sequence[Sequence[int]],
        offers: Sequence[tuple[int, int, int]],
    ) -> None:
        """Plan recurrent states that the engine hands over, with the attention up to them.

        Args:
            hashes: the request's block hashes.
            tracker: says whether the request may be stored.
            table: block ids per engine group.
            offers: (group id, block id, boundary in tokens); the block holds the exact
                state at the boundary once this step's forward has run.
        """
        if tracker.blocked:
            return
        unit, chunk = self._geometry.hash_block_tokens, self._geometry.chunk_tokens
        spans: list[tuple[GroupGeometry, int, int]] = []
        boundaries = set()
        for group_id, block, tokens in offers:
            group = self._recurrent.get(group_id)
            if group is None or block == NULL_BLOCK or tokens % unit or tokens <= 0:
                continue
            if tokens > len(hashes) * unit:
                continue
            boundaries.add(tokens)
            self._plan_state(hashes, group, block, tokens, tracker)
        for tokens in sorted(boundaries):
            start = (tokens - 1) // chunk * chunk
            if tokens % chunk:
                spans += [(group, start, tokens) for group in self._attention]
        self._plan(hashes, table, spans, tracker)

    def _plan_state(
        self,
        hashes: Sequence[bytes],
        group: GroupGeometry,
        block: int,
        tokens: int,
        tracker: SaveTracker,
    ) -> None:
        key = self._database.key_at(hashes, tokens, group.group_id)
        start = (tokens - 1) // self._geometry.chunk_tokens * self._geometry.chunk_tokens
        self._emit([(key, group, start, tokens, [block])], tracker)

    def _plan(
        self,
        hashes: Sequence[bytes],
        table: Sequence[Sequence[int]],
        spans: Iterable[tuple[GroupGeometry, int, int]],
        tracker: SaveTracker,
        *,
        final: bool = True,
    ) -> int | None:
        """Queue the chunks of ``spans``; return where the first one begins that has to wait."""
        wanted = self._wanted(hashes, table, spans, self._age(tracker))
        return self._emit(wanted, tracker, final=final)

    def _wanted(
        self,
        hashes: Sequence[bytes],
        table: Sequence[Sequence[int]],
        spans: Iterable[tuple[GroupGeometry, int, int]],
        age: int,
    ) -> Iterator[Wanted]:
        for group, start, end in spans:
            first, n = self._geometry.blocks_in_span(group, start, end)
            if n == 0:
                continue
            key = self._database.key_at(hashes, end, group.group_id)
            if self._known(key, age - end):
                continue
            blocks = table[group.group_id][first : first + n]
            if len(blocks) < n or NULL_BLOCK in blocks:
                self._counts.add("save_skipped_chunks.block_gone")
                continue
            yield key, group, start, end, list(blocks)

    def _emit(
        self, wanted: Iterable[Wanted], tracker: SaveTracker, *, final: bool = True
    ) -> int | None:
        """Reserve pages for chunks that are nowhere yet and queue one job for them."""
        age = self._age(tracker)
        refused: int | None = None
        chunks: list[SaveChunk] = []
        entries: list[Entry] = []
        n_pinned = 0
        for key, group, start, end, blocks in wanted:
            if self._known(key, age - end):
                continue
            crowded = self._ledger.pinned_blocks + n_pinned + len(blocks) > self._max_pinned
            if (crowded or not self._catalog.has_room(len(blocks))) and not final:
                refused = start
                break
            if self._policy.min_uses > 1 and not self._seen_enough(key, tracker.number):
                self._counts.add("save_skipped_chunks.min_uses")
                continue
            if crowded:
                self._counts.add("save_dropped_chunks.device.pins")
                self._catalog.gone.note(key, Why.DROPPED)
                continue
            entry = self._catalog.begin_save(key, len(blocks), age - end)
            if entry is None:
                self._counts.add("save_dropped_chunks.ram.no_page")
                self._catalog.gone.note(key, Why.DROPPED)
                continue
            assert entry.pages is not None
            entry.span = (start, end)
            n_pinned += len(blocks)
            entries.append(entry)
            ids = np.array(blocks, dtype=np.int64)
            chunks.append(
                SaveChunk(key, group.group_id, start, end, ids, entry.pages, self._policy.through)
            )
        if chunks:
            job = SaveJob(self._next_job_id(), self._generation(), tuple(chunks))
            self._ledger.open_save(job, entries)
            self._jobs.append(job)
        return refused

    def _known(self, key: bytes, used: int) -> bool:
        """Whether a chunk is somewhere, or on its way; it counts as used again."""
        entry = self._catalog.get(key)
        if entry is None:
            return False
        entry.used = max(entry.used, used)
        return entry.ram is not RamState.ABSENT or self._catalog.source_of(entry) is not None

    def _seen_enough(self, key: bytes, request: int) -> bool:
        """Count the requests that met a chunk which is nowhere; True when it is to be saved."""
        n, last = self._seen.pop(key, (0, -1))
        n += last != request  # once each: at its prompt's end, at its own, after a preemption
        if n >= self._policy.min_uses:
            return True
        self._seen[key] = (n, request)
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        return False
