"""Cutting a run of bytes that lies in several buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def cut(parts: Sequence[bytes | memoryview], piece_bytes: int) -> Iterator[list[memoryview]]:
    """Yield the run of bytes that ``parts`` are in pieces, each a list of views.

    Every piece but the last has ``piece_bytes``. Copies nothing.
    """
    piece: list[memoryview] = []
    room = piece_bytes
    for part in parts:
        view = memoryview(part)
        while view:
            taken, view = view[:room], view[room:]
            piece.append(taken)
            room -= len(taken)
            if room == 0:
                yield piece
                piece, room = [], piece_bytes
    if piece:
        yield piece
