"""`kvtier bench address`: block ids to addresses, against vLLM's own way and a plain loop.

Same inputs for all: a Python list of random block ids and the chunks that they
make, in; the address of every chunk in every region and its length, out. Results
are compared before anything is timed. Time is this thread's CPU time; the three
take turns, and medians are compared.
"""

from __future__ import annotations

import json as json_module
import random
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from ..connector.token_database import ChunkedTokenDatabase

REGIONS = (64, 160)
CHUNKS = (128, 800, 12_500)
BLOCK_TOKENS = 16
PAGE_BYTES = 64 << 10  # Llama-like: 16 tokens, 8 heads, 128 numbers, K and V, bf16
POOL_BLOCKS = 40_000
BUDGET_S = 2.0  # for one row
MIN_ROUNDS, MAX_ROUNDS = 3, 40
BURST, LONG_BURST = 5, 2
LONG_CHUNKS = 5_000
SEED = 20_260_401


def run(json: bool) -> dict[str, Any]:
    """Measure every row, print the table or one JSON object, and return that object.

    Raises:
        RuntimeError: two ways disagree.
    """
    rows = [_measure(regions, chunks) for regions in REGIONS for chunks in CHUNKS]
    result: dict[str, Any] = {"rows": rows}
    if json:
        print(json_module.dumps(result))
        return result
    print(f"{'regions':>8} {'chunks':>8} {'kvtier ms':>10} {'vs vLLM':>9} {'vs loop':>9}")
    for row in rows:
        vllm = "-" if row["ratio_to_vllm"] is None else f"{row['ratio_to_vllm']:.0f}x"
        print(
            f"{row['regions']:>8} {row['chunks']:>8} {row['kvtier_ms']:>10.3f} "
            f"{vllm:>9} {row['ratio_to_scalar']:>8.0f}x"
        )
    return result


def _measure(n_regions: int, n_chunks: int) -> dict[str, Any]:
    database, bases, lengths = _database(n_regions)
    block_ids = random.Random(SEED + n_chunks).choices(range(1, POOL_BLOCKS), k=n_chunks)  # noqa: S311 (no secret)
    out = _buffer(n_chunks, n_regions)
    spans = range(0, n_chunks * BLOCK_TOKENS, BLOCK_TOKENS)
    chunks = [(start, start + BLOCK_TOKENS) for start in spans]

    def kvtier() -> tuple[NDArray[Any], NDArray[Any]]:
        plan = database.plan(0, block_ids, spans, BLOCK_TOKENS)
        return database.addresses(plan, out=out), database.lengths(plan)

    def scalar() -> tuple[list[list[int]], list[list[int]]]:
        return _scalar(chunks, block_ids, bases, lengths)

    peer = _vllm(bases, lengths)
    ways: dict[str, Callable[[], Any]] = {"kvtier": kvtier, "scalar": scalar}
    if peer is not None:
        ways["vllm"] = lambda: peer.prepare_values(chunks, block_ids, [0] * n_chunks)
    _compare(ways, n_chunks)
    median_s = _interleaved(ways, LONG_BURST if n_chunks > LONG_CHUNKS else BURST)
    ours_s = median_s["kvtier"]
    return {
        "regions": n_regions,
        "chunks": n_chunks,
        "ratio_to_vllm": round(median_s["vllm"] / ours_s, 2) if "vllm" in median_s else None,
        "ratio_to_scalar": round(median_s["scalar"] / ours_s, 2),
        "kvtier_ms": round(ours_s * 1000, 4),
    }


def _database(n_regions: int) -> tuple[ChunkedTokenDatabase, list[int], list[int]]:
    """Return a token database over made-up memory, and its bases and lengths as lists."""
    from ..connector.geometry import Geometry, GroupGeometry, GroupKind, Region
    from ..connector.regions import region_table
    from ..connector.token_database import ChunkedTokenDatabase

    regions = tuple(
        Region(f"layers.{i}", i * PAGE_BYTES * POOL_BLOCKS, PAGE_BYTES, PAGE_BYTES)
        for i in range(n_regions)
    )
    group = GroupGeometry(0, GroupKind.FULL, BLOCK_TOKENS, None, regions)
    geometry = Geometry(
        groups=(group,),
        hash_block_tokens=BLOCK_TOKENS,
        hit_alignment_tokens=BLOCK_TOKENS,
        scheduler_block_tokens=BLOCK_TOKENS,
        chunk_tokens=256,
        num_blocks=POOL_BLOCKS,
        layout="LBHNC",
        n_engine_groups=1,
    )
    origin = 0x7F00_0000_0000
    table = region_table(
        0,
        ((origin + r.offset_bytes, r.stride_bytes, r.length_bytes) for r in regions),
        POOL_BLOCKS,
    )
    return ChunkedTokenDatabase(geometry, {0: table}), table.base.tolist(), table.length.tolist()


def _buffer(n_rows: int, n_columns: int) -> NDArray[Any]:
    import numpy as np

    return np.empty((n_rows, n_columns), dtype=np.uint64)


def _scalar(
    chunks: list[tuple[int, int]], block_ids: list[int], bases: list[int], lengths: list[int]
) -> tuple[list[list[int]], list[list[int]]]:
    """Compute the same with plain loops."""
    addresses, sizes = [], []
    for start, end in chunks:
        block_id = block_ids[start // BLOCK_TOKENS]
        n_blocks = -(-(end - start) // BLOCK_TOKENS)
        addresses.append(
            [base + block_id * length for base, length in zip(bases, lengths, strict=True)]
        )
        sizes.append([length * n_blocks for length in lengths])
    return addresses, sizes


def _vllm(bases: list[int], lengths: list[int]) -> Any | None:
    """Return vLLM's own layout object over the same memory, or None without vLLM."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import data

        layout = data.RankLocalStoreLayout(
            data.KeyMetadata("model", 0, 0, 0, 0), BLOCK_TOKENS, BLOCK_TOKENS
        )
        layout.set_kv_caches_base_addr(bases)
        layout.set_block_len(lengths)
    except (ImportError, AttributeError, TypeError) as error:
        print(f"no comparison with vLLM: {error}", file=sys.stderr)
        return None
    return layout


def _compare(ways: dict[str, Callable[[], Any]], n_chunks: int) -> None:
    addresses, lengths = ways["kvtier"]()
    for name, way in ways.items():
        if name == "kvtier":
            continue
        other = way()
        if addresses.tolist() != other[0] or [lengths.tolist()] * n_chunks != other[1]:
            raise RuntimeError(f"kvtier and {name} disagree; nothing was timed")


def _interleaved(ways: dict[str, Callable[[], Any]], burst: int) -> dict[str, float]:
    """Return the median CPU seconds of each way, taking turns in short bursts.

    In a burst each finds the processor's caches as its own last call left them.
    """
    samples: dict[str, list[float]] = {name: [] for name in ways}
    deadline_s = time.monotonic() + BUDGET_S
    for done in range(MAX_ROUNDS):
        if done >= MIN_ROUNDS and time.monotonic() > deadline_s:
            break
        for name, way in ways.items():
            for _ in range(burst):
                began_s = time.thread_time()
                way()
                samples[name].append(time.thread_time() - began_s)
    return {name: statistics.median(values) for name, values in samples.items()}
