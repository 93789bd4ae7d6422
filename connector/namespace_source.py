"""The namespace of an engine as its scheduler half knows it, epochs included.

Tiers of this engine's own (RAM, a folder) and tiers that engines share keep an
epoch each, so that a clear of one engine's folder does not part it from the
others, and a shared tier that does not answer leaves the folder of use.

A clear says that the weights in memory may no longer be those of the checkpoint,
by which the namespace names them. So what an engine stores after a clear is its own
until it ends: no engine that starts later, with the checkpoint's weights, finds it.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ..storage.errors import KVTierError
from . import engine_api, shared_tiers
from . import namespace as ns
from .config import Config
from .epoch import epoch_apart, in_time, raise_epoch, read_epoch
from .folders import answers
from .geometry import Geometry
from .namespace import Namespace
from .plan import NamespaceInfo
from .shared_epoch import SharedEpoch
from .weights import WeightsCache

logger = logging.getLogger("kvtier.namespace")

FOLDER_WAIT_S = 2.0  # for the folder's epoch: an engine does not stop for a disk that hangs
FIRST_EPOCH_WAIT_S = 0.5  # for a shared tier's epoch, before the engine goes on without the tier
RAISE_WAIT_S = 1.0


class NamespaceSource:
    """Computes the namespace when it can be known. Scheduler thread only.

    The constructor reads files (weights fingerprint); `current` does not, but for
    the epoch when the namespace is first made, and for a bounded time.

    Args:
        vllm_config: vLLM's `VllmConfig`.
        kv_cache_config: the scheduler's.
        geometry: read from the same.
        config: the settings.
        clock: monotonic seconds.
        new_mark: a text that no other call of any engine returns.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        geometry: Geometry,
        config: Config,
        clock: Callable[[], float] = time.monotonic,
        new_mark: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        self._new_mark = new_mark
        self._cleared: dict[str, str] = {}  # what parts this engine from all others
        self._vllm = vllm_config
        self._config = config
        self._clock = clock
        self._root = config.disk
        kept = config.disk is not None and answers(config.disk)
        cache = WeightsCache(os.path.join(config.disk or "", "weights.json") if kept else None)
        self._fields = ns.static_fields(
            vllm_config, kv_cache_config, geometry, weights_cache=cache, tenant=config.tenant_salt
        )
        self._memory_epoch = 0
        # Read once: another engine that clears the folder may have other weights by then.
        self._folder_epoch: int | None = None
        self._apart: int | None = None  # instead of the folder's, where that is not known
        self._shared: SharedEpoch | None = None
        self._shared_until_s: float | None = None
        self._told_shared: int | None = None
        self._warned = False

    def set_ranks(self, facts: dict[str, dict[str, Any]]) -> None:
        """Add what the workers told, by rank."""
        self._fields["ranks"] = facts

    def _epoch_name(self) -> str:
        return ns.digest_of(self._fields).hex()

    # -- the namespace ---------------------------------------------------

    def current(self, generation: int) -> NamespaceInfo | None:
        """Return the namespace, or None while the engine has not set its root hash.

        None, too, for a moment at first, while a shared tier is asked for its epoch.
        """
        own = self._space(self._own_epoch())
        if own is None or self._shared_is_awaited():
            return None
        self._tell(own)
        shared_epoch = self._told_shared = None if self._shared is None else self._shared.value
        shared = None if shared_epoch is None else self._space(shared_epoch)
        return NamespaceInfo(
            own.digest,
            generation,
            own.describe(),
            None if shared is None else shared.digest,
            None if shared is None else shared.describe(),
        )

    def _own_epoch(self) -> int:
        """Return the epoch of the tiers that are this engine's own."""
        if self._root is None:
            return self._memory_epoch
        if self._apart is not None:
            return self._apart
        if self._folder_epoch is None:
            try:
                self._folder_epoch = in_time(
                    partial(read_epoch, self._root, self._epoch_name()), FOLDER_WAIT_S
                )
            except KVTierError as err:
                self._apart = epoch_apart()
                logger.error(  # noqa: TRY400 - the message says it all
                    "kvtier: %s. What lies there may have been cleared: it is not served in this "
                    "run, and what this run writes there no other will find",
                    err,
                )
                return self._apart
        return self._folder_epoch

    def _space(self, epoch: int) -> Namespace | None:
        root = ns.root_fields(self._vllm, epoch)
        if root is None:
            return None
        return ns.namespace_of(
            {**self._fields, **root, **self._cleared},
            root_is_random=engine_api.root_hash_is_random(self._vllm),
        )

    def _tell(self, space: Namespace) -> None:
        algorithm, root_hash = (space.fields[name] for name in ("hash_algorithm", "root_hash"))
        if space.root_is_random and not self._warned:
            self._warned = True
            logger.warning(
                "kvtier: prefix hashes (%s) start from a random seed: nothing can be shared or "
                "survive a restart; set PYTHONHASHSEED or use --prefix-caching-hash-algo sha256",
                algorithm,
            )
        logger.info("kvtier: namespace %s (root hash %s)", space.digest.hex(), root_hash)

    def changed(self) -> bool:
        """Whether a shared tier's epoch has become known since `current` told; never blocks."""
        return self._shared is not None and self._shared.value != self._told_shared

    # -- epochs ----------------------------------------------------------

    def _shared_is_awaited(self) -> bool:
        """Whether the first answer of a shared tier may still come in time."""
        shared = self._shared_epoch()
        if shared is None or shared.value is not None:
            return False
        if self._shared_until_s is None:
            self._shared_until_s = self._clock() + FIRST_EPOCH_WAIT_S
        return self._clock() < self._shared_until_s

    def _shared_epoch(self) -> SharedEpoch | None:
        if self._shared is None:
            self._shared = shared_tiers.open_epoch(self._config, self._epoch_name())
        return self._shared

    def raise_epoch(self) -> bool:
        """Make everything stored so far unreachable; False (and a line) when it is not durable.

        What is stored from now on is found by this engine alone, see above.
        """
        kept = True
        self._cleared = {"cleared_by": self._new_mark()}
        if self._root is None:
            self._memory_epoch += 1
        else:
            try:
                self._folder_epoch = in_time(
                    partial(raise_epoch, self._root, self._epoch_name()), FOLDER_WAIT_S
                )
                self._apart = None
            except KVTierError as err:
                # Not a number near the folder's: another clear may get that one.
                self._apart = epoch_apart()
                kept = False
                logger.error(  # noqa: TRY400 - the message says it all
                    "kvtier: cleared for this run only: %s; after a restart old KV could be served "
                    "again, so remove the store's folder before that",
                    err,
                )
        shared = self._shared_epoch()
        if shared is not None and not shared.raise_epoch(RAISE_WAIT_S):
            kept = False
            logger.error(
                "kvtier: Redis is not cleared: it does not answer. It is left alone until it is; "
                "an engine that starts before that could serve old KV from it"
            )
        return kept

    def close(self) -> None:
        """Stop asking shared tiers. Idempotent."""
        if self._shared is not None:
            self._shared.close()
