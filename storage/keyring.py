"""Keys that records below RAM are encrypted with.

A ring holds one key that seals and any number that open. A key is 32 bytes and
never leaves this module but to derive a record's own key; what is written into
headers is its id, 4 bytes of a digest from which nothing of the key follows.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import importlib.util
import os
import re
from collections.abc import Iterable, Mapping

from .errors import ConfigError

KEY_BYTES = 32
MAX_KEYS = 64
_MAX_FILE_BYTES = 1 << 16
_HEX = re.compile(r"[0-9A-Fa-f]{64}")
_BASE64 = re.compile(r"[0-9A-Za-z+/_-]{43}=?")
_URL_SAFE = str.maketrans("-_", "+/")
_WANTED = "a key is 32 bytes, as 64 hex digits or as base64"


def looks_like_key(text: str) -> bool:
    """Whether a text may be a key itself, and so must not be shown."""
    return bool(_HEX.fullmatch(text) or _BASE64.fullmatch(text))


class Key:
    """One secret of `KEY_BYTES`; prints as its id."""

    __slots__ = ("_secret", "key_id")

    def __init__(self, secret: bytes) -> None:
        assert len(secret) == KEY_BYTES
        self._secret = secret
        # 0 in a header means "not sealed".
        self.key_id = int.from_bytes(self._derive(b"kvtier key id")[:4], "little") or 1

    def _derive(self, label: bytes) -> bytes:
        return hmac.new(self._secret, label, hashlib.sha256).digest()

    def record_key(self, salt: bytes) -> bytes:
        """Return the AES-256 key of the one record that has this salt.

        A key of its own for each record, as the AES-GCM-HKDF streaming schemes have it: no
        number of records makes two nonces meet under one key.
        """
        return self._derive(b"kvtier record" + salt)

    def __repr__(self) -> str:
        return f"Key({self.key_id:08x})"


class KeyRing:
    """The keys of one engine or tool. Immutable.

    Args:
        keys: the first one seals; all of them open. At least one.
        reads_plain: also read records that are not sealed. An engine does not: whoever may
            write to the store could put anything there. For tools that seal an old store.

    Raises:
        ConfigError: none, too many, or the same one twice.
    """

    def __init__(self, keys: Iterable[Key], *, reads_plain: bool = False) -> None:
        self._keys: dict[int, Key] = {}
        for key in keys:
            if key.key_id in self._keys:
                raise ConfigError(f"encryption keys: {key.key_id:08x} is given twice")
            self._keys[key.key_id] = key
        if not 0 < len(self._keys) <= MAX_KEYS:
            raise ConfigError(f"encryption keys: {len(self._keys)} given; give 1 to {MAX_KEYS}")
        self.writer = next(iter(self._keys.values()))
        self.reads_plain = reads_plain

    def get(self, key_id: int) -> Key | None:
        """Return the key of that id, or None when it is not ours."""
        return self._keys.get(key_id)

    def __repr__(self) -> str:
        return f"KeyRing({list(self._keys.values())})"


def read_key_ring(
    path: str | None, variable: str | None, environment: Mapping[str, str] = os.environ
) -> KeyRing | None:
    """Return the ring of settings `encryption_key_file` and `encryption_key_env`; None for none.

    Args:
        path: a file of one key a line, the sealing one first (``#`` begins a comment), or of
            32 raw bytes.
        variable: name of an environment variable: keys parted by commas or blanks.
        environment: where to look it up.

    Raises:
        ConfigError: one line, which never shows what was read.
    """
    if path is None and variable is None:
        return None
    if path is not None and variable is not None:
        raise ConfigError(
            "kvtier settings 'encryption_key_file' and 'encryption_key_env' are both set; keep one"
        )
    if importlib.util.find_spec("cryptography") is None:
        raise ConfigError(
            "kvtier encryption needs the package 'cryptography'; "
            "install it with: pip install 'kvtier[encryption]'"
        )
    if path is not None:
        return KeyRing(_file_keys(path))
    assert variable is not None
    where = f"kvtier setting 'encryption_key_env' = {variable!r}"
    text = environment.get(variable)
    if text is None:
        raise ConfigError(f"{where}: no such environment variable")
    return KeyRing(_text_keys(re.split(r"[,\s]+", text.strip(", \t\r\n")), where))


def _file_keys(path: str) -> list[Key]:
    where = f"kvtier setting 'encryption_key_file' = {path!r}"
    try:
        with open(os.path.expanduser(path), "rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror or error}; give a readable file") from None
    if len(data) == KEY_BYTES:
        return [Key(data)]
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigError(f"{where}: too long for keys; {_WANTED}, one a line")
    lines = (line.partition("#")[0].strip() for line in data.decode("latin-1").splitlines())
    return _text_keys([line for line in lines if line], where)


def _text_keys(words: list[str], where: str) -> list[Key]:
    keys = []
    for number, word in enumerate(words, 1):
        secret = b""
        if _HEX.fullmatch(word):
            secret = bytes.fromhex(word)
        elif _BASE64.fullmatch(word):
            usual = word.rstrip("=").translate(_URL_SAFE)
            secret = base64.b64decode(usual + "=")
        if len(secret) != KEY_BYTES:
            raise ConfigError(f"{where}: key {number} of {len(words)} is none; {_WANTED}")
        keys.append(Key(secret))
    return keys
