"""A link over a tier whose records other engines have encrypted."""

import pytest

from kvtier.storage.counts import Counts
from kvtier.storage.disk import DiskTier
from kvtier.storage.jobs import ChunkStatus
from kvtier.storage.keyring import Key, KeyRing
from kvtier.storage.link import LinkLimits, TierLink
from kvtier.storage.testing import NAMESPACE, aligned, joined, payload_of, spec_of

OURS, THEIRS = KeyRing([Key(bytes(32))]), KeyRing([Key(bytes(range(32)))])


@pytest.fixture
def link_of(tmp_path):
    links = []

    def open_link(keys):
        tier = DiskTier(str(tmp_path), NAMESPACE, 0, 1 << 30, keys=keys, poll_s=0.05)
        link = TierLink(tier, Counts(), lambda: 0.0, LinkLimits())
        links.append(link)
        return link

    yield open_link
    for link in links:
        link.close(0.0)


def load(link):
    into = aligned(spec_of(1).raw_bytes)
    return link.load(spec_of(1), [into]), bytes(into)


@pytest.mark.parametrize("writer", [THEIRS, None])
def test_another_engines_record_is_missed_and_left(link_of, writer):
    """Without its key a record is a counted miss; it stays for the engine that has the key."""
    theirs, ours = link_of(writer), link_of(OURS)
    assert theirs.save(spec_of(1), payload_of(1))
    assert load(ours)[0] is ChunkStatus.MISSING
    assert ours._counts.take()["load_failed_chunks.disk.encryption_key"] == 1
    assert load(theirs) == (ChunkStatus.OK, joined(payload_of(1)))


def test_our_save_takes_its_place(link_of):
    """A record that could not be read is replaced by the next save, not a false hit for ever."""
    theirs, ours = link_of(THEIRS), link_of(OURS)
    theirs.save(spec_of(1), payload_of(2))
    load(ours)
    assert ours.save(spec_of(1), payload_of(1))
    assert load(ours) == (ChunkStatus.OK, joined(payload_of(1)))
    ours.save(spec_of(1), payload_of(3))  # an intact one of ours is left alone
    assert load(ours)[1] == joined(payload_of(1))
