"""Which recorded request began like this one: what a recording need not write again.

Prefix hashes cover all tokens before them, so two chains that agree at one block agree at every
block before it. An agent's next turn begins with its whole last prompt: of 6,000 hashes only the
new ones are written.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

MAX_REMEMBERED_BLOCKS = 200_000  # about 20 MB


@dataclass(frozen=True, slots=True)
class ChainPlace:
    """Where a prompt's chain lies among those before it.

    Attributes:
        session: a number that turns of one session have in common.
        base_line: number of the request, in this part, whose chain begins alike.
        shared_blocks: how many blocks they share; 0: none is known.
        new_hashes: the hashes after those.
    """

    session: str
    base_line: int
    shared_blocks: int
    new_hashes: list[bytes]


@dataclass(slots=True)
class _Known:
    line: int
    session: str
    hashes: list[bytes]


class Chains:
    """The chains of the last requests, a bounded number of blocks. One thread."""

    def __init__(self, max_blocks: int = MAX_REMEMBERED_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._blocks = 0
        self._by_last: OrderedDict[bytes, _Known] = OrderedDict()
        self._by_first: dict[bytes, bytes] = {}  # first hash -> last hash of a known chain
        self._lines = 0
        self._sessions = 0

    def new_part(self) -> None:
        """Begin a part: it refers to no line before it. Sessions go on."""
        self._lines = 0
        for known in self._by_last.values():
            known.line = -1

    def add(self, hashes: list[bytes]) -> ChainPlace:
        """Take in the next request's chain."""
        line = self._lines
        self._lines += 1
        before = next((h for h in reversed(hashes) if h in self._by_last), None)
        known = self._by_last.get(before) if before is not None else None
        if known is not None:
            session, shared = known.session, len(known.hashes)
            base_line = known.line
            self._forget(known)  # the new chain holds all of it
        else:
            self._sessions += 1
            session = str(self._sessions)
            known = self._by_last.get(self._by_first.get(hashes[0], b"")) if hashes else None
            shared = 0 if known is None else _common(known.hashes, hashes)
            base_line = -1 if known is None else known.line
        if base_line < 0:
            shared = 0
        if hashes:
            self._keep(_Known(line, session, hashes))
        return ChainPlace(session, base_line, shared, hashes[shared:])

    def _keep(self, known: _Known) -> None:
        self._by_last[known.hashes[-1]] = known
        self._by_first[known.hashes[0]] = known.hashes[-1]
        self._blocks += len(known.hashes)
        while self._blocks > self._max_blocks and len(self._by_last) > 1:
            self._forget(next(iter(self._by_last.values())))

    def _forget(self, known: _Known) -> None:
        del self._by_last[known.hashes[-1]]
        if self._by_first.get(known.hashes[0]) == known.hashes[-1]:
            del self._by_first[known.hashes[0]]
        self._blocks -= len(known.hashes)


def _common(a: list[bytes], b: list[bytes]) -> int:
    """Return how many leading blocks two chains share; they agree up to one place."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
