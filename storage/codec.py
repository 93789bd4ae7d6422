"""Lossless codecs on byte planes.

KV values are floats: their sign-and-exponent bytes repeat, their mantissa
bytes do not. So the payload is cut into frames, each frame into byte planes
(all first bytes of the values, all second bytes, ...), and each plane is
compressed only where it shrinks. What decodes is bit for bit what was encoded.

Encoded payload::

    u32 table[frames][planes]   stored length of each plane;
                                top bit set: the plane is stored as it is
    planes, in table order

A frame is `FRAME_BYTES` of the raw payload (the last may be shorter), so the
number of frames, and each plane's decoded length, follow from the raw length:
nothing in the encoded bytes decides how much is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .errors import ConfigError, DamageReason, RecordDamaged
from .record import CodecId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from .tier import Buffers

    Bytes = NDArray[np.uint8]

FRAME_BYTES = 1 << 20
ITEM_BYTES = (1, 2, 4)
_STORED_AS_IS = 1 << 31
_SAMPLE_BYTES = 16 << 10
_WORTH = 63 / 64  # decoding costs time: a plane or record must shrink to this at least
_ZSTD_LEVEL = 1


@dataclass(frozen=True, slots=True)
class Encoded:
    """An encoded payload: ``parts`` in order, ``stored_bytes`` in all."""

    codec: CodecId
    parts: list[bytes | memoryview]
    stored_bytes: int


def codec_of(name: str) -> CodecId:
    """Return the codec called ``name``.

    Raises:
        ConfigError: no such codec.
    """
    try:
        return CodecId[name.upper()]
    except KeyError:
        known = ", ".join(codec.name.lower() for codec in CodecId)
        raise ConfigError(f"codec: {name!r} is none of {known}") from None


def encode(codec: CodecId, item_bytes: int, payload: Buffers) -> Encoded:
    """Encode ``payload``; the result is RAW (the buffers themselves) where nothing is gained.

    Holds the interpreter lock only between planes. Besides the result it
    allocates two frames.

    Args:
        codec: what to try.
        item_bytes: bytes of one value: 1, 2 or 4.
        payload: the buffers, in order.
    """
    raw_bytes = sum(len(part) for part in payload)
    if codec is not CodecId.RAW and item_bytes in ITEM_BYTES and raw_bytes % item_bytes == 0:
        encoded = _encode_planes(codec, item_bytes, payload, raw_bytes)
        if encoded is not None:
            return encoded
    return Encoded(CodecId.RAW, list(payload), raw_bytes)


def decode(codec: CodecId, item_bytes: int, stored: bytes | memoryview, into: Buffers) -> None:
    """Decode ``stored`` into ``into``, which it must fill exactly.

    Never allocates more than two frames beyond its arguments, whatever the bytes say.

    Raises:
        RecordDamaged: CODEC; ``into`` is then undefined.
    """
    raw_bytes = sum(len(part) for part in into)
    if codec is CodecId.RAW:
        if len(stored) != raw_bytes:
            raise RecordDamaged(DamageReason.CODEC, f"{len(stored)} raw bytes for {raw_bytes}")
        _scatter(np.frombuffer(stored, np.uint8), [np.frombuffer(p, np.uint8) for p in into])
        return
    if item_bytes not in ITEM_BYTES or raw_bytes % item_bytes:
        raise RecordDamaged(DamageReason.CODEC, f"{raw_bytes} bytes of {item_bytes}-byte values")
    _decode_planes(codec, item_bytes, memoryview(stored), into, raw_bytes)


def _encode_planes(
    codec: CodecId, item_bytes: int, payload: Buffers, raw_bytes: int
) -> Encoded | None:
    shrink = _compressor(codec)
    frames = -(-raw_bytes // FRAME_BYTES)
    table = np.zeros((frames, item_bytes), "<u4")
    parts: list[bytes | memoryview] = []
    for frame, views in enumerate(_frames(payload, raw_bytes)):
        values = _gather(views).reshape(-1, item_bytes)
        for number in range(item_bytes):
            plane = np.ascontiguousarray(values[:, number])
            packed = _shrunk(shrink, plane.data)
            if packed is None:
                table[frame, number] = len(plane) | _STORED_AS_IS
                parts.append(plane.data)
            else:
                table[frame, number] = len(packed)
                parts.append(packed)
    stored_bytes = table.nbytes + sum(len(part) for part in parts)
    if stored_bytes > raw_bytes * _WORTH:
        return None
    return Encoded(codec, [table.tobytes(), *parts], stored_bytes)


def _shrunk(shrink: Callable[[memoryview], bytes], plane: memoryview) -> bytes | None:
    """Return the compressed plane, or None where a sample, or all of it, does not shrink."""
    if len(plane) > 4 * _SAMPLE_BYTES:
        middle = len(plane) // 2
        sample = plane[middle : middle + _SAMPLE_BYTES]
        if len(shrink(sample)) > len(sample) * _WORTH:
            return None
    packed = shrink(plane)
    return packed if len(packed) < len(plane) * _WORTH else None


def _decode_planes(
    codec: CodecId, item_bytes: int, stored: memoryview, into: Buffers, raw_bytes: int
) -> None:
    expand = _decompressor(codec)
    frames = -(-raw_bytes // FRAME_BYTES)
    table_bytes = frames * item_bytes * 4
    if len(stored) < table_bytes:
        raise RecordDamaged(DamageReason.CODEC, "ends inside its table")
    table = np.frombuffer(stored[:table_bytes], "<u4").reshape(frames, item_bytes)
    lengths = table & np.uint32(_STORED_AS_IS - 1)
    if int(lengths.sum(dtype=np.uint64)) != len(stored) - table_bytes:
        raise RecordDamaged(DamageReason.CODEC, "its table does not add up")
    at = table_bytes
    for frame, views in enumerate(_frames(into, raw_bytes)):
        whole = sum(len(view) for view in views)
        values = (views[0] if len(views) == 1 else np.empty(whole, np.uint8)).reshape(
            -1, item_bytes
        )
        for number in range(item_bytes):
            length = int(lengths[frame, number])
            part = stored[at : at + length]
            if int(table[frame, number]) & _STORED_AS_IS == 0:
                part = memoryview(expand(part, len(values)))
            if len(part) != len(values):
                raise RecordDamaged(
                    DamageReason.CODEC, f"a plane of {len(part)} bytes for {len(values)}"
                )
            values[:, number] = np.frombuffer(part, np.uint8)
            at += length
        if len(views) > 1:
            _scatter(values.reshape(-1), views)


def _frames(buffers: Buffers, raw_bytes: int) -> Iterator[list[Bytes]]:
    """Cut the run of bytes that the buffers are into frames, each a list of array views."""
    arrays = [np.frombuffer(buffer, np.uint8) for buffer in buffers if len(buffer)]
    index = offset = 0
    for start in range(0, raw_bytes, FRAME_BYTES):
        left = min(FRAME_BYTES, raw_bytes - start)
        views = []
        while left:
            view = arrays[index][offset : offset + left]
            views.append(view)
            left -= len(view)
            offset += len(view)
            if offset == len(arrays[index]):
                index, offset = index + 1, 0
        yield views


def _gather(views: list[Bytes]) -> Bytes:
    return views[0] if len(views) == 1 else np.concatenate(views)


def _scatter(data: Bytes, views: list[Bytes]) -> None:
    at = 0
    for view in views:
        view[:] = data[at : at + len(view)]
        at += len(view)


def _compressor(codec: CodecId) -> Callable[[memoryview], bytes]:
    """Return one-shot compression; the libraries are imported only where used."""
    if codec is CodecId.LZ4:
        import lz4.block  # noqa: PLC0415 - optional work, only for this codec

        def lz4_shrink(data: memoryview) -> bytes:
            return bytes(lz4.block.compress(data, store_size=False))

        return lz4_shrink
    import zstandard  # noqa: PLC0415 - optional work, only for this codec

    return zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_content_size=True).compress


def _decompressor(codec: CodecId) -> Callable[[memoryview, int], bytes]:
    """Return one-shot decompression to at most the given length; foreign errors mapped."""
    if codec is CodecId.LZ4:
        import lz4.block  # noqa: PLC0415 - optional work, only for this codec

        def lz4_expand(data: memoryview, length: int) -> bytes:
            try:
                return bytes(lz4.block.decompress(data, uncompressed_size=length))
            except (lz4.block.LZ4BlockError, ValueError, OverflowError) as error:
                raise RecordDamaged(DamageReason.CODEC, f"lz4: {error}") from None

        return lz4_expand
    import zstandard  # noqa: PLC0415 - optional work, only for this codec

    expander = zstandard.ZstdDecompressor(max_window_size=FRAME_BYTES)

    def zstd_expand(data: memoryview, length: int) -> bytes:
        try:
            # The library allocates what the frame says, so that is checked first.
            if zstandard.frame_content_size(data) != length:
                raise RecordDamaged(DamageReason.CODEC, "zstd: frame of another length")
            return expander.decompress(data, max_output_size=length, allow_extra_data=False)
        except (zstandard.ZstdError, ValueError, OverflowError) as error:
            raise RecordDamaged(DamageReason.CODEC, f"zstd: {error}") from None

    return zstd_expand
