"""The optimum and least-recently-used over sizes, against exhaustive search and plain lists."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvtier.tools.replay_bounds import Optimum, Recency, limited_tokens
from kvtier.tools.traces import Request, Trace


def random_trace(seed, n_requests, depth, n_branches):
    """Prompts that extend, cut and fork one another; one block is one token."""
    rng = random.Random(seed)
    nodes, chains = {}, []
    for _ in range(n_requests):
        base = rng.choice(chains)[: rng.randint(0, depth)] if chains else []
        chain = list(base)
        for _ in range(rng.randint(0, depth - len(base))):
            parent = chain[-1] if chain else -1
            key = (parent, rng.randrange(n_branches))
            chain.append(nodes.setdefault(key, len(nodes)))
        chains.append(chain)
    requests = tuple(
        Request(float(i), i, len(c) + 1, 1, np.array(c, dtype=np.int32))
        for i, c in enumerate(chains)
    )
    return Trace("random", 1, requests, max(1, len(nodes)))


def best_by_search(trace, capacity):
    """Try every set of blocks that could be kept after every request."""
    best = {frozenset(): 0}
    for request in trace.requests:
        chain = request.nodes.tolist()
        after = {}
        for kept, score in best.items():
            hit = 0
            while hit < len(chain) and chain[hit] in kept:
                hit += 1
            pool = sorted(kept | set(chain))
            for mask in range(1 << len(pool)):
                chosen = frozenset(node for i, node in enumerate(pool) if mask >> i & 1)
                if len(chosen) <= capacity:
                    after[chosen] = max(after.get(chosen, 0), score + hit)
        best = after
    return max(best.values())


@pytest.mark.parametrize("seed", range(25))
def test_the_optimum_is_what_exhaustive_search_finds(seed):
    """On small traces no choice of what to keep gives more hits than the bound, and one as many."""
    print("seed", seed)
    trace = random_trace(seed, n_requests=6, depth=3, n_branches=2)
    if trace.n_nodes > 9:
        pytest.skip("too many sets to try")
    for capacity in range(4):
        found = int(Optimum(trace).hit_blocks(capacity).sum())
        assert found == best_by_search(trace, capacity), capacity


def lru_by_list(trace, capacity):
    """Keep blocks in a list, oldest first; a request makes its blocks young from end to start."""
    kept, hits = [], []
    for request in trace.requests:
        chain = request.nodes.tolist()
        hit = 0
        while hit < len(chain) and chain[hit] in kept:
            hit += 1
        hits.append(hit)
        kept = [node for node in kept if node not in chain] + chain[::-1]
        kept = kept[max(0, len(kept) - capacity) :]
    return hits


@pytest.mark.parametrize("seed", range(20))
def test_recency_is_least_recently_used_at_every_size(seed):
    """One walk gives each request's hit at every size, as a plain list does."""
    print("seed", seed)
    trace = random_trace(seed, n_requests=40, depth=9, n_branches=2)
    recency = Recency(trace)
    capacities = [0, 1, 2, 3, 5, 8, 13, 30, 1000]
    totals = []
    for capacity in capacities:
        wanted = lru_by_list(trace, capacity)
        assert recency.hit_blocks(capacity).tolist() == wanted
        totals.append(sum(wanted))
    assert recency.hit_tokens_at(capacities) == totals


def test_a_hit_leaves_a_token_to_compute():
    """A prompt of whole blocks that is all stored hits all but its last block."""
    nodes = np.arange(4, dtype=np.int32)
    requests = tuple(Request(float(i), 0, 64, 0, nodes) for i in range(2))
    trace = Trace("t", 16, requests, 4)
    assert limited_tokens(trace, Optimum(trace).hit_blocks(4)).tolist() == [0, 48]
    assert Recency(trace).hit_tokens_at([3, 4]) == [48, 48]
