"""What a cache of a given size can do at best, and what least-recently-used does at every size.

Both walk a trace once, on intervals of a chain's depths instead of single blocks, which prefixes
allow: a request that uses a block uses all before it. So the blocks whose next (or last) use is
one request lie on that request's chain and leave from its deep end.

Sources: L. A. Belady, "A study of replacement algorithms for a virtual-storage computer" (1966),
with bypass; R. L. Mattson et al., "Evaluation techniques for storage hierarchies" (1970).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..storage.catalog import RAM
from .replay_chunks import ChunkedTrace, hit_limit_blocks
from .replay_results import Result, Setup
from .replay_tiers import DISK, Policy, Sizes
from .traces import Trace

Counts = npt.NDArray[np.int64]
_Segments = list[tuple[int, int, int]]  # (first depth, end depth, request)

NEVER = -1


def _segments(uses: npt.NDArray[np.int32]) -> _Segments:
    """Cut a chain's depths into runs of equal use."""
    if not len(uses):
        return []
    cuts = np.flatnonzero(uses[1:] != uses[:-1]) + 1
    starts = [0, *cuts.tolist()]
    return [
        (start, end, int(uses[start]))
        for start, end in zip(starts, [*starts[1:], len(uses)], strict=True)
    ]


class Optimum:
    """The clairvoyant optimum: what is used again last is not kept (Belady, with bypass).

    An upper bound for every policy that keeps blocks: it keeps single blocks, loses nothing to
    chunks, and writes nothing twice. Its hits at a size hold all of those at a smaller one.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._next: list[_Segments] = []
        uses = np.full(trace.n_nodes, NEVER, dtype=np.int32)
        for number in range(len(trace.requests) - 1, -1, -1):
            nodes = trace.requests[number].nodes
            self._next.append(_segments(uses[nodes]))
            uses[nodes] = number
        self._next.reverse()

    def hit_blocks(self, capacity_blocks: int) -> Counts:
        """Return each request's hit, in blocks, (n requests,)."""
        hits = np.zeros(len(self._trace.requests), dtype=np.int64)
        buckets: dict[int, deque[tuple[int, int]]] = {}  # by next use; deepest first
        sizes: dict[int, int] = {}
        far: list[int] = []  # heap of minus the next use
        held = 0
        for number, segments in enumerate(self._next):
            buckets.pop(number, None)
            resident = sizes.pop(number, 0)
            hits[number] = resident
            held -= resident
            for start, end, after in segments:
                if after == NEVER:
                    continue
                if after not in buckets:
                    buckets[after] = deque()
                    sizes[after] = 0
                    heapq.heappush(far, -after)
                buckets[after].append((start, end))
                sizes[after] += end - start
                held += end - start
            while held > capacity_blocks:
                last = -far[0]
                if not sizes.get(last):
                    heapq.heappop(far)
                    buckets.pop(last, None)
                    sizes.pop(last, None)
                    continue
                start, end = buckets[last].popleft()
                gone = min(end - start, held - capacity_blocks)
                if end - start > gone:
                    buckets[last].appendleft((start, end - gone))
                sizes[last] -= gone
                held -= gone
        return hits


class Recency:
    """Least recently used at every size, from one walk (stack distances).

    Of one request's blocks the last counts as used first, so a prefix goes from its end.

    Attributes:
        segments: for each request, (first depth, end depth, distance of the first);
            a block at depth d hits when a cache holds at least ``distance + d - first`` blocks.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        n = len(trace.requests)
        self.segments: list[_Segments] = []
        last = np.full(trace.n_nodes, NEVER, dtype=np.int32)
        tree = [0] * (n + 1)  # Fenwick: blocks by the request that used them last
        held = 0
        for number, request in enumerate(trace.requests):
            found: _Segments = []
            for start, end, before in _segments(last[request.nodes]):
                if before == NEVER:
                    continue
                younger = held - _prefix(tree, before + 1)
                found.append((start, end, younger + 1))
            self.segments.append(found)
            for start, end, before in _segments(last[request.nodes]):
                if before != NEVER:
                    _grow(tree, before, start - end)
                    held -= end - start
            _grow(tree, number, len(request.nodes))
            held += len(request.nodes)
            last[request.nodes] = number

    def hit_blocks(self, capacity_blocks: int) -> Counts:
        """Return each request's hit, in blocks, (n requests,)."""
        hits = np.zeros(len(self.segments), dtype=np.int64)
        for number, segments in enumerate(self.segments):
            for start, end, distance in segments:
                hits[number] += min(end - start, max(0, capacity_blocks - distance + 1))
        return hits

    def hit_tokens_at(self, capacities_blocks: Sequence[int]) -> list[int]:
        """Return the hit tokens of the whole trace at each size."""
        requests = self._trace.requests
        top = max(capacities_blocks, default=0)
        steps = np.zeros(top + 2, dtype=np.int64)
        for request, segments in zip(requests, self.segments, strict=True):
            limit = hit_limit_blocks(request.prompt_tokens, self._trace.block_tokens)
            for start, end, distance in segments:
                n = min(end, limit) - start
                if n > 0 and distance <= top:
                    steps[distance] += 1
                    steps[min(top + 1, distance + n)] -= 1
        at_size = np.cumsum(np.cumsum(steps))
        return [int(at_size[c]) * self._trace.block_tokens for c in capacities_blocks]


def _grow(tree: list[int], index: int, by: int) -> None:
    index += 1
    while index < len(tree):
        tree[index] += by
        index += index & -index


def _prefix(tree: list[int], n: int) -> int:
    """Return the sum of the first ``n``."""
    total = 0
    while n:
        total += tree[n]
        n &= n - 1
    return total


def limited_tokens(trace: Trace, hit_blocks: Counts) -> Counts:
    """Return hits in tokens, cut to what the engine may take, (n requests,)."""
    limits = np.array(
        [hit_limit_blocks(r.prompt_tokens, trace.block_tokens) for r in trace.requests],
        dtype=np.int64,
    )
    cut: Counts = np.minimum(hit_blocks, limits) * trace.block_tokens
    return cut


def bound(
    chunked: ChunkedTrace, setup: Setup, sizes: Sequence[Sizes], policy: Policy
) -> list[Result]:
    """Return the clairvoyant optimum at each size.

    RAM and disk are taken as holding different blocks; recurrent states as free and always there.
    """
    trace = chunked.trace
    optimum = Optimum(trace)
    results = []
    for one in sizes:
        ram_blocks = one.ram_bytes // chunked.page_bytes
        all_blocks = ram_blocks + one.disk_bytes // chunked.page_bytes
        ram = int(limited_tokens(trace, optimum.hit_blocks(ram_blocks)).sum())
        both = ram
        if all_blocks > ram_blocks:
            both = int(limited_tokens(trace, optimum.hit_blocks(all_blocks)).sum())
        result = Result(policy.name, one.ram_bytes, one.disk_bytes)
        result.requests = len(trace.requests)
        result.prompt_tokens = trace.prompt_tokens
        result.hit_tokens = {"device": 0, RAM: ram, DISK: both - ram}
        per_token = setup.shape.loaded_bytes_per_token
        result.loaded_bytes = {RAM: ram * per_token, DISK: (both - ram) * per_token}
        results.append(result)
    return results


def device_hits(trace: Trace, setup: Setup) -> list[int]:
    """Return what the engine's own prefix cache has of each request, in blocks."""
    if not setup.device_tokens:
        return [0] * len(trace.requests)
    hits: list[int] = Recency(trace).hit_blocks(setup.device_tokens // trace.block_tokens).tolist()
    return hits
