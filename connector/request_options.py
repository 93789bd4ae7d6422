"""What a request may ask of kvtier, and what keeps its chunks apart from others'.

Options come in `kv_transfer_params`: ``{"kvtier": {"store": false, "read": false,
"tenant": "name"}}``. LoRA adapters are named in vLLM's block hashes by name and
path only; here the adapter's content is mixed in as well, so that an adapter
replaced under its old path shares nothing with the one before.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from ..storage.errors import KVTierError

logger = logging.getLogger("kvtier.request")

PARAMS_KEY = "kvtier"
MAX_TOLD = 1000  # reasons that are remembered, so that each is told once
_KNOWN = frozenset({"store", "read", "tenant"})
_told: set[str] = set()


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """How one request wants to be treated.

    Attributes:
        store: keep what it computes.
        read: serve it from what is kept.
        salt: mixed into its keys; empty shares with everybody.
    """

    store: bool = True
    read: bool = True
    salt: bytes = b""


def read_options(params: object, adapter: str | None) -> RequestOptions:
    """Return the options in a request's `kv_transfer_params`.

    What is not understood makes the request neither read nor stored (and one log
    line for all such requests): a tenant's KV is never shared because of a spelling mistake.

    Args:
        params: `request.kv_transfer_params`: an object or None, but a client may give anything.
        adapter: fingerprint of the LoRA adapter's content, if there is one.
    """
    asked = _asked(params)
    if asked is None:
        _complain(
            f"kv_transfer_params {PARAMS_KEY!r} not understood; use store, read (true or false) "
            "and tenant (text). Such requests are neither served from the cache nor stored"
        )
        return RequestOptions(store=False, read=False)
    store, read, tenant = asked
    if tenant is None and adapter is None:
        return RequestOptions(store, read)
    digest = hashlib.blake2b(digest_size=32, person=b"kvtier-salt")
    for part in (tenant, adapter):
        text = b"" if part is None else b"+" + part.encode()
        digest.update(len(text).to_bytes(4, "little") + text)
    return RequestOptions(store, read, digest.digest())


def _complain(text: str) -> None:
    """Log one line for each reason, not for each request that has it."""
    if text not in _told:
        if len(_told) >= MAX_TOLD:
            _told.clear()
        _told.add(text)
        logger.warning("kvtier: %s", text)


def _asked(params: object) -> tuple[bool, bool, str | None] | None:
    """Return (store, read, tenant), or None for what is not understood."""
    given = params.get(PARAMS_KEY) if isinstance(params, Mapping) else params
    if given is None:
        given = {}
    if not isinstance(given, Mapping) or not _KNOWN.issuperset(given):
        return None
    store, read, tenant = given.get("store", True), given.get("read", True), given.get("tenant")
    if not isinstance(store, bool) or not isinstance(read, bool):
        return None
    if tenant is not None and not _is_text(tenant):
        return None
    return store, read, tenant


def _is_text(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # half a character, which JSON can spell
        return False
    return True


def options_of(request: Any, adapter_of: Callable[[Any], str | None] | None) -> RequestOptions:
    """Return the options of a request of vLLM's.

    Args:
        request: vLLM's ``Request``.
        adapter_of: fingerprint of its LoRA adapter, or None; raises `KVTierError` where
            there can be none: such a request is neither served nor stored.
    """
    adapter = None
    if adapter_of is not None:
        try:
            adapter = adapter_of(request)
        except KVTierError as err:
            _complain(f"requests are neither served nor stored: {err}")
            return RequestOptions(store=False, read=False)
    return read_options(getattr(request, "kv_transfer_params", None), adapter)


class SaltedHashes(Sequence[bytes]):
    """A request's block hashes with a salt mixed into each, computed where looked at.

    SHA-256 hashes are combined with the salt by exclusive or: both are outputs of
    cryptographic hash functions, so that two chains meet only where somebody inverts one of
    them, and a walk over 12,500 boundaries takes a tenth of the time that hashing each once
    more would. Other hashes are hashed once more.
    """

    def __init__(self, hashes: Sequence[bytes], salt: bytes) -> None:
        self._hashes = hashes
        self._salt = salt

    def __len__(self) -> int:
        return len(self._hashes)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return self._mix_all(self._hashes[index])
        return self._mix(self._hashes[index])

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._mix_all(self._hashes))

    def _mix(self, block_hash: bytes) -> bytes:
        salt, size = self._salt, len(self._salt)
        if len(block_hash) != size:
            return hashlib.blake2b(block_hash, key=salt, digest_size=size).digest()
        mixed = int.from_bytes(block_hash, "big") ^ int.from_bytes(salt, "big")
        return mixed.to_bytes(size, "big")

    def _mix_all(self, hashes: Sequence[bytes]) -> list[bytes]:
        joined, size = b"".join(hashes), len(self._salt)
        if len(joined) != size * len(hashes):
            return [self._mix(h) for h in hashes]
        rows = np.frombuffer(joined, np.uint8).reshape(-1, size)
        mixed = rows ^ np.frombuffer(self._salt, np.uint8)
        salted: list[bytes] = mixed.view(f"V{size}").ravel().tolist()  # trailing zeros stay
        return salted
