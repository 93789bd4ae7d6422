"""Lookups against brute force over positions, on random group mixes and records."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from kvtier.connector.geometry import Geometry, GroupGeometry, GroupKind
from kvtier.connector.lookup import PrefixLookup
from kvtier.storage.catalog import Catalog

SEEDS = range(1500)
FULL, WINDOW = GroupKind.FULL, GroupKind.SLIDING_WINDOW
LOCAL, STATE = GroupKind.CHUNKED_LOCAL, GroupKind.RECURRENT


# -- the oracle: positions and sets, nothing of the subject -----------------------


def positions(group, tokens):
    """Positions whose KV a request that continues after ``tokens`` reads."""
    if group.kind is FULL:
        return range(tokens)
    if group.kind is WINDOW:  # the next token sees itself and W - 1 before it
        return range(max(0, tokens - group.window_tokens + 1), tokens)
    return range(tokens // group.window_tokens * group.window_tokens, tokens)


def blocks_for(group, tokens):
    if group.kind is STATE:
        return [(tokens - 1) // group.block_tokens]
    blocks = {p // group.block_tokens for p in positions(group, tokens)}
    if tokens % group.block_tokens:
        # The block that goes on being filled is found by others once it is full, so all
        # of it must be right, also where this request does not look.
        blocks.add(tokens // group.block_tokens)
    return sorted(blocks)


class Oracle:
    def __init__(self, geometry, present):
        self.geometry, self.present = geometry, present  # group id -> ends of its records

    def kept(self, group, end):
        """Blocks that the record of ``group`` at ``end`` keeps: those of its chunk that matter."""
        start = (end - 1) // self.geometry.chunk_tokens * self.geometry.chunk_tokens
        return [b for b in blocks_for(group, end) if (b + 1) * group.block_tokens > start]

    def serves(self, group, end, block, tokens):
        """Whether that record has all of ``block`` that a hit of ``tokens`` needs."""
        reach = min((block + 1) * group.block_tokens, tokens)
        same_chunk = (end - 1) // self.geometry.chunk_tokens == (
            block * group.block_tokens // self.geometry.chunk_tokens
        )
        return same_chunk and block in self.kept(group, end) and end >= reach

    def needed(self, group, tokens, local):
        if group.kind is STATE:
            return blocks_for(group, tokens)
        return [b for b in blocks_for(group, tokens) if b >= local // group.block_tokens]

    def can(self, group, tokens, local):
        ends = self.present[group.group_id]
        if group.kind is STATE:
            return tokens in ends
        return all(
            any(self.serves(group, end, block, tokens) for end in ends)
            for block in self.needed(group, tokens, local)
        )

    def serves_all(self, tokens, local):
        return all(self.can(g, tokens, local) for g in self.geometry.groups)

    def hit(self, local, limit, hashed):
        """The longest hit under the rule that `kvtier.connector.lookup` states."""
        unit, chunk = self.geometry.hit_alignment_tokens, self.geometry.chunk_tokens
        groups = self.geometry.groups
        full = [g for g in groups if g.kind is FULL]
        fine = self.geometry.hash_block_tokens
        matched = next(
            (n for n in range(hashed, local, -fine) if all(self.can(g, n, local) for g in full)),
            local,
        )
        limit = min(limit, hashed) // unit * unit
        if not full:
            matched = limit
        reached = min(matched // unit * unit, limit)
        best = min(matched - self.geometry.draft_drop_tokens, limit) // unit * unit
        if best <= local:
            return local
        if not self.serves_all(best, local) and self.serves_all(reached, local):
            return reached
        every = any(g.kind is STATE for g in groups)
        for n in range(best, local, -unit):
            tried = every or n > (best - 1) // chunk * chunk or n % chunk == 0
            if tried and all(self.can(g, n, local) for g in groups):
                return n
        return local


# -- random cases --------------------------------------------------------------------


def random_geometry(rng):
    kinds = rng.choices([FULL, WINDOW, LOCAL, STATE], [4, 4, 2, 2], k=rng.randrange(1, 4))
    sizes = [rng.choice([4, 8, 16]) for _ in kinds]
    groups = tuple(
        GroupGeometry(i, k, s, rng.randrange(2, 70) if k in {WINDOW, LOCAL} else None, ())
        for i, (k, s) in enumerate(zip(kinds, sizes, strict=True))
    )
    unit = math.gcd(*sizes)
    whole = math.lcm(*sizes)
    fine = STATE in kinds and len(kinds) > 1 and rng.random() < 0.5
    if fine:
        unit = rng.choice([u for u in (2, 4, 8) if unit % u == 0])
    return Geometry(
        groups=groups,
        hash_block_tokens=unit,
        hit_alignment_tokens=unit if fine else whole,
        scheduler_block_tokens=whole,
        chunk_tokens=whole * rng.randrange(1, 5),
        num_blocks=1000,
        layout="test",
        n_engine_groups=len(groups),
        draft_drop_tokens=rng.choice([0, 0, unit if fine else whole]),
    )


def random_case(rng):
    geometry = random_geometry(rng)
    unit, chunk = geometry.hash_block_tokens, geometry.chunk_tokens
    n_tokens = rng.randrange(1, 6 * chunk)
    hashes = [rng.randbytes(16) for _ in range(n_tokens // unit)]
    catalog = Catalog(("disk", "redis"))
    catalog.add_pages(100_000)
    catalog.set_offline("redis", offline=True)
    oracle = Oracle(geometry, {g.group_id: set() for g in geometry.groups})
    density, fine = rng.choice([0.5, 0.9, 1.0]), rng.choice([0.0, 0.1, 0.5])
    for group in geometry.groups:
        for end in range(unit, len(hashes) * unit + 1, unit):
            chance = density if end % chunk == 0 else fine
            if group.kind is STATE:
                chance = max(chance, 0.2)
            kept = oracle.kept(group, end)
            if rng.random() >= chance or not kept:
                continue
            key = hashes[end // unit - 1] + bytes((group.group_id,))
            place = rng.choices(["ram", "disk", "redis", "filling"], [5, 5, 1, 1])[0]
            if place in {"disk", "redis"}:
                catalog.tier_added(place, key, 0)
            else:
                entry = catalog.begin_save(key, len(kept))
                if place == "ram":
                    catalog.filled(entry, ok=True)
                    catalog.unpin(entry)
            if place in {"ram", "disk"}:
                oracle.present[group.group_id].add(end)
    step = geometry.scheduler_block_tokens
    local = rng.choice([0, 0, rng.randrange(n_tokens // step + 1) * step])
    return geometry, catalog, oracle, hashes, n_tokens, local


@pytest.mark.parametrize("first", SEEDS[::100])
def test_longest_hit(first):
    """The hit is brute force's, and its pieces are exactly the blocks that it needs."""
    for seed in range(first, first + 100):
        rng = random.Random(seed)
        geometry, catalog, oracle, hashes, n_tokens, local = random_case(rng)
        lookup = PrefixLookup(geometry, catalog)
        limit = lookup.limit_tokens(n_tokens)
        unit = geometry.hit_alignment_tokens
        assert limit == max(0, (n_tokens - 1) // unit * unit)
        hit = lookup.find(hashes, local, limit)
        hashed = len(hashes) * geometry.hash_block_tokens
        assert hit.tokens == oracle.hit(local, limit, hashed), f"seed {seed}: {geometry}"
        if hit.tokens > local:
            check_pieces(seed, geometry, oracle, hashes, local, hit.tokens, lookup)


def check_pieces(seed, geometry, oracle, hashes, local, tokens, lookup):
    used = Counter()
    for piece in lookup.pieces(hashes, local, tokens):
        group = geometry.group(piece.group_id)
        end = piece.end_tokens
        where = f"seed {seed}: {piece}"
        assert end in oracle.present[group.group_id], where
        assert piece.key == hashes[end // geometry.hash_block_tokens - 1] + bytes(
            (group.group_id,)
        ), where
        assert piece.start_tokens == (end - 1) // geometry.chunk_tokens * geometry.chunk_tokens
        kept = oracle.kept(group, end)
        assert (piece.stored_block, piece.stored_blocks) == (kept[0], len(kept)), where
        blocks = range(piece.first_block, piece.first_block + piece.n_blocks)
        assert piece.n_blocks > 0, where
        for block in blocks:
            if group.kind is not STATE:
                assert oracle.serves(group, end, block, tokens), where
            used[group.group_id, block] += 1
    needed = Counter(
        (g.group_id, b) for g in geometry.groups for b in oracle.needed(g, tokens, local)
    )
    assert used == needed, f"seed {seed}"


def test_hits_are_found_often_enough():
    """The random cases are worth something: many hits, of every kind of group, and many misses."""
    hits, misses = Counter(), 0
    for seed in range(300):
        geometry, catalog, _, hashes, n_tokens, local = random_case(random.Random(seed))
        lookup = PrefixLookup(geometry, catalog)
        found = lookup.find(hashes, local, lookup.limit_tokens(n_tokens)).tokens > local
        misses += not found
        hits.update({g.kind for g in geometry.groups} if found else ())
    assert min(hits[k] for k in GroupKind if k is not GroupKind.UNSUPPORTED) > 15
    assert misses > 30
