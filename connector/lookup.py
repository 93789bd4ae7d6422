"""How long a prefix can be restored, over all groups at once.

Pure functions of the geometry, the catalog and a request's block hashes; no
I/O. A hit of L tokens needs, in every group (vLLM's own rules, see
`kv_cache_coordinator.py` there): full attention, every block up to L; sliding
window, the blocks that the window before L reaches; recurrent, exactly the
state at L.

Physical chunks are large, the matching unit is small. Records that end inside
a chunk (tails, states) are tried after the last whole chunk, and the leading
blocks of a longer record of the same chain serve a shorter hit: a position's KV
depends only on the tokens before it, and the key's hash covers those.

Full attention gives the longest length that comes into question. Where another
group falls short there, shorter ones are tried: with recurrent groups every
boundary; without, every boundary inside the last chunk and then the ends of
whole chunks only. Of a long prompt's tens of thousands of boundaries only those
are looked at where the catalog has a record of the group in question.

A draft head that reads the target's hidden states (EAGLE, MTP) writes KV at a
position that depends on the token after it. Like the engine on its own hits, a
hit ends one draft block before the last match, so that the token after it is
known to be the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from ..storage.catalog import Catalog
from ..storage.entry import RamState
from .geometry import Geometry, GroupGeometry, GroupKind
from .token_database import ChunkedTokenDatabase

WALK_BOUNDARIES = 1024  # looked at in one go


class MissReason(str, Enum):
    """Why a hit does not reach further; also a metric label."""

    NONE = "none"  # it reaches as far as any hit may
    PROMPT_SHORT = "prompt_short"  # the prompt has no whole block to restore
    NOT_STORED = "not_stored"  # never stored, as far as this engine remembers
    EVICTED = "evicted"  # it was stored: evicted, deleted, or taken out of use since
    DROPPED = "dropped"  # a save, or a write below RAM, found no room and was dropped
    SAVING = "saving"  # on its way out of the device, too early to load
    TIER_OFF = "tier_off"  # stored, but on a tier that does not answer
    WINDOW_MISSING = "window_missing"  # sliding-window blocks before the hit's end
    STATE_MISSING = "state_missing"  # no recurrent state at a boundary
    GATE = "gate"  # computing was judged cheaper
    LOAD_FAILED = "load_failed"  # a load for this request failed before
    LATE = "late"  # the answer of a tier did not come in time
    AUDIT = "audit"  # computed on purpose, to be compared with what is stored
    NOT_READ = "not_read"  # the request asked not to be served from the cache
    OFF = "off"  # kvtier serves nothing in this engine; the log says why


NOWHERE = frozenset({MissReason.NOT_STORED, MissReason.EVICTED, MissReason.DROPPED})


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks of one record that a hit uses.

    Attributes:
        stored_block: index (in the request's block table) of the record's first block.
        stored_blocks: blocks that the record keeps.
        first_block, n_blocks: the part that is used, in table indices.
    """

    key: bytes
    group_id: int
    start_tokens: int
    end_tokens: int
    stored_block: int
    stored_blocks: int
    first_block: int
    n_blocks: int


@dataclass(frozen=True, slots=True)
class Hit:
    """What can be restored: tokens from the prompt's start, and why not more."""

    tokens: int
    reason: MissReason


class PrefixLookup:
    """Finds hits in one catalog. Scheduler thread only.

    Args:
        geometry: the engine's groups.
        catalog: what is where.
    """

    def __init__(self, geometry: Geometry, catalog: Catalog) -> None:
        self._geometry = geometry
        self._catalog = catalog
        self._database = ChunkedTokenDatabase(geometry)
        self._unit = geometry.hit_alignment_tokens
        self._full = [g for g in geometry.groups if g.kind is GroupKind.FULL]
        self._others = [g for g in geometry.groups if g.kind is not GroupKind.FULL]
        self._recurrent = [g for g in self._others if g.kind is GroupKind.RECURRENT]
        self._windowed = [g for g in self._others if g.kind is not GroupKind.RECURRENT]
        # The group whose records say which boundaries are worth a question.
        self._scarce = next(iter(self._recurrent or self._windowed), None)
        self._ends = catalog.follow(self._scarce.group_id) if self._scarce is not None else set()

    def limit_tokens(self, num_tokens: int) -> int:
        """Return the longest hit that leaves the engine enough tokens to compute."""
        rest = num_tokens - self._geometry.computed_tokens
        return max(0, rest) // self._unit * self._unit

    def find(self, hashes: Sequence[bytes], local_tokens: int, limit_tokens: int) -> Hit:
        """Return the longest hit in (local_tokens, limit_tokens], or one of ``local_tokens``.

        Args:
            hashes: the request's block hashes, one for each `hash_block_tokens`.
            local_tokens: what the device holds already, a multiple of whole blocks.
            limit_tokens: longest hit allowed, see `limit_tokens`.
        """
        hashed = len(hashes) * self._geometry.hash_block_tokens
        limit = min(limit_tokens, hashed // self._unit * self._unit)
        if limit <= local_tokens:
            short = limit_tokens <= 0 or not hashes
            return Hit(local_tokens, MissReason.PROMPT_SHORT if short else MissReason.NONE)
        covered = min(
            (self._full_cover(g, hashes, local_tokens, hashed) for g in self._full), default=limit
        )
        reached = min(covered // self._unit * self._unit, limit)
        proven = min(covered - self._geometry.draft_drop_tokens, limit) // self._unit * self._unit
        best = max(proven, local_tokens)
        reason = MissReason.NONE if reached >= limit else self._why(hashes, reached)
        missing = self._lacking(hashes, local_tokens, best) if best > local_tokens else None
        if missing is None:
            return Hit(best, reason)
        if best < reached and self._lacking(hashes, local_tokens, reached) is None:
            # Windows end at the match itself: a draft that may be wrong at one position
            # costs less than going back to the chunk's start.
            return Hit(reached, reason)
        for tokens in self._shorter(hashes, best, local_tokens):
            if self._lacking(hashes, local_tokens, tokens) is None:
                return Hit(tokens, _lacks(missing))
        return Hit(local_tokens, _lacks(missing))

    def pieces(
        self, hashes: Sequence[bytes], local_tokens: int, tokens: int
    ) -> tuple[Piece, ...] | None:
        """Return the records that bring a hit from ``local_tokens`` to ``tokens``, or None."""
        pieces: list[Piece] = []
        for group in self._geometry.groups:
            found = self._group_pieces(group, hashes, local_tokens, tokens)
            if found is None:
                return None
            pieces += found
        return tuple(pieces)

    def sources(
        self, hashes: Sequence[bytes], local_tokens: int, tokens: int
    ) -> list[tuple[str, int]]:
        """Return (place, end in tokens) of each run of the hit that one place serves.

        Told by the first full-attention group's chunks; without one, by nothing.
        """
        runs: list[tuple[str, int]] = []
        chunk = self._geometry.chunk_tokens
        if not self._full:
            return runs
        first = local_tokens // chunk
        lead = self._full[0].group_id
        keys = self._database.chunk_keys(hashes, lead, max(first, tokens // chunk), first)
        for number, key in enumerate(keys, first + 1):
            source = self._catalog.source(key)
            end = number * chunk
            if source is None:
                break
            if runs and runs[-1][0] == source:
                runs[-1] = (source, end)
            else:
                runs.append((source, end))
        if runs and runs[-1][1] < tokens:
            runs[-1] = (runs[-1][0], tokens)
        return runs

    def _shorter(self, hashes: Sequence[bytes], best: int, local_tokens: int) -> Iterator[int]:
        """Yield, longest first, the hits below ``best`` that can be possible."""
        chunk, unit = self._geometry.chunk_tokens, self._unit
        if self._recurrent:
            yield from self._with_record(hashes, range(best - unit, local_tokens, -unit))
            return
        # Inside the last chunk a record may serve a boundary that it does not end at.
        start = max(local_tokens, (best - 1) // chunk * chunk)
        yield from range(best - unit, start, -unit)
        ends = range((best - 1) // chunk * chunk, local_tokens, -chunk)
        assert self._scarce is not None
        if self._scarce.kind is GroupKind.SLIDING_WINDOW:
            yield from self._with_record(hashes, ends)
        else:
            yield from ends

    def _with_record(self, hashes: Sequence[bytes], boundaries: range) -> Iterator[int]:
        """Yield those of the falling ``boundaries`` at which the scarce group has a record."""
        step = -boundaries.step // self._geometry.hash_block_tokens
        for i in range(0, len(boundaries), WALK_BOUNDARIES):
            some = boundaries[i : i + WALK_BOUNDARIES]
            first = some[-1] // self._geometry.hash_block_tokens - 1
            last = some[0] // self._geometry.hash_block_tokens
            here = hashes[first:last:step]
            if not self._ends.isdisjoint(here):
                found = (h in self._ends for h in reversed(here))
                yield from (t for t, is_end in zip(some, found, strict=True) if is_end)

    def _key(self, hashes: Sequence[bytes], tokens: int, group_id: int) -> bytes:
        return self._database.key_at(hashes, tokens, group_id)

    def _full_cover(
        self, group: GroupGeometry, hashes: Sequence[bytes], local_tokens: int, hashed: int
    ) -> int:
        """Return up to where every block from ``local_tokens`` on is in some record."""
        chunk = self._geometry.chunk_tokens
        first = local_tokens // chunk
        keys = self._database.chunk_keys(hashes, group.group_id, first_chunk=first)
        n = self._catalog.run_length(keys)
        covered = (first + n) * chunk
        tail = self._longest_record(hashes, group, covered, min(hashed, covered + chunk - 1))
        return max(covered if n else local_tokens, tail or 0)

    def _longest_record(
        self, hashes: Sequence[bytes], group: GroupGeometry, after: int, upto: int
    ) -> int | None:
        """Return the longest end in (after, upto] of a servable record of ``group``."""
        unit = self._geometry.hash_block_tokens
        tokens = upto // unit * unit
        while tokens > after:
            if self._catalog.source(self._key(hashes, tokens, group.group_id)) is not None:
                return tokens
            tokens -= unit
        return None

    def _lacking(
        self, hashes: Sequence[bytes], local_tokens: int, tokens: int
    ) -> GroupGeometry | None:
        """Return a group without full attention that cannot serve a hit of ``tokens``."""
        for group in self._others:
            if self._group_pieces(group, hashes, local_tokens, tokens) is None:
                return group
        return None

    def _group_pieces(
        self, group: GroupGeometry, hashes: Sequence[bytes], local_tokens: int, tokens: int
    ) -> list[Piece] | None:
        geometry, size = self._geometry, group.block_tokens
        end = -(-tokens // size)
        if group.kind is GroupKind.RECURRENT:
            key = self._key(hashes, tokens, group.group_id)
            if self._catalog.source(key) is None:
                return None
            start = (tokens - 1) // geometry.chunk_tokens * geometry.chunk_tokens
            return [Piece(key, group.group_id, start, tokens, end - 1, 1, end - 1, 1)]
        block = max(group.first_needed_block(tokens), local_tokens // size)
        per_chunk = geometry.chunk_blocks(group)
        pieces = []
        while block < end:
            start = block // per_chunk * geometry.chunk_tokens
            stop = min(end, (block // per_chunk + 1) * per_chunk)
            piece = self._record_for(group, hashes, start, block, stop, tokens)
            if piece is None and group.kind is not GroupKind.FULL:
                piece = self._part_of(group, hashes, start, block, min(tokens, stop * size))
            if piece is None:
                return None
            pieces.append(piece)
            block += piece.n_blocks
        return pieces

    def _record_for(
        self,
        group: GroupGeometry,
        hashes: Sequence[bytes],
        start: int,
        block: int,
        stop: int,
        tokens: int,
    ) -> Piece | None:
        """Find a record of the chunk at ``start`` that keeps blocks [block, stop)."""
        geometry, unit = self._geometry, self._geometry.hash_block_tokens
        need = min(tokens, stop * group.block_tokens)  # tokens that the record must reach
        whole = start + geometry.chunk_tokens
        longest = min(whole, len(hashes) * unit)
        ends = [whole] if longest == whole else []
        if need < whole:
            ends += [need, *(e for e in range(longest // unit * unit, need, -unit) if e != whole)]
        for end in ends:
            key = self._key(hashes, end, group.group_id)
            if self._catalog.source(key) is None:
                continue
            stored_block, stored = geometry.blocks_in_span(group, start, end)
            if stored_block <= block and stop <= stored_block + stored:
                n = stop - block
                return Piece(key, group.group_id, start, end, stored_block, stored, block, n)
        return None

    def _part_of(
        self, group: GroupGeometry, hashes: Sequence[bytes], start: int, block: int, before: int
    ) -> Piece | None:
        """Find a shorter record of the chunk at ``start`` that keeps ``block`` and reaches far.

        Records of one chunk keep different parts of a window, and several may make up
        what no single one has. Only whole blocks of a shorter record count.
        """
        geometry, unit = self._geometry, self._geometry.hash_block_tokens
        for end in range(before - unit, start, -unit):
            if self._catalog.source(self._key(hashes, end, group.group_id)) is None:
                continue
            stored_block, stored = geometry.blocks_in_span(group, start, end)
            n = end // group.block_tokens - block
            if stored_block <= block and n > 0:
                key = self._key(hashes, end, group.group_id)
                return Piece(key, group.group_id, start, end, stored_block, stored, block, n)
        return None

    def _why(self, hashes: Sequence[bytes], covered: int) -> MissReason:
        """Say why the full-attention groups end at ``covered``."""
        chunk = self._geometry.chunk_tokens
        end = (covered // chunk + 1) * chunk
        if end > len(hashes) * self._geometry.hash_block_tokens:
            return MissReason.NOT_STORED
        for group in self._full:
            key = self._key(hashes, end, group.group_id)
            entry = self._catalog.get(key)
            why = self._catalog.gone.why(key)
            if entry is None and why is not None:
                return MissReason(why.value)
            if entry is not None and self._catalog.source_of(entry) is None:
                if any(entry.masks):
                    return MissReason.TIER_OFF
                if entry.ram is RamState.FILLING:
                    return MissReason.SAVING
        return MissReason.NOT_STORED


def _lacks(group: GroupGeometry) -> MissReason:
    if group.kind is GroupKind.RECURRENT:
        return MissReason.STATE_MISSING
    return MissReason.WINDOW_MISSING
