"""The namespace as the scheduler half asks for it: its epochs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvtier.connector import namespace_source as subject
from kvtier.connector.epoch import raise_epoch
from kvtier.connector.namespace_source import NamespaceSource


@pytest.fixture
def source_on(monkeypatch):
    """Makes sources of engines that differ in nothing, on a folder."""
    monkeypatch.setattr(subject.ns, "static_fields", lambda *_, **__: {"model": "m"})
    root = {"hash_algorithm": "sha256", "root_hash": "00"}
    monkeypatch.setattr(subject.ns, "root_fields", lambda _, epoch: {**root, "epoch": epoch})
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
    assert source_on(tmp_path).current(0).digest == one.current(1).digest


def test_two_clears_at_once_do_not_meet(source_on, tmp_path):
    """What another engine raised between this one's clear and its next step is not this one's."""
    one, other = source_on(tmp_path), source_on(tmp_path)
    assert one.raise_epoch()
    raise_epoch(str(tmp_path), one._epoch_name())
    assert one.current(1).digest != other.current(0).digest
