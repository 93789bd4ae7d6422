"""What a request may ask in `kv_transfer_params`: whatever is in there, the engine lives."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from kvtier.connector import request_options as subject
from kvtier.connector.request_options import RequestOptions, options_of, read_options

REFUSED = RequestOptions(store=False, read=False)


@pytest.fixture(autouse=True)
def _nothing_told(monkeypatch):
    monkeypatch.setattr(subject, "_told", set())


@pytest.mark.parametrize("params", [None, {}, {"kvtier": None}, {"kvtier": {}}, {"other": 1}])
def test_nothing_asked(params):
    """Without options a request is read, stored and shared."""
    assert read_options(params, None) == RequestOptions()


def test_what_can_be_asked():
    """Each option does what it says and nothing else."""
    assert read_options({"kvtier": {"store": False}}, None) == RequestOptions(store=False)
    assert read_options({"kvtier": {"read": False}}, None) == RequestOptions(read=False)
    one, other = (read_options({"kvtier": {"tenant": t}}, None) for t in ("one", "other"))
    assert one.store
    assert one.read
    assert len({one.salt, other.salt, b"", read_options(None, "one").salt}) == 4
    assert read_options({"kvtier": {"tenant": ""}}, None).salt != b""


@pytest.mark.parametrize(
    "given",
    [
        False,
        True,
        0,
        "",
        "off",
        [],
        ["store"],
        {"store": 0},
        {"store": None},
        {"read": "false"},
        {"tenant": 3},
        {"tenant": b"x"},
        {"tenant": "a\ud800"},
        {"Store": False},
        {"store": False, "raed": False},
        {3: 4},
    ],
    ids=repr,
)
def test_what_is_not_understood_is_kept_apart(given, caplog):
    """Neither served nor stored, with a line, and never an exception."""
    with caplog.at_level(logging.WARNING, "kvtier.request"):
        assert read_options({"kvtier": given}, None) == REFUSED
    assert len(caplog.records) == 1


@pytest.mark.parametrize("params", ["text", 7, ["kvtier"], b"bytes", True], ids=repr)
def test_parameters_that_are_no_object(params):
    """VLLM hands on whatever a client gave as `kv_transfer_params`."""
    request = SimpleNamespace(kv_transfer_params=params)
    assert options_of(request, None) == REFUSED
