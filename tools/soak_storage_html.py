"""The report of a storage soak as one page that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from itertools import pairwise
from typing import Any

from .soak_html import details, findings_table, head, steadiness_table, table, tiles
from .soak_svg import Band, Line, lines_over_time, n_bytes, number

FORMAT = "kvtier-soak-storage"
PLOTS = ("operations", "memory", "handles", "stores")
"""What every report draws, as ``plot-NAME``."""


def storage_page(found: Mapping[str, Any]) -> str:
    """Return the page of a report."""
    setup, lives = found["setup"], found["lives"]
    subtitle = (
        f"storage alone: {setup['tier']}, {setup['keys']:,} keys of "
        f"{setup['record_bytes'] // 1024} KiB, {setup['threads']} threads"
    )
    shown = [
        ("operations", f"{found['operations']['all']:,}"),
        ("processes killed", f"{sum(life['killed'] for life in lives)}"),
        ("wrong", f"{sum(life['wrong'] for life in lives)}"),
        ("bits flipped", f"{sum(life['flipped'] for life in lives)}"),
        ("a second", f"{found['operations']['all'] / max(1.0, found['duration_s']):,.0f}"),
    ]
    return "\n".join(
        [
            head(found, subtitle),
            tiles(shown),
            findings_table(found["findings"]),
            "<h2>Over time</h2>",
            _plots(found),
            steadiness_table(found["steadiness"]),
            "<h2>Lives</h2>",
            _lives(found),
            details("Operations", found["operations"].items()),
            details("Set-up", setup.items()),
            "</body></html>",
        ]
    )


def _plots(found: Mapping[str, Any]) -> str:
    samples = found["samples"]
    bands = [
        Band(f"check after life {life['life']}", life["until_s"], after["at_s"])
        for life, after in pairwise(found["lives"])
    ]

    def line(name: str, label: str) -> Line:
        return Line(label, [(s["at_s"], s[name]) for s in samples if name in s])

    rates = [
        (b["at_s"], (b["operations"] - a["operations"]) / (b["at_s"] - a["at_s"]))
        for a, b in pairwise(samples)
        if b["incarnation"] == a["incarnation"] and b["at_s"] > a["at_s"]
    ]
    all_kinds = [Line("all", rates)]
    memory, disk = [line("rss_bytes", "resident")], [line("disk_bytes", "disk")]
    handles = (line("fds", "descriptors"), line("threads", "threads"))
    return "".join(
        (
            lines_over_time("operations", "Operations a second", all_kinds, number, bands),
            lines_over_time("memory", "Memory", memory, n_bytes, bands),
            lines_over_time("handles", "File descriptors and threads", handles, number, bands),
            lines_over_time("stores", "Bytes on disk", disk, n_bytes, bands),
        )
    )


def _lives(found: Mapping[str, Any]) -> str:
    columns = ("life", "at", "ended", "room", "operations", "flipped", "there", "missing",
               "damaged", "chunks", "wrong")  # fmt: skip
    rows = [
        (
            str(life["life"]),
            f"{life['at_s']:.1f}-{life['until_s']:.1f} s",
            "killed" if life["killed"] else "closed",
            "for everything" if life["roomy"] else "evicts",
            escape(number(life["operations"])),
            *(str(life[k]) for k in ("flipped", "there", "missing", "damaged", "chunks", "wrong")),
        )
        for life in found["lives"]
    ]
    return table(columns, rows)
