"""The namespace of an engine as its scheduler half knows it, epoch included."""

from __future__ import annotations

import logging
import os
from typing import Any

from ..storage.errors import TierUnavailable
from . import engine_api
from . import namespace as ns
from .config import Config
from .epoch import raise_epoch, read_epoch
from .geometry import Geometry
from .plan import NamespaceInfo
from .weights import WeightsCache

logger = logging.getLogger("kvtier.namespace")


class NamespaceSource:
    """Computes the namespace when it can be known. Scheduler thread only.

    The constructor reads files (weights fingerprint); `current` does not, but for
    the epoch when the namespace is first made.
    """

    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, geometry: Geometry, config: Config
    ) -> None:
        self._vllm = vllm_config
        self._root = config.disk
        cache = WeightsCache(
            os.path.join(config.disk, "weights.json") if config.disk is not None else None
        )
        self._fields = ns.static_fields(
            vllm_config, kv_cache_config, geometry, weights_cache=cache, tenant=config.tenant_salt
        )
        self._memory_epoch = 0
        self._warned = False

    def set_ranks(self, facts: dict[str, dict[str, Any]]) -> None:
        """Add what the workers told, by rank."""
        self._fields["ranks"] = facts

    def _epoch_name(self) -> str:
        return ns.digest_of(self._fields).hex()

    def current(self, generation: int) -> NamespaceInfo | None:
        """Return the namespace, or None while the engine has not set its root hash."""
        epoch = self._memory_epoch
        if self._root is not None:
            epoch += read_epoch(self._root, self._epoch_name())
        root = ns.root_fields(self._vllm, epoch)
        if root is None:
            return None
        algorithm = str(root["hash_algorithm"])
        space = ns.namespace_of(
            {**self._fields, **root},
            root_is_random=engine_api.root_hash_is_random(self._vllm),
        )
        if space.root_is_random and not self._warned:
            self._warned = True
            logger.warning(
                "kvtier: prefix hashes (%s) start from a random seed: nothing can be shared or "
                "survive a restart; set PYTHONHASHSEED or use --prefix-caching-hash-algo sha256",
                algorithm,
            )
        logger.info("kvtier: namespace %s (root hash %s)", space.digest.hex(), root["root_hash"])
        return NamespaceInfo(space.digest, generation, space.describe())

    def raise_epoch(self) -> bool:
        """Make everything stored so far unreachable; False (and a line) when it is not durable."""
        if self._root is not None:
            try:
                raise_epoch(self._root, self._epoch_name())
            except TierUnavailable as err:
                self._memory_epoch += 1
                logger.error(  # noqa: TRY400 - the message says it all
                    "kvtier: cleared for this run only: %s; after a restart old KV could be served "
                    "again, so remove the store's folder before that",
                    err,
                )
                return False
            return True
        self._memory_epoch += 1
        return True
