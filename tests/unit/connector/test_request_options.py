"""Salts keep chunks apart; what is wrong with requests is said once, not for each."""

from __future__ import annotations

import hashlib
import logging
import random
from types import SimpleNamespace

import pytest

from kvtier.connector import request_options as subject
from kvtier.connector.request_options import SaltedHashes, options_of, read_options
from kvtier.storage.errors import KVTierError

SALTS = [read_options({"kvtier": {"tenant": t}}, a).salt for t in ("a", "b", None) for a in "xy"]


@pytest.mark.parametrize("size", [32, 16])
def test_salted_hashes_are_a_sequence_of_their_own(size):
    """By index, slice and iteration the same; apart from every other salt's and the plain ones."""
    rng = random.Random(5)
    plain = [rng.randbytes(size) for _ in range(50)] + [bytes(size), b"\xff" * size]
    seen = set(plain)
    for salt in SALTS:
        salted = SaltedHashes(plain, salt)
        rows = list(salted)
        assert len(salted) == len(rows) == len(plain)
        assert [salted[i] for i in range(len(plain))] == rows
        assert salted[-1] == rows[-1]
        for cut in (slice(3, 40, 7), slice(None), slice(9, 9), slice(-3, None)):
            assert salted[cut] == rows[cut]
        assert seen.isdisjoint(rows)
        seen.update(rows)
    assert len(seen) == len(plain) * (len(SALTS) + 1)
    assert list(SaltedHashes([], SALTS[0])) == []


def test_a_salt_changes_half_of_the_bits():
    """Nothing of a chain shows through: salted and plain hashes look unrelated."""
    plain = [hashlib.sha256(bytes([i])).digest() for i in range(200)]
    for salt in SALTS:
        flips = [
            (int.from_bytes(a, "big") ^ int.from_bytes(b, "big")).bit_count()
            for a, b in zip(plain, SaltedHashes(plain, salt), strict=True)
        ]
        assert all(90 < n < 166 for n in flips)


def test_what_follows_a_session_s_rewritten_end(monkeypatch):
    """The engine shortens its list; what is seen is always what is there now."""
    hashes = [bytes([i]) * 32 for i in range(5)]
    salted = SaltedHashes(hashes, SALTS[0])
    before = list(salted)
    del hashes[3:]
    hashes.append(b"z" * 32)
    assert list(salted)[:3] == before[:3]
    assert len(salted) == 4
    assert salted[3] != before[3]


@pytest.mark.parametrize("what", ["options", "adapter"])
def test_what_is_wrong_with_many_requests_is_one_line(monkeypatch, caplog, what):
    """Neither read nor stored, and told once for each reason."""
    monkeypatch.setattr(subject, "_told", set())
    ours = logging.getLogger("kvtier")
    monkeypatch.setattr(ours, "handlers", [*ours.handlers, caplog.handler])

    def no_adapter(request):
        raise KVTierError(f"adapter {request.name} is nowhere")

    for name in ("one", "one", "two", "one"):
        params = {"kvtier": {"tennant": "a"}} if what == "options" else None
        request = SimpleNamespace(kv_transfer_params=params, name=name)
        options = options_of(request, no_adapter if what == "adapter" else None)
        assert not options.store
        assert not options.read
    told = {id(r): r.getMessage() for r in caplog.records}.values()
    assert len(told) == (2 if what == "adapter" else 1)


def test_the_memory_of_what_was_said_is_bounded(monkeypatch):
    """However many reasons there are."""
    monkeypatch.setattr(subject, "_told", set())
    monkeypatch.setattr(subject, "MAX_TOLD", 3)
    for number in range(10):
        subject._complain(f"reason {number}")
        assert len(subject._told) <= 3
