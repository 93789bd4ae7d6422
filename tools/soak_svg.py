"""Charts as inline SVG, without scripts: lines over time, stacked bars, groups of bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 860, 240
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 12, 34
MAX_POINTS = 600
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8a8a8a")
"""Okabe and Ito's, told apart by colour-blind people too."""
FIXED = {"device": "#0072b2", "ram": "#009e73", "disk": "#e69f00", "redis": "#cc79a7",
         "computed": "#b8bec4"}  # fmt: skip
"""What means the same in every report looks the same."""


def colour(name: str, number: int) -> str:
    """Return the colour of a series."""
    return FIXED.get(name, COLOURS[number % len(COLOURS)])


Points = Sequence[tuple[float, float]]
Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Line:
    """One series; ``dashed`` for a cap."""

    name: str
    points: Points
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Band:
    """A stretch of time to mark, as a fault; from and to in seconds."""

    name: str
    begin_s: float
    end_s: float


def ticks(top: float, n: int = 4, *, binary: bool = False) -> list[float]:
    """Return round numbers from 0 to at least ``top``; ``binary`` for bytes."""
    if top <= 0:
        return [0.0, 1.0]
    unit = 1024.0 ** int(math.log(max(1.0, top), 1024)) if binary else 1.0
    raw = top / n / unit
    size = 10.0 ** math.floor(math.log10(raw))
    step = unit * next(size * m for m in (1, 2, 2.5, 5, 10) if size * m >= raw * 0.999)
    return [step * i for i in range(math.ceil(top / step - 1e-9) + 1)]


def number(value: float) -> str:
    """Return a number as an axis shows it."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g} {unit}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def n_bytes(value: float) -> str:
    """Return bytes as an axis shows them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def seconds(value: float) -> str:
    """Return a time as an axis shows it."""
    if value >= 7200:
        return f"{value / 3600:.3g} h"
    if value >= 180:
        return f"{value / 60:.3g} min"
    if 0 < value < 1:
        return f"{value * 1000:.3g} ms"
    return f"{value:.3g} s"


class _Frame:
    """Axes and scale of one chart."""

    def __init__(self, x_top: float, y_top: float, y_format: Format) -> None:
        self.y_ticks = ticks(y_top, binary=y_format is n_bytes)
        self.x_top = x_top or 1.0
        self._y_top = self.y_ticks[-1] or 1.0
        self._y_format = y_format

    def x(self, value: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * value / self.x_top, 1)

    def y(self, value: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / self._y_top, 1)

    def axes(self) -> list[str]:
        out = []
        for tick in self.y_ticks:
            y = self.y(tick)
            out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
            out.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">'
                       f"{escape(self._y_format(tick))}</text>")  # fmt: skip
        return out

    def time_axis(self) -> list[str]:
        return [
            f'<text x="{self.x(tick)}" y="{HEIGHT - 14}" text-anchor="middle">'
            f"{escape(seconds(tick) if tick else '0')}</text>"
            for tick in ticks(self.x_top, 8)
            if tick <= self.x_top
        ]

    def bands(self, bands: Sequence[Band]) -> list[str]:
        out = []
        for band in bands:
            begin, end = self.x(band.begin_s), self.x(min(self.x_top, band.end_s))
            out.append(
                f'<rect class="fault" x="{begin}" y="{TOP}" width="{max(1.5, end - begin):.1f}" '
                f'height="{HEIGHT - TOP - BOTTOM}"><title>{escape(band.name)}</title></rect>'
            )
        return out


def _figure(
    name: str,
    title: str,
    note: str,
    keys: Sequence[str],
    body: Sequence[str],
    dashed: Collection[str] = (),
) -> str:
    legend = "".join(
        f"<span>{_mark(colour(key, i), dashed=key in dashed)}{escape(key)}</span>"
        for i, key in enumerate(keys)
    )
    return (
        f'<figure id="plot-{name}"><figcaption><b>{escape(title)}</b> {escape(note)}'
        f'<div class="legend">{legend}</div></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        + "".join(body)
        + "</svg></figure>"
    )


def _mark(colour: str, *, dashed: bool) -> str:
    if dashed:
        return f'<i class="dashed" style="border-color:{colour}"></i>'
    return f'<i style="background:{colour}"></i>'


def lines_over_time(
    name: str,
    title: str,
    lines: Sequence[Line],
    y_format: Format = number,
    bands: Sequence[Band] = (),
    note: str = "",
    end_s: float = 0.0,
) -> str:
    """Return a chart of series over seconds, from zero; a gap in time breaks no line.

    Args:
        name: of the element, ``plot-NAME``.
        title: above it.
        lines: what to draw; those without points are left out.
        y_format: of the left axis.
        bands: faults.
        note: beside the title.
        end_s: where the time axis ends, if later than the last point.
    """
    lines = [line for line in lines if line.points]
    x_top = max([end_s, *(p[0] for line in lines for p in line.points)], default=1.0)
    y_top = max((p[1] for line in lines for p in line.points), default=1.0)
    frame = _Frame(x_top, y_top, y_format)
    body = [*frame.bands(bands), *frame.axes(), *frame.time_axis()]
    for i, line in enumerate(lines):
        step = max(1, len(line.points) // MAX_POINTS)
        path = " ".join(f"{frame.x(x)},{frame.y(y)}" for x, y in line.points[::step])
        dash = ' stroke-dasharray="6 4"' if line.dashed else ""
        body.append(
            f'<polyline fill="none" stroke="{colour(line.name, i)}" stroke-width="1.6"'
            f'{dash} points="{path}"><title>{escape(line.name)}</title></polyline>'
        )
    dashed = [line.name for line in lines if line.dashed]
    return _figure(name, title, note, [line.name for line in lines], body, dashed)


def stacked_over_time(
    name: str,
    title: str,
    keys: Sequence[str],
    rows: Sequence[tuple[float, Mapping[str, float]]],
    bucket_s: float,
    bands: Sequence[Band] = (),
) -> str:
    """Return bars of buckets over seconds, the keys on top of one another."""
    x_top = max((at for at, _ in rows), default=0.0) + bucket_s
    y_top = max((sum(row.values()) for _, row in rows), default=1.0)
    frame = _Frame(x_top, y_top, number)
    body = [*frame.bands(bands), *frame.axes(), *frame.time_axis()]
    for at, row in rows:
        under = 0.0
        x = frame.x(at)
        width = max(0.8, frame.x(at + bucket_s) - x - 0.6)
        for i, key in enumerate(keys):
            value = row.get(key, 0)
            if not value:
                continue
            top, bottom = frame.y(under + value), frame.y(under)
            under += value
            body.append(
                f'<rect x="{x}" y="{top}" width="{width:.1f}" height="{bottom - top:.1f}" '
                f'fill="{colour(key, i)}"><title>{escape(key)}: {value:,.0f} tokens at '
                f"{escape(seconds(at))}</title></rect>"
            )
    return _figure(name, title, f"tokens in {seconds(bucket_s)}", keys, body)


def groups(
    name: str,
    title: str,
    keys: Sequence[str],
    rows: Sequence[tuple[str, Sequence[float | None]]],
    y_format: Format = seconds,
) -> str:
    """Return groups of bars side by side, a group for each row."""
    y_top = max((v for _, values in rows for v in values if v is not None), default=1.0)
    frame = _Frame(max(1, len(rows)), y_top, y_format)
    body = frame.axes()
    for at, (label, values) in enumerate(rows):
        left, right = frame.x(at + 0.15), frame.x(at + 0.85)
        width = (right - left) / max(1, len(keys))
        for i, value in enumerate(values):
            if value is None:
                continue
            y = frame.y(value)
            body.append(
                f'<rect x="{left + i * width:.1f}" y="{y}" width="{width - 1.5:.1f}" '
                f'height="{HEIGHT - BOTTOM - y:.1f}" fill="{colour(keys[i], i)}">'
                f"<title>{escape(keys[i])}, {escape(label)}: "
                f"{escape(y_format(value))}</title></rect>"
            )
        middle = (left + right) / 2
        body.append(f'<text x="{middle:.1f}" y="{HEIGHT - 14}" text-anchor="middle">'
                    f"{escape(label)}</text>")  # fmt: skip
    return _figure(name, title, "", keys, body)
