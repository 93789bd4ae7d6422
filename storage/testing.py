"""The contract that every tier passes, as a test class. Needs pytest.

A tier's test file says::

    class TestDiskContract(TierContract):
        @pytest.fixture
        def open_tier(self, tmp_path):
            ...
            return lambda namespace=NAMESPACE, rank=0: DiskTier(...)

and runs all of it. `open_tier` opens a tier over one and the same store each time.
"""

from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

import pytest

from .errors import DamageReason, RecordDamaged, RecordMissing
from .tier import ALIGN_BYTES, PutResult, RecordSpec, Tier

NAMESPACE = bytes(range(16))
OTHER_NAMESPACE = bytes(range(1, 17))


class OpenTier(Protocol):
    """Opens a tier over the store of the test."""

    def __call__(self, namespace: bytes = NAMESPACE, rank: int = 0) -> Tier:
        """Return a tier that the test closes."""


def aligned(length: int) -> memoryview:
    """Return a zeroed, writable view as a tier wants it."""
    return memoryview(mmap.mmap(-1, length))


def key_of(number: int, group: int = 0) -> bytes:
    """Return a chunk key; hashes may end in zero bytes."""
    return number.to_bytes(2, "big") + bytes(30) + bytes((group,))


def spec_of(number: int, raw_bytes: int = 4 * ALIGN_BYTES, group: int = 0) -> RecordSpec:
    """Return the spec of test record ``number``."""
    return RecordSpec(key_of(number, group), 256 * number, 256 * number + 256, raw_bytes)


def payload_of(number: int, raw_bytes: int = 4 * ALIGN_BYTES, pieces: int = 2) -> list[memoryview]:
    """Return record ``number``'s bytes, always the same, in ``pieces`` aligned buffers."""
    whole = aligned(raw_bytes)
    whole[:] = random.Random(number).randbytes(raw_bytes)  # noqa: S311 - repeatable on purpose
    step = max(1, raw_bytes // ALIGN_BYTES // pieces) * ALIGN_BYTES
    return [whole[start : start + step] for start in range(0, raw_bytes, step)]


def joined(buffers: list[memoryview]) -> bytes:
    """Return the buffers' bytes."""
    return b"".join(buffers)


def read_back(tier: Tier, number: int, raw_bytes: int = 4 * ALIGN_BYTES) -> bytes:
    """Return what the tier holds of record ``number``."""
    into = aligned(raw_bytes)
    tier.get(spec_of(number, raw_bytes), [into])
    return bytes(into)


class TierContract:
    """What every tier promises. Subclasses give the fixture `open_tier`."""

    @pytest.fixture
    def open_tier(self) -> OpenTier:
        """Return what opens a tier; to be overridden."""
        raise NotImplementedError

    @pytest.fixture
    def tier(self, open_tier: OpenTier) -> Iterator[Tier]:
        """Give an open, empty tier."""
        tier = open_tier()
        yield tier
        tier.close()

    def test_bytes_come_back(self, tier: Tier) -> None:
        """What was put is what get gives, whatever the cut into buffers."""
        for number, raw_bytes in enumerate((4096, 8192, 5 * 4096, 1 << 20, (4 << 20) + 4096)):
            payload = payload_of(number, raw_bytes, pieces=1 + number)
            assert tier.put(spec_of(number, raw_bytes), payload) is PutResult.STORED
            into = payload_of(99, raw_bytes, pieces=3)
            assert tier.get(spec_of(number, raw_bytes), into) >= 4096
            assert joined(into) == joined(payload)

    def test_compressible_bytes_come_back(self, tier: Tier) -> None:
        """Zeros, and values with few exponents, come back bit for bit."""
        zeros = aligned(1 << 20)
        tier.put(spec_of(1, 1 << 20), [zeros])
        into = payload_of(5, 1 << 20)
        tier.get(spec_of(1, 1 << 20), into)
        assert joined(into) == bytes(1 << 20)

    def test_many_buffers(self, tier: Tier) -> None:
        """More buffers than one system call takes are no problem."""
        raw_bytes = 1500 * ALIGN_BYTES
        payload = payload_of(1, raw_bytes, pieces=1500)
        assert len(payload) == 1500
        tier.put(spec_of(1, raw_bytes), payload)
        into = payload_of(2, raw_bytes, pieces=1500)
        tier.get(spec_of(1, raw_bytes), into)
        assert joined(into) == joined(payload)

    def test_missing(self, tier: Tier) -> None:
        """A key that was never put is missing, not damaged."""
        with pytest.raises(RecordMissing):
            read_back(tier, 1)

    def test_put_leaves_what_is_there(self, tier: Tier) -> None:
        """A second put of a key says EXISTS; with replace it stores."""
        assert tier.put(spec_of(1), payload_of(1)) is PutResult.STORED
        assert tier.put(spec_of(1), payload_of(2)) is PutResult.EXISTS
        assert read_back(tier, 1) == joined(payload_of(1))
        assert tier.put(spec_of(1), payload_of(2), replace=True) is PutResult.STORED
        assert read_back(tier, 1) == joined(payload_of(2))

    def test_another_record_is_refused(self, tier: Tier) -> None:
        """A spec of other tokens or another length is damage, with its reason."""
        tier.put(spec_of(1), payload_of(1))
        right = spec_of(1)
        moved = RecordSpec(right.key, 0, 256, right.raw_bytes)
        with pytest.raises(RecordDamaged) as caught:
            tier.get(moved, [aligned(right.raw_bytes)])
        assert caught.value.reason is DamageReason.IDENTITY
        longer = RecordSpec(
            right.key, right.start_tokens, right.end_tokens, right.raw_bytes + ALIGN_BYTES
        )
        with pytest.raises(RecordDamaged) as caught:
            tier.get(longer, [aligned(longer.raw_bytes)])
        assert caught.value.reason is DamageReason.LENGTH

    def test_delete(self, tier: Tier) -> None:
        """Delete counts what was there and makes it missing."""
        for number in range(3):
            tier.put(spec_of(number), payload_of(number))
        assert tier.delete([key_of(0), key_of(2), key_of(7)]) == 2
        assert tier.contains_many([key_of(number) for number in range(3)]) == [False, True, False]
        with pytest.raises(RecordMissing):
            read_back(tier, 0)
        assert tier.delete([]) == 0

    def test_groups_are_apart(self, tier: Tier) -> None:
        """The same prefix hash in two groups names two records."""
        tier.put(spec_of(1, group=0), payload_of(1))
        tier.put(spec_of(1, group=1), payload_of(2))
        assert read_back(tier, 1) == joined(payload_of(1))
        assert tier.contains_many([key_of(1, 0), key_of(1, 1), key_of(1, 2)]) == [True, True, False]

    def test_namespaces_and_ranks_are_apart(self, tier: Tier, open_tier: OpenTier) -> None:
        """Nothing of one namespace or rank is seen from another, and clear stays inside its own."""
        others = [open_tier(namespace=OTHER_NAMESPACE), open_tier(rank=1)]
        try:
            tier.put(spec_of(1), payload_of(1))
            for other in others:
                assert other.contains_many([key_of(1)]) == [False]
                with pytest.raises(RecordMissing):
                    read_back(other, 1)
                other.put(spec_of(1), payload_of(2))
                other.clear()
                assert list(other.scan()) == []
            assert read_back(tier, 1) == joined(payload_of(1))
        finally:
            for other in others:
                other.close()

    def test_scan_and_stat(self, tier: Tier) -> None:
        """Scan yields every record once, with what it takes; stat agrees where it counts."""
        for number in range(5):
            tier.put(spec_of(number), payload_of(number))
        found = list(tier.scan())
        assert sorted(info.key for info in found) == [key_of(number) for number in range(5)]
        assert all(info.stored_bytes >= 4 * ALIGN_BYTES for info in found)

    def test_quarantine(self, tier: Tier) -> None:
        """A quarantined record is missing, and a put stores it anew without replace."""
        tier.put(spec_of(1), payload_of(1))
        tier.quarantine(key_of(1), "payload_checksum")
        tier.quarantine(key_of(2), "payload_checksum")
        with pytest.raises(RecordMissing):
            read_back(tier, 1)
        assert key_of(1) not in [info.key for info in tier.scan()]
        assert tier.put(spec_of(1), payload_of(1)) is PutResult.STORED
        assert read_back(tier, 1) == joined(payload_of(1))

    def test_clear(self, tier: Tier) -> None:
        """Clear leaves nothing, and the tier goes on working."""
        for number in range(5):
            tier.put(spec_of(number), payload_of(number))
        tier.clear()
        assert list(tier.scan()) == []
        assert not any(tier.contains_many([key_of(number) for number in range(5)]))
        assert tier.put(spec_of(1), payload_of(1)) is PutResult.STORED

    def test_touch_unknown_keys(self, tier: Tier) -> None:
        """Touch is best effort: unknown keys do no harm."""
        tier.put(spec_of(1), payload_of(1))
        tier.touch([key_of(1), key_of(2)])
        assert read_back(tier, 1) == joined(payload_of(1))

    def test_outlives_its_object(self, tier: Tier, open_tier: OpenTier) -> None:
        """A persistent tier gives the same bytes to the next one opened."""
        if not tier.capabilities.persistent:
            pytest.skip("not persistent")
        tier.put(spec_of(1), payload_of(1))
        tier.close()
        again = open_tier()
        try:
            assert read_back(again, 1) == joined(payload_of(1))
            assert again.contains_many([key_of(1)]) == [True]
        finally:
            again.close()

    def test_threads(self, tier: Tier) -> None:
        """Threads that put, get and delete the same few keys see whole records or none."""
        failures: list[str] = []

        def work(seed: int) -> None:
            rng = random.Random(seed)  # noqa: S311 - repeatable on purpose
            for _ in range(40):
                number = rng.randrange(3)
                act = rng.choice(("put", "put", "get", "get", "delete", "replace"))
                try:
                    if act == "get":
                        if read_back(tier, number) != joined(payload_of(number)):
                            failures.append(f"wrong bytes of {number}")
                    elif act == "delete":
                        tier.delete([key_of(number)])
                    else:
                        tier.put(spec_of(number), payload_of(number), replace=act == "replace")
                except RecordMissing:
                    pass
                except Exception as error:  # noqa: BLE001 - whatever it is, the test reports it
                    failures.append(f"{act} {number}: {error!r}")

        _together([lambda seed=seed: work(seed) for seed in range(4)])  # type: ignore[misc]
        assert failures == []

    def test_close_twice(self, tier: Tier) -> None:
        """Close is idempotent."""
        tier.close()
        tier.close()


def _together(works: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
