"""What the scheduler half believes of a shared tier: how it learns, doubts and forgets."""

import pytest

from kvtier.connector import shared_lookup as subject
from kvtier.connector.geometry import Geometry, GroupGeometry, GroupKind, Region
from kvtier.connector.lookup import PrefixLookup
from kvtier.connector.prober import Answer
from kvtier.connector.shared_lookup import SharedLookup
from kvtier.storage.catalog import Catalog
from kvtier.storage.counts import Counts

UNIT, CHUNK = 16, 64


class Clock:
    now_s = 50.0

    def __call__(self):
        return self.now_s


class FakeProber:
    """Takes questions; the test answers them when it likes."""

    name = "redis"

    def __init__(self):
        self.silent = False
        self.refuses = False
        self.questions = []
        self.answers = []
        self.closed = False

    def ask(self, question):
        if not self.refuses:
            self.questions.append(question)
        return not self.refuses

    def take(self):
        answers, self.answers = self.answers, []
        return answers

    def answer(self, question, present=(), asked=True):
        self.answers.append(Answer(question, tuple(present), asked, 1))

    def close(self):
        self.closed = True


def group(number, kind, window=None):
    return GroupGeometry(number, kind, UNIT, window, (Region("l", 0, 4096, 4096),))


def geometry_of(*groups):
    return Geometry(groups, UNIT, UNIT, UNIT, CHUNK, 100, "LBHNC", len(groups))


FULL = geometry_of(group(0, GroupKind.FULL))
WINDOWED = geometry_of(
    group(0, GroupKind.SLIDING_WINDOW, 32), group(1, GroupKind.FULL), group(2, GroupKind.RECURRENT)
)


def hashes(n_tokens, seed=1):
    return [seed.to_bytes(4, "big") + (i + 1).to_bytes(28, "big") for i in range(n_tokens // UNIT)]


class Setup:
    def __init__(self, geometry=FULL, n_holders=1, **more):
        self.clock = Clock()
        self.catalog = Catalog(("disk", "redis"), n_holders)
        self.shared = SharedLookup(geometry, self.catalog, self.clock, Counts(), **more)
        self.prober = FakeProber()
        self.shared.set_probers([self.prober])
        self.lookup = PrefixLookup(geometry, self.catalog)

    def ask(self, n_tokens=256, covered=0, ticket="r", seed=1):
        return self.shared.ask(ticket, hashes(n_tokens, seed), covered, n_tokens - UNIT)

    @property
    def question(self):
        return self.prober.questions[-1]

    def keys(self, question=None):
        return [key for keys in (question or self.question).chunks for key in keys]

    def hit(self, n_tokens=256, seed=1):
        return self.lookup.find(hashes(n_tokens, seed), 0, n_tokens - UNIT).tokens


@pytest.fixture
def setup():
    return Setup()


def test_an_answer_becomes_a_hit(setup):
    """Keys that are there are served from the shared tier, up to the last token but one."""
    assert setup.ask()
    assert setup.shared.open("r")
    setup.shared.take()
    assert setup.shared.open("r")
    setup.prober.answer(setup.question, setup.keys())
    setup.shared.take()
    assert not setup.shared.open("r")
    assert setup.hit() == 240
    assert setup.catalog.source(setup.keys()[0]) == "redis"


def test_windows_are_asked_for_where_the_longest_hit_ends():
    """A prompt of whole chunks is restored to a block before its end, with its windows there."""
    setup = Setup(geometry_of(group(0, GroupKind.FULL), group(1, GroupKind.SLIDING_WINDOW, 32)))
    setup.ask(128)
    inside = setup.question.inside(2)
    assert inside == [hashes(128)[112 // UNIT - 1] + b"\1"]
    setup.prober.answer(setup.question, [*setup.keys(), *inside])
    setup.shared.take()
    assert setup.hit(128) == 112


@pytest.mark.parametrize("n_tokens", [64, 128, 130, 250, 256])
def test_every_record_that_can_serve_is_asked_for(n_tokens):
    """Wherever a prompt ends, all keys at its hashes' ends are asked for, whole chunk or not."""
    setup = Setup()
    setup.ask(n_tokens)
    n_whole = n_tokens // CHUNK
    ends = [(i + 1) * CHUNK // UNIT for i in range(n_whole)]
    ends += range(n_whole * CHUNK // UNIT + 1, n_tokens // UNIT + 1)
    asked = setup.keys() + list(setup.question.inside(n_whole))
    assert asked == [hashes(256)[end - 1] + b"\0" for end in ends]


def test_only_what_is_not_known_is_asked_for(setup):
    """The question begins at the chunk where the hit so far ends."""
    setup.ask(covered=144)
    assert setup.keys() == [hashes(256)[end - 1] + b"\0" for end in (12, 16)]
    assert not setup.ask(covered=240)


def test_all_groups_are_asked_and_full_attention_leads():
    """Windows and states go with the chunk; whatever the order of groups, the full one is first."""
    setup = Setup(WINDOWED)
    setup.ask(128)
    first = setup.question.chunks[0]
    assert first[0] == hashes(128)[3] + b"\1"
    assert hashes(128)[3] + b"\0" in first
    assert [key for key in first if key.endswith(b"\2")] == [h + b"\2" for h in hashes(64)]
    assert setup.question.led
    assert not Setup(geometry_of(group(0, GroupKind.RECURRENT))).shared._led


def test_absence_is_believed_for_a_moment(setup):
    """After "nothing there" the chain is not asked for again for a second, other chains are."""
    setup.ask()
    setup.prober.answer(setup.question)
    setup.shared.take()
    assert not setup.ask(ticket="another")
    assert setup.ask(seed=2)
    setup.clock.now_s += subject.NEGATIVE_TTL_S + 0.01
    assert setup.ask()


def test_a_question_that_was_never_put_leaves_no_memory_of_absence(setup):
    """A tier that failed has not said that the chain is absent."""
    setup.ask()
    setup.prober.answer(setup.question, asked=False)
    setup.shared.take()
    assert not setup.shared.open("r")
    assert setup.ask()


def test_a_silent_refusing_or_offline_tier_is_not_waited_for(setup):
    """Then the answer is what is known here, at once."""
    setup.prober.silent = True
    assert not setup.ask()
    setup.prober.silent, setup.prober.refuses = False, True
    assert not setup.ask()
    setup.prober.refuses = False
    setup.catalog.set_offline("redis", True)
    assert not setup.ask()
    assert not setup.shared.open("r")
    assert setup.prober.questions == []


def test_a_late_answer_is_learned_from_but_opens_nothing(setup):
    """An answer after its request went on serves the next; it is not taken for another's."""
    setup.ask()
    old = setup.question
    setup.shared.forget("r")
    setup.ask(covered=64)
    setup.prober.answer(old, setup.keys(old))
    setup.shared.take()
    assert setup.shared.open("r")
    assert setup.hit() == 240
    setup.prober.answer(setup.question, ())
    setup.shared.take()
    assert not setup.shared.open("r")


def test_a_failed_load_is_believed_more_than_an_answer_under_way(setup):
    """Asked, load fails, answer comes: the record that is known to be bad stays forgotten."""
    setup.ask()
    keys = setup.keys()
    for key in keys:
        setup.catalog.tier_added("redis", key, 0)
    setup.shared.learned("redis", keys)
    setup.catalog.tier_removed("redis", keys[1])
    setup.shared.missed("redis", [keys[1]], [])
    setup.prober.answer(setup.question, keys)
    setup.shared.take()
    assert setup.hit() == CHUNK
    setup.clock.now_s += subject.DISTRUST_S + 0.1
    setup.ask(covered=64)
    setup.prober.answer(setup.question, keys)
    setup.shared.take()
    assert setup.hit() == 240


def test_one_missing_record_puts_the_rest_of_the_prefix_in_doubt(setup):
    """What a failed load had not read yet is forgotten too, so that one question finds it all."""
    setup.ask()
    keys = setup.keys()
    setup.prober.answer(setup.question, keys)
    setup.shared.take()
    setup.catalog.tier_removed("redis", keys[1])
    setup.shared.missed("redis", [keys[1]], keys[2:])
    assert [setup.catalog.source(key) for key in keys] == ["redis", None, None, None]


def test_a_tier_that_nobody_shares_keeps_its_own_index(setup):
    """A failed load from disk leaves the other records of the disk alone."""
    key = hashes(64)[3] + b"\0"
    setup.catalog.tier_added("disk", key, 0)
    setup.shared.learned("disk", [key])
    setup.shared.missed("disk", [], [key])
    setup.shared.doubt("disk")
    setup.shared.take()
    assert setup.catalog.source(key) == "disk"


def test_what_is_believed_is_bounded():
    """However much is learned, the catalog holds at most the bound of what only Redis has."""
    setup = Setup(max_known=100)
    for seed in range(1, 60):
        setup.ask(seed=seed)
        setup.prober.answer(setup.question, setup.keys())
        setup.shared.take()
    assert len(setup.catalog) == 100
    assert setup.hit(seed=59) == 240
    assert setup.hit(seed=1) == 0


def test_a_tier_that_was_away_is_asked_anew_without_a_long_step(setup, monkeypatch):
    """After an outage beliefs go bit by bit, and what is learned meanwhile stays."""
    monkeypatch.setattr(subject, "FORGET_AT_ONCE", 3)
    for seed in range(1, 6):
        setup.ask(seed=seed)
        setup.prober.answer(setup.question, setup.keys())
        setup.shared.take()
    setup.shared.doubt("redis")
    setup.ask(seed=3, ticket="new")
    setup.prober.answer(setup.question, setup.keys())
    before = len(setup.catalog)
    setup.shared.take()
    assert before - len(setup.catalog) <= 3
    for _ in range(10):
        setup.shared.take()
    assert {seed: setup.hit(seed=seed) for seed in range(1, 6)} == {1: 0, 2: 0, 3: 240, 4: 0, 5: 0}


def test_new_probers_close_the_old_ones_and_forget(setup):
    """After a clear nothing of the old namespace is waited for or believed."""
    setup.ask()
    old = setup.prober
    setup.shared.set_probers([FakeProber()])
    assert old.closed
    assert not setup.shared.open("r")
    old.answer(old.questions[0], [k for keys in old.questions[0].chunks for k in keys])
    setup.shared.take()
    assert setup.hit() == 0


def test_the_memory_of_absence_is_bounded(setup, monkeypatch):
    """Any number of chains that are nowhere leaves a bounded memory."""
    monkeypatch.setattr(subject, "MAX_REMEMBERED", 50)
    for seed in range(1, 200):
        setup.ask(64, seed=seed)
        setup.prober.answer(setup.question)
        setup.shared.take()
    assert len(setup.shared._absent) <= 50


def test_all_holders_are_noted():
    """A key that every rank holds is served where several ranks must hold it."""
    setup = Setup(n_holders=4)
    setup.ask()
    setup.prober.answer(setup.question, setup.keys())
    setup.shared.take()
    assert setup.hit() == 240
