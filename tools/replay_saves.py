"""What one replayed request leaves behind, as the save planner of the connector does it."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from ..storage.entry import RamState
from .replay_chunks import ATTENTION, STATE, Chain, ChunkedTrace, hit_limit_blocks, key_of
from .replay_tiers import SimulatedTiers
from .traces import Request


@dataclass(slots=True)
class Saver:
    """Saves what is nowhere yet of one request. All positions in blocks.

    Attributes:
        hit: up to where the prompt was not computed.
        age: of the request's chunks.
        begin_s: when its prefill begins.
        per_block_s: prefill of one block.
    """

    tiers: SimulatedTiers
    chunked: ChunkedTrace
    request: Request
    hit: int
    age: int
    begin_s: float
    per_block_s: float

    def save(self, chain: Chain, covered: int) -> None:
        """Save whole chunks, then the tail, or recurrent states with what they need.

        Args:
            chain: the prompt's whole chunks.
            covered: some record covers the prompt up to here.
        """
        first = bisect_right(chain.ends, covered)
        start = chain.ends[first - 1] if first else 0
        for key, end in zip(chain.keys[first:], chain.ends[first:], strict=True):
            self._keep(key, start, end, end - start)
            start = end
        n_blocks = len(self.request.nodes)
        if self.chunked.state_blocks:
            self._save_states(covered)
        else:
            self._keep_tail(n_blocks)
        self.tiers.decode(self._computed_s(n_blocks), self.request.output_tokens)

    def _save_states(self, covered: int) -> None:
        """Keep the states that the engine hands over: at the prompt's end and at a junction.

        A junction is where the prompt leaves what is known, if no state was there.
        """
        every = self.chunked.state_blocks
        boundaries = {hit_limit_blocks(self.request.prompt_tokens, self.chunked.trace.block_tokens)}
        if covered > self.hit:
            boundaries.add(covered)
        for depth in sorted({b // every * every for b in boundaries} - {0}):
            self._keep_tail(depth)
            key = key_of(int(self.request.nodes[depth - 1]), STATE)
            self._keep(key, depth - 1, depth, self.chunked.state_pages)

    def _keep_tail(self, end: int) -> None:
        start = end // self.chunked.chunk_blocks * self.chunked.chunk_blocks
        if end > start:
            key = key_of(int(self.request.nodes[end - 1]), ATTENTION)
            self._keep(key, start, end, end - start)

    def _keep(self, key: bytes, start: int, end: int, n_pages: int) -> None:
        catalog = self.tiers.catalog
        entry = catalog.get(key)
        if entry is not None:
            if self.tiers.policy.lru:
                entry.used = max(entry.used, self.age - end)
            if entry.ram is not RamState.ABSENT or catalog.source_of(entry) is not None:
                return
        self.tiers.save(key, n_pages, (start, end), self.age - end, self._computed_s(end))

    def _computed_s(self, end: int) -> float:
        return self.begin_s + max(0, end - self.hit) * self.per_block_s
