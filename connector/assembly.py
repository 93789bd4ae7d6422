"""Puts the halves together from vLLM's configuration objects."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..storage.catalog import Catalog
from ..storage.errors import ConfigError, KVTierError
from ..storage.keyring import KeyRing
from ..storage.link import LinkLimits
from ..storage.ram import Arena
from ..storage.tier import Tier
from ..storage.transfer import TransferLimits
from . import shared_tiers
from .adapters import Adapters
from .audit import AuditOptions
from .audit_compare import layers_of
from .audit_worker import AuditSetup
from .config import Config
from .control import FOLDER as CONTROL_FOLDER
from .control import ControlServer
from .device_side import CudaSide, HostSide
from .folders import answers
from .geometry import Geometry
from .plan import NamespaceInfo
from .recorder import Recorder
from .regions import build_region_tables
from .scheduler import SchedulerHalf
from .tracker import SchedulerOptions
from .worker import ArenaPlan, WorkerHalf
from .write_back import WritePolicy

logger = logging.getLogger("kvtier")

STAGING_SHARE = 4  # of the RAM tier: at most one part in so many is staging
STAGING_WAIT_S = 60.0


def lower_tiers(config: Config) -> tuple[str, ...]:
    """Return the names of the configured tiers below RAM, fastest first."""
    return tuple(name for name, on in (("disk", config.disk), ("redis", config.redis)) if on)


def arena_plan(config: Config, geometry: Geometry, n_ranks: int, n_stages: int = 1) -> ArenaPlan:
    """Cut this rank's RAM into staging slots and catalog pages.

    Raises:
        ConfigError: too little for one chunk.
    """
    page_bytes = geometry.page_bytes
    slot_pages = max(
        geometry.chunk_blocks(group)
        if group.window_tokens is None
        else geometry.stored_blocks(group)
        for group in geometry.groups
    )
    slot_pages = max(1, slot_pages)
    ram_bytes = config.per_rank(config.ram_bytes, n_ranks)
    total_bytes = ram_bytes or 2 * config.staging_bytes
    audit_pages = 2 * slot_pages if config.audit_rate else 0
    n_pages = total_bytes // page_bytes
    wanted = min(config.staging_bytes, total_bytes // STAGING_SHARE) // page_bytes
    if not lower_tiers(config):
        wanted = 0
    threads = config.load_threads * max(1, len(lower_tiers(config)))
    # Pipeline ranks have pages of different sizes but must number them alike: there
    # the count may not depend on bytes.
    fitting = wanted // slot_pages if n_stages == 1 else threads
    slots = max(1, min(fitting, 4 * threads))
    staging_pages = slots * slot_pages + audit_pages
    if n_pages < staging_pages + slot_pages:
        need = (staging_pages + slot_pages) * page_bytes * n_ranks
        name = "ram" if config.ram_bytes else "staging"
        raise ConfigError(
            f"kvtier setting {name!r} = {total_bytes} bytes a rank holds no chunk of this model "
            f"(one takes {slot_pages * page_bytes}); give at least {need} bytes in all"
        )
    return ArenaPlan(page_bytes, staging_pages, n_pages - staging_pages, slot_pages, audit_pages)


def build_scheduler(
    config: Config,
    geometry: Geometry,
    namespace: Callable[[int], NamespaceInfo | None],
    n_ranks: int,
    replicas: int = 1,
    n_stages: int = 1,
    namespace_changed: Callable[[], bool] | None = None,
) -> SchedulerHalf:
    """Make the scheduler half."""
    n_holders = n_ranks // replicas
    plan = arena_plan(config, geometry, n_ranks, n_stages)
    catalog = Catalog(
        lower_tiers(config),
        n_holders,
        retain_in_ram=config.ram_bytes > 0,
        first_page=plan.staging_pages,
    )
    options = SchedulerOptions(
        promote=config.promote,
        load_policy=config.load_policy,
        deadline_s=config.load_deadline_s,
        lookup_deadline_s=config.lookup_deadline_s,
        write=write_policy(config),
        shared=shared_tiers.shared_options(config, n_holders, namespace_changed),
        adapter_of=Adapters().fingerprint,
        audit=AuditOptions(config.audit_rate),
        recorder=open_recorder(config, geometry),
        control=open_control(config),
    )
    return SchedulerHalf(
        geometry, catalog, namespace, time.monotonic, n_ranks=n_ranks, options=options
    )


def open_recorder(config: Config, geometry: Geometry) -> Recorder | None:
    """Begin the recording that the settings ask for."""
    if config.record_folder is None:
        return None
    return Recorder(config.record_folder, config.record_bytes, geometry.hash_block_tokens)


def open_control(config: Config) -> ControlServer | None:
    """Listen for `kvtier warm`; without it, and with one line, where that cannot be."""
    folder = config.control_folder
    if folder is None and config.disk is not None:
        folder = os.path.join(config.disk, CONTROL_FOLDER)
    if not folder or not config.ram_bytes or not lower_tiers(config):
        return None
    if not answers(config.control_folder or config.disk or folder):
        return None
    try:
        return ControlServer(folder)
    except (OSError, KVTierError) as error:
        logger.warning("kvtier: no control socket, `kvtier warm` will not find this engine: %s",
                       error)  # fmt: skip
        return None


def write_policy(config: Config) -> WritePolicy:
    """Return what is written to which lower tier, and when."""
    ways = {"disk": config.disk_write, "redis": config.redis_write}
    tiers = lower_tiers(config)
    return WritePolicy(
        through=tuple(t for t in tiers if ways[t] == "through"),
        back=tuple(t for t in tiers if ways[t] == "back"),
        min_uses=config.min_uses,
    )


def build_worker(
    config: Config,
    geometry: Geometry,
    kv_cache_config: Any,
    kv_caches: dict[str, Any],
    rank: int,
    n_ranks: int,
    item_bytes: int,
    replicas: int = 1,
    n_stages: int = 1,
) -> WorkerHalf:
    """Make a worker half on registered KV caches."""
    plan = arena_plan(config, geometry, n_ranks, n_stages)
    tables = build_region_tables(kv_cache_config, geometry, kv_caches)
    device = next(iter(kv_caches.values())).device
    keys = config.key_ring()  # once: a reset opens the tiers anew with the same
    side = HostSide() if device.type == "cpu" else CudaSide(device, plan)
    arena = Arena(plan.page_bytes, plan.n_pages, on_segment=side.on_segment)
    arena.start()
    try:
        _await_staging(arena, plan)
        mover = side.open_mover(tables, arena)
    except BaseException:  # the engine may go on without kvtier, and should have the memory
        side.close()
        arena.close()
        raise
    links = {name: _link_limits(config) for name in lower_tiers(config)}
    return WorkerHalf(
        rank,
        arena,
        plan,
        {group.group_id: group.padded_block_bytes for group in geometry.groups},
        mover,
        TierOpener(config, rank // replicas, n_ranks, item_bytes, keys),
        time.monotonic,
        TransferLimits(copy_threads=side.copy_threads, links=links),
        replicas=replicas,
        audits=_audit_setup(config, geometry, kv_caches, plan),
    )


def _await_staging(arena: Arena, plan: ArenaPlan) -> None:
    if not arena.wait_ready(plan.staging_pages, STAGING_WAIT_S):
        raise ConfigError(
            f"kvtier: {plan.staging_pages * plan.page_bytes} bytes of staging memory could not be "
            "had in time; lower 'ram' or 'staging'"
        )


def _audit_setup(
    config: Config, geometry: Geometry, kv_caches: dict[str, Any], plan: ArenaPlan
) -> AuditSetup | None:
    if not plan.audit_pages:
        return None
    dtypes = {name: getattr(tensor, "dtype", None) for name, tensor in kv_caches.items()}
    pages = np.arange(plan.staging_pages - plan.audit_pages, plan.staging_pages, dtype=np.int64)
    return AuditSetup(
        pages[: plan.slot_pages],
        pages[plan.slot_pages :],
        {group.group_id: layers_of(group, dtypes) for group in geometry.groups},
        config.audit_tolerance,
    )


def _link_limits(config: Config) -> LinkLimits:
    return LinkLimits(
        load_threads=config.load_threads,
        save_threads=config.save_threads,
        save_queue_bytes=config.save_queue_bytes,
    )


class TierOpener:
    """Opens the configured tiers below RAM for a namespace, one rank's. Does not wait for them.

    The folder's tier stays what it is where only the shared tiers' namespace is another: they
    may answer late, and its index costs a walk of the folder.
    """

    def __init__(
        self, config: Config, rank: int, n_ranks: int, item_bytes: int, keys: KeyRing | None
    ) -> None:
        self._config = config
        self._rank = rank
        self._n_ranks = n_ranks
        self._item_bytes = item_bytes
        self._keys = keys
        self._folder: tuple[tuple[bytes, int], Tier] | None = None  # of which namespace

    def __call__(self, info: NamespaceInfo) -> Sequence[Tier]:
        """Return the tiers of a namespace; whoever is handed none closes those before."""
        folder, self._folder = self._folder, None
        tiers: list[Tier] = []
        place = (info.digest, info.generation)
        if self._config.disk is not None:
            same = folder is not None and folder[0] == place
            tiers.append(folder[1] if folder and same else self._open_folder(info))
        if self._config.redis is not None and info.shared_digest is not None:
            tiers.append(
                shared_tiers.open_redis(
                    self._config, info, self._rank, self._item_bytes, self._keys
                )
            )
        if self._config.disk is not None:
            self._folder = (place, tiers[0])
        return tiers

    def _open_folder(self, info: NamespaceInfo) -> Tier:
        from ..storage.disk import DiskTier  # noqa: PLC0415 (only where it is used)

        config = self._config
        assert config.disk is not None
        assert config.disk_capacity_bytes is not None
        scale = self._n_ranks if config.size_scope == "per_rank" else 1
        return DiskTier(
            config.disk,
            info.digest,
            self._rank,
            config.disk_capacity_bytes * scale,
            codec=config.disk_codec,
            item_bytes=self._item_bytes,
            description=info.description,
            keys=self._keys,
            reads_at_once=-(-config.load_threads // 2),
        )
