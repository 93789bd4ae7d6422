"""Questions about shared tiers, and their answers, as the scheduler half sees them.

Scheduler thread only; the asking is done by `kvtier.connector.prober`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from ..storage.catalog import Catalog
from .geometry import Geometry, GroupKind
from .prober import Answer, Prober, Question
from .token_database import ChunkedTokenDatabase

NEGATIVE_TTL_S = 1.0
MAX_NEGATIVE = 10_000


class SharedLookup:
    """Asks each shared tier at most once for a request's admission.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, geometry: Geometry, catalog: Catalog, clock: Callable[[], float]) -> None:
        self._geometry = geometry
        self._catalog = catalog
        self._clock = clock
        self._database = ChunkedTokenDatabase(geometry)
        self._probers: list[Prober] = []
        self._open: dict[str, int] = {}  # ticket -> answers still to come
        self._absent: dict[bytes, float] = {}  # first key of a question -> when to ask again
        # Full attention first: its chunks lead the walk.
        self._groups = sorted(geometry.groups, key=lambda g: g.kind is not GroupKind.FULL)
        self.round_trips = 0

    def set_probers(self, probers: Iterable[Prober]) -> None:
        """Ask these from now on; those before are closed."""
        old, self._probers = self._probers, list(probers)
        self._open.clear()
        self._absent.clear()
        for prober in old:
            prober.close()

    @property
    def active(self) -> bool:
        """Whether there is anybody to ask."""
        return bool(self._probers)

    def ask(
        self, ticket: str, hashes: Sequence[bytes], covered_tokens: int, limit_tokens: int
    ) -> bool:
        """Ask for the chain after ``covered_tokens``; True when an answer will come."""
        chunk, unit = self._geometry.chunk_tokens, self._geometry.hash_block_tokens
        first = covered_tokens // chunk
        limit = min(limit_tokens, len(hashes) * unit)
        if limit <= covered_tokens:
            return False
        mark = hashes[min(limit, (first + 1) * chunk) // unit - 1]
        if self._absent.get(mark, 0.0) > self._clock():
            return False
        hashes = list(hashes)  # the engine may change its own
        ends = range((first + 1) * chunk, limit // chunk * chunk + 1, chunk)
        chunks = [self._keys(hashes, end - chunk, end) for end in ends]
        inside = partial(self._inside, hashes, first, limit)
        question = Question(ticket, mark, chunks, inside)
        asked = sum(prober.ask(question) for prober in self._probers)
        if asked:
            self._open[ticket] = asked
        return asked > 0

    def _keys(self, hashes: Sequence[bytes], start: int, end: int) -> list[bytes]:
        """Return the keys of the whole chunk [start, end), the leading group's first."""
        keys = []
        for group in self._groups:
            if group.kind is GroupKind.RECURRENT:
                keys += self._ends(hashes, group.group_id, start, end)
            elif self._geometry.blocks_in_span(group, start, end)[1]:
                keys.append(self._database.key_at(hashes, end, group.group_id))
        return keys

    def _inside(self, hashes: Sequence[bytes], first: int, limit: int, n_whole: int) -> list[bytes]:
        """Return the keys that can end inside the chunk after ``n_whole`` found ones."""
        chunk = self._geometry.chunk_tokens
        start = (first + n_whole) * chunk
        end = min(limit, start + chunk - 1)
        keys: list[bytes] = []
        for group in self._groups:
            keys += self._ends(hashes, group.group_id, start, end)
        return keys

    def _ends(self, hashes: Sequence[bytes], group_id: int, start: int, end: int) -> list[bytes]:
        step = self._geometry.hit_alignment_tokens
        ends = range(start // step * step + step, end + 1, step)
        return [self._database.key_at(hashes, tokens, group_id) for tokens in ends]

    def open(self, ticket: str) -> bool:
        """Whether an answer for this ticket is still to come."""
        return ticket in self._open

    def forget(self, ticket: str) -> None:
        """Nobody waits for this ticket any more."""
        self._open.pop(ticket, None)

    def take(self) -> None:
        """Put the answers that have come into the catalog."""
        for prober in self._probers:
            for answer in prober.take():
                self._settle(prober.name, answer)

    def _settle(self, tier: str, answer: Answer) -> None:
        self.round_trips += answer.round_trips
        for key in answer.present:
            for holder in range(self._catalog.n_holders):
                self._catalog.tier_added(tier, key, holder)
        ticket, mark = answer.ticket, answer.mark
        if not answer.present:
            if len(self._absent) >= MAX_NEGATIVE:
                self._absent.clear()
            self._absent[mark] = self._clock() + NEGATIVE_TTL_S
        left = self._open.get(ticket, 0) - 1
        if left > 0:
            self._open[ticket] = left
        else:
            self._open.pop(ticket, None)

    def close(self) -> None:
        """Stop asking."""
        self.set_probers(())
