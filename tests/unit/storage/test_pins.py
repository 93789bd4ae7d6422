"""Pins as an evictor knows them."""

from __future__ import annotations

import errno
import os
import time

import pytest

from kvtier.storage import pins
from kvtier.storage.pins import Pin, PinFolder, PinnedKeys

SPACE = bytes(16)
KEYS = [bytes([n]) * 33 for n in range(3)]


@pytest.fixture
def pinned(tmp_path):
    """A store with one pin that has been read."""
    PinFolder(str(tmp_path)).add(Pin(SPACE, (KEYS[0],), 1, 10, 1.0))
    made = PinnedKeys(str(tmp_path), lambda: time.time() + 10.0)
    made.refresh(1000)
    assert made.holds(SPACE, KEYS[0])
    return made


def failing(number):
    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("what", ["_read", "listdir", "stat"])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO])
def test_pins_that_cannot_be_read_now_hold(pinned, tmp_path, monkeypatch, what, number):
    """A shortage of descriptors or a bad moment of the disk lets nothing pinned go."""
    PinFolder(str(tmp_path)).add(Pin(SPACE, (KEYS[1],), 1, 10, 2.0))
    with monkeypatch.context() as patched:
        patched.setattr(pins if what == "_read" else os, what, failing(number))
        pinned.refresh(1000)
    assert pinned.holds(SPACE, KEYS[0])
    pinned.refresh(1000)
    assert [pinned.holds(SPACE, key) for key in KEYS] == [True, True, False]


def test_pins_go_with_their_folder(pinned, tmp_path):
    """No folder, no pins; what lies there and is no pin hurts nobody."""
    folder = tmp_path / "pins"
    (folder / ("a" * 12 + ".json")).mkdir()
    (folder / ("b" * 12 + ".json")).symlink_to("nowhere")
    (folder / ("c" * 12 + ".json")).write_text("{")
    pinned.refresh(1000)
    assert pinned.holds(SPACE, KEYS[0])
    folder.rename(tmp_path / "away")
    pinned.refresh(1000)
    assert not pinned.holds(SPACE, KEYS[0])
