"""Which chunks are saved, from which blocks, and when."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvtier.connector.geometry import GroupKind
from kvtier.connector.write_back import WRITE_BACK_RETRY_S, WritePolicy
from kvtier.storage.catalog import RAM
from kvtier.storage.jobs import TierNews

from .halves import BLOCK, CHUNK, Half, geometry_of, group, request_of

WINDOW, STATE = GroupKind.SLIDING_WINDOW, GroupKind.RECURRENT


def spans(plan):
    return [
        (c.group, c.start_tokens, c.end_tokens, c.blocks.tolist())
        for job in plan.saves
        for c in job.chunks
    ]


def started(half, request, n_tokens=None):
    half.half.on_new_request(request)
    return half.table(request, n_tokens or request.num_tokens)


def finish(half, request, *, status="FINISHED_STOPPED"):
    request.status.name = status
    half.half.finished(request, half.tables[request.request_id])


def test_whole_chunks_in_the_step_that_completes_them():
    """A chunk is saved with the step whose forward fills it, once."""
    half = Half()
    request = request_of("a", 200)
    (row,) = started(half, request)
    assert spans(half.plan(a=63)) == []
    request.num_computed_tokens = 63
    assert spans(half.plan(a=1)) == [(0, 0, 64, row[:4])]
    request.num_computed_tokens = 64
    assert spans(half.plan(a=136)) == [(0, 64, 128, row[4:8]), (0, 128, 192, row[8:12])]
    request.num_computed_tokens = 200
    request.num_tokens += 1
    assert spans(half.plan(a=1)) == []


def test_nothing_past_the_accepted_tokens():
    """Draft tokens that a step computes are not saved, though their blocks are full."""
    half = Half()
    request = request_of("a", 64)
    request.num_tokens = 60
    started(half, request, 80)
    request.num_computed_tokens = 59
    assert spans(half.plan(a=6)) == []
    request.num_computed_tokens, request.num_tokens = 60, 64
    assert [s[:3] for s in spans(half.plan(a=6))] == [(0, 0, 64)]


def test_blocks_are_pinned_until_copied():
    """Blocks of a save outlive their request."""
    half = Half()
    request = request_of("a", 64)
    (row,) = started(half, request)
    (job,) = half.plan(a=64).saves
    assert half.pool.pinned == row[:4]
    assert half.half.frees_soon()
    half.save_ends(job)
    assert half.pool.freed == row[3::-1]
    assert half.catalog.source(half.key(request, 64)) == RAM
    finish(half, request)
    assert half.at_rest()


@pytest.mark.parametrize(
    ("n_prompt", "n_tokens", "tails"),
    [
        (100, 101, [(64, 96)]),
        (95, 97, [(64, 80), (64, 96)]),
        (96, 96, [(64, 96)]),
        (64, 65, []),
        (79, 80, []),
        (90, 170, [(64, 128), (64, 80), (128, 160)]),
    ],
)
def test_tail_at_the_end(n_prompt, n_tokens, tails):
    """Kept are the prompt's last whole blocks and the turn's, without the last sampled token."""
    half = Half()
    request = request_of("a", n_tokens, n_prompt=n_prompt)
    started(half, request)
    half.plan(a=64)
    request.num_computed_tokens = max(n_prompt, n_tokens - 1)
    finish(half, request)
    found = [s[1:3] for s in spans(half.plan())]
    assert found == tails


@pytest.mark.parametrize("status", ["FINISHED_ABORTED", "FINISHED_ERROR", "FINISHED_IGNORED"])
def test_an_aborted_request_saves_nothing_new(status):
    """Only a normal end vouches for the last tokens."""
    half = Half()
    request = request_of("a", 100, 100)
    started(half, request)
    finish(half, request, status=status)
    assert spans(half.plan()) == []
    assert half.at_rest()


def test_what_is_kept_is_not_saved_again():
    """A chunk in RAM, on its way there, or on a tier that answers costs nothing more."""
    half = Half()
    one, two, three = (request_of(n, 192) for n in "abc")
    for request in (one, two, three):
        started(half, request)
    half.on_tier(one, 128)
    (job,) = half.plan(a=64).saves
    assert spans(half.plan(b=64)) == []
    half.save_ends(job)
    assert [s[1:3] for s in spans(half.plan(c=192))] == [(128, 192)]


def test_a_chunk_on_a_tier_that_is_off_is_saved():
    """While the tier with the only copy does not answer, RAM takes one."""
    half = Half()
    request = request_of("a", 64)
    started(half, request)
    half.on_tier(request, 64)
    half.catalog.set_offline("disk", offline=True)
    assert len(spans(half.plan(a=64))) == 1


def test_window_groups_keep_their_last_blocks():
    """Of a window's chunk only the blocks that a hit at its end needs."""
    half = Half(geometry_of(group(), group(1, WINDOW, window=33)))
    request = request_of("a", 64)
    full, window = started(half, request)
    window[0] = window[1] = 0  # slid out of the window
    assert spans(half.plan(a=63)) == []
    request.num_prompt_tokens = 80
    assert spans(half.plan(a=64)) == [(0, 0, 64, full), (1, 0, 64, window[2:])]


def test_blocks_that_are_gone_are_counted_once():
    """A chunk whose blocks slid away cannot be saved; one that is kept already is no loss."""
    half = Half(geometry_of(group(), group(1, WINDOW, window=33)))
    request = request_of("a", 128, n_prompt=130)
    _, window = started(half, request)
    window[:4] = [0, 0, 0, 0]
    half.on_tier(request, 64, 0)
    plan = half.plan(a=128)
    assert [s[:3] for s in spans(plan)] == [(0, 64, 128), (1, 64, 128)]
    assert half.half.take_counts()["save_skipped_chunks.block_gone"] == 1
    half.on_tier(request, 64, 1)
    again = request_of("b", 128, n_prompt=130)
    _, window = started(half, again)
    window[:4] = [0, 0, 0, 0]
    half.plan(b=128)
    assert "save_skipped_chunks.block_gone" not in half.half.take_counts()


def prompt_of(half, n_prompt, name="a", n_tokens=None):
    """Start a request whose first step computes its whole prompt."""
    request = request_of(name, n_tokens or n_prompt, n_prompt=n_prompt)
    started(half, request)
    return request


@pytest.mark.parametrize("n_prompt", [1, 16, 17, 31, 32, 33, 64, 65, 79, 80, 81, 127, 128, 129])
@pytest.mark.parametrize("windowed", [False, True])
def test_a_prompt_sent_again_is_restored_to_its_last_block(n_prompt, windowed):
    """Whatever the answer was: all but the last token, on whole blocks."""
    groups = (group(), group(1, WINDOW, window=33)) if windowed else (group(),)
    half = Half(geometry_of(*groups))
    prompt_of(half, n_prompt)
    for job in half.plan(a=n_prompt).saves:
        half.save_ends(job)
    again = request_of("b", n_prompt)
    assert half.half.lookup(again, 0)[0] == (n_prompt - 1) // BLOCK * BLOCK


def test_a_prompts_tail_comes_with_its_last_step_and_once():
    """Chunked prefill: not before the prompt's last whole block is valid, then never again."""
    half = Half()
    request = prompt_of(half, 100)
    assert spans(half.plan(a=60)) == []
    request.num_computed_tokens = 60
    assert [s[1:3] for s in spans(half.plan(a=30))] == [(0, 64)]
    request.num_computed_tokens = 90
    assert [s[1:3] for s in spans(half.plan(a=10))] == [(64, 96)]
    request.num_computed_tokens = 100
    request.num_tokens += 1
    assert spans(half.plan(a=1)) == []
    assert half.catalog.get(half.key(request, 96)) is not None


def test_a_prompts_tail_waits_for_room():
    """A tail that finds no page is planned with a later step."""
    half = Half(pages=5)
    prompt_of(half, 64)
    (job,) = half.plan(a=64).saves
    second = prompt_of(half, 40, "b")
    assert spans(half.plan(b=40)) == []
    second.num_computed_tokens = 40
    second.num_tokens += 1
    half.save_ends(job)
    assert [s[1:3] for s in spans(half.plan(b=1))] == [(0, 32)]
    assert half.half.take_counts().get("save_dropped_chunks.ram.no_page") is None


def test_a_request_that_is_not_to_be_stored_leaves_no_tail():
    """`store: false` holds for the prompt's tail too."""
    half = Half()
    request = request_of("a", 100, n_prompt=100)
    request.kv_transfer_params = {"kvtier": {"store": False}}
    started(half, request)
    assert spans(half.plan(a=100)) == []


def test_states_only_when_handed_over():
    """Recurrent groups are saved from the engine's offers, with the attention up to them."""
    geometry = geometry_of(group(), group(1, STATE), unit=8, align=8)
    half = Half(geometry)
    request = request_of("a", 160, unit=8)
    full, _ = started(half, request)
    offers = {"a": [(1, 900, 72), (1, 0, 80), (1, 901, 77), (5, 902, 80), (1, 903, 400)]}
    plan = half.plan(offers, a=128)
    found = spans(plan)
    assert (1, 64, 72, [900]) in found
    assert (0, 64, 72, [full[4]]) in found
    assert [s for s in found if s[0] == 1] == [(1, 64, 72, [900])]
    assert {s[:3] for s in found if s[0] == 0} == {(0, 0, 64), (0, 64, 128), (0, 64, 72)}
    assert 900 in half.pool.pinned
    assert spans(half.plan(offers, a=1)) == []


def test_an_attention_tail_alone_serves_no_hybrid():
    """With recurrent groups the end of a turn saves no tail without a state."""
    half = Half(geometry_of(group(), group(1, STATE)))
    request = request_of("a", 101, 101, n_prompt=100)
    started(half, request)
    finish(half, request)
    assert [s[:3] for s in spans(half.plan())] == [(0, 0, 64)]


def test_a_session_that_rewrites_its_end():
    """Tokens that a streaming session replaced are saved anew, however its length moved."""
    half = Half()
    request = request_of("a", 128)
    started(half, request, 256)
    half.save_ends(half.plan(a=128).saves[0])
    request.num_computed_tokens = 127
    other = request_of("a", 192, seed=9).block_hashes
    request.block_hashes[7:] = other[7:]
    request.num_tokens = 192
    assert [s[1:3] for s in spans(half.plan(a=65))] == [(64, 128), (128, 192)]
    shorter = request_of("b", 128, seed=3)
    started(half, shorter, 128)
    half.save_ends(half.plan(b=128).saves[0])
    shorter.block_hashes[:] = request_of("b", 64, seed=4).block_hashes
    shorter.num_tokens = shorter.num_prompt_tokens = shorter.num_computed_tokens = 64
    finish(half, shorter)
    assert [s[1:3] for s in spans(half.plan())] == [(0, 64)]


def test_no_page_waits_and_then_drops():
    """What finds no RAM page waits for a later step; at the request's end it is dropped."""
    half = Half(pages=4)
    request = request_of("a", 128)
    started(half, request)
    plan = half.plan(a=128)
    assert [s[1:3] for s in spans(plan)] == [(0, 64)]
    request.num_computed_tokens = 128
    assert spans(half.plan(a=1)) == []
    half.save_ends(plan.saves[0])
    later = half.plan(a=1)
    assert [s[1:3] for s in spans(later)] == [(64, 128)]
    other = request_of("b", 64, seed=5)
    started(half, other)
    other.num_computed_tokens = 64
    finish(half, other)
    assert half.half.take_counts()["save_dropped_chunks.ram.no_page"] == 1
    half.half.lookup(request_of("again", 100, seed=5), 0)
    assert half.half._trackers["again"].reason.value == "dropped"


def test_pins_are_bounded():
    """Saves in flight never hold so much of the device that it could not go on."""
    half = Half(geometry_of(num_blocks=12), pages=100)
    request = request_of("a", 192)
    started(half, request)
    half.tables["a"] = ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 11],)
    plan = half.plan(a=192)
    assert [s[1:3] for s in spans(plan)] == [(0, 64), (64, 128)]
    half.save_ends(plan.saves[0])
    request.num_computed_tokens = 192
    assert [s[1:3] for s in spans(half.plan(a=1))] == [(128, 192)]


def test_a_request_that_may_not_be_stored():
    """`store: false` keeps nothing of a request, its tail included."""
    half = Half()
    params = {"kvtier": {"store": False}}
    request = request_of("a", 101, 101, kv_transfer_params=params)
    started(half, request)
    assert spans(half.plan(a=1)) == []
    finish(half, request)
    assert spans(half.plan()) == []


def test_min_uses():
    """With ``min_uses`` a chunk is saved when it is met for the second time."""
    half = Half(write=WritePolicy(through=("disk",), min_uses=2))
    for name, saved in (("a", 0), ("b", 1)):
        request = request_of(name, 64)
        started(half, request)
        assert len(spans(half.plan(**{name: 64}))) == saved


def test_one_request_is_one_use():
    """A tail that a request meets at its prompt's end and again at its own was used once."""
    half = Half(write=WritePolicy(through=("disk",), min_uses=2))
    for name, saved in (("a", []), ("b", [(0, 64), (64, 96)])):
        request = prompt_of(half, 100, name, n_tokens=102)
        spanned = spans(half.plan(**{name: 100}))
        request.num_computed_tokens = 40  # preempted, and resumed on blocks of the device
        spanned += spans(half.plan(**{name: 61}))
        request.num_computed_tokens = 101
        finish(half, request)
        spanned += spans(half.plan())
        assert [s[1:3] for s in spanned] == saved


def fill_ram(half, *, written):
    """Save chunks that only RAM holds until it is full; return the keys of all write-backs."""
    back = []
    for i in range(4):
        request = request_of(str(i), CHUNK, seed=i)
        started(half, request)
        for job in half.plan(**{request.request_id: CHUNK}).saves:
            is_back = not len(job.chunks[0].blocks)
            back += [chunk.key for chunk in job.chunks] if is_back else []
            half.save_ends(job, written=("disk",) if is_back and written else ())
    return back


def test_write_back_before_ram_is_full():
    """Chunks that only RAM holds are written below, oldest first, before their pages are needed."""
    half = Half(pages=16, write=WritePolicy(back=("disk",)))
    back = fill_ram(half, written=True)
    for job in half.plan().saves:
        assert all(len(c.blocks) == 0 and c.tiers == ("disk",) for c in job.chunks)
        back += [chunk.key for chunk in job.chunks]
        half.save_ends(job)
    assert half.pool.pinned == []
    oldest = [half.key(request_of("x", CHUNK, seed=i), CHUNK) for i in range(4)]
    assert back == oldest[: len(back)]
    assert half.catalog.resident()["disk"] == len(back) > 0
    assert half.catalog.room_without_loss() >= 0.25
    assert half.catalog.counts.ram_evicted_lost_chunks == 0


def test_what_was_loaded_is_written_back_once_only_ram_holds_it():
    """What the disk evicts and RAM has promoted goes back, and keeps no other waiting."""
    half = Half(pages=9 * 4, write=WritePolicy(back=("disk",)))
    old = request_of("old", 8 * CHUNK + 16, seed=99)
    for end in range(CHUNK, 8 * CHUNK + 1, CHUNK):
        half.on_tier(old, end)
    half.half.on_new_request(old)
    half.half.lookup(old, 0)
    half.admit(old, 8 * CHUNK)
    (load,) = half.plan().loads
    half.load_ends(load)
    half.tell(TierNews("disk", removed=tuple(chunk.key for chunk in load.chunks)))
    (job,) = half.plan().saves
    spans = {chunk.key: (chunk.start_tokens, chunk.end_tokens) for chunk in job.chunks}
    assert spans == {half.key(old, end): (end - CHUNK, end) for end in range(64, 513, 64)}
    half.save_ends(job)
    assert half.catalog.resident()["disk"] == 8


def test_a_write_back_in_vain_waits():
    """A tier that takes nothing is not offered the same chunks step after step."""
    half = Half(pages=16, write=WritePolicy(back=("disk",)))
    assert fill_ram(half, written=False)
    half.clock.advance(WRITE_BACK_RETRY_S)
    (job,) = half.plan().saves
    half.save_ends(job, written=())
    for _ in range(20):
        half.clock.advance(WRITE_BACK_RETRY_S / 21)
        assert half.plan().saves == ()
        assert not half.half.pending()
    half.clock.advance(WRITE_BACK_RETRY_S / 2)
    assert half.plan().saves


def test_a_prefix_leaves_ram_from_its_end():
    """Chunks saved in several steps, the last of them late, go before the prefix's head."""
    half = Half(pages=4 * 4, tiers=())
    request = request_of("a", 3 * CHUNK)
    started(half, request)
    jobs = []
    for at in range(3):
        request.num_computed_tokens = at * CHUNK
        jobs += half.plan(a=CHUNK).saves
    for job in jobs:
        half.save_ends(job, written=())
    for n in range(1, 5):
        other = request_of(f"o{n}", CHUNK, seed=n)
        started(half, other)
        (job,) = half.plan(**{f"o{n}": CHUNK}).saves
        half.save_ends(job, written=())
        left = [half.catalog.source(half.key(request, e)) == RAM for e in (64, 128, 192)]
        assert left == [True] * (4 - n) + [False] * (n - 1), f"after {n} others"


def test_a_finished_prefix_counts_as_used():
    """At the end of a turn the whole prefix is young, here and below, its head the youngest."""
    half = Half(pages=2 * 4)
    request = request_of("a", 97, n_prompt=80)
    started(half, request)
    for job in half.plan(a=80).saves:
        half.save_ends(job)
    other = request_of("b", CHUNK, seed=1)
    started(half, other)
    half.save_ends(half.plan(b=CHUNK).saves[0])
    request.num_computed_tokens = 96
    finish(half, request)
    plan = half.plan()
    assert half.catalog.source(half.key(request, 64)) == RAM
    assert half.catalog.source(half.key(other, 64)) == "disk"
    assert plan.touches == (("disk", (half.key(request, 64),)),)


def test_partial_tails_of_a_finished_request():
    """States at a finished prompt's end are kept under their boundary."""
    half = Half(geometry_of(group(), group(1, STATE)))
    request = request_of("a", 128, 128)
    rows = started(half, request)
    half.half.partial_tail(request, rows, [(1, 900, 112)])
    half.half.partial_tail(SimpleNamespace(request_id="other"), rows, [(1, 901, 112)])
    assert (1, 64, 112, [900]) in spans(half.plan())
    assert BLOCK * 7 == 112


@pytest.mark.parametrize(("written", "reason"), [((), "dropped"), (("disk",), "evicted")])
def test_a_write_that_was_dropped_is_told_when_ram_has_let_go(written, reason):
    """A chunk that left RAM: dropped where its write below had found no room, else evicted."""
    half = Half(pages=4)
    request = request_of("a", 64)
    half.table(request, 64)
    half.half.admitted(request, half.kv_blocks(half.tables["a"]), 0)
    (job,) = half.plan(a=64).saves
    half.save_ends(job, written=written)
    entry = half.catalog.get(half.key(request, 64))
    other = half.catalog.begin_save(b"other" * 6 + bytes(1), 4)  # pushes it out of RAM
    assert other is not None
    assert entry.pages is None
    if written:
        half.catalog.tier_removed("disk", half.key(request, 64))
    again = request_of("b", 100)
    half.half.lookup(again, 0)
    assert half.half._trackers["b"].reason.value == reason
