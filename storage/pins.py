"""Pins: prefixes that people want kept, whatever is used least.

A pin names records of one namespace by their keys, so it also holds what is
saved again under the same key. In a folder each pin is a small file
``ROOT/pins/NAME.json``, for its owner only; whoever evicts looks whether the
folder has changed. Pins bind at most one part in `PIN_SHARE` of the capacity:
the oldest pins count first, and what is pinned beyond that is evicted like the rest.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .disk_layout import make_folders
from .disk_place import write_small
from .errors import KVTierError
from .key import NAMESPACE_BYTES, key_name, parse_key_name

_LOG = logging.getLogger("kvtier.pins")

PINS = "pins"
PIN_SHARE = 2  # of the capacity, at most one part in this
PIN_FORMAT = 1
MAX_PIN_BYTES = 32 << 20
MAX_KEYS = 200_000  # of one pin
_NAME = re.compile(r"[0-9a-f]{12}")
_NOT_NOW = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE})
_SETTLED_S = 0.1  # a folder that changed more recently may change again unseen


@dataclass(frozen=True, slots=True)
class Pin:
    """One pinned prefix, or whatever else was pinned in one go.

    Attributes:
        namespace: 16 bytes.
        keys: chunk keys.
        n_tokens: from the prompt's start that they restore; 0 where that is not known.
        stored_bytes: what their records took when they were pinned, all ranks.
        created_at_s: Unix time.
        note: what people say of it.
    """

    namespace: bytes
    keys: tuple[bytes, ...]
    n_tokens: int
    stored_bytes: int
    created_at_s: float
    note: str = ""

    @property
    def name(self) -> str:
        """What it is called: the same records, the same name."""
        digest = hashlib.blake2b(self.namespace, digest_size=6)
        for key in sorted(self.keys):
            digest.update(key)
        return digest.hexdigest()

    def as_dict(self) -> dict[str, Any]:
        """Return what people want to know of it."""
        return {
            "pin": self.name,
            "namespace": self.namespace.hex(),
            "tokens": self.n_tokens,
            "keys": len(self.keys),
            "stored_bytes": self.stored_bytes,
            "created_at_s": self.created_at_s,
            "note": self.note,
        }

    def pack(self) -> bytes:
        """Return its file's content."""
        return json.dumps(
            {
                "format": PIN_FORMAT,
                "namespace": self.namespace.hex(),
                "keys": [key_name(key) for key in self.keys],
                "tokens": self.n_tokens,
                "stored_bytes": self.stored_bytes,
                "created_at_s": self.created_at_s,
                "note": self.note,
            }
        ).encode()


def parse_pin(data: bytes) -> Pin:
    """Return the pin in a file's content.

    Raises:
        KVTierError: it is none; no other exception.
    """
    try:
        pin = _pin(json.loads(data))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        pin = None
    if pin is None:
        raise KVTierError("a pin that this build does not read")
    return pin


def _pin(said: Any) -> Pin | None:
    namespace = bytes.fromhex(said["namespace"])
    keys = tuple(parse_key_name(name) for name in said["keys"])
    if said["format"] != PIN_FORMAT or len(namespace) != NAMESPACE_BYTES or len(keys) > MAX_KEYS:
        return None
    return Pin(
        namespace,
        keys,
        int(said["tokens"]),
        int(said["stored_bytes"]),
        float(said["created_at_s"]),
        str(said["note"]),
    )


def is_pin_name(text: str) -> bool:
    """Whether a pin can be called so."""
    return _NAME.fullmatch(text) is not None


class PinFolder:
    """The pins of a folder. Blocking."""

    def __init__(self, root: str) -> None:
        self.path = f"{root}/{PINS}"

    def all(self) -> list[Pin]:
        """Return all pins, the oldest first; what is none is left out.

        Raises:
            OSError: they cannot be told now.
        """
        found = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for entry in os.listdir(self.path):
                name, _, suffix = entry.partition(".")
                if suffix == "json" and is_pin_name(name):
                    try:
                        found.append(parse_pin(_read(f"{self.path}/{entry}")))
                    except KVTierError:
                        continue
                    except OSError as error:
                        if error.errno in _NOT_NOW:
                            raise
        return sorted(found, key=lambda pin: (pin.created_at_s, pin.name))

    def add(self, pin: Pin) -> None:
        """Keep a pin; one of the same name is replaced.

        Raises:
            OSError.
        """
        make_folders(self.path)
        temporary = f"{self.path}/.{secrets.token_hex(8)}.tmp"
        try:
            write_small(f"{self.path}/{pin.name}.json", temporary, pin.pack())
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def remove(self, name: str) -> bool:
        """Drop a pin; return whether it was there.

        Raises:
            OSError.
        """
        try:
            os.unlink(f"{self.path}/{name}.json")
        except FileNotFoundError:
            return False
        return True


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_PIN_BYTES:
            raise KVTierError("a pin that is no small file")
        return file.read(MAX_PIN_BYTES)


class PinnedKeys:
    """Which records an evictor must leave alone. `holds` is memory only.

    Args:
        root: the store.
        clock: Unix time.
    """

    def __init__(self, root: str, clock: Callable[[], float]) -> None:
        self._folder = PinFolder(root)
        self._clock = clock
        self._seen: tuple[int, int] | None = None  # folder as of the last look, and the capacity
        self._keys: dict[bytes, frozenset[bytes]] = {}
        self._beyond = False

    def refresh(self, capacity_bytes: int) -> None:
        """Read the pins anew if the folder has changed. Blocking; one `stat` if it has not.

        Where they cannot be read now, those of before hold.
        """
        try:
            changed_ns = os.stat(self._folder.path).st_mtime_ns
            if self._seen == (changed_ns, capacity_bytes):
                return
            pins = self._folder.all()
        except (FileNotFoundError, NotADirectoryError):
            self._seen, self._keys = None, {}
            return
        except OSError as error:
            self._seen = None
            _LOG.debug("pins cannot be read now: %s", error)
            return
        held, within = 0, []
        for pin in pins:
            held += pin.stored_bytes
            if held <= capacity_bytes // PIN_SHARE:
                within.append(pin)
        self._keys = keys_by_namespace(within)
        settled = self._clock() - changed_ns / 1e9 > _SETTLED_S
        self._seen = (changed_ns, capacity_bytes) if settled else None
        beyond = held > capacity_bytes // PIN_SHARE
        if beyond != self._beyond:
            self._beyond = beyond
            _LOG.warning(
                "disk tier: %s",
                f"pins hold {held} bytes, more than one part in {PIN_SHARE} of the capacity; the "
                "newest ones are not kept" if beyond else "all pins are kept",
            )  # fmt: skip

    def holds(self, namespace: bytes, key: bytes) -> bool:
        """Whether a record must stay."""
        return key in self._keys.get(namespace, ())


def keys_by_namespace(pins: Iterable[Pin]) -> dict[bytes, frozenset[bytes]]:
    """Return the keys that pins hold, by namespace."""
    found: dict[bytes, set[bytes]] = {}
    for pin in pins:
        found.setdefault(pin.namespace, set()).update(pin.keys)
    return {namespace: frozenset(keys) for namespace, keys in found.items()}
