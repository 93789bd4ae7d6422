"""Wishes to have records in RAM: how the scheduler half works on them, how they reach it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import stat
import threading
import time
from queue import Queue
from types import SimpleNamespace

import pytest

from kvtier.connector import control
from kvtier.connector.control import ControlServer, check_owner, parse_wish
from kvtier.connector.warm_request import MAX_KEYS, WarmRequest
from kvtier.connector.warmer import CHUNKS_UNDER_WAY, DEADLINE_S
from kvtier.storage.catalog import RAM
from kvtier.storage.errors import KVTierError
from kvtier.storage.jobs import ChunkStatus, LoadDone, LoadRetired, TierNews
from kvtier.storage.key import key_name

from .halves import CHUNK, OK, Half, request_of

SPACE = bytes(16)


def half_of(n_chunks=3, *, tier="disk", **options):
    """A half with a control, and a request whose chunks a tier holds."""
    stub = SimpleNamespace(wishes=Queue(), close=lambda: None)
    half = Half(tiers=("disk", "redis"), control=stub, **options)
    half.wishes = stub.wishes
    request = request_of("a", n_chunks * CHUNK + 8)
    ends = range(CHUNK, n_chunks * CHUNK + 1, CHUNK)
    if tier == "disk":
        for end in ends:
            half.on_tier(request, end)
    keys = tuple((half.key(request, end), end) for end in ends)
    return half, request, WarmRequest(tier, SPACE, keys)


def run(half, wish, limit=100):
    """Step until the wish is over; the jobs that were planned."""
    half.wishes.put(wish)
    jobs = []
    for _ in range(limit):
        for job in half.plan().loads:
            jobs.append(job)
            half.load_ends(job)
        if wish.over:
            break
    return jobs


def test_records_come_up_in_their_order():
    """Loads without request and device blocks, into own pages; then a hit is one of RAM."""
    half, request, wish = half_of()
    half.plan()
    assert not half.half.pending()
    half.wishes.put(wish)
    assert half.half.pending()
    (job,) = half.plan().loads
    assert job.request_id == ""
    assert [(c.key, c.end_tokens) for c in job.chunks] == list(wish.keys)
    assert [(c.source, len(c.blocks), len(c.pages), c.n_blocks) for c in job.chunks] == [
        ("disk", 0, 4, 4)
    ] * 3
    assert wish.as_dict()["state"] == "running"
    half.load_ends(job)
    assert half.half.pending()
    assert half.plan().loads == ()
    assert wish.as_dict() == {
        "state": "done",
        "chunks": 3,
        "loaded": 3,
        "in_ram": 0,
        "skipped": {},
    }
    assert half.at_rest()
    assert half.half.take_counts() == {"warmed_chunks.disk": 3}
    assert half.half.lookup(request, 0) == (192, True)
    half.admit(request, 192)
    assert {c.source for c in half.plan().loads[0].chunks} == {RAM}


def test_a_request_does_not_wait_for_what_a_wish_brings():
    """What is read when no thread has anything better to do may be long in coming."""
    half, request, wish = half_of()
    half.wishes.put(wish)
    half.half.on_new_request(request)
    (job,) = half.plan().loads
    assert half.half.lookup(request, 0) == (192, True)
    half.admit(request, 192)
    (own,) = half.plan().loads
    assert [(c.source, c.pages) for c in own.chunks] == [("disk", None)] * 3
    half.load_ends(own)
    half.load_ends(job)
    half.plan()
    assert wish.as_dict()["loaded"] == 3
    assert half.half.lookup(request, 0) == (192, True)
    half.half.finished(request, half.tables["a"])
    assert half.at_rest()


def test_few_at_a_time_and_half_of_ram():
    """However many are asked for, few are under way, and the rest of RAM is left alone."""
    half, _, wish = half_of(40, pages=100)
    first = half.on_tier(request_of("b", 200, seed=9), CHUNK)
    entry = half.catalog.begin_promote(first, 4)
    half.catalog.filled(entry, True)
    half.catalog.unpin(entry)
    jobs = run(half, wish)
    assert all(len(job.chunks) <= CHUNKS_UNDER_WAY for job in jobs)
    said = wish.as_dict()
    assert (said["loaded"], said["skipped"]) == (12, {"no_room": 28})
    assert [half.catalog.source(key) for key, _ in wish.keys[:13]] == [RAM] * 12 + ["disk"]
    assert half.catalog.source(first) == RAM
    assert half.at_rest()


def test_only_what_is_also_below_gives_way():
    """RAM that holds the only copy of something is not taken; nothing is lost for a wish."""
    half, _, wish = half_of(3, pages=8)
    other = request_of("b", 200, seed=5)
    for end in (CHUNK, 2 * CHUNK):
        entry = half.catalog.begin_save(half.key(other, end), 4)
        half.catalog.filled(entry, True)
        half.catalog.unpin(entry)
    run(half, wish)
    assert wish.as_dict()["skipped"] == {"no_room": 3}
    assert half.catalog.source(half.key(other, CHUNK)) == RAM


def test_what_is_there_is_kept_and_what_is_not_is_told():
    """In RAM already: counted and made young; not stored, of no group, of no length: skipped."""
    half, _, wish = half_of()
    run(half, wish)
    old = half.catalog.get(wish.keys[0][0]).used
    other = request_of("b", 200, seed=3)
    wish = WarmRequest(
        "disk",
        SPACE,
        (
            wish.keys[0],
            (half.key(other, CHUNK), CHUNK),
            (half.key(other, CHUNK)[:-1] + b"\x07", CHUNK),
            (half.key(other, CHUNK), 0),
        ),
    )
    assert run(half, wish) == []
    said = wish.as_dict()
    assert (said["in_ram"], said["skipped"]) == (1, {"not_stored": 1, "unknown": 2})
    assert half.catalog.get(wish.keys[0][0]).used > old
    assert half.half.take_counts()["warm_skipped_chunks.unknown"] == 2


def test_a_shared_tier_is_believed_and_corrected():
    """Nobody has told the engine of these records; what is missing is forgotten again."""
    half, _, wish = half_of(tier="redis")
    wish.namespace = b"s" * 16
    half.half._namespace_of = half_space
    half.wishes.put(wish)
    (job,) = half.plan().loads
    assert {c.source for c in job.chunks} == {"redis"}
    half.load_ends(job, OK, ChunkStatus.MISSING, ChunkStatus.DAMAGED)
    half.plan()
    said = wish.as_dict()
    assert (said["state"], said["loaded"], said["skipped"]) == ("done", 1, {"failed": 2})
    assert [half.catalog.source(key) for key, _ in wish.keys] == [RAM, None, None]
    assert half.at_rest()


def half_space(generation):
    from kvtier.connector.plan import NamespaceInfo

    return NamespaceInfo(SPACE, generation, {}, b"s" * 16, {})


def test_other_namespaces_and_tiers_are_left_alone():
    """An engine that has not the namespace, or not the tier, says so and does nothing."""
    for tier, namespace in (("disk", b"x" * 16), ("redis", SPACE), ("tape", SPACE)):
        half, _, wish = half_of()
        wish.tier, wish.namespace = tier, namespace
        assert run(half, wish) == []
        assert wish.as_dict()["state"] == "other_namespace"
        assert half.at_rest()


def test_nobody_waits_any_more():
    """A wish that is given up begins nothing new; a clear and the end of the engine end it."""
    half, _, wish = half_of(20, pages=400)
    half.wishes.put(wish)
    (job,) = half.plan().loads
    wish.cancel()
    half.load_ends(job)
    assert half.plan().loads == ()
    assert (wish.as_dict()["state"], wish.as_dict()["loaded"]) == ("cancelled", 8)
    assert half.at_rest()
    for end in ("reset", "shutdown"):
        half, _, wish = half_of(20, pages=400)
        half.wishes.put(wish)
        (job,) = half.plan().loads
        later = WarmRequest("disk", SPACE, wish.keys)
        half.wishes.put(later)
        getattr(half.half, end)()
        assert wish.as_dict()["state"] == later.as_dict()["state"] == "cancelled"
        half.load_ends(job, *[ChunkStatus.CANCELLED] * 8)
        half.plan()
        assert half.catalog.pinned_pages == 0


def test_a_read_that_hangs_ends_a_wish():
    """What has not come by the end of its time is told as failed; the next wish has its turn."""
    half, _, wish = half_of(20, pages=400)
    half.wishes.put(wish)
    (job,) = half.plan().loads
    wish.cancel()
    half.tell(LoadDone(job.job_id, "", bytes([ChunkStatus.DEADLINE] * 8), ok=False))
    half.clock.advance(DEADLINE_S - 1.0)
    half.plan()
    assert not wish.over
    half.clock.advance(2.0)
    half.plan()
    assert (wish.as_dict()["state"], wish.as_dict()["skipped"]) == ("cancelled", {"failed": 8})
    assert not half.half.pending()
    half.tell(LoadRetired(job.job_id, bytes(8)))
    assert half.at_rest()


def test_all_ranks_must_have_it():
    """With two ranks a record is in RAM once both have read it."""
    half, _, wish = half_of(1, n_ranks=2)
    half.wishes.put(wish)
    (job,) = half.plan().loads

    half.tell(LoadDone(job.job_id, "", bytes([OK]), ok=True), rank=0)
    half.tell(LoadRetired(job.job_id, b"\1"), rank=0)
    half.plan()
    assert wish.as_dict()["loaded"] == 0
    half.tell(LoadDone(job.job_id, "", bytes([OK]), ok=True), rank=1)
    half.tell(LoadRetired(job.job_id, b"\1"), rank=1)
    half.plan()
    assert wish.as_dict()["loaded"] == 1


# -- the socket ---------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path):
    made = ControlServer(str(tmp_path / ("long" * 30) / "control"))
    yield made, tmp_path / ("long" * 30) / "control"
    made.close()


def line(sent, **changes):
    value = {
        "format": "kvtier-control",
        "version": 1,
        "do": "warm",
        "tier": "disk",
        "namespace": SPACE.hex(),
        "keys": [[key_name(key), end] for key, end in sent],
    }
    return json.dumps({**value, **changes}).encode() + b"\n"


def visit(folder):
    (name,) = [n for n in os.listdir(folder) if n.endswith(".sock")]
    fd = os.open(folder, os.O_RDONLY)
    try:
        return control.connect(fd, name, 5)
    finally:
        os.close(fd)


def answers(visitor):
    with visitor.makefile("rb") as file:
        return [json.loads(row) for row in file]


def test_a_wish_travels_and_is_reported(server):
    """Only its owner can come; the wish arrives whole; progress comes back until it is over."""
    made, folder = server
    (name,) = os.listdir(folder)
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(folder / name).st_mode) == 0o600
    keys = [(bytes([n]) * 33, 256 * n) for n in range(1, 5)]
    with visit(folder) as visitor:
        visitor.sendall(line(keys))
        wish = made.wishes.get(timeout=5)
        assert (wish.tier, wish.namespace, list(wish.keys)) == ("disk", SPACE, keys)
        wish.begin()
        wish.count("loaded", 3)
        wish.count("no_room")
        wish.end("done")
        said = answers(visitor)
    assert said[0]["state"] in {"waiting", "running", "done"}
    assert said[-1] == {
        "state": "done",
        "chunks": 4,
        "loaded": 3,
        "in_ram": 0,
        "skipped": {"no_room": 1},
    }


def test_a_visitor_that_hangs_up_cancels(server):
    """Who goes away does not leave work behind, and the next one is served."""
    made, folder = server
    for _ in range(2):
        with visit(folder) as visitor:
            visitor.sendall(line([]))
            wish = made.wishes.get(timeout=5)
        deadline_s = time.monotonic() + 5
        while not wish.cancelled:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)


@pytest.mark.parametrize(
    "data",
    [
        b"\n",
        b"[]\n",
        b"{}\n",
        line([], version=2),
        line([], do="exec"),
        line([], namespace="00"),
        line([], namespace=7),
        line([], keys=[["x", 1]]),
        line([], keys=[["00" * 32 + "-g0", "many"]]),
        line([], keys=[["00" * 32 + "-g0", 1]] * (MAX_KEYS + 1)),
        b"[" * 100_000 + b"\n",
    ],
)
def test_what_is_not_understood_is_refused(server, data):
    """One line of reason; the thread lives on."""
    made, folder = server
    with visit(folder) as visitor:
        visitor.sendall(data)
        (said,) = answers(visitor)
    assert said["state"] == "refused"
    assert made.wishes.empty()
    assert made._thread.is_alive()


def test_wishes_that_wait_are_few(server):
    """An engine that does not step refuses the fifth, without a thread or memory for each."""
    made, folder = server
    for _ in range(control.MAX_WAITING):
        made.wishes.put(WarmRequest("disk", SPACE, ()))
    with visit(folder) as visitor:
        visitor.sendall(line([]))
        assert answers(visitor)[-1]["why"] == "too many wait already"


def test_silent_and_talkative_visitors(server, monkeypatch):
    """Who says nothing, or does not stop, is sent away; others are served after that."""
    monkeypatch.setattr(control, "READ_TIMEOUT_S", 0.2)
    monkeypatch.setattr(control, "MAX_LINE_BYTES", 1000)
    made, folder = server
    with visit(folder) as silent, visit(folder) as talker, visit(folder) as visitor:
        talker.sendall(b"x" * 5000)
        visitor.sendall(line([]))
        wish = made.wishes.get(timeout=10)
        wish.end("done")
        assert answers(visitor)[-1]["state"] == "done"
        assert silent.recv(100) == b""
    with visit(folder) as visitor:
        visitor.sendall(b" " * 1000 + line([]))
        assert "too long" in answers(visitor)[-1]["why"]


def test_who_goes_on_talking_does_not_hurry_the_engine(server, monkeypatch):
    """Bytes after the line are passed over, at the pace of the progress that is told."""
    made, folder = server
    tell, told = control._tell, []
    monkeypatch.setattr(control, "_tell", lambda *args: told.append(1) or tell(*args))
    with visit(folder) as visitor:
        visitor.sendall(line([]))
        wish = made.wishes.get(timeout=5)
        for _ in range(5):
            visitor.sendall(b"x")
            time.sleep(0.1)
        assert len(told) < 10
        wish.end("done")


def test_a_moment_without_descriptors_does_not_end_the_listening(server, monkeypatch):
    """When `accept` fails, the next visitor is served all the same."""
    made, folder = server
    monkeypatch.setattr(control, "TELL_EVERY_S", 0.01)
    real, failed = made._socket, threading.Event()

    def accept():
        if failed.is_set():
            return real.accept()
        failed.set()
        raise OSError(errno.EMFILE, "Too many open files")

    made._socket = SimpleNamespace(accept=accept, close=real.close)
    assert failed.wait(5)
    with visit(folder) as visitor:
        visitor.sendall(b"\n")
        assert answers(visitor)[-1]["state"] == "refused"


def test_a_socket_has_its_name_when_it_listens(tmp_path, monkeypatch):
    """Another engine that starts now finds nothing that looks as if its engine were dead."""
    seen, rename = [], os.rename

    def look(*args, **kwargs):
        seen.extend(os.listdir(tmp_path))
        control._sweep(str(tmp_path), kwargs["src_dir_fd"])
        rename(*args, **kwargs)

    monkeypatch.setattr(os, "rename", look)
    made = ControlServer(str(tmp_path))
    assert len(seen) == 1
    assert not seen[0].endswith(control.SUFFIX)
    assert os.listdir(tmp_path) == [made._name]
    made.close()


def test_another_user_is_not_heard(server, monkeypatch):
    """The kernel tells who is at the other end."""
    made, folder = server
    monkeypatch.setattr(control, "_user", lambda visitor: os.geteuid() + 1)
    with visit(folder) as visitor:
        with contextlib.suppress(BrokenPipeError):
            visitor.sendall(line([]))
        with contextlib.suppress(ConnectionResetError):
            assert answers(visitor) == []
    assert made.wishes.empty()


def test_a_folder_of_others_is_not_used(tmp_path):
    """Where somebody else could put a socket, no engine listens and no command asks."""
    folder = tmp_path / "control"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(KVTierError, match="owner"):
        ControlServer(str(folder))
    folder.chmod(0o755)
    fd = os.open(folder, os.O_RDONLY)
    check_owner(fd, str(folder))
    os.close(fd)


def test_sockets_of_the_dead_are_swept(tmp_path, monkeypatch):
    """An engine that was killed leaves a socket; the next one takes it away, not the living's."""
    first = ControlServer(str(tmp_path))
    dead = socket.socket(socket.AF_UNIX)
    monkeypatch.chdir(tmp_path)
    dead.bind("9-dead.sock")
    dead.close()
    second = ControlServer(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == sorted([first._name, second._name])
    first.close()
    second.close()
    second.close()
    assert os.listdir(tmp_path) == []
    assert not [t for t in threading.enumerate() if t.name == "kvtier-control"]


def test_keys_survive_the_wire():
    """What is sent is what is asked for."""
    keys = [(os.urandom(33), n) for n in range(100)]
    assert parse_wish(line(keys)).keys == tuple(keys)


def test_indexes_are_waited_for():
    """While a tier's index is being read a wish waits: it would be told that nothing is there."""
    half, _, wish = half_of()
    half.tell(TierNews("disk", complete=False, reset=True))
    half.wishes.put(wish)
    assert half.plan().loads == ()
    assert wish.as_dict()["state"] == "waiting"
    half.tell(TierNews("disk", added=tuple(key for key, _ in wish.keys)))
    assert len(half.plan().loads[0].chunks) == 3
