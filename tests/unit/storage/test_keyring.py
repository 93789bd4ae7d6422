"""Encryption keys: how they are read, and that nothing shows them."""

import base64
import hashlib
import hmac

import pytest

from kvtier.storage.errors import ConfigError
from kvtier.storage.keyring import Key, KeyRing, read_key_ring

ONE = bytes(range(32))
TWO = bytes(range(200, 232))  # its base64 has the letters that the URL-safe alphabet changes


def id_of(secret):
    return int.from_bytes(hmac.new(secret, b"kvtier key id", hashlib.sha256).digest()[:4], "little")


def ring_of(tmp_path, data):
    path = tmp_path / "keys"
    path.write_bytes(data)
    return read_key_ring(str(path), None)


def refusal(path, variable, environment=None):
    with pytest.raises(ConfigError) as caught:
        read_key_ring(path, variable, environment or {})
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_nothing_set():
    """Without a setting there is no ring, and nothing is encrypted."""
    assert read_key_ring(None, None, {}) is None


@pytest.mark.parametrize(
    "data",
    [
        ONE,
        ONE.hex().encode(),
        ONE.hex().upper().encode() + b"\r\n",
        base64.b64encode(ONE) + b"\n",
        base64.b64encode(ONE).rstrip(b"="),
        b"# the key of 2024\n\n  " + ONE.hex().encode() + b"   # old\n",
    ],
)
def test_ways_to_write_a_key(tmp_path, data):
    """32 raw bytes, hex and base64 are one and the same key."""
    assert ring_of(tmp_path, data).writer.key_id == id_of(ONE)


def test_url_safe_base64(tmp_path):
    """Base64 of either alphabet is read."""
    for text in (base64.b64encode(TWO), base64.urlsafe_b64encode(TWO)):
        assert ring_of(tmp_path, text).writer.key_id == id_of(TWO)
    assert base64.b64encode(TWO) != base64.urlsafe_b64encode(TWO)


def test_first_writes_all_read(tmp_path):
    """The first key seals, every key opens, no other does."""
    ring = ring_of(tmp_path, TWO.hex().encode() + b"\n" + base64.b64encode(ONE) + b"\n")
    assert ring.writer.key_id == id_of(TWO)
    assert ring.get(id_of(ONE)).key_id == id_of(ONE)
    assert ring.get(id_of(bytes(32))) is None
    text = f" {TWO.hex()},\n{ONE.hex()} "
    again = read_key_ring(None, "KEYS", {"KEYS": text})
    assert (again.writer.key_id, again.get(id_of(ONE)) is None) == (id_of(TWO), False)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"# nothing\n",
        ONE[:31],
        ONE + b"\n",
        ONE.hex().encode()[:-1],
        ONE.hex().encode() + b"0",
        base64.b64encode(ONE + b"x"),
        ONE.hex().encode() + b"\n" + b"hunter2\n",
        ONE.hex().encode() + b"\n" + ONE.hex().encode(),
        b"\n".join(bytes([i]).hex().encode() * 32 for i in range(65)),
        b"x" * 70_000,
    ],
    ids=range(11),  # else the folder's name would show the key
)
def test_wrong_files(tmp_path, data):
    """A file that holds no keys, too many, or one twice is refused in one line without them."""
    path = tmp_path / "keys"
    path.write_bytes(data)
    text = refusal(str(path), None)
    assert ONE.hex() not in text
    assert "hunter2" not in text
    assert base64.b64encode(ONE).decode()[:8] not in text


def test_wrong_settings(tmp_path):
    """No file, no variable, or both settings: one line that says what to do."""
    assert "No such file" in refusal(str(tmp_path / "none"), None)
    assert "Is a directory" in refusal(str(tmp_path), None)
    assert "no such environment variable" in refusal(None, "KEY")
    assert "keep one" in refusal("x", "KEY", {"KEY": ONE.hex()})
    assert "hunter2" not in refusal(None, "KEY", {"KEY": "hunter2"})
    assert "key 1 of 1" in refusal(None, "KEY", {"KEY": ""})


def test_without_the_package(tmp_path, monkeypatch):
    """Where the package is missing, the refusal names what installs it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "kvtier[encryption]" in refusal(str(tmp_path / "none"), None)


def test_a_ring_does_not_print_its_keys():
    """Neither repr nor str of keys and rings holds a byte of a secret."""
    ring = KeyRing([Key(ONE), Key(TWO)])
    for text in (repr(ring), str(ring.writer), f"{ring.writer!r}"):
        assert ONE.hex()[:8] not in text
        assert f"{id_of(ONE):08x}" in text
