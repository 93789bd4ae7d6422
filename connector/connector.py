"""`KVTierConnector`: the class that vLLM loads, thin over the two halves.

Everything that goes wrong while the halves are built, other than a wrong
setting, turns kvtier off in this engine with one line: no hits, nothing saved,
never an exception into a step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from ..storage.errors import ConfigError, GeometryError, KVTierError
from . import assembly, engine_api
from .config import Config, load
from .geometry import Geometry, from_kv_cache_config
from .logs import use_engine_log
from .lookup import MissReason
from .metrics import KVTierPromMetrics, KVTierStats
from .namespace_source import NamespaceSource
from .plan import Plan, RankReport
from .scheduler import SchedulerHalf
from .worker import WorkerHalf

logger = logging.getLogger("kvtier")


@dataclass
class PlanMetadata(base.KVConnectorMetadata):
    """A `Plan` in vLLM's envelope."""

    plan: Plan


@dataclass
class WorkerFacts(base.KVConnectorHandshakeMetadata):
    """What a rank tells the scheduler once, at start; ``off`` is why it does nothing."""

    rank: int
    facts: dict[str, Any]
    ready_pages: int
    off: str | None = None
    short_copies: bool = False
    staging_pages: int = 0


@dataclass
class WorkerReports(base.KVConnectorWorkerMetadata):
    """The ranks' reports of one step in vLLM's envelope."""

    reports: tuple[RankReport, ...]

    def aggregate(self, other: base.KVConnectorWorkerMetadata) -> base.KVConnectorWorkerMetadata:
        """Put two ranks' reports side by side."""
        assert isinstance(other, WorkerReports)
        return WorkerReports(self.reports + other.reports)


class KVTierConnector(base.KVConnectorBase_V1, base.SupportsHMA):
    """Tiered KV cache offload: device, RAM, disk, Redis.

    vLLM makes one object for the scheduler and one for each worker.
    """

    def __init__(
        self, vllm_config: Any, role: base.KVConnectorRole, kv_cache_config: Any = None
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        use_engine_log()
        transfer_config = vllm_config.kv_transfer_config
        # A lost record is a miss, never an error of the user's request.
        transfer_config.kv_load_failure_policy = "recompute"
        self._vllm = vllm_config
        self._kv_cache_config = kv_cache_config
        self._n_ranks = int(vllm_config.parallel_config.world_size)
        self._rank = int(vllm_config.parallel_config.rank)
        self._n_stages = int(vllm_config.parallel_config.pipeline_parallel_size)
        self._replicas = engine_api.identical_ranks(vllm_config, kv_cache_config)
        self._settings: Config = load(
            transfer_config.kv_connector_extra_config or {}, n_ranks=self._n_ranks
        )
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._names: NamespaceSource | None = None
        self._geometry: Geometry | None = None
        self._gauge_step = 0
        self._off: str | None = None
        self._unserved = 0  # requests since the last report that met it off
        self._short_copies = False
        try:
            engine_api.check_interface()
            self._geometry = from_kv_cache_config(
                vllm_config, kv_cache_config, self._settings.chunk_tokens
            )
            if role is base.KVConnectorRole.SCHEDULER:
                self._build_scheduler(self._geometry)
        except ConfigError:
            raise
        except KVTierError as err:
            self._turn_off(str(err))
        except Exception as err:
            logger.debug("kvtier: start failed", exc_info=True)
            self._turn_off(f"this engine is not understood: {err!r}")

    def _build_scheduler(self, geometry: Geometry) -> None:
        logger.info("kvtier: settings %s", self._settings.effective())
        untested = engine_api.untested_engine()
        if untested is not None:
            logger.warning("kvtier: %s", untested)
        engine_api.check_settings(self._vllm)
        self._names = NamespaceSource(self._vllm, self._kv_cache_config, geometry, self._settings)
        self._scheduler = assembly.build_scheduler(
            self._settings,
            geometry,
            self._names.current,
            self._n_ranks,
            self._replicas,
            self._n_stages,
            self._names.changed,
        )

    def _turn_off(self, reason: str) -> None:
        self.shutdown()
        self._scheduler = self._worker = self._geometry = self._names = None
        self._off = reason
        logger.warning("kvtier: off in this engine, no hits and nothing saved: %s", reason)

    # -- what vLLM asks of the class -------------------------------------------

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> base.KVConnectorStats | None:
        """Wrap stats that came through a process border."""
        return KVTierStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVTierPromMetrics:
        """Register the Prometheus families in the front-end process."""
        return KVTierPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # noqa: ARG003
        """Answer False: device addresses change over a sleep (asked from vLLM 0.33 on)."""
        return False

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache owes nobody a delivery."""
        return False

    # -- scheduler side ------------------------------------------------------------

    @property
    def scheduler_half(self) -> SchedulerHalf | None:
        """The scheduler half, for tools that run the engine in process."""
        return self._scheduler

    @property
    def worker_half(self) -> WorkerHalf | None:
        """The worker half, for tools that run the engine in process."""
        return self._worker

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take the block pool for pins."""
        if self._scheduler is not None:
            self._scheduler.bind_block_pool(gpu_block_pool)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Take in what the workers told at start."""
        self._take_facts(metadata.values())

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Any]) -> None:
        """Take in what the workers told at start."""
        self._take_facts(metadata.values())

    def _take_facts(self, values: Iterable[Any]) -> None:
        if self._names is None or self._scheduler is None:
            return
        facts = [value for value in values if isinstance(value, WorkerFacts)]
        off = {fact.off for fact in facts if fact.off is not None}
        if off or 0 < len(facts) < self._n_ranks:
            # A rank that does nothing would never report a load: its request would wait for ever.
            self._turn_off("; ".join(sorted(off)) or f"only ranks {[f.rank for f in facts]} answer")
            return
        self._names.set_ranks({str(f.rank): f.facts for f in facts})
        # What ranks stage in is theirs, however the scheduler's half cuts RAM.
        first_page = max((fact.staging_pages for fact in facts), default=None)
        if first_page is not None and not self._scheduler.pages_begin(first_page):
            self._turn_off("the ranks tell too late which RAM pages are their own")
            return
        for fact in facts:
            self._scheduler.pages_ready(fact.rank, fact.ready_pages)
        if any(fact.short_copies for fact in facts):
            self._scheduler.short_copies.on = True
            logger.warning(
                "kvtier: with prefix_match_unit this vLLM damages KV of this model after its own "
                "hits inside a block; what is computed from there on is not stored. Start it "
                "without prefix_match_unit"
            )

    def on_new_request(self, request: Any) -> None:
        """Begin to follow a request."""
        if self._scheduler is None:
            self._unserved += 1
        else:
            self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Look the request's prefix up."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.lookup(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the load that was granted."""
        if self._scheduler is not None:
            self._scheduler.admitted(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> base.KVConnectorMetadata:
        """Plan this step."""
        if self._scheduler is None:
            return PlanMetadata(Plan())
        return PlanMetadata(self._scheduler.build_plan(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """Take in what the workers report."""
        meta = connector_output.kv_connector_worker_meta
        if self._scheduler is None:
            return
        if connector_output.invalid_block_ids:  # another connector's: ours names requests
            self._scheduler.spoiled()
        if isinstance(meta, WorkerReports):
            self._scheduler.settle(meta.reports)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Save the end of a finished request (engines with a single group)."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Save the end of a finished request; its blocks are pinned one by one, never held."""
        if self._scheduler is not None:
            self._scheduler.finished(request, block_ids)
        return False, None

    def register_finished_partial_tail(
        self,
        request: Any,
        block_ids: tuple[list[int], ...],
        partial_tail_offloads: Sequence[tuple[int, int, int]],
    ) -> bool:
        """Keep the recurrent states at a finished request's end."""
        if self._scheduler is not None:
            self._scheduler.partial_tail(request, block_ids, partial_tail_offloads)
        return False

    def has_pending_push_work(self) -> bool:
        """Keep the engine stepping while jobs are out."""
        return self._scheduler is not None and self._scheduler.pending()

    def has_pending_block_frees(self) -> bool:
        """Hold off a preemption while saves in flight are about to free blocks."""
        return self._scheduler is not None and self._scheduler.frees_soon()

    def get_external_cache_hit_sources(self, request: Any, num_hits: int) -> Any:
        """Split a hit by the kinds of places that vLLM knows."""
        if self._scheduler is None:
            return super().get_external_cache_hit_sources(request, num_hits)
        hits = self._scheduler.hit_sources(request)
        sources = engine_api.hit_sources(hits, num_hits)
        if sources is None:
            return super().get_external_cache_hit_sources(request, num_hits)
        return sources

    def reset_cache(self) -> bool | None:
        """Forget everything in every tier, for good; False when that cannot be kept."""
        if self._scheduler is None or self._names is None:
            return True
        kept = self._names.raise_epoch()
        self._scheduler.reset()
        return kept

    # -- worker side ------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Build the worker half on the engine's KV memory."""
        if self._geometry is None:
            return
        try:
            if getattr(self._vllm.cache_config, "prefix_match_unit", None):
                self._short_copies = engine_api.copies_fall_short(kv_caches)
            self._worker = assembly.build_worker(
                self._settings,
                self._geometry,
                self._kv_cache_config,
                kv_caches,
                self._rank,
                self._n_ranks,
                engine_api.kv_item_bytes(kv_caches),
                self._replicas,
                self._n_stages,
            )
        except GeometryError as err:
            self._turn_off(str(err))
        except (ConfigError, MemoryError, OSError):
            raise
        except Exception as err:
            logger.debug("kvtier: start failed", exc_info=True)
            self._turn_off(f"this engine is not understood: {err!r}")

    def get_handshake_metadata(self) -> base.KVConnectorHandshakeMetadata | None:
        """Tell the scheduler what only a worker knows, be it that it does nothing."""
        if self._geometry is None or self._worker is None:
            return WorkerFacts(self._rank, {}, 0, self._off or "no KV cache was registered")
        from .namespace import worker_facts  # noqa: PLC0415 (only once)

        facts = worker_facts(self._vllm, self._geometry)
        pages = self._worker.first_pages()
        return WorkerFacts(
            self._rank,
            facts,
            pages,
            short_copies=self._short_copies,
            staging_pages=self._worker.staging_pages,
        )

    def _plan(self) -> Plan:
        meta = self._get_connector_metadata()
        assert isinstance(meta, PlanMetadata)
        return meta.plan

    def bind_connector_metadata(self, connector_metadata: base.KVConnectorMetadata) -> None:
        """Take in the step's plan; zeroing and copy-on-write are enqueued, loads may start."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin(self._plan())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: loads started with the plan."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: blocks are complete before their request is scheduled."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: whole blocks are saved after the forward."""

    def wait_for_save(self) -> None:
        """The forward has been launched: start this step's saves, wait for nothing."""
        if self._worker is not None:
            self._worker.forward_launched()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:  # noqa: ARG002
        """Return the requests whose loads are over, and those that failed."""
        finished, failed = self._worker.collect() if self._worker is not None else (set(), set())
        return engine_api.transfer_results(finished, failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Refuse to be used where failures cannot be told (`get_transfer_results` can)."""
        if self._worker is None:  # an engine so old that it has nothing else to ask
            return None, None
        results = self.get_transfer_results(finished_req_ids)
        return None, results.finished_recving

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Nothing: failures are told by request."""
        return set()

    def build_connector_worker_meta(self) -> base.KVConnectorWorkerMetadata | None:
        """Report this step's events."""
        report = self._worker.report() if self._worker is not None else None
        return None if report is None else WorkerReports((report,))

    # -- both sides ------------------------------------------------------------

    def get_kv_connector_stats(self) -> base.KVConnectorStats | None:
        """Return counters since the last call, and gauges now and then."""
        data: dict[str, float] = {}
        if self._worker is not None:
            data.update(self._worker.take_counts())
        if self._scheduler is not None:
            data.update(self._scheduler.take_counts())
        if self._unserved:
            data[f"misses.{MissReason.OFF.value}"], self._unserved = self._unserved, 0
        self._gauge_step += 1
        if data or self._gauge_step % 100 == 1:
            half = self._worker or self._scheduler
            if half is not None:
                where = f"@{self._rank}" if self._worker is not None else "@s"
                data.update({f"gauge.{k}{where}": v for k, v in half.gauges().items()})
        return KVTierStats(data=data) if data else None

    def shutdown(self) -> None:
        """Stop; idempotent, also on an object that was never completed."""
        worker = getattr(self, "_worker", None)
        if worker is not None:
            worker.shutdown()
        scheduler = getattr(self, "_scheduler", None)
        if scheduler is not None:
            scheduler.shutdown()
        names = getattr(self, "_names", None)
        if names is not None:
            names.close()
