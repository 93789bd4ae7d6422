"""Adapters: their content keeps KV apart, and where it cannot be told nothing is shared."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest

from kvtier.connector import adapters as subject
from kvtier.connector.adapters import AdapterError, Adapters
from kvtier.connector.weights import WeightsError


def write(folder, content):
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(content * 100)
    return str(folder)


def use(path, number=1, name="a", **more):
    request = SimpleNamespace(lora_name=name, lora_path=path, lora_int_id=number, **more)
    return SimpleNamespace(lora_request=request)


def test_a_request_without_an_adapter_has_none():
    """The bare model is shared by all that use it."""
    assert Adapters().fingerprint(SimpleNamespace(lora_request=None)) is None
    assert Adapters().fingerprint(SimpleNamespace()) is None


def test_content_counts_and_not_the_place(tmp_path):
    """Equal adapters share wherever they lie; others never do."""
    one, other = write(tmp_path / "one", b"1"), write(tmp_path / "two", b"2")
    copy = shutil.copytree(one, tmp_path / "copy")
    subject = Adapters()
    first = subject.fingerprint(use(one, 1))
    assert subject.fingerprint(use(str(copy), 2)) == first
    assert subject.fingerprint(use(other, 3)) != first


@pytest.mark.parametrize("inplace", [False, True])
def test_files_that_change_under_a_running_engine_are_not_believed(tmp_path, inplace):
    """The engine may use the old ones, its device may hold their KV: refused from then on."""
    path = write(tmp_path / "one", b"1")
    running = Adapters()
    first = running.fingerprint(use(path))
    write(tmp_path / "one", b"2")
    for number in (1, 1, 2):
        with pytest.raises(AdapterError, match="changed under the running engine"):
            running.fingerprint(use(path, number, load_inplace=inplace))
    write(tmp_path / "one", b"1")  # it may have been read meanwhile
    with pytest.raises(AdapterError):
        running.fingerprint(use(path))
    write(tmp_path / "one", b"2")
    assert Adapters().fingerprint(use(path)) != first  # after a restart


def test_files_that_were_only_touched_are_the_same(tmp_path):
    """A copy over itself changes nothing."""
    path = write(tmp_path / "one", b"1")
    running = Adapters()
    first = running.fingerprint(use(path))
    shutil.rmtree(path)
    write(tmp_path / "one", b"1")
    assert running.fingerprint(use(path)) == first


def test_another_path_under_an_old_number_counts_only_when_it_is_loaded(tmp_path):
    """The engine goes on with what it has, unless it is told to load in place."""
    one, two = write(tmp_path / "one", b"1"), write(tmp_path / "two", b"2")
    running = Adapters()
    first = running.fingerprint(use(one))
    for path in (two, one):
        with pytest.raises(AdapterError, match="old number 1"):
            running.fingerprint(use(path))
    second = running.fingerprint(use(two, load_inplace=True))
    assert second != first
    assert running.fingerprint(use(two)) == second


def test_the_memory_is_bounded(tmp_path, monkeypatch):
    """However many adapters come, so many are remembered; those in use stay."""
    monkeypatch.setattr(subject, "MAX_REMEMBERED", 3)
    running = Adapters()
    for number in range(9):
        running.fingerprint(use(write(tmp_path / str(number), b"%d" % number), number))
        running.fingerprint(use(str(tmp_path / "0"), 0))
    assert len(running._contents) == len(running._paths) == 3
    write(tmp_path / "0", b"x")
    with pytest.raises(AdapterError):
        running.fingerprint(use(str(tmp_path / "0"), 0))


def test_adapters_by_hub_id_are_found_where_the_engine_puts_them(tmp_path, monkeypatch):
    """An id resolves to its local snapshot, asking no network; what is nowhere is refused."""
    snapshot = tmp_path / "hub" / "models--some--lora" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    write(snapshot, b"1")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert subject.local_adapter_path("some/lora") == str(snapshot)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert subject.local_adapter_path("~/x") == str(tmp_path / "x")
    for name in ("nobody/nothing", "no such id at all/x/y"):
        with pytest.raises(WeightsError):
            subject.local_adapter_path(name)
    with pytest.raises(WeightsError):
        Adapters().fingerprint(use("nobody/nothing"))
