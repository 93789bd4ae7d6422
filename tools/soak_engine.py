"""The engine under a soak, in this process: several requests at once, and looks inside."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from ..storage.catalog_check import check_catalog
from ..storage.key import key_name
from .engine import Engine, EngineError, EngineOptions, device_name
from .soak_types import TOP_LOGPROBS, Ask, ChunkUse, Reply

QUIET_TIMEOUT_S = 60.0
NO_KVTIER = {"kvtier": {"read": False, "store": False}}


@dataclass(slots=True)
class _Open:
    """A request under way."""

    ask: Ask
    since_s: float
    internal_id: str
    first_s: float | None = None


class SoakEngine(Engine):
    """An engine that answers many and tells what it holds. Not thread-safe."""

    def __init__(self, options: EngineOptions) -> None:
        more = {"disable_log_stats": False, "max_logprobs": 20, **options.more}
        super().__init__(replace(options, more=more))
        self._open: dict[str, _Open] = {}
        self._loads: dict[str, list[ChunkUse]] = {}
        self.counters: Counter[str] = Counter()
        self._watch_counters()
        self._watch_plans()
        self._free_at_start = self.free_blocks

    # -- requests ------------------------------------------------------------

    def submit(self, name: str, ask: Ask, since_s: float | None = None) -> None:
        """Hand a request over."""
        params = self._sampling(
            temperature=0.0,
            max_tokens=ask.answer_tokens,
            min_tokens=ask.answer_tokens,
            ignore_eos=True,
            logprobs=TOP_LOGPROBS,
            detokenize=False,
            extra_args=None if ask.kvtier else {"kv_transfer_params": NO_KVTIER},
        )
        inputs: dict[str, Any] = {"prompt_token_ids": list(ask.prompt)}
        if ask.salt is not None:
            inputs["cache_salt"] = ask.salt
        internal_id = self._llm.llm_engine.add_request(name, inputs, params)
        self._open[name] = _Open(
            ask, self._clock() if since_s is None else since_s, internal_id or name
        )

    @property
    def busy(self) -> bool:
        """Whether a request is under way."""
        return bool(self._open)

    @property
    def pending(self) -> bool:
        """Whether the connector has work that only steps bring on."""
        return self.storing

    def step(self) -> list[tuple[str, Reply]]:
        """Step once; return what was finished."""
        done = []
        for output in self._llm.llm_engine.step():
            opened = self._open.get(output.request_id)
            if opened is None:
                continue
            now_s = self._clock()
            if opened.first_s is None and output.outputs[0].token_ids:
                opened.first_s = now_s - opened.since_s
            if output.finished:
                del self._open[output.request_id]
                done.append((output.request_id, self._reply(opened, output, now_s)))
        if not self._scheduler.running:
            time.sleep(0.0005)  # loads run on threads of this process
        return done

    def _reply(self, opened: _Open, output: Any, now_s: float) -> Reply:
        completion = output.outputs[0]
        stats = self._prefill_stats.pop(opened.internal_id, None)
        restored_tokens = int(stats.num_external_cached_tokens) if stats else 0
        top = tuple(
            tuple(sorted(((t, float(x.logprob)) for t, x in row.items()), key=lambda p: -p[1]))
            for row in completion.logprobs or ()
        )
        return Reply(
            tokens=tuple(completion.token_ids),
            top=top,
            prompt_tokens=len(output.prompt_token_ids),
            ttft_s=opened.first_s or 0.0,
            total_s=now_s - opened.since_s,
            device_tokens=int(stats.num_local_cached_tokens) if stats else 0,
            restored=self._restored_by_tier(opened.internal_id, restored_tokens),
            loads=tuple(self._loads.pop(opened.internal_id, ())),
        )

    def abort(self, name: str) -> Reply | None:
        """Give a request up, whatever it is doing; None when it is over already."""
        opened = self._open.pop(name, None)
        if opened is None:
            return None
        self._llm.llm_engine.abort_request([opened.internal_id], internal=True)
        self._prefill_stats.pop(opened.internal_id, None)
        loads = tuple(self._loads.pop(opened.internal_id, ()))
        return Reply((), (), len(opened.ask.prompt), loads=loads, aborted=True)

    # -- inside --------------------------------------------------------------

    def _watch_counters(self) -> None:
        client = self._llm.llm_engine.engine_core
        get_output = client.get_output

        def watched() -> Any:
            outputs = get_output()
            told = outputs.scheduler_stats
            if told is not None:
                for name, value in (told.kv_connector_stats or {}).items():
                    if not name.startswith("gauge."):
                        self.counters[name] += value
                drafts = told.spec_decoding_stats
                if drafts is not None:
                    self.counters["draft_tokens"] += drafts.num_draft_tokens
                    self.counters["accepted_tokens"] += drafts.num_accepted_tokens
            return outputs

        client.get_output = watched

    def _watch_plans(self) -> None:
        """Keep which chunks each request loads: they cross here on their way to the workers."""
        connector = self.connector
        if connector is None or not hasattr(connector, "scheduler_half"):
            return
        build = connector.build_connector_meta

        def watched(scheduler_output: Any) -> Any:
            meta = build(scheduler_output)
            for job in getattr(getattr(meta, "plan", None), "loads", ()):
                self._loads[job.request_id] = [
                    ChunkUse(key_name(c.key), int(c.start_tokens), int(c.end_tokens), c.source)
                    for c in job.chunks
                ]
            return meta

        connector.build_connector_meta = watched

    @property
    def free_blocks(self) -> int:
        """Blocks of the device pool that no request holds."""
        return int(self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def _worker_half(self) -> Any:
        if self.connector is None:
            return None
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        return getattr(get_kv_transfer_group(), "worker_half", None) if (
            has_kv_transfer_group()
        ) else None  # fmt: skip

    def sample(self) -> dict[str, float]:
        """Return counters, and gauges of now (``gauge.``)."""
        scheduler, half = self._scheduler, getattr(self.connector, "scheduler_half", None)
        worker = self._worker_half()
        gauges: dict[str, float] = {
            "free_device_blocks": self.free_blocks,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
        }
        for part in (half, worker):
            if part is not None:
                gauges.update(part.gauges())
                self.counters.update(part.take_counts())
        return {**self.counters, **{f"gauge.{name}": float(v) for name, v in gauges.items()}}

    def quiet(self) -> list[str]:
        """Step until nothing is outstanding; return what is still held, in words."""
        try:
            self.drain(QUIET_TIMEOUT_S)
        except EngineError as error:
            return [str(error)]
        held = []
        if self.free_blocks != self._free_at_start:
            held.append(
                f"{self._free_at_start - self.free_blocks} device blocks are held by nobody's "
                f"request ({self.free_blocks} of {self._free_at_start} are free)"
            )
        if self._scheduler.requests:
            held.append(f"{len(self._scheduler.requests)} requests are left in the scheduler")
        half = getattr(self.connector, "scheduler_half", None)
        if half is not None:
            if half.catalog.pinned_pages:
                held.append(f"{half.catalog.pinned_pages} RAM pages are pinned by no job")
            try:
                check_catalog(half.catalog)
            except AssertionError as error:
                held.append(f"the catalog contradicts itself: {error}")
        return held

    def facts(self) -> dict[str, Any]:
        """Return what the soak must know of the engine."""
        config = self._llm.llm_engine.vllm_config
        half = getattr(self.connector, "scheduler_half", None)
        return {
            "block_tokens": self.block_tokens,
            "device_blocks": self._free_at_start,
            "max_model_tokens": int(config.model_config.max_model_len),
            "vocab_tokens": int(config.model_config.get_vocab_size()),
            "kv_bytes_per_token": self.kv_bytes_per_token(),
            "groups": len(self._scheduler.kv_cache_config.kv_cache_groups),
            "device": device_name(),
            "kvtier": half is not None,
        }
