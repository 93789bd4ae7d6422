"""How much RAM and disk a model's sessions need, and what they bring. No engine needed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..connector.values import format_size
from ..storage.catalog import RAM
from .model_sizes import ModelKV
from .replay_bounds import Optimum, Recency, limited_tokens
from .replay_chunks import PAGE_ALIGN_BYTES, Shape
from .replay_results import Setup
from .replay_run import Job, run_all
from .replay_tiers import DISK, POLICIES, Sizes, Speeds
from .traces import Trace
from .traces_read import read_trace

DEFAULT_SESSION_TOKENS = 150_000
CURVE_POWERS = range(12)  # sizes: these powers of two below where everything fits
REPLAYED_POWERS = range(0, 12, 2)
REPLAYED_MERGE = 16


@dataclass(frozen=True, slots=True)
class Wish:
    """What is planned for.

    Attributes:
        model: its KV.
        sizes: of the tiers, all ranks together.
        speeds: measured or expected.
        session_tokens: of one session; None: the trace's median, or a default.
        chunk_tokens: of a chunk.
        disk_path: folder for the settings.
    """

    model: ModelKV
    sizes: Sizes
    speeds: Speeds
    session_tokens: int | None = None
    chunk_tokens: int = 256
    disk_path: str = "/path/on/nvme"


@dataclass(frozen=True, slots=True)
class TraceWish:
    """A trace to plan with."""

    source: str
    n_users: int = 16
    share_prefix: bool = False


def plan(wish: Wish, traced: TraceWish | None, n_jobs: int = 1) -> dict[str, Any]:
    """Return the plan as one object, ready for JSON. Blocking.

    Args:
        wish: model, sizes, speeds.
        traced: adds the hit rate over sizes.
        n_jobs: processes, where hit rates must be replayed (recurrent states).

    Raises:
        TraceError, OSError: of the trace.
    """
    shape = wish.model.shape(wish.chunk_tokens)
    trace = None
    if traced is not None:
        trace = read_trace(traced.source, n_users=traced.n_users, share_prefix=traced.share_prefix)
    session = wish.session_tokens or _median_session(trace)
    result: dict[str, Any] = {
        "model": _model(wish.model, shape),
        "session_tokens": session,
        "session_bytes": _session_bytes(shape, session),
        "tiers": _tiers(wish, shape, session),
        "kv_transfer_config": settings(wish),
    }
    if trace is not None and traced is not None:
        result["trace"] = _trace(trace, shape)
        result["curve"] = _curve(wish, shape, trace, traced, n_jobs)
    return result


def _median_session(trace: Trace | None) -> int:
    if trace is None:
        return DEFAULT_SESSION_TOKENS
    longest = trace.longest_tokens()
    return max(1, longest[len(longest) // 2])


def _model(model: ModelKV, shape: Shape) -> dict[str, Any]:
    return {
        "name": model.name,
        "layers": [
            {
                "kind": layers.kind.value,
                "layers": layers.n,
                "token_bytes": layers.n * layers.token_bytes,
                "window_tokens": layers.window_tokens or None,
                "state_bytes": layers.n * layers.state_bytes or None,
            }
            for layers in model.layers
        ],
        "stored_bytes_per_token": shape.stored_bytes_per_token,
        "loaded_bytes_per_token": shape.loaded_bytes_per_token,
        "loaded_bytes_per_hit": shape.loaded_bytes,
        "state_bytes": shape.state_bytes,
        "state_every_tokens": shape.state_every_tokens or None,
        "chunk_tokens": shape.chunk_tokens,
        "chunk_bytes": shape.chunk_tokens * shape.stored_bytes_per_token,
    }


def _session_bytes(shape: Shape, tokens: int) -> int:
    """Return what one session takes: its KV, and one recurrent state."""
    return tokens * shape.stored_bytes_per_token + shape.state_bytes


def _tiers(wish: Wish, shape: Shape, session: int) -> list[dict[str, Any]]:
    speeds = wish.speeds
    tiers = []
    for tier, n_bytes, per_s in (
        (RAM, wish.sizes.ram_bytes, speeds.ram_bytes_per_s),
        (DISK, wish.sizes.disk_bytes, speeds.disk_read_bytes_per_s),
    ):
        if not n_bytes:
            continue
        load_s = speeds.latency_s
        load_s += (session * shape.loaded_bytes_per_token + shape.loaded_bytes) / per_s
        tiers.append(
            {
                "tier": tier,
                "bytes": n_bytes,
                "tokens": n_bytes // max(1, shape.stored_bytes_per_token),
                "sessions": round(n_bytes / _session_bytes(shape, session), 1),
                "session_load_s": load_s,
                "session_prefill_s": session / speeds.prefill_tokens_per_s,
                "pays_from_tokens": pays_from(shape, speeds, per_s),
            }
        )
    return tiers


def pays_from(shape: Shape, speeds: Speeds, bytes_per_s: float) -> int | None:
    """Return the shortest hit that is quicker to load than to compute; None: no hit is."""
    gain_s = 1 / speeds.prefill_tokens_per_s - shape.loaded_bytes_per_token / bytes_per_s
    if gain_s <= 0:
        return None
    return max(1, math.ceil((speeds.latency_s + shape.loaded_bytes / bytes_per_s) / gain_s))


def settings(wish: Wish) -> dict[str, Any]:
    """Return the value of vLLM's `--kv-transfer-config`."""
    extra: dict[str, Any] = {}
    if wish.sizes.ram_bytes:
        extra["ram"] = format_size(wish.sizes.ram_bytes)
    if wish.sizes.disk_bytes:
        extra["disk"] = wish.disk_path
        extra["disk_capacity"] = format_size(wish.sizes.disk_bytes)
    if wish.chunk_tokens != 256:
        extra["chunk_tokens"] = wish.chunk_tokens
    return {
        "kv_connector": "KVTierConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def settings_text(wish: Wish) -> str:
    """Return the option to paste into a shell."""
    return f"--kv-transfer-config '{json.dumps(settings(wish))}'"


# -- with a trace ------------------------------------------------------------------


def _block_bytes(shape: Shape, trace: Trace) -> int:
    n_bytes = trace.block_tokens * shape.stored_bytes_per_token
    return -(-n_bytes // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES


def _trace(trace: Trace, shape: Shape) -> dict[str, Any]:
    blocks = trace.distinct_blocks()
    states = len(trace.requests) * shape.state_bytes
    return {
        "name": trace.name,
        "requests": len(trace.requests),
        "prompt_tokens": trace.prompt_tokens,
        "distinct_tokens": blocks * trace.block_tokens,
        "distinct_bytes": blocks * _block_bytes(shape, trace) + states,
        "duration_s": trace.duration_s,
    }


def _curve(
    wish: Wish, shape: Shape, trace: Trace, traced: TraceWish, n_jobs: int
) -> list[dict[str, Any]]:
    """Return hit rates over sizes: least recently used, and the best that any policy can do.

    For attention alone both come from one walk of the trace. Recurrent states make a hit depend
    on what else is kept, so there the catalog itself is replayed, at fewer sizes.
    """
    powers = REPLAYED_POWERS if shape.state_bytes else CURVE_POWERS
    wanted = {wish.sizes.ram_bytes, wish.sizes.ram_bytes + wish.sizes.disk_bytes} - {0}
    sizes = _sizes(_trace(trace, shape)["distinct_bytes"], powers, wanted)
    block_bytes = _block_bytes(shape, trace)
    blocks = [n // block_bytes for n in sizes]
    if shape.state_bytes:
        hits = _replayed(wish, shape, traced, sizes, n_jobs)
    else:
        hits = Recency(trace).hit_tokens_at(blocks)
    optimum = Optimum(trace)
    best = [int(limited_tokens(trace, optimum.hit_blocks(n)).sum()) for n in blocks]
    return [
        {
            "bytes": n_bytes,
            "tokens": n_bytes // max(1, shape.stored_bytes_per_token),
            "hit_rate": hit / trace.prompt_tokens,
            "best_hit_rate": top / trace.prompt_tokens,
            "planned": n_bytes in wanted,
        }
        for n_bytes, hit, top in zip(sizes, hits, best, strict=True)
    ]


def _sizes(distinct_bytes: int, powers: range, wanted: set[int]) -> list[int]:
    """Return the sizes to look at: up to where everything fits, and those planned."""
    top = math.ceil(math.log2(max(2, distinct_bytes)))
    return sorted({1 << (top - p) for p in powers if top - p >= 12} | wanted)


def _replayed(
    wish: Wish, shape: Shape, traced: TraceWish, sizes: Sequence[int], n_jobs: int
) -> list[int]:
    setup = Setup(shape, wish.speeds, gated=False)
    job = Job(traced.source, setup, traced.n_users, traced.share_prefix, REPLAYED_MERGE)
    results = run_all(job, [Sizes(n) for n in sizes], [POLICIES["lru"]], n_jobs)
    return [sum(result.hit_tokens.values()) for result in results]
