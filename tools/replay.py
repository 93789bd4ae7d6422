"""Runs a trace against kvtier's catalog and eviction, with simulated time.

One request after another, in the order of arrival, each as the scheduler half treats it: look up
the prefix, load what pays, save what was computed. Where requests overlap in a real engine, here
the earlier one is done first.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import groupby, islice

import numpy as np

from ..connector.gate import Gate
from ..storage.catalog import RAM
from ..storage.entry import Entry
from .replay_chunks import ATTENTION, STATE, Chain, ChunkedTrace, hit_limit_blocks, key_of
from .replay_results import Result, Setup
from .replay_saves import Saver
from .replay_tiers import DISK, Policy, SimulatedTiers, Sizes
from .traces import Nodes, Request


class Replay:
    """One run. Use once.

    Args:
        chunked: the trace.
        setup: model and speeds.
        sizes, policy: what is tried.
        local_blocks: what the device has of each request.
    """

    def __init__(
        self,
        chunked: ChunkedTrace,
        setup: Setup,
        sizes: Sizes,
        policy: Policy,
        local_blocks: Sequence[int],
    ) -> None:
        self._chunked = chunked
        self._setup = setup
        self._policy = policy
        self._local = local_blocks
        self._tiers = SimulatedTiers(
            sizes,
            policy,
            chunked.page_bytes,
            chunked.trace.block_tokens,
            setup.speeds,
            chunked.merge,
            max(chunked.merge * chunked.chunk_blocks, chunked.state_pages),
        )
        self._catalog = self._tiers.catalog
        self._gate = Gate("auto" if setup.gated else "always")
        self._engine_free_s = 0.0
        self._first_token_s = np.zeros(len(chunked.trace.requests))
        self.result = Result(policy.name, sizes.ram_bytes, sizes.disk_bytes)
        self.result.hit_tokens = {"device": 0, RAM: 0, DISK: 0}
        self.result.loaded_bytes = {RAM: 0, DISK: 0}

    def run(self, progress: Callable[[int], None] | None = None) -> Result:
        """Replay every request; ``progress`` hears the number done now and then."""
        for number, request in enumerate(self._chunked.trace.requests):
            self._request(number, request, self._chunked.chains[number])
            if progress is not None and number % 1024 == 0:
                progress(number)
        return self._sum_up()

    def _sum_up(self) -> Result:
        result, moved = self.result, self._tiers.moved
        result.requests = len(self._chunked.trace.requests)
        result.prompt_tokens = self._chunked.trace.prompt_tokens
        result.disk_written_bytes = moved.disk_written_bytes
        result.saved_chunks = moved.saved_chunks
        result.skipped_chunks = moved.skipped_chunks
        result.dropped_writes = moved.dropped_writes
        result.disk_evicted_chunks = moved.disk_evicted_chunks
        result.ram_evicted_chunks = self._catalog.counts.ram_evicted_chunks
        if len(self._first_token_s):
            p50, p90 = np.percentile(self._first_token_s, (50, 90))
            result.first_token_p50_s, result.first_token_p90_s = float(p50), float(p90)
        return result

    # -- one request ---------------------------------------------------------------

    def _request(self, number: int, request: Request, chain: Chain) -> None:
        block = self._chunked.trace.block_tokens
        limit = hit_limit_blocks(request.prompt_tokens, block)
        local = min(int(self._local[number]), limit)
        first = bisect_right(chain.ends, local)
        found, covered = self._cover(request.nodes, chain, first, local)
        hit, state = min(covered, limit), None
        if self._chunked.state_blocks:
            hit, state = self._state_at(request.nodes, hit, local)
        parts = _parts(found, chain.ends, first, local, hit)
        if hit > local and (end := self._pays_until(parts, local, hit)) < hit:
            self.result.gate_cut_tokens += (hit - end) * block
            hit = end
            if self._chunked.state_blocks:
                hit, state = self._state_at(request.nodes, hit, local)
            parts = _parts(found, chain.ends, first, local, hit)
        age = self._catalog.age()
        if self._policy.lru:
            self._renew(found, state, chain, first, hit, age)
        load_s = self._load(parts, state, self._served_s(request)) if hit > local else 0.0
        self.result.hit_tokens["device"] += local * block
        begin_s = self._compute(number, request, hit, load_s)
        speed = self._setup.speeds.prefill_tokens_per_s
        saver = Saver(self._tiers, self._chunked, request, hit, age, begin_s, block / speed)
        saver.save(chain, covered)

    def _cover(self, nodes: Nodes, chain: Chain, first: int, local: int) -> tuple[list[Entry], int]:
        """Return the records that cover the prompt from ``local`` on, and up to which block.

        As `connector.lookup` finds them: whole chunks, then one record that ends inside the next.
        """
        catalog = self._catalog
        n = catalog.run_length(islice(chain.keys, first, None))
        entries = [e for e in map(catalog.get, chain.keys[first : first + n]) if e is not None]
        covered = chain.ends[first + n - 1] if n else local
        inside = covered // self._chunked.chunk_blocks * self._chunked.chunk_blocks
        longest = min(len(nodes), inside + self._chunked.chunk_blocks - 1)
        for depth in range(longest, covered, -1):
            entry = catalog.get(key_of(int(nodes[depth - 1]), ATTENTION))
            if entry is not None and catalog.source_of(entry) is not None:
                return [*entries, entry], depth
        return entries, covered

    def _state_at(self, nodes: Nodes, hit: int, local: int) -> tuple[int, Entry | None]:
        """Return the deepest boundary up to ``hit`` whose state is stored, and its record."""
        every = self._chunked.state_blocks
        for depth in range(hit // every * every, local, -every):
            entry = self._catalog.get(key_of(int(nodes[depth - 1]), STATE))
            if entry is not None and self._catalog.source_of(entry) is not None:
                return depth, entry
        return local, None

    def _pays_until(self, parts: Sequence[_Part], local: int, hit: int) -> int:
        """Return up to where loading is quicker than computing, by kvtier's own gate."""
        block = self._chunked.trace.block_tokens
        per_token = self._setup.shape.loaded_bytes_per_token
        n_tokens = (hit - local) * block
        if not self._gate.doubts(n_tokens, n_tokens * per_token):
            return hit
        end = local
        for source, run in groupby(parts, lambda part: self._catalog.source_of(part[0])):
            tokens = sum(n for _, n in run) * block
            if not self._gate.pays(source or DISK, tokens, tokens * per_token):
                return end
            end += tokens // block
        return hit

    def _load(self, parts: Sequence[_Part], state: Entry | None, now_s: float) -> float:
        """Load a hit; return how long that takes."""
        shape, speeds = self._setup.shape, self._setup.speeds
        wanted = [entry for entry, _ in parts]
        if state is not None:
            wanted.append(state)
        below = self._tiers.take(wanted, young=self._policy.lru)
        slow = set(map(id, below))
        blocks = {RAM: sum([n for _, n in parts]), DISK: 0}
        if below:
            blocks[DISK] = sum([n for entry, n in parts if id(entry) in slow])
            blocks[RAM] -= blocks[DISK]
        if self._policy.lru:
            self._tiers.used_on_disk([entry.key for entry in reversed(wanted)], now_s)
        else:
            self._tiers.brought_in(below)
        load_s, n_bytes = speeds.latency_s, {}
        for tier, per_s in ((RAM, speeds.ram_bytes_per_s), (DISK, speeds.disk_read_bytes_per_s)):
            tokens = blocks[tier] * self._chunked.trace.block_tokens
            n = tokens * shape.loaded_bytes_per_token
            if tier == (DISK if below else RAM):
                n += shape.loaded_bytes
            self.result.hit_tokens[tier] += tokens
            self.result.loaded_bytes[tier] += n
            load_s += n / per_s
            if n:
                n_bytes[tier] = n
        self._gate.note_load(n_bytes, load_s)
        return load_s

    def _renew(
        self,
        found: list[Entry],
        state: Entry | None,
        chain: Chain,
        first: int,
        hit: int,
        age: int,
    ) -> None:
        """Make what the request has met young; a prefix's end is its oldest.

        As the save planner leaves them, whose step comes after `Catalog.touch`.
        """
        ends = chain.ends
        for entry, end in zip(found, ends[first:] if first else ends, strict=False):
            entry.used = age - end
        if len(found) > len(ends) - first:  # a tail
            found[-1].used = age - ends[-1] - 1 if ends else age - 1
        for key, end in zip(chain.keys[:first], ends, strict=False):
            known = self._catalog.get(key)
            if known is not None:
                known.used = age - end
        if state is not None:
            state.used = age - hit

    def _served_s(self, request: Request) -> float:
        """Return when a request's turn comes: the engine computes one prompt at a time."""
        return max(request.at_s, self._engine_free_s)

    def _compute(self, number: int, request: Request, hit: int, load_s: float) -> float:
        """Prefill what was not loaded; return when that begins."""
        tokens = request.prompt_tokens - hit * self._chunked.trace.block_tokens
        compute_s = tokens / self._setup.speeds.prefill_tokens_per_s
        begin_s = self._served_s(request) + load_s
        self._engine_free_s = begin_s + compute_s
        self._gate.note_step(begin_s, tokens)
        self._gate.note_step(self._engine_free_s, 0)
        self.result.load_s += load_s
        self.result.prefill_s += compute_s
        self._first_token_s[number] = load_s + compute_s
        return begin_s


_Part = tuple[Entry, int]  # a record, and how many blocks of it a hit uses


def _parts(found: list[Entry], ends: list[int], first: int, local: int, hit: int) -> list[_Part]:
    """Return the records that bring a hit from ``local`` to ``hit``."""
    if hit <= local:
        return []
    n = bisect_left(ends, hit) + 1 - first  # the record that reaches the hit is the last
    stops = [*ends[first : first + n - 1], hit]
    starts = [local, *stops]
    return [
        (entry, stop - start)
        for entry, start, stop in zip(found[:n], starts, stops, strict=False)
        if stop > start
    ]
