"""The namespace as the scheduler half asks for it: its epochs."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from kvtier.connector import epoch as epoch_file
from kvtier.connector import namespace_source as subject
from kvtier.connector.epoch import raise_epoch, read_epoch
from kvtier.connector.namespace_source import NamespaceSource
from kvtier.storage.errors import TierUnavailable
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


class Refuses:
    """Stands for ``os`` where the epoch is kept: opening for reading or writing fails."""

    def __init__(self, code, when):
        self._code, self._when = code, when

    def __getattr__(self, name):
        return getattr(os, name)

    def open(self, path, flags, *args):
        if self._when(path, flags):
            raise OSError(self._code, os.strerror(self._code))
        return os.open(path, flags, *args)


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE, errno.EACCES, errno.ESTALE])
def test_an_epoch_that_cannot_be_read_is_not_nought(source_on, tmp_path, monkeypatch, code):
    """What was cleared is not served because the number that says so could not be read."""
    cleared = source_on(tmp_path)
    before = cleared.current(0).digest
    assert cleared.raise_epoch()
    with monkeypatch.context() as patch:
        patch.setattr(epoch_file, "os", Refuses(code, lambda *_: True))
        blind, other = source_on(tmp_path), source_on(tmp_path)
        met = {before, cleared.current(1).digest}
        assert blind.current(0).digest not in met
        assert blind.current(0).digest == blind.current(0).digest
        assert other.current(0).digest not in met | {blind.current(0).digest}
    assert blind.raise_epoch()
    assert blind.current(1).digest not in met
    assert source_on(tmp_path).current(0).digest not in met | {blind.current(1).digest}


def test_a_clear_that_was_not_durable_gets_no_number_of_another(source_on, tmp_path, monkeypatch):
    """What is written between a clear that failed and one that did not is never served again."""
    engine, other = source_on(tmp_path), source_on(tmp_path)
    seen = [engine.current(0).digest]
    writes = Refuses(errno.ENOSPC, lambda _, flags: flags & os.O_CREAT)
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(epoch_file, "os", writes)
            assert not engine.raise_epoch()
        seen.append(engine.current(1).digest)
    assert engine.raise_epoch()
    seen.append(engine.current(2).digest)
    seen.append(source_on(tmp_path).current(0).digest)
    assert other.raise_epoch()
    seen.append(other.current(1).digest)
    assert len(set(seen)) == len(seen)


def test_clears_of_several_engines_at_once(tmp_path):
    """Each clear has a number of its own, also when all engines clear at the same moment."""
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda _: raise_epoch(str(tmp_path), "a" * 32), range(40)))
    assert sorted(got) == list(range(1, 41))
    assert read_epoch(str(tmp_path), "a" * 32) == 40


@pytest.mark.parametrize("call", ["read_epoch", "raise_epoch"])
def test_a_folder_that_hangs_does_not_stop_the_engine(source_on, tmp_path, monkeypatch, call):
    """A call to the disk that never returns: a bounded wait, and nothing of before is served."""
    engine = source_on(tmp_path)
    before = source_on(tmp_path).current(0).digest
    go = threading.Event()
    monkeypatch.setattr(subject, "FOLDER_WAIT_S", 0.05)
    monkeypatch.setattr(subject, call, lambda *_: go.wait(30) and 0)
    if call == "raise_epoch":
        assert not engine.raise_epoch()
    assert engine.current(1).digest != before
    go.set()


def test_an_epoch_s_file_is_anything(tmp_path):
    """No file, a folder, a pipe or rubbish in its place never counts as the first epoch."""
    name = "b" * 32
    raise_epoch(str(tmp_path), name)
    path = tmp_path / "epochs" / name
    for make in (os.mkdir, os.mkfifo):
        path.unlink() if path.is_file() else None
        make(path)
        with contextlib.suppress(TierUnavailable):
            assert read_epoch(str(tmp_path), name) > 1
        path.rmdir() if path.is_dir() else path.unlink()
    path.write_bytes(b"rubbish")
    assert read_epoch(str(tmp_path), name) > 1
    assert raise_epoch(str(tmp_path), name) > 1


def test_a_clear_leaves_nothing_behind_and_is_the_owner_s(tmp_path):
    """Folders 0700 and files 0600 from the root on; no temporary file stays."""
    root = tmp_path / "deep" / "store"
    old = os.umask(0)
    try:
        raise_epoch(str(root), "c" * 32)
    finally:
        os.umask(old)
    for folder, folders, files in os.walk(tmp_path / "deep"):
        assert os.stat(folder).st_mode & 0o777 == 0o700
        assert all(os.stat(f"{folder}/{name}").st_mode & 0o777 == 0o600 for name in files)
        assert folders or ".tmp" not in "".join(files)
