"""Codecs: lossless, never larger, never more memory than promised."""

import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.storage.codec import FRAME_BYTES, codec_of, decode, encode
from kvtier.storage.errors import ConfigError, DamageReason, RecordDamaged
from kvtier.storage.record import CodecId

CODECS = [CodecId.RAW, CodecId.LZ4, CodecId.ZSTD]


def bf16_like(n_bytes, seed=0):
    """Values as a KV cache has them: few exponents, random mantissas."""
    values = np.random.default_rng(seed).standard_normal(n_bytes // 2).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def cut(data, lengths):
    view = memoryview(bytearray(data))
    parts, at = [], 0
    for length in lengths:
        parts.append(view[at : at + length])
        at += length
    return [*parts, view[at:]]


def round_trip(codec, item_bytes, data, cut_in, cut_out):
    encoded = encode(codec, item_bytes, cut(data, cut_in))
    stored = b"".join(encoded.parts)
    assert len(stored) == encoded.stored_bytes <= len(data)
    into = cut(bytes(len(data)), cut_out)
    decode(encoded.codec, item_bytes, stored, into)
    assert b"".join(into) == data
    return encoded


@pytest.mark.parametrize(("codec", "least"), [(CodecId.LZ4, 1.15), (CodecId.ZSTD, 1.4)])
def test_gain_on_bf16(codec, least):
    """Byte planes make bf16 values shrink as measured."""
    data = bf16_like(3 * FRAME_BYTES + 8192)
    encoded = round_trip(codec, 2, data, [4096, FRAME_BYTES], [FRAME_BYTES + 4096])
    assert encoded.codec is codec
    assert len(data) / encoded.stored_bytes > least


@pytest.mark.parametrize("codec", CODECS)
def test_noise_is_stored_raw(codec):
    """Bytes that do not shrink are stored as they are, without a copy."""
    payload = [memoryview(random.Random(1).randbytes(1 << 20))]
    encoded = encode(codec, 2, payload)
    assert encoded.codec is CodecId.RAW
    assert encoded.parts[0] is payload[0]


@pytest.mark.parametrize("codec", CODECS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_lossless(codec, data):
    """Every payload comes back bit for bit, however it is cut on either side."""
    item_bytes = data.draw(st.sampled_from([1, 2, 4]))
    n_bytes = 4 * data.draw(st.integers(1, 6000))
    kind = data.draw(st.sampled_from(["zeros", "noise", "floats", "mixed"]))
    seed = data.draw(st.integers(0, 1000))
    payload = {
        "zeros": bytes(n_bytes),
        "noise": random.Random(seed).randbytes(n_bytes),
        "floats": bf16_like(n_bytes, seed),
        "mixed": (bytes(n_bytes // 2) + random.Random(seed).randbytes(n_bytes))[:n_bytes],
    }[kind]
    cuts = st.lists(st.integers(0, n_bytes // 3), max_size=2)
    round_trip(codec, item_bytes, payload, data.draw(cuts), data.draw(cuts))


@pytest.mark.parametrize("codec", [CodecId.LZ4, CodecId.ZSTD])
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_damaged_bytes(codec, data):
    """Damaged bytes decode to something of the right length, or are a RecordDamaged."""
    raw = bf16_like(16384)
    stored = bytearray(b"".join(encode(codec, 2, [memoryview(raw)]).parts))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(stored) - 1))
        new = data.draw(st.binary(min_size=1, max_size=9))
        stored[at : at + len(new)] = new
    cut_to = data.draw(st.integers(0, len(stored) + 8))
    into = [memoryview(bytearray(16384))]
    try:
        decode(codec, 2, bytes(stored[:cut_to]), into)
    except RecordDamaged as damage:
        reason = damage.reason
    else:
        reason = DamageReason.CODEC
    assert reason is DamageReason.CODEC


@pytest.mark.parametrize("codec", CODECS)
@given(stored=st.binary(max_size=200))
@settings(max_examples=200)
def test_any_bytes(codec, stored):
    """Any bytes are a RecordDamaged, nothing else."""
    with pytest.raises(RecordDamaged):
        decode(codec, 2, stored, [memoryview(bytearray(4096))])


def test_bomb():
    """A frame that would expand to far more is refused before it is expanded."""
    import lz4.block
    import zstandard

    huge = bytes(256 << 20)
    for codec, packed in [
        (CodecId.ZSTD, zstandard.ZstdCompressor().compress(huge)),
        (CodecId.ZSTD, zstandard.ZstdCompressor(write_content_size=False).compress(huge)),
        (CodecId.LZ4, lz4.block.compress(huge, store_size=False)),
    ]:
        stored = len(packed).to_bytes(4, "little") + packed
        into = [memoryview(bytearray(4096))]
        tracemalloc.start()
        with pytest.raises(RecordDamaged):
            decode(codec, 1, stored, into)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_bytes < 4 << 20


def test_names():
    """Codecs have names; others are refused with the ones that exist."""
    assert codec_of("zstd") is CodecId.ZSTD
    with pytest.raises(ConfigError, match="raw, lz4, zstd"):
        codec_of("gzip")
