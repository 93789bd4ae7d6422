"""The tiers that engines share, put together from the configuration: Redis."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from ..storage.errors import KVTierError
from ..storage.keyring import KeyRing
from ..storage.tier import Tier
from .config import Config
from .plan import NamespaceInfo
from .prober import Prober
from .shared_epoch import SharedEpoch
from .tracker import SharedOptions

logger = logging.getLogger("kvtier")

REDIS = "redis"


def shared_options(
    config: Config, n_holders: int, namespace_changed: Callable[[], bool] | None
) -> SharedOptions:
    """Return what the scheduler half needs of the shared tiers.

    Args:
        config: the settings.
        n_holders: ranks that each keep records of their own.
        namespace_changed: see `SharedOptions`.
    """
    if config.redis is None:
        return SharedOptions()
    return SharedOptions(
        tiers=(REDIS,),
        open_probers=lambda info: open_probers(config, info, n_holders),
        clear=lambda info: clear_in_background(config, info, n_holders),
        namespace_changed=namespace_changed,
    )


def open_redis(
    config: Config,
    info: NamespaceInfo,
    rank: int,
    item_bytes: int = 1,
    keys: KeyRing | None = None,
) -> Tier:
    """Open one rank's records in Redis. Does not connect."""
    from ..storage.redis import RedisTier  # noqa: PLC0415 (only where it is used)

    assert info.shared_digest is not None
    return RedisTier(
        config.redis_settings(),
        info.shared_digest,
        rank,
        codec=config.redis_codec,
        item_bytes=item_bytes,
        description=info.shared_description,
        keys=keys,
    )


def open_probers(config: Config, info: NamespaceInfo, n_holders: int) -> Sequence[Prober]:
    """Open what asks Redis for other engines' chunks; nothing while it must be left alone."""
    from ..storage.redis_lookup import RedisLookup  # noqa: PLC0415 (only where it is used)

    if info.shared_digest is None:
        return ()
    index = RedisLookup(config.redis_settings(), info.shared_digest, n_holders)
    return [Prober(REDIS, index, time.monotonic, patience_s=config.lookup_deadline_s)]


def open_epoch(config: Config, name: str) -> SharedEpoch | None:
    """Start asking Redis for the cache epoch kept for ``name``; None without Redis."""
    if config.redis is None:
        return None
    from ..storage.redis_epoch import raise_epoch, read_epoch  # noqa: PLC0415 (likewise)

    settings = config.redis_settings()
    return SharedEpoch(lambda: read_epoch(settings, name), partial(raise_epoch, settings, name))


def clear_in_background(config: Config, info: NamespaceInfo, n_holders: int) -> None:
    """Delete what a namespace that nobody can find any more keeps in Redis; a line tells.

    It costs room only: what is left goes with its time to live.
    """
    if info.shared_digest is None:
        return
    clearing = threading.Thread(
        target=_clear, args=(config, info, n_holders), name="kvtier-clear", daemon=True
    )
    clearing.start()


def _clear(config: Config, info: NamespaceInfo, n_holders: int) -> None:
    trouble = []
    for rank in range(n_holders):
        tier = open_redis(config, info, rank)
        try:
            tier.clear()
        except KVTierError as err:
            trouble.append(f"rank {rank}: {err}")
        except Exception as err:
            logger.exception("kvtier: clearing failed unexpectedly")
            trouble.append(f"rank {rank}: {err!r}")
        finally:
            tier.close()
    assert info.shared_digest is not None
    name = info.shared_digest.hex()
    if trouble:
        logger.warning(
            "kvtier: the cleared namespace %s still has records in Redis, which nobody reads: %s; "
            "`kvtier rm` deletes them",
            name,
            "; ".join(trouble),
        )
    else:
        logger.info("kvtier: the cleared namespace %s has no records in Redis any more", name)
