"""What is asked of an engine about itself."""

from __future__ import annotations

import pytest

from kvtier.connector import engine_api


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        ("0.32.0", True),
        ("0.31.0", True),
        ("0.32.1rc2+cpu", True),
        ("0.33.0", False),
        ("0.3.2", False),
        ("0.320.0", False),
        ("unknown", False),
    ],
)
def test_an_engine_outside_the_tested_range_is_named_in_one_line(monkeypatch, version, tested):
    """The line has the engine's version and those that were tested; within the range, none."""
    monkeypatch.setattr(engine_api, "engine_version", lambda: version)
    line = engine_api.untested_engine()
    assert (line is None) == tested
    if line is not None:
        assert version in line
        assert "0.31, 0.32" in line
        assert "\n" not in line


def views(*sizes):
    """Views of one memory that all begin where it does; ``sizes`` are their blocks' bytes."""
    torch = pytest.importorskip("torch")
    memory = torch.zeros(1024, dtype=torch.int8)
    return {str(i): memory.as_strided((4, 1, 1, n), (64, 64, 64, 1)) for i, n in enumerate(sizes)}


def test_copies_of_views_that_overlap_are_tried(monkeypatch):
    """A copy that leaves a part behind is known as such where views differ, by what it does."""
    utils = pytest.importorskip("vllm.v1.worker.utils")

    def copies_all(caches, num_blocks, pairs):
        for cache in caches:
            for source, to in pairs:
                cache[to] = cache[source]

    def copies_first(caches, num_blocks, pairs):
        copies_all(caches[:1], num_blocks, pairs)

    for copy, falls_short in ((copies_all, False), (copies_first, True)):
        monkeypatch.setattr(utils, "copy_kv_cache_blocks_inplace", copy)
        assert engine_api.copies_fall_short(views(32, 64)) == falls_short
        assert not engine_api.copies_fall_short(views(64, 64)), "one size: nothing is left behind"
