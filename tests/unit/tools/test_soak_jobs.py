"""The storage soak's scheduler half: what works is not wrong, and what does not is named."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest

from kvtier.storage.disk import DiskTier
from kvtier.storage.disk_layout import iter_record_files
from kvtier.storage.errors import RecordMissing
from kvtier.storage.jobs import LoadRetired, SaveRetired
from kvtier.tools import soak_chunks, soak_storage_jobs

SEED = 5


def tier_of(folder, capacity_bytes=1 << 26):
    return DiskTier(str(folder), soak_chunks.NAMESPACE, 0, capacity_bytes, poll_s=0.1)


def player_on(folder, done=None, **more):
    done = Counter() if done is None else done
    more = {"lossless": True, **more}
    return soak_storage_jobs.JobPlayer(
        tier_of(folder, more.pop("capacity_bytes", 1 << 26)), SEED, 1,
        lambda kind: done.update([kind]), **more,
    )  # fmt: skip


def play(player, most_s=20.0, enough=lambda: False):
    """Run it until it is enough; whatever it finds is raised."""
    stopped = threading.Event()
    threading.Timer(most_s, stopped.set).start()
    watch = threading.Thread(target=lambda: _wait(enough, stopped))
    watch.start()
    try:
        player.run(stopped)
    finally:
        stopped.set()
        watch.join()


def _wait(enough, stopped):
    while not stopped.wait(0.01):
        if enough():
            stopped.set()


@pytest.mark.parametrize("capacity_bytes", [1 << 26, 4 << 20], ids=["roomy", "evicting"])
def test_what_works_is_not_wrong(tmp_path, capacity_bytes):
    """Hundreds of jobs over few pages: all report, all bytes are right, and are after the end."""
    print("seed", SEED)
    done = Counter()
    lossless = capacity_bytes > 1 << 25
    player = player_on(tmp_path, done, capacity_bytes=capacity_bytes, lossless=lossless)
    play(player, most_s=60.0, enough=lambda: done["load"] > 300 and done["save"] > 100)
    assert done["save"] > 100
    assert player._catalog.counts.ram_evicted_chunks > 0
    tier = tier_of(tmp_path, capacity_bytes)
    try:
        found = soak_chunks.check_chunks(tier, SEED)
    finally:
        tier.close()
    assert found["wrong"] == []
    assert found["there"] > 100


def test_loads_without_time_do_not_take_the_tier_off(tmp_path, monkeypatch):
    """Each read is slower than every second load waits: the tier stays on, and all is right."""
    monkeypatch.setattr(soak_storage_jobs, "SHORT_SHARE", 0.5)
    player, late = player_on(tmp_path), Counter()
    link = next(iter(player._transfer.links.values()))
    get, tell = link.tier.get, link.late

    def slow(spec, into):
        time.sleep(5 * soak_storage_jobs.SHORT_S)
        return get(spec, into)

    def told_late():
        late["late"] += 1
        tell()

    link.tier.get, link.late = slow, told_late
    play(player, most_s=60.0, enough=lambda: late["late"] > 9)
    assert late["late"] > 9


def test_a_byte_that_a_load_changes_is_found(tmp_path):
    """One bit of one block, on its way to the device."""
    player = player_on(tmp_path)
    mover = player._transfer._load_runner._mover
    load = mover.load

    def damaged(group, blocks, pages, after=None):
        ticket = load(group, blocks, pages, after)
        player._device[blocks[-1], 4000] ^= 1
        return ticket

    mover.load = damaged
    with pytest.raises(soak_chunks.Wrong, match="holds other bytes"):
        play(player)


def test_a_save_that_reads_too_late_is_found(tmp_path):
    """Told as copied before it was: the block is another chunk's by then."""
    player = player_on(tmp_path)
    runner = player._transfer._save_runner
    save = runner._mover.save

    def late(group, blocks, pages, after=None):
        player._device[blocks[0]] = 7  # as if the engine had used it again
        return save(group, blocks, pages, after)

    runner._mover.save = late
    with pytest.raises(soak_chunks.Wrong, match="holds other bytes"):
        play(player)


@pytest.mark.parametrize("kind", [SaveRetired, LoadRetired])
def test_a_report_that_comes_twice_or_never_is_found(tmp_path, monkeypatch, kind):
    """Every job reports exactly once."""
    for times, words in ((2, "came twice"), (0, "have not reported")):
        if times == 0:
            monkeypatch.setattr(soak_storage_jobs, "REST_S", 0.5)
        player = player_on(tmp_path / words)
        take = player._transfer.take_events
        player._transfer.take_events = lambda take=take, times=times: [
            e for event in take() for e in [event] * (times if isinstance(event, kind) else 1)
        ]
        with pytest.raises(soak_chunks.Wrong, match=words):
            play(player)


def test_a_page_that_nobody_gives_back_is_found(tmp_path):
    """At rest no RAM page is pinned, no device block held."""
    done = Counter()
    player = player_on(tmp_path, done)
    unpin = player._catalog.unpin
    player._catalog.unpin = lambda entry: unpin(entry) if done["load"] < 50 else None
    with pytest.raises(soak_chunks.Wrong, match="pinned by no job"):
        play(player)


def test_a_record_that_vanishes_is_found_where_nothing_is_evicted(tmp_path):
    """In a store with room for everything nothing may be missing; elsewhere it may."""
    done = Counter()
    player = player_on(tmp_path, done)
    tier = next(iter(player._transfer.links.values())).tier
    get = tier.get

    def forgetful(spec, into):
        if done["load"] > 50:
            raise RecordMissing("gone")
        return get(spec, into)

    tier.get = forgetful
    with pytest.raises(soak_chunks.Wrong, match="is lost"):
        play(player)


def test_what_is_left_after_a_kill_is_compared(tmp_path, monkeypatch):
    """A record that is damaged, or holds another chunk's bytes, is told with its number."""
    done = Counter()
    play(player_on(tmp_path, done), enough=lambda: done["save"] > 60)
    files = [f.path for f in iter_record_files(str(tmp_path))]
    with open(files[0], "r+b") as file:
        file.seek(5000)
        old = file.read(1)
        file.seek(5000)
        file.write(bytes((old[0] ^ 1,)))
    tier = tier_of(tmp_path)
    try:
        wrong = soak_chunks.check_chunks(tier, SEED)["wrong"]
        assert len(wrong) == 1
        assert "is damaged, by no fault" in wrong[0]
        monkeypatch.setattr(soak_chunks.Content, "holds", lambda *_: False)
        found = soak_chunks.check_chunks(tier, SEED)
        assert found["there"] == len(files) - 1
        assert sum("holds other bytes" in text for text in found["wrong"]) >= found["there"]
        assert all("never written" in t for t in soak_chunks.check_chunks(tier, SEED + 1)["wrong"])
    finally:
        tier.close()
