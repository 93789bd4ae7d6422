"""How a soak's figures read: series by what they are, bytes with their unit, counts in full."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .soak_svg import n_bytes, number

MIN_RATE_S = 1800.0
"""Watched for less, a slope says nothing about an hour: noise is taken for a leak."""

_SERIES = {
    "rss_bytes": "resident memory",
    "fds": "file descriptors",
    "save_queue_bytes": "waiting to be written",
    "pinned_ram_pages": "pinned RAM pages",
    "waiting": "waiting requests",
    "disk_bytes": "disk",
    "redis_bytes": "Redis",
}


def series(name: str) -> str:
    """Return what a series is."""
    return _SERIES.get(name, name.replace("_", " "))


def amount(name: str, value: float | None) -> str:
    """Return a value of a series, with the unit that the series' name ends in."""
    if value is None:
        return "-"
    return n_bytes(value) if name.endswith("_bytes") else number(value)


def an_hour(row: Mapping[str, Any]) -> str:
    """Return how much a series grows in an hour, where it was watched for long enough."""
    if row["watched_s"] < MIN_RATE_S:
        return "-"
    return amount(row["name"], row["slope_per_h"])


def plain(name: str, value: Any) -> str:
    """Return any figure of a report."""
    if isinstance(value, Mapping):
        parts = (f"{k}: {plain(str(k), v)}" for k, v in value.items() if v is not None)
        return ", ".join(parts) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(plain(name, v) for v in value) or "none"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if "_bytes" in name:  # also of a metric: loaded_bytes.disk
        return n_bytes(value)
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() else f"{value:g}"
    return str(value)
