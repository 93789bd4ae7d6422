"""The real vLLM, in this process, for the demo and the benchmarks.

The engine core is stepped by hand, so that the time to the first token is what the engine
took and nothing else, and so that saves still in flight after a request can be waited for:
with the in-process client nothing steps once the last answer is out.

Everything that knows vLLM's insides is in this module.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import time
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..storage.errors import KVTierError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

ENGINE_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in this process
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",  # two threads fighting over two cores are several times slower
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
DRAIN_TIMEOUT_S = 60.0


class EngineError(KVTierError):
    """The engine cannot be used here; the message says what to do."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to start one engine.

    Attributes:
        model: folder or name of the model.
        device_tokens: size of the device cache; None leaves it to vLLM.
        block_tokens: vLLM's block size; None leaves it to vLLM.
        max_model_tokens: longest prompt and answer together.
        dtype: of weights and KV.
        tokenizer: whether vLLM should load one (token-id prompts need none).
        kvtier: `kv_connector_extra_config`, or None for an engine without kvtier.
        more: further arguments of `vllm.LLM`.
    """

    model: str
    device_tokens: int | None = None
    block_tokens: int | None = None
    max_model_tokens: int = 8192
    dtype: str = "float32"
    tokenizer: bool = False
    kvtier: Mapping[str, Any] | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished request.

    Attributes:
        prompt_tokens: length of the prompt.
        token_ids: what was generated.
        logprobs: of each generated token.
        ttft_s: from handing the request over to its first token.
        device_tokens: of the prompt, found in the device's own prefix cache.
        restored_tokens: of the prompt, brought back by the connector.
        restored_by_tier: the same, split by tier where the connector tells.
    """

    prompt_tokens: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ttft_s: float
    total_s: float
    device_tokens: int
    restored_tokens: int
    restored_by_tier: Mapping[str, int]

    def same_as(self, other: Answer, tolerance: float) -> bool:
        """Whether tokens are equal and every logprob agrees within ``tolerance``."""
        return self.token_ids == other.token_ids and self.logprob_distance(other) <= tolerance

    def logprob_distance(self, other: Answer) -> float:
        """Return the largest difference over the positions that both have (NaN counts as inf)."""
        pairs = zip(self.logprobs, other.logprobs, strict=False)
        distances = [abs(a - b) for a, b in pairs]
        return max((math.inf if math.isnan(d) else d for d in distances), default=0.0)


class Engine:
    """One running vLLM. Not thread-safe; one engine at a time in a process.

    Raises:
        EngineError: vLLM is not installed, or refuses the options.
    """

    def __init__(
        self, options: EngineOptions, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        prepare_environment()
        vllm = _import_vllm()
        self.options = options
        self._clock = clock
        self._prefill_stats: dict[str, Any] = {}
        self._count = 0
        self._sampling = vllm.SamplingParams
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of vLLM and torch are not the user's to mend
            try:
                self._llm: Any = vllm.LLM(**_llm_arguments(options))
            except (TypeError, ValueError, RuntimeError) as error:  # options that it refuses
                raise EngineError(f"vLLM does not start: {error}") from error
        self._watch_prefill_stats()
        self.block_tokens = int(self._llm.llm_engine.vllm_config.cache_config.block_size)

    def __enter__(self) -> Engine:  # noqa: PYI034 (Python 3.10 has no typing.Self)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, prompt_token_ids: Sequence[int], answer_tokens: int = 16) -> Answer:
        """Run one request to its end, greedily. Blocking; steps the engine."""
        return self.ask_together([prompt_token_ids], answer_tokens)[0]

    def ask_together(
        self, prompts: Sequence[Sequence[int]], answer_tokens: int = 16
    ) -> list[Answer]:
        """Run requests side by side to their end, greedily. Blocking; steps the engine."""
        core = self._llm.llm_engine
        params = self._sampling(
            temperature=0.0,
            max_tokens=answer_tokens,
            min_tokens=answer_tokens,
            ignore_eos=True,
            logprobs=1,
            detokenize=self.options.tokenizer,
        )
        started_s = self._clock()
        request_ids = []
        for prompt in prompts:
            self._count += 1
            name = f"ask-{self._count}"
            prompt_ids = {"prompt_token_ids": list(prompt)}
            request_ids.append((name, core.add_request(name, prompt_ids, params)))
        first_s: dict[str, float] = {}
        ended: dict[str, tuple[Any, float]] = {}
        while core.has_unfinished_requests():
            for output in core.step():
                if output.outputs[0].token_ids:
                    first_s.setdefault(output.request_id, self._clock() - started_s)
                if output.finished:
                    ended[output.request_id] = output, self._clock() - started_s
        if len(ended) < len(prompts) or len(first_s) < len(prompts):
            raise EngineError("the engine dropped a request without an answer")
        return [
            self._answer(inner, ended[name][0], first_s[name], ended[name][1])
            for name, inner in request_ids
        ]

    def _answer(self, request_id: str, final: Any, ttft_s: float, total_s: float) -> Answer:
        completion = final.outputs[0]
        token_ids = tuple(completion.token_ids)
        rows = completion.logprobs or []
        stats = self._prefill_stats.pop(request_id, None)
        restored_tokens = int(stats.num_external_cached_tokens) if stats else 0
        return Answer(
            prompt_tokens=len(final.prompt_token_ids),
            token_ids=token_ids,
            logprobs=tuple(
                float(row[token].logprob) for row, token in zip(rows, token_ids, strict=True)
            ),
            ttft_s=ttft_s,
            total_s=total_s,
            device_tokens=int(stats.num_local_cached_tokens) if stats else 0,
            restored_tokens=restored_tokens,
            restored_by_tier=self._restored_by_tier(request_id, restored_tokens),
        )

    def _watch_prefill_stats(self) -> None:
        """Keep each request's count of cached tokens, which `RequestOutput` adds up into one."""
        client = self._llm.llm_engine.engine_core
        get_output = client.get_output

        def watched() -> Any:
            outputs = get_output()
            for output in outputs.outputs:
                if output.prefill_stats is not None:
                    self._prefill_stats[output.request_id] = output.prefill_stats
            return outputs

        client.get_output = watched

    def _restored_by_tier(self, request_id: str, restored_tokens: int) -> dict[str, int]:
        """Ask the scheduler half where the tokens came from; the only place that knows how."""
        half = getattr(self.connector, "scheduler_half", None)
        hits = getattr(half, "last_hits", {}).get(request_id)
        if hits:
            return {tier: int(tokens) for tier, tokens in hits.items() if tokens}
        return {"unknown": restored_tokens} if restored_tokens else {}

    @property
    def _scheduler(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def connector(self) -> Any:
        """The connector object on the scheduler's side, or None."""
        return self._scheduler.connector

    def kv_bytes_per_token(self) -> int:
        """Return the bytes of KV that one token takes in all layers."""
        config = self._scheduler.kv_cache_config
        n_bytes = 0.0
        for group in config.kv_cache_groups:
            spec = group.kv_cache_spec
            n_bytes += len(group.layer_names) * spec.page_size_bytes / spec.block_size
        return round(n_bytes)

    @property
    def storing(self) -> bool:
        """Whether anything that the connector started is outstanding.

        An engine does not step for all of it: not for a call that hangs.
        """
        if self.connector is None:
            return False
        half = getattr(self.connector, "scheduler_half", None)
        outstanding = half is not None and half.outstanding
        return bool(outstanding or self.connector.has_pending_push_work())

    def drain(self, timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Step until nothing that the connector started is outstanding.

        Raises:
            EngineError: something still is, after ``timeout_s``.
        """
        deadline_s = self._clock() + timeout_s
        while self.storing:
            if self._clock() > deadline_s:
                raise EngineError(f"saves are still outstanding after {timeout_s:.0f} s")
            self._llm.llm_engine.step()
            time.sleep(0.001)

    def forget_device_cache(self) -> None:
        """Empty the device's prefix cache and nothing else.

        Raises:
            EngineError: blocks are still in use.
        """
        self.drain()
        if self._llm.llm_engine.reset_prefix_cache(
            reset_running_requests=False, reset_connector=False
        ):
            return
        raise EngineError("the device cache could not be emptied: blocks are still in use")

    def close(self) -> None:
        """Stop the engine and give everything back. Idempotent; drains saves first."""
        if self._llm is None:
            return
        with contextlib.suppress(EngineError):
            self.drain()
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        gc.collect()
        cleanup_dist_env_and_memory()


def prepare_environment() -> None:
    """Set what the engine must find in the environment before vLLM is imported.

    What the user has set wins, but for the in-process client, which this module needs.
    """
    for name, value in ENGINE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # Before vLLM has set up its own logging it would speak through Python's last resort.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])


def _import_vllm() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import vllm
    except ImportError as error:
        raise EngineError(
            f"vLLM is not installed in this Python ({error}); "
            "`make install` sets up one for the CPU"
        ) from error
    return vllm


def device_name() -> str:
    """Return what vLLM runs on here: ``cpu``, ``cuda``, ..."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def _llm_arguments(options: EngineOptions) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": options.model,
        "dtype": options.dtype,
        "max_model_len": options.max_model_tokens,
        "max_num_seqs": 8,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": not options.tokenizer,
        "use_tqdm_on_load": False,
        "seed": 0,
    }
    block_tokens = options.block_tokens
    if options.device_tokens is not None:
        block_tokens = block_tokens or default_block_tokens()
        # one block more: vLLM keeps block 0 for itself
        arguments["num_gpu_blocks_override"] = options.device_tokens // block_tokens + 1
    if block_tokens is not None:
        arguments["block_size"] = block_tokens
    if options.kvtier is not None:
        from vllm.config import KVTransferConfig

        arguments["kv_transfer_config"] = KVTransferConfig(
            kv_connector="KVTierConnector",
            kv_connector_module_path="kvtier.connector",
            kv_role="kv_both",
            kv_connector_extra_config=dict(options.kvtier),
        )
    return {**arguments, **options.more}


def default_block_tokens() -> int:
    """Return the block size that the demo and benchmarks ask for on this device."""
    return 128 if device_name() == "cpu" else 16
