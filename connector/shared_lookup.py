"""Questions about shared tiers, and what is known of them, as the scheduler half sees it.

What is known lives in the catalog; here is kept how it got there, so that it
stays bounded and is corrected: at most `MAX_KNOWN` chunks a tier are believed to
be there, absence is believed for a moment, a failed load is believed more than
an answer that was under way. Scheduler thread only; the asking is done by
`kvtier.connector.prober`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import overload

from ..storage.catalog import Catalog
from ..storage.counts import Counts
from .geometry import Geometry, GroupKind
from .prober import Answer, Prober, Question
from .token_database import ChunkedTokenDatabase

NEGATIVE_TTL_S = 1.0
DISTRUST_S = 5.0  # longer than an answer can be under way
MAX_REMEMBERED = 10_000
MAX_KNOWN = 1 << 17  # chunks of a tier; about 500 bytes each
FORGET_AT_ONCE = 512  # chunks in one step


@dataclass(slots=True)
class _Open:
    """A question that a request waits for."""

    number: int
    left: int  # answers still to come


class SharedLookup:
    """Asks each shared tier at most once for a request's admission.

    Args:
        clock: monotonic seconds.
        counts: where to count.
        max_known: see `MAX_KNOWN`.
    """

    def __init__(
        self,
        geometry: Geometry,
        catalog: Catalog,
        clock: Callable[[], float],
        counts: Counts,
        max_known: int = MAX_KNOWN,
    ) -> None:
        self._geometry = geometry
        self._catalog = catalog
        self._clock = clock
        self._counts = counts
        self._max_known = max_known
        self._database = ChunkedTokenDatabase(geometry)
        self._probers: list[Prober] = []
        self._number = 0
        self._open: dict[str, _Open] = {}  # by ticket
        self._absent: dict[bytes, float] = {}  # mark -> when to ask again
        self._distrusted: dict[bytes, float] = {}  # key -> until when answers may be old
        self._known: dict[str, OrderedDict[bytes, None]] = {}  # tier -> keys, oldest first
        self._doubtful: dict[str, list[bytes]] = {}  # tier -> keys to forget bit by bit
        # Full attention first: its chunks lead the walk.
        self._groups = sorted(geometry.groups, key=lambda g: g.kind is not GroupKind.FULL)
        self._led = any(g.kind is GroupKind.FULL for g in self._groups)

    def set_probers(self, probers: Iterable[Prober]) -> None:
        """Ask these from now on; those before are closed, and all that was known is void."""
        old, self._probers = self._probers, list(probers)
        self._forget_all()
        for prober in old:
            prober.close()

    def _forget_all(self) -> None:
        for memory in (self._open, self._absent, self._distrusted):
            memory.clear()
        self._known = {prober.name: OrderedDict() for prober in self._probers}
        self._doubtful = {}

    @property
    def active(self) -> bool:
        """Whether there is anybody to ask."""
        return bool(self._probers)

    # -- asking ----------------------------------------------------------

    def ask(
        self, ticket: str, hashes: Sequence[bytes], covered_tokens: int, limit_tokens: int
    ) -> bool:
        """Ask for the chain after ``covered_tokens``; True when an answer will come."""
        chunk, unit = self._geometry.chunk_tokens, self._geometry.hash_block_tokens
        first = covered_tokens // chunk
        limit = len(hashes) * unit  # a record that ends after the hit serves it, too
        if min(limit, limit_tokens) <= covered_tokens:
            return False
        mark = hashes[min(limit, (first + 1) * chunk) // unit - 1]
        if self._absent.get(mark, 0.0) > self._clock():
            return False
        probers = [
            prober
            for prober in self._probers
            if not prober.silent and not self._catalog.is_offline(prober.name)
        ]
        if not probers:
            return False
        hashes = list(hashes)  # the engine may change its own
        ends = range((first + 1) * chunk, limit // chunk * chunk + 1, chunk)
        # Made where they are asked for, on the prober's thread: a recurrent group has a key
        # at every boundary.
        chunks = _Chunks(ends, lambda end: self._keys(hashes, end - chunk, end))
        inside = partial(self._inside, hashes, first, limit, limit_tokens)
        self._number += 1
        question = Question(self._number, ticket, mark, chunks, inside, self._led)
        asked = sum(prober.ask(question) for prober in probers)
        if asked:
            self._open[ticket] = _Open(self._number, asked)
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

    def _inside(
        self, hashes: Sequence[bytes], first: int, limit: int, longest: int, n_whole: int
    ) -> list[bytes]:
        """Return the keys that can end inside the chunk after ``n_whole`` found ones.

        And where the longest hit ends inside the last one found, what windows need there.
        """
        chunk = self._geometry.chunk_tokens
        start = (first + n_whole) * chunk
        end = min(limit, start + chunk - 1)
        keys: list[bytes] = []
        for group in self._groups:
            if group.window_tokens is not None and start - chunk < longest < start:
                keys.append(self._database.key_at(hashes, longest, group.group_id))
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
        """Nobody waits for this ticket any more; an answer is still learned from."""
        self._open.pop(ticket, None)

    # -- what is known ---------------------------------------------------

    def take(self) -> None:
        """Put the answers that have come into the catalog."""
        for prober in self._probers:
            for answer in prober.take():
                self._settle(prober.name, answer)
        if self._doubtful:
            self._forget_some()

    def _settle(self, tier: str, answer: Answer) -> None:
        self._counts.add("shared_round_trips", answer.round_trips)
        now_s = self._clock()
        believed = [key for key in answer.present if self._distrusted.get(key, 0.0) <= now_s]
        for key in believed:
            for holder in range(self._catalog.n_holders):
                self._catalog.tier_added(tier, key, holder)
        self.learned(tier, believed)
        if answer.asked and not answer.present:
            _remember(self._absent, answer.question.mark, now_s + NEGATIVE_TTL_S)
        waiting = self._open.get(answer.question.ticket)
        if waiting is not None and waiting.number == answer.question.number:
            waiting.left -= 1
            if waiting.left == 0:
                del self._open[answer.question.ticket]

    def learned(self, tier: str, keys: Iterable[bytes]) -> None:
        """Note that the catalog has been told of ``keys`` on ``tier``; the oldest give way."""
        known = self._known.get(tier)
        if known is None:
            return
        for key in keys:
            known[key] = None
            known.move_to_end(key)
        while len(known) > self._max_known:
            self._catalog.tier_removed(tier, known.popitem(last=False)[0])

    def missed(self, tier: str, bad: Iterable[bytes], unread: Iterable[bytes]) -> None:
        """Correct what is believed after a load from ``tier`` that failed.

        Args:
            tier: any lower tier; nothing happens for one that no prober asks.
            bad: keys that were missing or damaged.
            unread: keys after those, which nobody has tried: where one is gone others
                may be, so they are asked for again instead of failing one by one.
        """
        known = self._known.get(tier)
        if known is None:
            return
        for key in unread:
            known.pop(key, None)
            self._catalog.tier_removed(tier, key)
        until_s = self._clock() + DISTRUST_S
        for key in bad:
            known.pop(key, None)
            _remember(self._distrusted, key, until_s)

    def doubt(self, tier: str) -> None:
        """The tier was away and may have come back empty: forget what is believed of it.

        Bit by bit, with each `take`; a load that comes first finds out for itself.
        """
        known = self._known.get(tier)
        if known:
            self._doubtful.setdefault(tier, []).extend(known)
            known.clear()

    def _forget_some(self) -> None:
        for tier, keys in list(self._doubtful.items()):
            for key in keys[-FORGET_AT_ONCE:]:
                if key not in self._known[tier]:
                    self._catalog.tier_removed(tier, key)
            del keys[-FORGET_AT_ONCE:]
            if not keys:
                del self._doubtful[tier]

    def close(self) -> None:
        """Stop asking."""
        self.set_probers(())


class _Chunks(Sequence[list[bytes]]):
    """The keys of each chunk, made when they are looked at."""

    def __init__(self, ends: range, keys: Callable[[int], list[bytes]]) -> None:
        self._ends = ends
        self._keys = keys

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> list[bytes]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[bytes]]: ...
    def __getitem__(self, index: int | slice) -> list[bytes] | list[list[bytes]]:
        if isinstance(index, slice):
            return [self._keys(end) for end in self._ends[index]]
        return self._keys(self._ends[index])


def _remember(memory: dict[bytes, float], key: bytes, until_s: float) -> None:
    if len(memory) >= MAX_REMEMBERED:
        memory.clear()
    memory[key] = until_s
