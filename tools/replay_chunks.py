"""A trace cut into the chunks that kvtier would keep, once for all runs of a replay."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .traces import Blocks, Nodes, Trace

PAGE_ALIGN_BYTES = 4096
ATTENTION = b"\0"
STATE = b"\1"


@dataclass(frozen=True, slots=True)
class Shape:
    """What a model's KV weighs, all ranks together.

    Attributes:
        stored_bytes_per_token: of a saved chunk.
        loaded_bytes_per_token: of a hit; less where only a window is needed.
        loaded_bytes: of every hit besides (windows, states).
        state_bytes: of one recurrent state; 0: the model has none.
        state_every_tokens: states are taken at multiples of this.
        chunk_tokens: of a chunk, rounded up to whole blocks of the trace.
    """

    stored_bytes_per_token: int
    loaded_bytes_per_token: int
    loaded_bytes: int = 0
    state_bytes: int = 0
    state_every_tokens: int = 0
    chunk_tokens: int = 256


@dataclass(frozen=True, slots=True)
class Chain:
    """A prompt as records, from its start; lists are shared and read only.

    Attributes:
        keys: of the records.
        ends: where each ends, in blocks.
    """

    keys: list[bytes]
    ends: list[int]


class ChunkedTrace:
    """A trace cut into chunks: keys that are made once and shared by all requests.

    Args:
        trace: the trace.
        shape: says how long a chunk is.
        merge: so many neighbouring chunks, at most, are moved as one where no request of the
            trace tells them apart. It makes a replay quicker, and eviction coarser.
    """

    def __init__(self, trace: Trace, shape: Shape, merge: int = 1) -> None:
        block = trace.block_tokens
        self.trace = trace
        self.chunk_blocks = -(-shape.chunk_tokens // block)
        self.state_blocks = -(-shape.state_every_tokens // block) if shape.state_bytes else 0
        page_bytes = block * shape.stored_bytes_per_token
        self.page_bytes = -(-page_bytes // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES
        self.state_pages = -(-shape.state_bytes // self.page_bytes)
        self.merge = merge
        self._keys: list[bytes | None] = [None] * trace.n_nodes
        self._users = np.zeros(trace.n_nodes, dtype=np.int32)  # requests that a block is in
        for request in trace.requests:
            self._users[request.nodes] += 1
        self.chains = [self._chain(request.nodes) for request in trace.requests]

    def _chain(self, nodes: Nodes) -> Chain:
        size = self.chunk_blocks
        nodes = nodes[size - 1 :: size]  # the end of each whole chunk
        last = self._last_of_each(nodes)
        known, keys = self._keys, []
        for node in nodes[last].tolist():
            key = known[node]
            if key is None:
                key = known[node] = key_of(node, ATTENTION)
            keys.append(key)
        return Chain(keys, ((last + 1) * size).tolist())

    def _last_of_each(self, ends: Nodes) -> Blocks:
        """Return the index of the last chunk of each record, (n records,)."""
        n = len(ends)
        numbers = np.arange(n)
        if self.merge == 1 or not n:
            return numbers
        # Whoever uses a chunk uses those before it: equally many users are the same users.
        users = self._users[ends]
        begins = np.concatenate(([True], users[1:] != users[:-1]))
        since = numbers - np.maximum.accumulate(np.where(begins, numbers, 0))
        begins |= since % self.merge == 0
        found: Blocks = np.flatnonzero(np.concatenate((begins[1:], [True])))
        return found


def key_of(node: int, group: bytes) -> bytes:
    """Return the chunk key of a prefix: its hash (here its number) and the group."""
    return node.to_bytes(8, "big") + group


def hit_limit_blocks(prompt_tokens: int, block_tokens: int) -> int:
    """Return how many blocks a hit may have: the engine computes at least one token."""
    return max(0, prompt_tokens - 1) // block_tokens
