"""Turns at the disk: so many at a time, and none is lost to a read that never returns."""

from __future__ import annotations

import os
import threading
import time

import pytest

from kvtier.storage.read_turns import ReadTurns

FOREVER_S = 30.0


class _Reader:
    """A thread that reads until it is let go."""

    def __init__(self, turns: ReadTurns) -> None:
        self.inside, self.let_go = threading.Event(), threading.Event()
        self._turns = turns
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._turns:
            self.inside.set()
            assert self.let_go.wait(FOREVER_S)

    def end(self) -> None:
        self.let_go.set()
        self._thread.join(FOREVER_S)
        assert not self._thread.is_alive()


def test_so_many_read_at_a_time_and_the_next_follows_at_once() -> None:
    """No more than the given number read; when one is done the next begins."""
    turns = ReadTurns(2, patience_s=FOREVER_S)
    first, second = _Reader(turns), _Reader(turns)
    assert first.inside.wait(FOREVER_S)
    assert second.inside.wait(FOREVER_S)
    third = _Reader(turns)
    assert not third.inside.wait(0.05)
    first.end()
    assert third.inside.wait(FOREVER_S)
    second.end()
    third.end()


def test_reads_that_never_return_take_no_turn_from_the_others() -> None:
    """With every turn in a hung read, one reader waits out its patience, and none after it."""
    patience_s = 0.3
    turns = ReadTurns(2, patience_s)
    hung = [_Reader(turns), _Reader(turns)]
    for reader in hung:
        assert reader.inside.wait(FOREVER_S)
    begin_s = time.monotonic()
    with turns:
        pass
    assert time.monotonic() - begin_s >= patience_s * 0.9
    for _ in range(50):  # 15 s if each waited
        with turns:
            pass
    assert time.monotonic() - begin_s < 10 * patience_s
    for reader in hung:
        reader.end()


def test_turns_of_reads_that_return_late_do_not_add_up() -> None:
    """After hung reads have come back, still no more than the given number read at a time."""
    turns = ReadTurns(1, patience_s=0.01)
    hung = _Reader(turns)
    assert hung.inside.wait(FOREVER_S)
    for _ in range(3):
        with turns:
            pass
    hung.end()
    turns._patience_s = FOREVER_S  # from here on a wait shows
    first = _Reader(turns)
    assert first.inside.wait(FOREVER_S)
    second = _Reader(turns)
    assert not second.inside.wait(0.05)
    first.end()
    assert second.inside.wait(FOREVER_S)
    second.end()


def test_an_error_gives_the_turn_back() -> None:
    """A read that raises has given its turn to the next."""
    turns = ReadTurns(1, patience_s=FOREVER_S)
    for _ in range(3):
        with pytest.raises(OSError, match="descriptor"), turns:
            os.preadv(-1, [], 0)
    reader = _Reader(turns)
    assert reader.inside.wait(FOREVER_S)
    reader.end()
