"""What the engine's own copies of blocks damage is kept out of the store."""

from __future__ import annotations

import pytest

from kvtier.connector import short_copies as subject
from kvtier.connector.geometry import GroupKind

from .halves import BLOCK, CHUNK, Half, geometry_of, group, request_of

UNIT = 4
GEOMETRY = geometry_of(group(0), group(1, GroupKind.RECURRENT), unit=UNIT, align=UNIT)


class Engine:
    """A half, and requests that hit so much on the device before they compute."""

    def __init__(self, *, on=True):
        self.half = Half(GEOMETRY, tiers=())
        self.half.half.short_copies.on = on
        self.n = 0

    def run(self, n_tokens, hit=0, seed=0, restored=0):
        """Compute a prompt after a hit; returns the ends of what is stored of it."""
        self.n += 1
        half = self.half.half
        request = request_of(f"r{self.n}", n_tokens, seed=seed, unit=UNIT)
        half.on_new_request(request)
        found, _ = half.lookup(request, hit // BLOCK * BLOCK)
        rows = self.half.table(request, n_tokens)
        if restored:
            assert found == restored - hit // BLOCK * BLOCK
        half.admitted(request, self.half.kv_blocks(rows), found if restored else 0)
        for job in self.half.plan().loads:
            self.half.load_ends(job)
            half.admitted(request, self.half.kv_blocks(rows), 0)
        request.num_computed_tokens = restored or hit
        offers = {request.request_id: [(1, rows[1][-1], n_tokens // UNIT * UNIT)]}
        plan = self.half.plan(
            offers, **{request.request_id: n_tokens - request.num_computed_tokens}
        )
        for job in plan.saves:
            self.half.save_ends(job, written=())
        request.num_computed_tokens = n_tokens
        request.status.name = "FINISHED_STOPPED"
        half.finished(request, rows)
        return sorted({c.end_tokens for job in plan.saves for c in job.chunks})


@pytest.mark.parametrize("on", [False, True])
def test_what_follows_a_copied_block_is_not_stored(on):
    """A hit inside a block is copied; on a whole block it is not."""
    engine = Engine(on=on)
    assert engine.run(70) == [64, 68]
    stored = engine.run(150, hit=68)
    assert (stored == []) == on
    assert engine.run(150, hit=64, seed=2) == [64, 128, 148]


def test_what_is_computed_on_damaged_blocks_is_not_stored_either():
    """The device serves them to later requests, up to any of their boundaries."""
    engine = Engine()
    engine.run(70)
    assert engine.run(150, hit=68) == []
    for hit in (80, 128, 144):
        assert engine.run(200, hit=hit) == []
    assert engine.run(260, hit=192) == [], "and what was computed on those"
    assert engine.run(200, hit=64) == [128, 192, 200], "before the copy all is right"


def test_what_is_restored_is_sound():
    """A hit of kvtier's own inside a block is loaded, not copied, and goes on being stored."""
    engine = Engine()
    engine.run(70)
    assert engine.run(150, restored=68) == [128, 148]
    assert engine.run(150, hit=16, restored=148)[-1:] == []


def test_an_answer_s_tokens_count_as_they_come():
    """A request that goes on after its first step leaves damaged blocks to its end."""
    engine = Engine()
    engine.run(70)
    half, request = engine.half.half, request_of("x", 100, unit=UNIT)
    half.on_new_request(request)
    half.lookup(request, 64)
    rows = engine.half.table(request, 200)
    half.admitted(request, engine.half.kv_blocks(rows), 0)
    request.num_computed_tokens = 68
    engine.half.plan(x=32)
    longer = request_of("x", 180, unit=UNIT)
    request.block_hashes, request.num_tokens = longer.block_hashes, 180
    request.num_computed_tokens = 100
    engine.half.plan(x=80)
    assert engine.run(260, hit=176) == []


def test_the_memory_is_bounded(monkeypatch):
    """The oldest damage is forgotten."""
    monkeypatch.setattr(subject, "MAX_REMEMBERED", 10)
    engine = Engine()
    engine.run(CHUNK, hit=4)
    engine.run(CHUNK, hit=4, seed=3)
    assert len(engine.half.half.short_copies._damaged) == 10
