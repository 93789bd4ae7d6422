"""The prober: what it asks, when it keeps still, and what reaches a real server."""

import contextlib
import socket
import threading
import time

import pytest

from kvtier.connector import prober as subject
from kvtier.connector.prober import MAX_BACKOFF_S, MAX_QUEUED, Prober, Question
from kvtier.storage.errors import TierUnavailable
from kvtier.storage.redis import RedisTier
from kvtier.storage.redis_lookup import RedisLookup
from kvtier.storage.testing import NAMESPACE, key_of, payload_of, spec_of
from kvtier.tools.redis_server import RedisServer, free_port

from ...redis_server import Cluster, Proxy, eventually, settings_of


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


class Index:
    """A shared tier made of a set; remembers what it was asked."""

    def __init__(self, held=()):
        self.keys = set(held)
        self.calls = []
        self.error = None
        self.during = lambda: None
        self.closed = False

    def held(self, keys):
        self.calls.append(list(keys))
        self.during()
        if self.error is not None:
            raise self.error
        return [key in self.keys for key in keys]

    def close(self):
        self.closed = True


@pytest.fixture
def clock():
    return Clock()


def still(index, clock, **more):
    """A prober whose thread the test plays."""
    return Prober("redis", index, clock, start=False, **more)


def chain(n, ticket="r1", number=1, tails=(), led=True, base=0):
    chunks = [[key_of(base + i)] for i in range(n)]
    return Question(number, ticket, b"mark", chunks, lambda found: tails[found : found + 1], led)


def answer_of(prober):
    (answer,) = prober.take()
    return answer


@pytest.mark.parametrize("n_held", [0, 1, 63, 64, 65, 191, 192, 449, 800])
def test_a_prefix_is_found_to_its_end_in_few_round_trips(clock, n_held):
    """However much of 800 chunks is there, exactly that is found, in at most 12 calls."""
    index = Index(key_of(i) for i in range(n_held))
    prober = still(index, clock)
    assert prober.ask(chain(800))
    prober.work()
    answer = answer_of(prober)
    assert answer.present == tuple(key_of(i) for i in range(n_held))
    assert answer.asked
    assert answer.round_trips == len(index.calls) <= 12
    assert sum(map(len, index.calls)) <= max(64, 4 * n_held)


def test_the_walk_ends_at_the_first_hole(clock):
    """What is after a missing chunk of a group with full attention is not asked for in vain."""
    index = Index(key_of(i) for i in range(800) if i != 10)
    prober = still(index, clock)
    prober.ask(chain(800))
    prober.work()
    assert len(index.calls) == 1
    assert key_of(9) in answer_of(prober).present


def test_records_that_end_inside_the_next_chunk_are_asked_for(clock):
    """After n whole chunks come the tails of chunk n, one round trip more."""
    tails = [key_of(1000 + i) for i in range(6)]
    index = Index([key_of(0), key_of(1), tails[2]])
    prober = still(index, clock)
    prober.ask(chain(5, tails=tails))
    prober.work()
    assert answer_of(prober).present == (key_of(0), key_of(1), tails[2])
    assert index.calls[-1] == [tails[2]]


def test_without_full_attention_no_chunk_leads(clock):
    """Windows and states need no unbroken chain: a missing chunk does not end the walk."""
    index = Index([key_of(790)])
    prober = still(index, clock)
    prober.ask(chain(800, led=False))
    prober.work()
    assert answer_of(prober).present == (key_of(790),)
    assert len(index.calls) <= 12


def test_questions_that_wait_together_go_out_together(clock):
    """A burst of requests takes as many round trips as its longest walk."""
    index = Index(key_of(i) for i in range(60_000))
    prober = still(index, clock)
    for i in range(50):
        assert prober.ask(chain(100, ticket=f"r{i}", number=i, base=1000 * i))
    prober.work()
    answers = prober.take()
    assert {a.question.ticket: len(a.present) for a in answers} == {f"r{i}": 100 for i in range(50)}
    assert len(index.calls) == 2


def test_a_full_queue_refuses(clock):
    """Questions beyond the bound are refused, not kept; those taken in are answered once."""
    prober = still(Index(), clock)
    assert [prober.ask(chain(1, number=i)) for i in range(MAX_QUEUED + 2)].count(False) == 2
    prober.work()
    assert len(prober.take()) == MAX_QUEUED
    assert prober.take() == []


def test_a_question_nobody_waits_for_is_not_asked(clock):
    """A question older than the deadline is answered with "not asked" and costs nothing."""
    index = Index()
    prober = still(index, clock, patience_s=0.1)
    prober.ask(chain(3))
    clock.now_s += 0.2
    prober.work()
    assert not answer_of(prober).asked
    assert index.calls == []


def test_a_tier_that_owes_an_answer_is_silent_for_everybody_else(clock):
    """While a call is out longer than anybody waits, others are refused at once; then no more."""
    index = Index()
    prober = still(index, clock, patience_s=0.1)
    seen = []

    def during():
        seen.append(prober.ask(chain(1, number=2)))
        clock.now_s += 0.5
        seen.append(prober.ask(chain(1, number=3)))

    index.during = during
    prober.ask(chain(1))
    prober.work()
    index.during = lambda: None
    assert seen == [True, False]
    assert not prober.silent
    assert prober.ask(chain(1, number=4))


def test_a_failure_silences_and_the_prober_itself_finds_out(clock, caplog):
    """After a failure nothing is asked for anybody until a probe, with back-off, is answered."""
    index = Index()
    index.error = TierUnavailable("gone")
    prober = still(index, clock)
    prober.ask(chain(1))
    prober.ask(chain(1, number=2))
    prober.work()
    assert [answer.asked for answer in prober.take()] == [False, False]
    assert prober.silent
    assert not prober.ask(chain(1, number=3))
    gaps, last_s = [], clock.now_s
    while len(gaps) < 9:
        clock.now_s += 0.25
        calls = len(index.calls)
        prober.work()
        if len(index.calls) > calls:
            gaps.append(clock.now_s - last_s)
            last_s = clock.now_s
    assert gaps == sorted(gaps)
    assert gaps[0] == pytest.approx(1.0, abs=0.3)
    assert gaps[-1] == pytest.approx(MAX_BACKOFF_S, abs=0.3)
    assert all(len(call) == 1 for call in index.calls[1:])
    index.error = None
    clock.now_s += MAX_BACKOFF_S
    prober.work()
    assert not prober.silent
    assert prober.ask(chain(1, number=4))
    assert len(caplog.records) == 2  # one line for each change of state


def test_an_exception_nobody_expects_does_not_end_the_prober(clock, caplog):
    """A bug below is logged, answered as nothing known, and the tier is tried again."""
    index = Index()
    index.error = ZeroDivisionError()
    prober = still(index, clock)
    prober.ask(chain(1))
    prober.work()
    assert not answer_of(prober).asked
    assert "unexpectedly" in caplog.text


def test_closing_wakes_nobody_up_later(clock):
    """A closed prober refuses, answers nothing and lets go of its tier."""
    index = Index()
    prober = still(index, clock)
    prober.ask(chain(1))
    prober.close()
    prober.work()
    assert index.closed
    assert prober.take() == []
    assert not prober.ask(chain(1))


def test_close_does_not_wait_for_a_call_that_hangs():
    """With its thread in a hung call a prober closes at once."""
    entered, release = threading.Event(), threading.Event()
    index = Index()

    def during():
        entered.set()
        release.wait(20)

    index.during = during
    prober = Prober("redis", index, lambda: 0.0)
    prober.ask(chain(1))
    assert entered.wait(10)
    prober.close()
    release.set()
    prober.close(wait_s=10)
    assert prober._thread is not None
    assert not prober._thread.is_alive()


# -- a real server -------------------------------------------------------------


class Counting:
    """Passes bytes on and counts round trips: bursts of the client after an answer."""

    def __init__(self, port):
        self.trips = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._socks = [self._listener]
        self._to = port
        self._turn = threading.Lock()
        self._asked = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                front, _ = self._listener.accept()
            except OSError:
                return
            back = socket.create_connection(("127.0.0.1", self._to))
            self._socks += [front, back]
            for source, sink, asks in ((front, back, True), (back, front, False)):
                threading.Thread(target=self._pass, args=(source, sink, asks), daemon=True).start()

    def _pass(self, source, sink, asks):
        try:
            while data := source.recv(1 << 16):
                with self._turn:
                    self.trips += asks and not self._asked
                    self._asked = asks
                sink.sendall(data)
        except OSError:
            return

    def close(self):
        for sock in self._socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def fill(url, n, rank=0):
    tier = RedisTier(settings_of(url), NAMESPACE, rank)
    for i in range(n):
        tier.put(spec_of(i), payload_of(i))
    tier.close()


def run_once(prober, question):
    assert prober.ask(question)
    found = []
    eventually(lambda: found.extend(prober.take()) or found)
    return found[0]


def test_800_chunks_that_only_redis_holds_take_at_most_12_round_trips():
    """Counted on the wire before a real server, greeting included."""
    with RedisServer() as server:
        with server.client() as client:
            name = RedisTier(settings_of(server.url), NAMESPACE, 0)._names.head
            client.mset({name(key_of(i)): b"x" for i in range(800)})
        counting = Counting(server.port)
        index = RedisLookup(settings_of(f"redis://127.0.0.1:{counting.port}"), NAMESPACE, 1)
        prober = Prober("redis", index, lambda: 0.0)
        answer = run_once(prober, chain(800))
        first = counting.trips
        run_once(prober, chain(800, number=2))
        again = counting.trips - first
        prober.close(5)
        counting.close()
    assert len(answer.present) == 800
    assert answer.round_trips <= again <= first <= 12


def test_a_chunk_counts_when_all_ranks_have_it():
    """Of two ranks' records both must be there; one EXISTS a chunk asks for them."""
    with RedisServer() as server:
        fill(server.url, 4, rank=0)
        fill(server.url, 2, rank=1)
        index = RedisLookup(settings_of(server.url), NAMESPACE, 2)
        assert index.held([key_of(i) for i in range(5)]) == [True, True, False, False, False]
        with server.client() as client:
            assert client.info("commandstats")["cmdstat_exists"]["calls"] == 5
        index.close()


def test_a_cluster_is_asked_for_all_ranks_too():
    """The records of a chunk's ranks lie on one node, whatever the node."""
    cluster = Cluster()
    try:
        fill(cluster.url, 12, rank=0)
        fill(cluster.url, 9, rank=1)
        index = RedisLookup(settings_of(cluster.url), NAMESPACE, 2)
        assert index.held([key_of(i) for i in range(14)]) == [i < 9 for i in range(14)]
        index.close()
    finally:
        cluster.close()


def test_a_dead_server_silences_and_a_started_one_is_found(monkeypatch):
    """Nobody listens: no answer to wait for. When the server is there it is asked again."""
    monkeypatch.setattr(subject, "MIN_BACKOFF_S", 0.05)
    port = free_port()
    prober = Prober(
        "redis",
        RedisLookup(settings_of(f"redis://127.0.0.1:{port}"), NAMESPACE, 1),
        time.monotonic,
    )
    prober.ask(chain(3))
    eventually(lambda: prober.take() and prober.silent)
    with RedisServer(port=port) as server:
        eventually(lambda: not prober.silent)
        fill(server.url, 3)
        assert len(run_once(prober, chain(3, number=2)).present) == 3
    prober.close(5)


def test_a_silent_server_holds_nobody_up():
    """A server that says nothing: asking is refused after the patience, without an answer."""
    with RedisServer() as server:
        proxy = Proxy(server.port)
        proxy.fault = "silent"
        prober = Prober(
            "redis",
            RedisLookup(settings_of(proxy.url), NAMESPACE, 1),
            time.monotonic,
            patience_s=0.05,
        )
        assert prober.ask(chain(3))
        begin_s = time.monotonic()
        eventually(lambda: prober.silent, 5)
        assert time.monotonic() - begin_s < 1
        assert not prober.ask(chain(3, number=2))
        prober.close(5)
        proxy.close()
