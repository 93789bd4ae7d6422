"""Opening the tiers of a namespace: what stays and what is opened anew."""

from __future__ import annotations

import pytest

from kvtier.connector import assembly
from kvtier.connector.assembly import TierOpener
from kvtier.connector.config import load
from kvtier.connector.plan import NamespaceInfo
from kvtier.storage.errors import KVTierError

OWN, OTHER, SHARED = b"o" * 16, b"x" * 16, b"s" * 16


@pytest.fixture
def opener(tmp_path):
    given = {"disk": str(tmp_path / "store"), "disk_capacity": "1GiB", "ram": "64MiB"}
    given["redis"] = "redis://127.0.0.1:1"
    made = TierOpener(load(given, check_machine=False), 0, 1, 2, None)
    opened = []

    def tiers(digest, generation=0, shared=None):
        found = made(NamespaceInfo(digest, generation, {}, shared, None))
        opened.extend(found)
        return list(found)

    yield tiers
    for tier in opened:
        tier.close()


def test_the_folder_stays_when_only_a_shared_tier_comes(opener):
    """A Redis that answers late costs the folder nothing: not its index, not what it does."""
    (disk,) = opener(OWN)
    again, redis = opener(OWN, shared=SHARED)
    assert again is disk
    assert redis.name == "redis"


@pytest.mark.parametrize(("digest", "generation"), [(OTHER, 0), (OWN, 1), (OTHER, 1)])
def test_another_namespace_has_a_folder_of_its_own(opener, digest, generation):
    """After a clear, or under another digest, nothing of the tier before is used."""
    (disk,) = opener(OWN)
    (after,) = opener(digest, generation)
    assert after is not disk


def test_what_could_not_be_opened_is_opened_anew(opener, monkeypatch):
    """Whoever gets nothing closes what was open; that is not handed out again."""
    (disk,) = opener(OWN)

    def broken(*_):
        raise KVTierError("no")

    with monkeypatch.context() as patch:
        patch.setattr(assembly.shared_tiers, "open_redis", broken)
        with pytest.raises(KVTierError):
            opener(OWN, shared=SHARED)
    after, _ = opener(OWN, shared=SHARED)
    assert after is not disk
