"""The epoch on a shared tier: known when it has been said, raised until it is."""

import threading

import pytest

from kvtier.connector import shared_epoch as subject
from kvtier.connector.shared_epoch import SharedEpoch
from kvtier.storage.errors import KVTierError, TierUnavailable
from kvtier.storage.redis_epoch import raise_epoch, read_epoch
from kvtier.tools.redis_server import RedisServer, free_port

from ...redis_server import eventually, settings_of


class Tier:
    """A number, and whether it can be reached."""

    def __init__(self, value=0):
        self.value = value
        self.up = True
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def _reach(self):
        self.entered.set()
        assert self.gate.wait(20)
        if not self.up:
            raise TierUnavailable("down")

    def read(self):
        self._reach()
        return self.value

    def raise_by(self, n):
        self._reach()
        self.value += n
        return self.value


@pytest.fixture
def tier(monkeypatch):
    monkeypatch.setattr(subject, "MIN_BACKOFF_S", 0.02)
    return Tier(7)


@pytest.fixture
def epoch(tier):
    epoch = SharedEpoch(tier.read, tier.raise_by)
    yield epoch
    tier.gate.set()
    epoch.close()


def test_it_is_read_without_being_waited_for(tier):
    """While the tier owes its answer the epoch is unknown; then it is the tier's."""
    tier.gate.clear()
    epoch = SharedEpoch(tier.read, tier.raise_by)
    assert tier.entered.wait(10)
    assert epoch.value is None
    tier.gate.set()
    eventually(lambda: epoch.value == 7)
    epoch.close()


def test_a_clear_raises_it(epoch, tier):
    """What is read after a clear is the raised number."""
    eventually(lambda: epoch.value == 7)
    assert epoch.raise_epoch(10)
    eventually(lambda: epoch.value == 8)


def test_a_clear_that_does_not_arrive_says_so_and_arrives_later(epoch, tier):
    """The old number is unknown from the clear on; when the tier is back it is raised."""
    eventually(lambda: epoch.value == 7)
    tier.up = False
    assert not epoch.raise_epoch(0.1)
    assert epoch.value is None
    tier.up = True
    eventually(lambda: epoch.value == 8)


def test_a_clear_during_another_is_raised_once_more(epoch, tier):
    """A clear while a raise is under way is not taken as done by that raise."""
    eventually(lambda: epoch.value == 7)
    tier.gate.clear()
    tier.entered.clear()
    assert not epoch.raise_epoch(0.01)
    assert tier.entered.wait(10)
    assert not epoch.raise_epoch(0.01)
    tier.gate.set()
    eventually(lambda: epoch.value == 9)


def test_another_engine_s_clear_is_not_followed(tier, monkeypatch, caplog):
    """It may have new weights that this one lacks: one line, and what is shared stays apart."""
    monkeypatch.setattr(subject, "ASK_AGAIN_S", 0.02)
    epoch = SharedEpoch(tier.read, tier.raise_by)
    eventually(lambda: epoch.value == 7)
    tier.value = 9
    eventually(lambda: caplog.text.count("another engine has cleared") == 1)
    tier.entered.clear()
    assert tier.entered.wait(10)
    assert epoch.value == 7
    tier.up = False
    tier.entered.clear()
    assert tier.entered.wait(10)
    assert epoch.value == 7, "a tier that does not answer takes nothing back"
    tier.up = True
    assert epoch.raise_epoch(10)
    eventually(lambda: epoch.value == 10)
    assert caplog.text.count("another engine has cleared") == 1
    epoch.close()


def test_a_number_that_goes_back_is_put_right(tier, monkeypatch, caplog):
    """An evicted key or an old snapshot does not bring back what was cleared."""
    monkeypatch.setattr(subject, "ASK_AGAIN_S", 0.02)
    epoch = SharedEpoch(tier.read, tier.raise_by)
    eventually(lambda: epoch.value == 7)
    tier.value = 0
    eventually(lambda: tier.value == 7)
    assert epoch.value == 7
    assert caplog.text.count("went back from 7 to 0") == 1
    monkeypatch.setattr(subject, "ASK_AGAIN_S", 60.0)
    tier.value = 0
    assert epoch.raise_epoch(10)
    eventually(lambda: epoch.value == 8)
    epoch.close()


def test_engines_share_it_on_a_server_and_it_outlives_them():
    """Read as 0 at first; a raise is seen by everybody; it has no time to live."""
    with RedisServer() as server:
        settings = settings_of(server.url)
        assert read_epoch(settings, "abc") == 0
        assert [raise_epoch(settings, "abc") for _ in range(3)] == [1, 2, 3]
        assert read_epoch(settings_of(server.url), "abc") == 3
        assert read_epoch(settings, "other") == 0
        with server.client() as client:
            assert client.ttl("t:epoch:abc") == -1


def test_what_is_no_epoch_is_never_taken_for_one():
    """Another type, a text or a dead server raise; nothing counts as 0 that is not absent."""
    with RedisServer() as server, server.client() as client:
        settings = settings_of(server.url)
        client.set("t:epoch:text", "x")
        client.lpush("t:epoch:list", "x")
        for name in ("text", "list"):
            for call in (read_epoch, raise_epoch):
                with pytest.raises(KVTierError):
                    call(settings, name)
    dead = settings_of(f"redis://127.0.0.1:{free_port()}")
    for call in (read_epoch, raise_epoch):
        with pytest.raises(TierUnavailable):
            call(dead, "abc")
