"""Curves over sizes as a PNG, drawn with Pillow: no display, no plotting library."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .exit_codes import ExitCode
from .reporting import CommandError, size

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

WIDTH, HEIGHT = 1200, 700
LEFT, TOP, RIGHT, BOTTOM = 90, 70, 40, 80
COLOURS = ("#0b62a4", "#d9541a", "#3a8f3a", "#7b4fa3", "#8a6d1d", "#444444")
SMOOTH = 4  # drawn so much larger, then made smaller
GREY = "#d5d5d5"


@dataclass(frozen=True, slots=True)
class Curve:
    """A line: (size in bytes, share from 0 to 1), by size."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line at a size."""

    name: str
    n_bytes: float


def check_png(path: str) -> None:
    """Say before minutes of work what a picture would fail at after them.

    Raises:
        CommandError: Pillow is not installed, or there can be no such file.
    """
    if importlib.util.find_spec("PIL") is None:
        raise CommandError("a PNG needs Pillow: pip install 'kvtier[plot]'")
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path) or not os.access(folder, os.W_OK):
        raise CommandError(f"--png {path}: no file can be written there", ExitCode.USAGE)


def draw_curves(path: str, title: str, curves: Sequence[Curve], marks: Sequence[Mark] = ()) -> None:
    """Write a PNG of shares over sizes, sizes on a scale of doublings. Blocking.

    Raises:
        CommandError: there is nothing to draw.
        OSError: the file cannot be written.
    """
    from PIL import Image, ImageDraw, ImageFont

    if not any(curve.points for curve in curves):
        raise CommandError("there is nothing to draw")
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    canvas = _Canvas(image, ImageDraw.Draw(image), ImageFont.load_default(16), curves, marks)
    canvas.text((LEFT, 12), title, ImageFont.load_default(22))
    canvas.frame()
    for mark in marks:
        canvas.mark(mark)
    for number, curve in enumerate(curves):
        canvas.curve(curve, COLOURS[number % len(COLOURS)], number)
    image.save(path, format="PNG")


def size_ticks(low: int, high: int) -> list[int]:
    """Return the powers of two to mark, some ten at most: from ``low`` to ``high`` or just above.

    The axis ends where the last of them stands.
    """
    step = max(1, math.ceil((high - low) / 9))
    return list(range(low, max(high, low + 1) + step, step))


class _Canvas:
    def __init__(
        self,
        image: Image,
        draw: ImageDraw,
        font: Any,
        curves: Sequence[Curve],
        marks: Sequence[Mark],
    ) -> None:
        sizes = [n for curve in curves for n, _ in curve.points] + [m.n_bytes for m in marks]
        logs = [math.log2(max(1.0, n)) for n in sizes]
        self._low = math.floor(min(logs))
        self._powers = size_ticks(self._low, math.ceil(max(logs)))
        self._high = self._powers[-1]
        self._image = image
        self._draw = draw
        self._font = font

    def _x(self, n_bytes: float) -> float:
        share = (math.log2(max(1.0, n_bytes)) - self._low) / (self._high - self._low)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def _y(self, share: float) -> float:
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def text(
        self,
        at: tuple[float, float],
        text: str,
        font: Any = None,
        fill: str = "black",
        anchor: str = "la",
    ) -> None:
        self._draw.text(at, text, fill=fill, font=font or self._font, anchor=anchor)

    def frame(self) -> None:
        for tenth in range(0, 11, 2):
            y = self._y(tenth / 10)
            self._draw.line((LEFT, y, WIDTH - RIGHT, y), fill=GREY)
            self.text((LEFT - 10, y), f"{tenth * 10} %", anchor="rm")
        for power in self._powers:
            x = self._x(2.0**power)
            self._draw.line((x, TOP, x, HEIGHT - BOTTOM), fill=GREY)
            self.text((x, HEIGHT - BOTTOM + 10), size(2.0**power), anchor="ma")
        self.text((LEFT, TOP - 8), "hit tokens of all prompt tokens", anchor="lb")
        self.text((WIDTH - RIGHT, HEIGHT - 14), "size of the cache", anchor="rb")

    def mark(self, mark: Mark) -> None:
        x = self._x(mark.n_bytes)
        for y in range(TOP, HEIGHT - BOTTOM, 12):
            self._draw.line((x, y, x, y + 6), fill="#888888", width=2)
        self.text((x, TOP - 8), mark.name, fill="#555555", anchor="mb")

    def _smooth(self, curve: Curve) -> Image:
        """Return where a curve covers a pixel, and how much of it: Pillow's lines have steps."""
        from PIL import Image, ImageDraw

        mask = Image.new("L", (WIDTH * SMOOTH, HEIGHT * SMOOTH))
        draw = ImageDraw.Draw(mask)
        points = [(self._x(n) * SMOOTH, self._y(s) * SMOOTH) for n, s in curve.points]
        if len(points) > 1:
            draw.line(points, fill=255, width=3 * SMOOTH, joint="curve")
        r = 4 * SMOOTH
        for x, y in points:
            draw.ellipse((x - r, y - r, x + r, y + r), fill=255)
        return mask.resize((WIDTH, HEIGHT), Image.Resampling.BOX)

    def curve(self, curve: Curve, colour: str, number: int) -> None:
        self._image.paste(colour, mask=self._smooth(curve))
        y = HEIGHT - BOTTOM - 30 - 26 * number
        self._draw.rectangle((WIDTH - 336, y - 13, WIDTH - RIGHT - 2, y + 13), fill="white")
        self._draw.line((WIDTH - 330, y, WIDTH - 290, y), fill=colour, width=3)
        self.text((WIDTH - 280, y), curve.name, anchor="lm")
