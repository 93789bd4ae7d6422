"""Request traces: which prefix every request asked for, and when.

A trace has no text. A prompt is a chain of prefix hashes, one at each block boundary; equal
hashes mean equal tokens from the prompt's start. Here every distinct prefix is one small number,
its node, so that replays work on integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..storage.errors import KVTierError

Nodes = npt.NDArray[np.int32]
Blocks = npt.NDArray[np.int64]

MAX_NODES = 1 << 31


class TraceError(KVTierError):
    """A trace cannot be read; one line says where and why."""


@dataclass(frozen=True, slots=True)
class Request:
    """One model call.

    Attributes:
        at_s: when it arrives, from the trace's start.
        session: what it belongs to; a number without meaning.
        prompt_tokens, output_tokens: lengths.
        nodes: (n,) the prefix at the end of each whole block of the prompt; read only.
    """

    at_s: float
    session: int
    prompt_tokens: int
    output_tokens: int
    nodes: Nodes


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival.

    Attributes:
        name: for people.
        block_tokens: tokens of a block.
        requests: all of them.
        n_nodes: nodes are below this number.
    """

    name: str
    block_tokens: int
    requests: tuple[Request, ...]
    n_nodes: int

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last."""
        return self.requests[-1].at_s - self.requests[0].at_s if self.requests else 0.0

    def distinct_blocks(self) -> int:
        """Return how many different blocks all prompts have."""
        seen = np.zeros(self.n_nodes, dtype=np.bool_)
        for request in self.requests:
            seen[request.nodes] = True
        return int(seen.sum())

    def longest_tokens(self) -> list[int]:
        """Return each session's longest prompt, in tokens, ascending."""
        longest: dict[int, int] = {}
        for request in self.requests:
            tokens = max(longest.get(request.session, 0), request.prompt_tokens)
            longest[request.session] = tokens
        return sorted(longest.values())


class TraceBuilder:
    """Turns hashes into nodes and checks that they can be prefix hashes.

    Args:
        name: of the trace.
        block_tokens: tokens that one hash stands for.
    """

    def __init__(self, name: str, block_tokens: int) -> None:
        if block_tokens < 1:
            raise TraceError(f"{name}: block size {block_tokens} is not a number of tokens")
        self.name = name
        self.block_tokens = block_tokens
        self._requests: list[Request] = []
        self._before = np.full(1024, -2, dtype=np.int64)  # the node before; -2: not seen
        self._n_nodes = 0
        self._names: dict[str, int] = {}

    @property
    def n_nodes(self) -> int:
        """Nodes handed out so far."""
        return self._n_nodes

    def reserve(self, n: int) -> int:
        """Hand out ``n`` node numbers; return the first."""
        first = self._n_nodes
        self._n_nodes += n
        if self._n_nodes >= MAX_NODES:
            raise TraceError(f"{self.name}: more than {MAX_NODES:,} different blocks")
        if self._n_nodes > len(self._before):
            grown = np.full(max(self._n_nodes, 2 * len(self._before)), -2, dtype=np.int64)
            grown[: len(self._before)] = self._before
            self._before = grown
        return first

    def named(self, names: Sequence[str]) -> Blocks:
        """Return the nodes of hashes given as text."""
        known = self._names
        for name in names:
            if name not in known:
                known[name] = self.reserve(1)
        return np.array([known[name] for name in names], dtype=np.int64)

    def add(
        self,
        where: str,
        at_s: float,
        session: int,
        prompt_tokens: int,
        output_tokens: int,
        nodes: Blocks,
    ) -> None:
        """Take in one request.

        Args:
            where: for messages, like "line 7".
            at_s: arrival.
            session: number of its session.
            prompt_tokens: length.
            output_tokens: length of the answer.
            nodes: (n,) nodes of the prompt's blocks; a last block that is not whole is cut off.

        Raises:
            TraceError: lengths and blocks disagree, or the hashes do not cover the prefix.
        """
        whole = prompt_tokens // self.block_tokens
        if not whole <= len(nodes) <= whole + 1:
            raise TraceError(
                f"{self.name}: {where}: {len(nodes)} blocks of {self.block_tokens} tokens "
                f"do not fit a prompt of {prompt_tokens} tokens"
            )
        nodes = nodes[:whole]
        if whole:
            before = np.empty(whole, dtype=np.int64)
            before[0] = -1
            before[1:] = nodes[:-1]
            known = self._before[nodes]
            wrong = np.flatnonzero((known != -2) & (known != before))
            if len(wrong):
                raise TraceError(
                    f"{self.name}: {where}: block {wrong[0]} has followed another block before; "
                    "a hash must stand for all tokens from the prompt's start"
                )
            self._before[nodes] = before
        self._requests.append(
            Request(at_s, session, prompt_tokens, output_tokens, nodes.astype(np.int32))
        )

    def build(self) -> Trace:
        """Return the trace, by arrival.

        Raises:
            TraceError: there is no request in it.
        """
        if not self._requests:
            raise TraceError(f"{self.name}: no request in it")
        ordered = tuple(sorted(self._requests, key=lambda request: request.at_s))
        return Trace(self.name, self.block_tokens, ordered, self._n_nodes)


def seat(durations_s: Iterable[float], n_users: int) -> list[float]:
    """Return when each session starts if ``n_users`` run one session after another.

    Sessions are begun in the order given, each as soon as a user is free.
    """
    free_s = [0.0] * n_users
    starts_s = []
    for duration_s in durations_s:
        user = min(range(n_users), key=lambda u: (free_s[u], u))
        starts_s.append(free_s[user])
        free_s[user] += duration_s
    return starts_s
