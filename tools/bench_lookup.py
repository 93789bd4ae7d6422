"""`kvtier bench lookup`: what a lookup costs the engine's scheduling thread.

A long prompt whose chunks are all known: half of them in RAM, half on disk, among many others.
The prompt's block hashes are given, as the engine gives them.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..connector.geometry import Geometry, GroupGeometry, GroupKind, Region
from ..connector.plan import RankReport
from ..connector.scheduler import SchedulerHalf
from ..storage.catalog import Catalog
from ..storage.errors import KVTierError
from ..storage.jobs import TierNews
from ..storage.key import chunk_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BLOCK_TOKENS, CHUNK_TOKENS = 16, 256
CHUNK_BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS
GROUP = 0
TIER = "disk"
CASES = ((20_000, 100_000), (200_000, 10_000), (200_000, 100_000))
REPEATS = 101


@dataclass(slots=True)
class _Request:
    """The part of vLLM's request that a lookup reads."""

    request_id: str
    num_tokens: int
    block_hashes: list[bytes]
    skip_reading_prefix_cache: bool = False


def run(
    say: Callable[[str], None],
    cases: Sequence[tuple[int, int]] = CASES,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Return the figures: medians of thread time on the wall."""
    rows = []
    for prompt_tokens, catalog_chunks in cases:
        say(f"{prompt_tokens} tokens, {catalog_chunks} chunks")
        rows.append(_measure(prompt_tokens, catalog_chunks, clock))
    return {"rows": rows}


def _measure(prompt_tokens: int, catalog_chunks: int, clock: Callable[[], float]) -> dict[str, Any]:
    hashes = [
        hashlib.sha256(i.to_bytes(8, "little")).digest()
        for i in range(prompt_tokens // BLOCK_TOKENS)
    ]
    half = _scheduler_half(hashes, prompt_tokens, catalog_chunks)
    times_s = []
    for number in range(REPEATS):
        request = _Request(f"bench-{number}", prompt_tokens + 1, hashes)
        begin_s = clock()
        found, _ = half.lookup(request, 0)
        times_s.append(clock() - begin_s)
        expected = prompt_tokens // CHUNK_TOKENS * CHUNK_TOKENS
        if found != expected:
            raise KVTierError(f"the lookup found {found} tokens of {expected}")
    return {
        "prompt_tokens": prompt_tokens,
        "catalog_chunks": catalog_chunks,
        "scheduler_ms": round(statistics.median(times_s) * 1000, 4),
    }


def _scheduler_half(hashes: list[bytes], prompt_tokens: int, catalog_chunks: int) -> SchedulerHalf:
    chain = [
        chunk_key(hashes[end // BLOCK_TOKENS - 1], GROUP)
        for end in range(CHUNK_TOKENS, prompt_tokens + 1, CHUNK_TOKENS)
    ]
    others = [
        chunk_key(hashlib.sha256(b"other" + i.to_bytes(8, "little")).digest(), GROUP)
        for i in range(catalog_chunks - len(chain))
    ]
    catalog = Catalog([TIER])
    catalog.add_pages(len(chain) * CHUNK_BLOCKS)
    for number, key in enumerate(chain + others):
        if number < len(chain) and number % 2:
            entry = catalog.begin_save(key, CHUNK_BLOCKS)
            assert entry is not None
            catalog.filled(entry, ok=True)
            catalog.unpin(entry)
        else:
            catalog.tier_added(TIER, key, 0, CHUNK_BLOCKS)
    half = SchedulerHalf(_geometry(), catalog, lambda *_: None, time.monotonic)
    half.settle([RankReport(0, 0, (TierNews(TIER, complete=True, online=True),))])
    return half


def _geometry() -> Geometry:
    region = Region("layer", 0, 4096, 4096)
    group = GroupGeometry(GROUP, GroupKind.FULL, BLOCK_TOKENS, None, (region,))
    return Geometry(
        groups=(group,),
        hash_block_tokens=BLOCK_TOKENS,
        hit_alignment_tokens=BLOCK_TOKENS,
        scheduler_block_tokens=BLOCK_TOKENS,
        chunk_tokens=CHUNK_TOKENS,
        num_blocks=1 << 20,
        layout="LBNHC",
        n_engine_groups=1,
    )
