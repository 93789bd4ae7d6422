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
