"""Comparing KV: exact counts, sizes of differences, and what counts as noise."""

import math
import struct

import numpy as np
import pytest

from kvtier.connector.audit_compare import TOLERANCES, Layer, Numbers, compare, numbers_of

SEED = 7
VALUES = 4096
ITEM = {Numbers.FLOAT32: 4, Numbers.FLOAT16: 2, Numbers.BFLOAT16: 2}
FLOATS = [Numbers.FLOAT32, Numbers.FLOAT16, Numbers.BFLOAT16]


def encoded(values, numbers):
    """The bytes of floats; bfloat16 is the upper half of a float32, as struct packs it."""
    if numbers is Numbers.FLOAT32:
        return struct.pack(f"<{len(values)}f", *values)
    if numbers is Numbers.FLOAT16:
        return struct.pack(f"<{len(values)}e", *values)
    packed = struct.pack(f"<{len(values)}f", *values)
    return b"".join(packed[i + 2 : i + 4] for i in range(0, len(packed), 4))


def normal(n=VALUES):
    return np.random.default_rng(SEED).normal(size=n).tolist()


def one(computed, stored, numbers, tolerance=None):
    """The only layer's result of blocks given as bytes."""
    layer = Layer("layer.0", 0, len(computed[0]), numbers)
    views = [[memoryview(block) for block in side] for side in (computed, stored)]
    (found,) = compare(*views, [layer], tolerance)
    return found


@pytest.mark.parametrize("numbers", list(Numbers))
def test_the_same_bytes(numbers):
    """Equal bytes are exact, whatever they mean: NaN and infinity too."""
    data = b"\xff\x7f\xc0\x7f" * 2048
    found = one([data, data], [data, data], numbers)
    assert found.values == found.exact == 2 * len(data) // ITEM.get(numbers, 1)
    assert (found.largest, found.mean, found.differs) == (0.0, 0.0, False)


@pytest.mark.parametrize("numbers", FLOATS)
def test_sizes_of_differences(numbers):
    """One value that is wrong by a known factor gives the counts and sizes that follow."""
    values = [1.0] * VALUES
    wrong = list(values)
    wrong[5] = 2.0
    found = one([encoded(values, numbers)], [encoded(wrong, numbers)], numbers)
    assert (found.values, found.exact) == (VALUES, VALUES - 1)
    assert found.largest == pytest.approx(0.5)
    per_slice = 4096 // ITEM[numbers]
    assert found.mean == pytest.approx(1 / (per_slice + 1), rel=1e-3)


@pytest.mark.parametrize("numbers", FLOATS)
def test_noise_passes_and_damage_does_not(numbers):
    """A tenth of the tolerance on every value is noise; a rolled slice in one block is not."""
    values = np.array(normal())
    noisy = values * (1 + TOLERANCES[numbers] / 10)
    sound = one([encoded(values, numbers)], [encoded(noisy, numbers)], numbers)
    assert not sound.differs
    damaged = values.copy()
    damaged[3072:] = np.roll(values[3072:], 3)
    blocks = [encoded(values, numbers)] * 2 + [encoded(damaged, numbers)]
    found = one([encoded(values, numbers)] * 3, blocks, numbers)
    assert (found.differs, found.block) == (True, 2)
    assert found.mean > 0.5


@pytest.mark.parametrize("numbers", FLOATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_none(numbers, bad):
    """A NaN or infinity on one side alone is beyond any tolerance."""
    values = normal()
    wrong = [*values[:-1], bad]
    for sides in ((values, wrong), (wrong, values)):
        found = one(*[[encoded(side, numbers)] for side in sides], numbers, 1e9)
        assert found.differs
        assert found.mean == math.inf


def test_the_same_nan_on_both_sides():
    """What is equal bit for bit is no difference, though it be no number."""
    values = normal()
    values[7] = math.nan
    near = [v * (1 + 1e-6) for v in values]
    sides = [[encoded(side, Numbers.FLOAT32)] for side in (values, near)]
    found = one(*sides, Numbers.FLOAT32)
    assert 0 < found.exact < VALUES
    assert not found.differs


def test_codes_of_one_byte():
    """float8 and int8 are compared as codes, neighbours a small step apart."""
    codes = np.arange(4096, dtype=np.uint8)
    near = codes ^ 1
    assert not one([codes], [near], Numbers.INT8).differs
    assert not one([codes], [near], Numbers.FLOAT8).differs
    assert one([codes], [np.roll(codes, 90)], Numbers.INT8).differs
    found = one([codes], [codes ^ 0x80], Numbers.FLOAT8)  # every sign
    assert found.differs
    assert found.mean == pytest.approx(2.0)


def test_tiny_values_are_not_damage():
    """Where everything is nearly zero a relative difference says nothing."""
    found = one(
        [encoded([1e-12] * VALUES, Numbers.FLOAT32)],
        [encoded([-1e-12] * VALUES, Numbers.FLOAT32)],
        Numbers.FLOAT32,
    )
    assert found.exact == 0
    assert not found.differs


def test_layers_lie_one_after_another():
    """Each layer is judged by its own bytes of a page, its padding by nobody."""
    page = bytearray(struct.pack("<24f", *normal(24)) + bytes(32))
    other = bytearray(page)
    other[40:44] = struct.pack("<f", 1e6)
    other[-1] = 1
    layers = [Layer(f"layer.{i}", 32 * i, 32, Numbers.FLOAT32) for i in range(3)]
    found = compare([memoryview(page)], [memoryview(other)], layers)
    assert [f.differs for f in found] == [False, True, False]
    assert [f.exact for f in found] == [8, 7, 8]
    odd = bytes([5] * 100)
    assert not one([odd], [odd], Numbers.FLOAT32).differs  # no whole number of slices


def test_what_torch_calls_them():
    """Dtypes are known by torch's names; unknown ones are compared as codes."""
    assert numbers_of("torch.bfloat16") is Numbers.BFLOAT16
    assert numbers_of("torch.int8") is Numbers.INT8
    for name in ("torch.uint8", "torch.float8_e4m3fn", None):
        assert numbers_of(name) is Numbers.FLOAT8
