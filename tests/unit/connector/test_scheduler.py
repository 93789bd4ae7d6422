"""The scheduler half's answers to the engine, step by step."""

from __future__ import annotations

import pytest

from kvtier.connector.admission import SHARED_LOAD_WAIT_S
from kvtier.connector.geometry import GroupKind
from kvtier.connector.lookup import MissReason
from kvtier.connector.plan import RankReport
from kvtier.connector.tier_states import INDEX_WAIT_S, NEWS_AGE_S
from kvtier.connector.tracker import SharedOptions
from kvtier.connector.write_back import WritePolicy
from kvtier.storage.catalog import RAM
from kvtier.storage.jobs import (
    ChunkStatus,
    LoadDone,
    LoadRetired,
    SaveCopied,
    SaveRetired,
    TierNews,
)

from .halves import CHUNK, OK, Half, geometry_of, group, request_of

DAMAGED, MISSING = ChunkStatus.DAMAGED, ChunkStatus.MISSING


def stored(n_tokens=200, *, n_chunks=3, **options):
    """A half whose disk holds the first chunks of a request, and that request."""
    half = Half(**options)
    request = request_of("a", n_tokens)
    for end in range(CHUNK, n_chunks * CHUNK + 1, CHUNK):
        half.on_tier(request, end)
    half.half.on_new_request(request)
    return half, request


def the_load(half):
    (job,) = half.plan().loads
    return job


# -- looking up and loading -----------------------------------------------------------


def test_a_hit_is_loaded():
    """Promise, plan, report: the blocks that were granted, in order, and all let go at the end."""
    half, request = stored()
    assert half.half.lookup(request, 0) == (192, True)
    half.admit(request, 192)
    job = the_load(half)
    assert job.request_id == "a"
    assert [c.blocks.tolist() for c in job.chunks] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    assert [c.source for c in job.chunks] == ["disk"] * 3
    assert all(c.pages is not None and len(c.pages) == 4 for c in job.chunks)
    assert half.half.pending()
    half.load_ends(job)
    assert [half.catalog.source(half.key(request, e)) for e in (64, 128, 192)] == [RAM] * 3
    assert half.at_rest()
    half.half.admitted(request, half.kv_blocks(half.tables["a"]), 0)
    assert half.plan().loads == ()


def test_only_what_the_device_lacks():
    """Blocks of the device's own hit, null blocks and hashed ones are not loaded."""
    half, request = stored()
    assert half.half.lookup(request, 80) == (112, True)
    rows = half.table(request, 192)
    half.pool.blocks[rows[0][5]].block_hash = b"valid already"
    half.half.admitted(request, half.kv_blocks(rows), 112)
    job = the_load(half)
    assert [(c.offset_blocks, c.blocks.tolist()) for c in job.chunks] == [
        (2, [7, 8]),
        (0, [9, 10, 11, 12]),
    ]
    half.load_ends(job)
    assert half.at_rest()


def test_blocks_that_are_no_run_doom_the_load():
    """A table that kvtier does not understand is computed, never half restored."""
    half, request = stored()
    half.half.lookup(request, 0)
    rows = half.table(request, 192)
    half.pool.blocks[rows[0][5]].block_hash = b"valid already"
    half.half.admitted(request, half.kv_blocks(rows), 192)
    job = the_load(half)
    assert job.doomed
    assert job.chunks == ()
    half.tell(LoadDone(job.job_id, "a", b"", ok=False), LoadRetired(job.job_id, b""))
    assert half.at_rest()


def test_promised_but_not_taken():
    """An engine that goes on without the hit loads nothing and holds nothing."""
    half, request = stored()
    half.half.lookup(request, 0)
    half.admit(request, 0)
    assert half.plan().loads == ()
    assert half.at_rest()
    assert "misses.none" not in half.half.take_counts()


def test_asking_changes_nothing():
    """A lookup may be repeated as often as the engine likes."""
    half, request = stored()
    before = half.half.take_counts()
    for _ in range(5):
        assert half.half.lookup(request, 0) == (192, True)
    assert half.half.take_counts() == {}
    assert before == {}
    assert half.at_rest()


def test_not_to_be_read():
    """Requests that skip the cache are not served from it; nor those that ask not to be."""
    half, _ = stored()
    for more in (
        {"skip_reading_prefix_cache": True},
        {"kv_transfer_params": {"kvtier": {"read": False}}},
    ):
        request = request_of("b", 200, **more)
        assert half.half.lookup(request, 0) == (0, False)
        half.admit(request, 0)
        assert half.half.take_counts()["misses.not_read"] == 1


def test_gone_between_promise_and_plan():
    """A chunk that vanished after the promise dooms the load; the request computes."""
    half, request = stored()
    half.half.lookup(request, 0)
    half.catalog.clear()
    half.admit(request, 192)
    job = the_load(half)
    assert job.doomed
    half.tell(LoadDone(job.job_id, "a", b"", ok=False), LoadRetired(job.job_id, b""))
    assert half.half.lookup(request, 0) == (0, False)
    assert half.at_rest()


def test_a_prefix_larger_than_ram_streams():
    """Chunks that get no page are loaded without one, and RAM is not emptied for them."""
    half, request = stored(pages=8)
    half.half.lookup(request, 0)
    half.admit(request, 192)
    job = the_load(half)
    assert [c.pages is None for c in job.chunks] == [False, False, True]
    half.load_ends(job)
    assert half.at_rest()


def test_loading_does_not_push_out_what_the_same_load_needs():
    """RAM chunks of a hit are pinned before others are promoted into their place."""
    half, request = stored(pages=8)
    promoted = [half.catalog.begin_promote(half.key(request, end), 4) for end in (64, 128)]
    for entry in promoted:
        half.catalog.filled(entry, ok=True)
        half.catalog.unpin(entry)
    half.half.lookup(request, 0)
    half.admit(request, 192)
    job = the_load(half)
    assert [c.source for c in job.chunks] == [RAM, RAM, "disk"]
    assert job.chunks[2].pages is None
    half.load_ends(job)
    assert half.at_rest()


def test_a_chunk_whose_lower_tier_is_off_is_not_lost_to_a_load():
    """Two tiers, one off: its chunk in RAM serves the very hit that needs room beside it."""
    half = Half(pages=4, tiers=("disk", "redis"))
    request = request_of("a", 130)
    half.on_tier(request, 64, tier="disk")
    entry = half.catalog.begin_promote(half.key(request, 64), 4)
    half.catalog.filled(entry, ok=True)
    half.catalog.unpin(entry)
    half.on_tier(request, 128, tier="redis")
    half.catalog.set_offline("disk", offline=True)
    assert half.half.lookup(request, 0) == (128, True)
    half.admit(request, 128)
    job = the_load(half)
    assert [(c.source, c.pages is None) for c in job.chunks] == [(RAM, False), ("redis", True)]
    half.load_ends(job)
    assert half.at_rest()


def test_no_promotion_when_it_is_off():
    """Without promotion loads stream, and RAM stays as it is."""
    half, request = stored(promote=False)
    half.half.lookup(request, 0)
    half.admit(request, 192)
    assert all(c.pages is None for c in the_load(half).chunks)
    assert half.catalog.pinned_pages == 0


# -- failures --------------------------------------------------------------------------


@pytest.mark.parametrize("status", [DAMAGED, MISSING])
def test_a_bad_record_is_forgotten_and_the_good_part_served(status):
    """After a failure the next lookup gives the prefix before the bad chunk, at most once more."""
    half, request = stored(promote=False)
    half.half.lookup(request, 0)
    half.admit(request, 192)
    half.load_ends(the_load(half), OK, status, ChunkStatus.CANCELLED)
    assert half.half.lookup(request, 0) == (64, True)
    half.admit(request, 64)
    half.load_ends(the_load(half), status)
    assert half.half.lookup(request, 0) == (0, False)
    half.admit(request, 0)
    counts = half.half.take_counts()
    assert counts["loads_failed"] == 2
    assert counts["misses.load_failed"] == 1
    assert half.at_rest()


def test_a_failed_copy_is_not_tried_again():
    """A request whose copy to the device failed computes; its records are not to blame."""
    half, request = stored()
    half.half.lookup(request, 0)
    half.admit(request, 192)
    half.load_ends(the_load(half), OK, ChunkStatus.COPY_FAILED, OK)
    assert half.half.lookup(request, 0) == (0, False)
    assert half.half.lookup(request_of("b", 200), 0) == (192, True)


@pytest.mark.parametrize("status", [ChunkStatus.DEADLINE, ChunkStatus.TIER_DOWN])
def test_a_tier_that_failed_a_request_is_not_asked_for_it_again(status):
    """What RAM holds is still restored; no second wait for the tier, no third try at all."""
    half, request = stored()
    half.half.lookup(request, 0)
    half.admit(request, 192)
    half.load_ends(the_load(half), OK, status, status)
    assert half.half.lookup(request, 0) == (64, True)
    assert half.half._trackers["a"].reason is MissReason.LOAD_FAILED
    half.admit(request, 64)
    job = the_load(half)
    assert {chunk.source for chunk in job.chunks} == {RAM}
    half.load_ends(job, status)
    assert half.half.lookup(request, 0) == (0, False)
    assert half.half.lookup(request_of("b", 200), 0) == (192, True)


@pytest.mark.parametrize("status", [ChunkStatus.DEADLINE, ChunkStatus.TIER_DOWN])
def test_a_tail_below_ram_does_not_cost_the_ram_part(status):
    """A hit whose end only the failed tier holds is cut to the whole chunks in RAM."""
    half = Half()
    request = request_of("a", 100)
    half.on_tier(request, 64)
    half.on_tier(request, 96)
    half.half.on_new_request(request)
    assert half.half.lookup(request, 0) == (96, True)
    half.admit(request, 96)
    half.load_ends(the_load(half), OK, status)
    assert half.half.lookup(request, 0) == (64, True)


def test_ram_chunks_that_were_not_tried_do_not_cost_the_ram_part():
    """Groups follow each other in a load: a tier that fails the first one spares the second."""
    half = Half(geometry_of(group(0), group(1, GroupKind.SLIDING_WINDOW, window=33)))
    request = request_of("a", 200)
    for end, group_id, in_ram in ((64, 0, True), (128, 0, False), (64, 1, True), (128, 1, True)):
        key = half.on_tier(request, end, group_id)
        if in_ram:
            entry = half.catalog.begin_promote(key, 2 if group_id else 4)
            half.catalog.filled(entry, True)
            half.catalog.unpin(entry)
    half.half.on_new_request(request)
    assert half.half.lookup(request, 0) == (128, True)
    half.admit(request, 128)
    job = the_load(half)
    assert [(c.group, c.source) for c in job.chunks] == [(0, RAM), (0, "disk"), (1, RAM)]
    half.load_ends(job, OK, ChunkStatus.TIER_DOWN, ChunkStatus.NOT_ATTEMPTED)
    assert half.half.lookup(request, 0) == (64, True)


def test_what_is_found_bad_after_it_was_computed_is_saved_all_the_same():
    """A check that ends late: the chunk is saved with the request's next step, or at its end."""
    half, request = stored(n_chunks=3)
    half.half.lookup(request, 0)
    half.admit(request, 192)
    job = the_load(half)
    half.tell(LoadDone(job.job_id, "a", bytes([DAMAGED, 0, 0]), ok=False))
    half.table(request, 200)
    assert half.plan(a=200).saves == ()  # all seems to be kept, or on its way into RAM
    half.tell(LoadRetired(job.job_id, bytes([0, 1, 0]), lost=(2,)))
    request.num_computed_tokens = 200
    request.num_tokens += 1
    saves = half.plan(a=1).saves
    assert [c.end_tokens for save in saves for c in save.chunks] == [64, 192]


def test_what_a_load_finds_bad_after_it_was_told_is_forgotten():
    """Records behind a bad one: named at the load's end, saved again by whoever computes them."""
    half, request = stored(n_chunks=3)
    half.half.lookup(request, 0)
    half.admit(request, 192)
    job = the_load(half)
    half.tell(
        LoadDone(job.job_id, "a", bytes([DAMAGED, 0, 0]), ok=False),
        LoadRetired(job.job_id, bytes([0, 1, 0]), lost=(2,)),
    )
    places = [half.catalog.source(half.key(request, e)) for e in (64, 128, 192)]
    assert places == [None, RAM, None]
    saves = half.plan(a=200).saves
    assert [c.end_tokens for job in saves for c in job.chunks] == [64, 192]


def test_a_load_that_fails_on_one_rank():
    """What one rank could not load, no rank is asked for again; RAM keeps what all have."""
    half, request = stored(n_ranks=2)
    half.half.lookup(request, 0)
    half.admit(request, 192)
    job = the_load(half)
    half.tell(LoadDone(job.job_id, "a", bytes([OK] * 3), ok=True), rank=0)
    assert half.half._trackers["a"].load_job is not None
    half.tell(LoadDone(job.job_id, "a", bytes([OK, DAMAGED, OK]), ok=False), rank=1)
    half.tell(LoadRetired(job.job_id, bytes([1, 1, 1])), rank=0)
    half.tell(LoadRetired(job.job_id, bytes([1, 0, 1])), rank=1)
    places = [half.catalog.source(half.key(request, e)) for e in (64, 128, 192)]
    assert places == [RAM, None, RAM]
    assert half.half.lookup(request, 0) == (64, True)


def test_abort_while_loading():
    """A request that goes while it loads cancels the load once; nothing is saved of it."""
    half, request = stored()
    half.half.lookup(request, 0)
    half.admit(request, 192)
    job = the_load(half)
    request.status.name = "FINISHED_ABORTED"
    half.half.finished(request, half.tables["a"])
    assert half.half.pending()
    plan = half.plan()
    assert plan.cancels == (job.job_id,)
    assert plan.saves == ()
    assert half.plan().cancels == ()
    half.load_ends(job, *[ChunkStatus.CANCELLED] * 3)
    assert half.at_rest()


def test_an_id_that_comes_back():
    """A new request under an old id is not confused with the one before."""
    half, request = stored()
    half.half.lookup(request, 0)
    half.admit(request, 192)
    job = the_load(half)
    half.half.finished(request, half.tables["a"])
    again = request_of("a", 200)
    half.half.on_new_request(again)
    half.load_ends(job, *[ChunkStatus.CANCELLED] * 3)
    tracker = half.half._trackers["a"]
    assert tracker.request is again
    assert tracker.failures == 0
    half.half.finished(request, half.tables["a"])
    assert half.half._trackers["a"].request is again


# -- waiting ---------------------------------------------------------------------------


def test_same_prefix_while_it_loads():
    """Others with this prefix wait for its load, until it is over."""
    half, request = stored()
    half.half.lookup(request, 0)
    half.admit(request, 192)
    job = the_load(half)
    other = request_of("b", 200)
    for _ in range(3):
        assert half.half.lookup(other, 0) == (None, False)
    half.load_ends(job)
    assert half.half.lookup(other, 0) == (192, True)
    half.admit(other, 192)
    assert [c.source for c in the_load(half).chunks] == [RAM] * 3


def test_same_prefix_while_it_loads_too_long():
    """The wait for another's load has an end; then the request streams for itself."""
    half, request = stored()
    half.half.lookup(request, 0)
    half.admit(request, 192)
    half.plan()
    other = request_of("b", 200)
    assert half.half.lookup(other, 0) == (None, False)
    half.clock.advance(SHARED_LOAD_WAIT_S + 1)
    assert half.half.lookup(other, 0) == (192, True)
    half.admit(other, 192)
    assert [c.pages is None for c in the_load(half).chunks] == [True] * 3


def test_nobody_waits_for_a_read_that_hangs():
    """A load that was given up holds its pages, but no other request."""
    half, request = stored()
    half.half.lookup(request, 0)
    half.admit(request, 192)
    job = the_load(half)
    half.tell(LoadDone(job.job_id, "a", bytes([ChunkStatus.DEADLINE] * 3), ok=False))
    assert half.half.lookup(request_of("b", 200), 0) == (192, True)


def test_no_engine_steps_for_ever_for_a_call_that_hangs():
    """An idle engine steps for writes and reads for a while; a pause or a stop waits for that."""
    half, request = stored()
    half.half.lookup(request, 0)
    half.admit(request, 192)
    job = the_load(half)
    half.clock.advance(60.0)
    half.plan()
    assert half.half.pending(), "a request waits"
    half.tell(LoadDone(job.job_id, "a", bytes([ChunkStatus.DEADLINE] * 3), ok=False))
    assert not half.half.pending()
    other = request_of("b", 128, seed=3)
    half.table(other, 128)
    half.half.on_new_request(other)
    (save,) = half.plan(b=128).saves
    half.clock.advance(60.0)
    assert half.half.pending(), "device blocks are pinned"
    half.tell(SaveCopied(save.job_id, bytes([OK] * len(save.chunks))))
    assert not half.half.pending()
    half.tell(LoadRetired(job.job_id, bytes(3)))
    half.tell(SaveRetired(save.job_id))
    half.half.finished(request, half.tables["a"])
    half.half.finished(other, half.tables["b"])
    assert half.catalog.pinned_pages == 0


def unread_index():
    half, _ = stored(n_chunks=0)
    half.tell(TierNews("disk", complete=False, reset=True))
    return half


def test_first_lookups_wait_for_the_index():
    """Until a tier's index is read, lookups are put off, and the engine goes on stepping."""
    half = unread_index()
    request = request_of("a", 200)
    assert half.half.lookup(request, 0) == (None, False)
    assert half.half.pending()
    half.tell(TierNews("disk", added=(half.key(request, 64),)))
    assert half.half.lookup(request, 0) == (64, True)
    assert not half.half.pending()


def test_the_index_is_waited_for_once():
    """An index that is not read in time holds the engine up once, not every request anew."""
    half = unread_index()
    assert half.half.lookup(request_of("a", 200), 0) == (None, False)
    half.clock.advance(INDEX_WAIT_S + 0.1)
    half.step()
    for name in "abc":
        assert half.half.lookup(request_of(name, 200), 0) == (0, False)
    assert not half.half.pending()


def test_an_index_of_a_tier_that_is_off_is_not_waited_for():
    """A tier that could not be opened, or went off while being read, holds nobody up."""
    half = unread_index()
    half.tell(TierNews("disk", complete=False, online=False))
    assert half.half.lookup(request_of("a", 200), 0) == (0, False)
    assert not half.half.pending()


def test_an_idle_engine_hears_of_others_records_before_it_computes():
    """Workers tell with a step: after a rest the first lookup waits for one where it can gain."""
    half, request = stored()
    half.step()
    half.clock.advance(NEWS_AGE_S + 0.1)
    later = request_of("b", 200, seed=4)
    assert half.half.lookup(later, 0) == (None, False)
    half.step()
    half.tell(TierNews("disk", added=(half.key(later, 64), half.key(later, 128))))
    assert half.half.lookup(later, 0) == (128, True)
    half.clock.advance(NEWS_AGE_S + 0.1)
    assert half.half.lookup(request, 0) == (192, True), "nothing to be gained"
    assert half.half.lookup(request_of("c", 60, seed=5), 0) == (0, False), "less than a chunk"
    half.tell(TierNews("disk", online=False))
    assert half.half.lookup(request_of("d", 200, seed=6), 0) == (0, False), "off"


@pytest.mark.parametrize("steps_ahead", [1, 2])
def test_an_engine_with_long_steps_is_not_idle(steps_ahead):
    """What comes in beside steps of seconds, one or two of them under way, is looked up at once."""
    half, _ = stored()
    half.plan()
    for name in "bcd":
        if steps_ahead == 2:
            half.plan()
        half.clock.advance(5 * NEWS_AGE_S)
        half.half.take_counts()
        assert half.half.lookup(request_of(name, 200, seed=4), 0) == (0, False)
        if steps_ahead == 1:
            half.plan()


def test_nobody_waits_for_news_of_tiers_that_are_asked():
    """Tiers that engines ask have no news; without a lower tier there is none either."""
    for options in ({"tiers": ("redis",), "shared": SharedOptions(("redis",))}, {"tiers": ()}):
        half = Half(**options)
        half.step()
        half.clock.advance(100.0)
        assert half.half.lookup(request_of("a", 200), 0) == (0, False)


class Silent:
    """A prober that takes every question and answers none."""

    name, silent = "redis", False

    def ask(self, _question):
        return True

    def take(self):
        return []

    def close(self):
        pass


def test_a_shared_tiers_answer_is_waited_for_once_and_its_lateness_is_told():
    """After the lookup deadline a request goes on; why it did not hit is counted as "late"."""
    shared = SharedOptions(tiers=("redis",), open_probers=lambda _: [Silent()])
    half = Half(tiers=("redis",), shared=shared, lookup_deadline_s=0.05)
    half.plan()
    request = request_of("a", 200)
    for _ in range(3):
        assert half.half.lookup(request, 0) == (None, False)
        half.clock.advance(0.02)
    assert half.half.lookup(request, 0) == (0, False)
    assert half.half.lookup(request, 0) == (0, False)  # not asked once more before it is admitted
    half.admit(request, 0)
    counts = half.half.take_counts()
    assert counts["lookups_late"] == 1
    assert counts["misses.late"] == 1
    assert "misses.not_stored" not in counts


# -- tiers -----------------------------------------------------------------------------


def test_news_of_ranks():
    """A record counts when every rank has told of it, and no longer once one has lost it."""
    half = Half(n_ranks=2)
    request = request_of("a", 200)
    key = half.key(request, 64)
    half.tell(TierNews("disk", added=(key,)), rank=0)
    assert half.half.lookup(request, 0) == (0, False)
    half.tell(TierNews("disk", added=(key,)), rank=1)
    assert half.half.lookup(request, 0) == (64, True)
    half.tell(TierNews("disk", removed=(key,)), rank=0)
    assert half.half.lookup(request, 0) == (0, False)


def test_a_tier_that_is_off_on_one_rank():
    """A tier serves only while it answers on every rank."""
    half, request = stored(n_ranks=2)
    half.tell(TierNews("disk", online=False), rank=1)
    assert half.half.lookup(request, 0) == (0, False)
    half.admit(request, 0)
    assert half.half.take_counts()["misses.tier_off"] == 1
    half.tell(TierNews("disk", online=True), rank=1)
    assert half.half.lookup(request, 0) == (192, True)


def test_news_of_before_a_reset():
    """What a tier of the old namespace still had to say is void once the new one begins."""
    half, request = stored()
    half.half.reset()
    assert half.half.lookup(request, 0) == (0, False)
    half.tell(TierNews("disk", added=(half.key(request, 64),)))
    half.tell(TierNews("disk", complete=False, reset=True), TierNews("disk"))
    assert half.half.lookup(request, 0) == (0, False)


def test_pages_grow_with_the_slowest_rank():
    """Only pages that every rank has are given out."""
    half = Half(n_ranks=2)
    half.half.settle([RankReport(0, 300, (), 0)])
    assert half.catalog.n_pages == 100
    half.half.settle([RankReport(1, 200, (), 1)])
    assert half.catalog.n_pages == 200


# -- reset -----------------------------------------------------------------------------


def test_reset():
    """After a reset nothing of before is served, saved or written, in flight or not."""
    half, request = stored()
    half.table(request, 200)
    half.half.lookup(request, 0)
    half.admit(request, 192)
    saver = request_of("s", 64, seed=5)
    half.half.on_new_request(saver)
    half.table(saver, 64)
    plan = half.plan(s=64)
    half.half.reset()
    fresh = half.plan()
    assert fresh.namespace.generation == 1
    assert half.plan().namespace is None
    half.save_ends(plan.saves[0])
    half.load_ends(plan.loads[0], *[ChunkStatus.CANCELLED] * 3)
    assert half.at_rest()
    assert len(half.catalog) == 0
    assert plan.saves[0].generation == plan.loads[0].generation == 0
    saver.num_tokens = saver.num_computed_tokens = 64
    saver.status.name = "FINISHED_STOPPED"
    half.half.finished(saver, half.tables["s"])
    assert half.plan().saves == ()
    new = request_of("n", 64, seed=5)
    half.half.on_new_request(new)
    half.table(new, 64)
    assert half.plan(n=64).saves[0].generation == 1


# -- telling ---------------------------------------------------------------------------


def test_counts_of_a_script():
    """Lookups, hits, tokens by tier and misses by reason agree with what was done."""
    half, request = stored(300)
    entry = half.catalog.begin_promote(half.key(request, 64), 4)
    half.catalog.filled(entry, ok=True)
    half.catalog.unpin(entry)
    half.half.lookup(request, 0)
    half.admit(request, 192)
    assert half.half.hit_sources(request) == {RAM: 64, "disk": 128}
    half.load_ends(the_load(half))
    half.half.admitted(request, half.kv_blocks(half.tables["a"]), 0)
    miss = request_of("b", 100, seed=9)
    half.half.lookup(miss, 16)
    half.admit(miss, 0)
    assert half.half.take_counts() == {
        "lookups": 2,
        "lookup_tokens": 400,
        "local_hit_tokens": 16,
        "hits": 1,
        "hit_tokens.ram": 64,
        "hit_tokens.disk": 128,
        "misses.not_stored": 2,
    }
    assert half.half.take_counts() == {}
    gauges = half.half.gauges()
    assert gauges["resident_chunks.ram"] == 3
    assert gauges["resident_chunks.disk"] == 3
    assert gauges["ram_pages.pinned"] == 0
    pages = {state: gauges[f"ram_pages.{state}"] for state in ("free", "held", "all")}
    assert pages["held"] == 12  # three chunks of four blocks
    assert pages["free"] + pages["held"] == pages["all"]
    assert gauges["resident_bytes.ram"] == 12 * half.geometry.page_bytes


def test_bytes_in_ram_are_those_of_all_ranks():
    """Each rank keeps its part of a chunk in a page of its own; nothing stays without `ram`."""
    half, request = stored(n_ranks=2)
    assert half.half.gauges()["resident_bytes.ram"] == 0
    entry = half.catalog.begin_promote(half.key(request, 64), 4)
    assert half.half.gauges()["ram_pages.held"] == 0
    half.catalog.filled(entry, ok=True)
    half.catalog.unpin(entry)
    assert half.half.gauges()["ram_pages.held"] == 4
    assert half.half.gauges()["resident_bytes.ram"] == 2 * 4 * half.geometry.page_bytes
    half.catalog.retain_in_ram = False
    assert half.half.gauges()["resident_bytes.ram"] == 0


def test_touches_reach_the_tiers():
    """What was loaded counts as used below, the head of the prefix last."""
    half, request = stored()
    half.half.lookup(request, 0)
    half.admit(request, 192)
    (touches,) = half.plan().touches
    assert touches == ("disk", tuple(half.key(request, e) for e in (192, 128, 64)))
    assert half.plan().touches == ()


def test_deadline():
    """A load carries the deadline that was set, or one that is derived."""
    for options, low, high in (({"deadline_s": 3.0}, 3.0, 3.0), ({}, 2.0, 60.0)):
        half, request = stored(**options)
        half.half.lookup(request, 0)
        half.admit(request, 192)
        assert low <= the_load(half).deadline_s <= high


def test_tails_serve_the_next_turn():
    """A finished turn's tail lets the next one restore to within a block."""
    half = Half(write=WritePolicy(through=("disk",)))
    turn = request_of("a", 101, n_prompt=100)
    half.half.on_new_request(turn)
    half.table(turn, 101)
    half.save_ends(half.plan(a=90).saves[0])
    turn.num_computed_tokens = 100
    turn.status.name = "FINISHED_STOPPED"
    half.half.finished(turn, half.tables["a"])
    half.save_ends(half.plan().saves[0])
    following = request_of("b", 180)
    assert half.half.lookup(following, 0) == (96, True)
    half.admit(following, 96)
    tail = the_load(half).chunks[1]
    assert (tail.start_tokens, tail.end_tokens, tail.n_blocks) == (64, 96, 2)


def test_groups_load_together():
    """A hit of several groups is one job, over all of them."""
    half = Half(geometry_of(group(), group(1)))
    request = request_of("a", 100)
    for group_id in (0, 1):
        half.on_tier(request, 64, group_id)
    half.half.lookup(request, 0)
    half.admit(request, 64)
    job = the_load(half)
    assert [c.group for c in job.chunks] == [0, 1]
    assert [c.blocks.tolist() for c in job.chunks] == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_a_tier_that_misses_deadlines_is_not_waited_for_by_others():
    """The gate learns from loads that were given up, not only from those that ended."""
    half, request = stored(load_policy="auto")
    for _ in range(4):  # a step of 1000 tokens takes a second
        half.half.gate.note_step(half.clock(), 1000)
        half.clock.advance(1.0)
    tokens, _ = half.half.lookup(request, 0)
    assert tokens
    half.admit(request, tokens)
    (job,) = half.plan().loads
    half.clock.advance(5.0)
    half.load_ends(job, *[ChunkStatus.DEADLINE] * len(job.chunks))
    other = request_of("other", request.num_tokens)
    assert half.half.lookup(other, 0) == (0, False)
    half.half.admitted(other, half.kv_blocks(half.table(other, 64)), 0)
    assert half.half.take_counts()["misses.gate"] == 1
