"""Why a hit ends where it does; the property test has the lengths."""

from __future__ import annotations

import pytest

from kvtier.connector.geometry import GroupKind
from kvtier.connector.lookup import MissReason, PrefixLookup
from kvtier.storage.catalog import Catalog

from .halves import geometry_of, group, request_of

WINDOW, STATE = GroupKind.SLIDING_WINDOW, GroupKind.RECURRENT


class Case:
    def __init__(self, *groups, n_tokens=300, **options):
        self.geometry = geometry_of(*groups, **options)
        self.catalog = Catalog(("disk", "redis"))
        self.catalog.add_pages(100)
        self.lookup = PrefixLookup(self.geometry, self.catalog)
        self.request = request_of("a", n_tokens, unit=self.geometry.hash_block_tokens)
        self.n_tokens = n_tokens

    def key(self, end, group_id=0):
        unit = self.geometry.hash_block_tokens
        return self.request.block_hashes[end // unit - 1] + bytes((group_id,))

    def on(self, tier, *ends, group_id=0):
        for end in ends:
            self.catalog.tier_added(tier, self.key(end, group_id), 0)

    def find(self, local=0, limit=None):
        limit = self.lookup.limit_tokens(self.n_tokens) if limit is None else limit
        hit = self.lookup.find(self.request.block_hashes, local, limit)
        return hit.tokens, hit.reason


def test_as_far_as_it_may():
    """A hit that reaches the limit has no reason to miss."""
    case = Case(n_tokens=129)
    case.on("disk", 64, 128)
    assert case.find() == (128, MissReason.NONE)


def test_hashes_that_look_ahead_leave_more_to_compute():
    """Where a block's hash covers tokens after it, a hit leaves so many to compute."""
    case = Case(n_tokens=129, computed=4)
    case.on("disk", 64, 128)
    assert case.find() == (112, MissReason.NONE)


def test_one_token_is_left_to_compute():
    """Also a prompt that is stored whole keeps its last block to be computed."""
    case = Case(n_tokens=128)
    case.on("disk", 64, 128)
    assert case.find() == (112, MissReason.NONE)


@pytest.mark.parametrize("n_tokens", [1, 15, 16])
def test_a_short_prompt(n_tokens):
    """A prompt without a whole block before its last token has nothing to restore."""
    assert Case(n_tokens=n_tokens).find() == (0, MissReason.PROMPT_SHORT)


def test_the_device_has_it_all():
    """Nothing more than the device's own hit is no miss."""
    case = Case(n_tokens=129)
    assert case.find(local=128) == (128, MissReason.NONE)


def test_not_stored():
    """The chain ends where a chunk was never stored."""
    case = Case()
    assert case.find() == (0, MissReason.NOT_STORED)
    case.on("disk", 64, 192)
    assert case.find() == (64, MissReason.NOT_STORED)


def test_what_was_there_and_went_is_told():
    """A chunk that was stored and is no more says so, until it is back or all is cleared."""
    case = Case()
    case.on("disk", 64, 128)
    case.catalog.tier_removed("disk", case.key(128))
    assert case.find() == (64, MissReason.EVICTED)
    case.on("redis", 128)
    assert case.find() == (128, MissReason.NOT_STORED)
    case.catalog.tier_removed("redis", case.key(128))
    assert case.find() == (64, MissReason.EVICTED)
    case.catalog.clear()
    assert case.find() == (0, MissReason.NOT_STORED)


def test_a_tier_that_starts_anew_has_evicted_nothing():
    """What a tier's new walk has not found yet does not count as evicted."""
    case = Case()
    case.on("disk", 64)
    case.catalog.forget_tier("disk", 0)
    assert case.find() == (0, MissReason.NOT_STORED)


def test_still_being_saved():
    """A chunk on its way out of the device is too early, not lost."""
    case = Case()
    case.on("disk", 64)
    case.catalog.begin_save(case.key(128), 4)
    assert case.find() == (64, MissReason.SAVING)


def test_tier_off():
    """A chunk that only a silent tier holds is said to be so."""
    case = Case()
    case.on("disk", 64)
    case.on("redis", 128)
    case.catalog.set_offline("redis", offline=True)
    assert case.find() == (64, MissReason.TIER_OFF)


def test_window_missing():
    """A window's blocks before the hit's end are needed, those before them are not."""
    case = Case(group(), group(1, WINDOW, window=33))
    case.on("disk", 64, 128, 192, 256)
    case.on("disk", 128, group_id=1)
    assert case.find() == (128, MissReason.WINDOW_MISSING)
    case.on("disk", 256, group_id=1)
    assert case.find() == (256, MissReason.NOT_STORED)


def test_state_missing():
    """A recurrent group serves exactly the boundaries whose state is kept."""
    case = Case(group(), group(1, STATE))
    case.on("disk", 64, 128, 192, 256)
    assert case.find() == (0, MissReason.STATE_MISSING)
    case.on("disk", 176, group_id=1)
    assert case.find() == (176, MissReason.STATE_MISSING)


def test_a_draft_head_takes_a_hit_back_by_a_block():
    """The last match proves the token after the hit; what is known beyond the limit does, too."""
    case = Case(n_tokens=145, draft_drop=16)
    case.on("disk", 64, 128)
    assert case.find() == (112, MissReason.NOT_STORED)
    case.on("disk", 144)
    assert case.find() == (128, MissReason.NONE)
    assert case.find(limit=112) == (112, MissReason.NONE)
    assert case.find(local=128) == (128, MissReason.NONE)


def test_a_draft_head_never_costs_a_windowed_group_its_chunk():
    """Where the windows' record ends at the match itself, the hit does, too."""
    case = Case(group(), group(1, WINDOW, window=20), n_tokens=300, draft_drop=16)
    case.on("disk", 64, 128, 176)
    case.on("disk", 64, 128, 176, group_id=1)
    assert case.find() == (176, MissReason.NOT_STORED)
    case.on("disk", 160, group_id=1)
    assert case.find() == (160, MissReason.NOT_STORED)


@pytest.mark.parametrize("kind", [WINDOW, STATE])
@pytest.mark.parametrize("n_states", [0, 3])
def test_a_long_prompt_asks_only_where_something_is(kind, n_states):
    """200,000 tokens of attention without windows or states: a few questions, not thousands."""
    window = 40 if kind is WINDOW else None
    case = Case(group(), group(1, kind, window=window), n_tokens=200_001)
    case.on("disk", *range(64, 200_001, 64))
    here = [64 * 100 * (i + 1) for i in range(n_states)]
    case.on("disk", *here, group_id=1)
    asked = []
    source = case.catalog.source
    case.catalog.source = lambda key: asked.append(key) or source(key)
    assert case.find()[0] == max(here, default=0)
    assert len(asked) < 60


def test_a_tail_after_whole_chunks():
    """After the last whole chunk a tail is tried, and a longer tail serves a shorter hit."""
    case = Case()
    case.on("disk", 64, 112)
    assert case.find() == (112, MissReason.NOT_STORED)
    assert case.find(limit=96)[0] == 96


def test_no_pieces_for_what_is_gone():
    """What went between promise and plan gives no plan."""
    case = Case()
    case.on("disk", 64)
    assert case.lookup.pieces(case.request.block_hashes, 0, 64) is not None
    case.catalog.drop(case.key(64))
    assert case.lookup.pieces(case.request.block_hashes, 0, 64) is None


def test_sources():
    """Runs of one place each, up to the hit's end."""
    case = Case()
    case.on("disk", 64, 192)
    case.on("redis", 128)
    entry = case.catalog.begin_save(case.key(256), 4)
    case.catalog.filled(entry, ok=True)
    case.catalog.unpin(entry)
    found = case.lookup.sources(case.request.block_hashes, 0, 272)
    assert found == [("disk", 64), ("redis", 128), ("disk", 192), ("ram", 272)]
