"""Any bytes, and damaged good ones, are an error of our own or a miss; memory stays bounded."""

import itertools
import re
import tracemalloc

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from .targets import MAX_BYTES, TARGETS

WORDS = re.compile(rb'"[^"]*"|[-+.\w]+')
SLOW = {"trace", "recording", "settings-file"}


@st.composite
def damaged(draw, seeds):
    """A good input with bytes changed, cut out, put in or repeated; or any bytes at all."""
    if not seeds or draw(st.integers(0, 3)) == 0:
        return draw(st.binary(max_size=700))
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        way = draw(st.integers(0, 3))
        if way == 0:
            data[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
        elif way == 1:
            del data[at : at + draw(st.integers(1, 40))]
        elif way == 2:
            data[at:at] = draw(st.sampled_from(PIECES) | st.binary(max_size=12))
        else:
            data[at:at] = data[max(0, at - draw(st.integers(1, 60))) : at]
    return bytes(data)


PIECES = (
    b"\0" * 8, b"\xff" * 8, b"1e999", b"-1", b"NaN", b"9" * 25, b"[" * 2000, b"null", b"{}", b"[]",
    b'"', b"\r\n", b"$999999999999\r\n", b"*9999999\r\n", b"*1\r\n" * 50, b"\xed\xa0\x80", b"true",
    b"9" * 5000, b"999999999999",
)  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
def test_any_input(name):
    """Only the exceptions that a parser may raise, and no more memory than there is a cap for."""
    target = TARGETS[name]

    @settings(max_examples=30, suppress_health_check=list(HealthCheck))
    @given(damaged(target.seeds))
    @example(b"")
    def check(data):
        target(data)

    tracemalloc.start()
    try:
        check()
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()


def swept(seed):
    """A good input with each of its words replaced by each piece, and each byte by others."""
    for word in WORDS.finditer(seed):
        for piece in PIECES:
            yield seed[: word.start()] + piece + seed[word.end() :]
    for at in range(len(seed)):
        for byte in (b"\0", b"\x7f", b"\xff", b""):
            yield seed[:at] + byte + seed[at + 1 :]


@pytest.mark.parametrize("name", TARGETS)
def test_good_input_with_one_thing_wrong(name):
    """Every word and every byte of a good input in turn."""
    target = TARGETS[name]
    for piece in PIECES:
        target(piece)
    for seed in target.seeds:
        every = 1 if name not in SLOW else 7
        for data in itertools.islice(swept(seed), 0, None, every):
            target(data)


@pytest.mark.parametrize("name", TARGETS)
def test_good_input(name):
    """What a fuzzer begins with is read: it is past the first check of each parser."""
    target = TARGETS[name]
    assert target.seeds
    for seed in target.seeds:
        if name == "redis-answers":
            target(seed)  # ends with the connection
        else:
            target.run(seed)
