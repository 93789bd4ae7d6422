"""The namespace as the scheduler half asks for it: its epochs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvtier.connector import namespace_source as subject
from kvtier.connector.epoch import raise_epoch
from kvtier.connector.namespace_source import NamespaceSource
from kvtier.tools.store_words import base_digest


@pytest.fixture
def source_on(monkeypatch):
    """Makes sources of engines that differ in nothing, on a folder."""
    fields = {"model": "m", "fields_format": 1}
    monkeypatch.setattr(subject.ns, "static_fields", lambda *_, **__: dict(fields))
    root = {"hash_algorithm": "sha256", "root_hash": "00"}
    monkeypatch.setattr(subject.ns, "root_fields", lambda _, epoch: {**root, "cache_epoch": epoch})
    monkeypatch.setattr(subject.engine_api, "root_hash_is_random", lambda _: False)
    monkeypatch.setattr(subject.shared_tiers, "open_epoch", lambda *_: None)

    def make(folder):
        config = SimpleNamespace(disk=str(folder), tenant_salt=None)
        return NamespaceSource(None, None, None, config)

    return make


def test_another_engine_s_clear_of_the_folder_is_not_followed(source_on, tmp_path):
    """It may have new weights; this one's namespace changes with its own clear only."""
    one, other = source_on(tmp_path), source_on(tmp_path)
    before = one.current(0).digest
    assert other.current(0).digest == before
    assert other.raise_epoch()
    assert other.current(1).digest != before
    assert one.current(0).digest == before
    assert one.raise_epoch()
    assert one.current(1).digest not in {before, other.current(1).digest}


def test_what_is_stored_after_a_clear_is_this_engine_s_alone(source_on, tmp_path):
    """The weights in memory may be new, the checkpoint's are old: a restart must not mix them."""
    one = source_on(tmp_path)
    before = one.current(0).digest
    assert one.raise_epoch()
    after = one.current(1)
    assert one.current(1).digest == after.digest
    restarted = source_on(tmp_path)
    assert restarted.current(0).digest not in {before, after.digest}
    assert restarted.current(0).digest == source_on(tmp_path).current(0).digest
    assert "cleared_by" in after.description
    assert base_digest(after.description) == base_digest(restarted.current(0).description)
    assert "cleared_by" not in restarted.current(0).description


def test_the_same_holds_for_what_lies_on_a_shared_tier(source_on, tmp_path, monkeypatch):
    """Two engines on one server, cleared as often: they share nothing, an engine later nothing."""
    epoch = SimpleNamespace(value=0)
    monkeypatch.setattr(subject.shared_tiers, "open_epoch", lambda *_: epoch)
    epoch.raise_epoch = lambda _: True
    one, other, later = (source_on(tmp_path / str(i)) for i in range(3))
    assert one.current(0).shared_digest == other.current(0).shared_digest
    for engine in (one, other):
        assert engine.raise_epoch()
    epoch.value = 2
    digests = {engine.current(1).shared_digest for engine in (one, other, later)}
    assert len(digests) == 3


def test_two_clears_at_once_do_not_meet(source_on, tmp_path):
    """What another engine raised between this one's clear and its next step is not this one's."""
    one, other = source_on(tmp_path), source_on(tmp_path)
    assert one.raise_epoch()
    raise_epoch(str(tmp_path), one._epoch_name())
    assert one.current(1).digest != other.current(0).digest
