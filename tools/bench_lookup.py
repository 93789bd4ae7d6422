"""`kvtier bench lookup`: what a lookup costs the engine's scheduling thread.

A long prompt whose chunks are all known: half of them in RAM, half on disk, among many others.
The prompt's block hashes are given, as the engine gives them.

With recurrent layers the worst case: attention is known to the prompt's end, a state only at its
first boundary, so that every boundary is looked at. For a tenant a salt is mixed into each.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..connector.geometry import Geometry, GroupGeometry, GroupKind, Region
from ..connector.plan import RankReport
from ..connector.request_options import PARAMS_KEY, SaltedHashes, read_options
from ..connector.scheduler import SchedulerHalf
from ..storage.catalog import Catalog
from ..storage.errors import KVTierError
from ..storage.jobs import TierNews
from ..storage.key import chunk_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BLOCK_TOKENS, CHUNK_TOKENS = 16, 256
CHUNK_BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS
GROUP, STATES = 0, (1, 2, 3)
TIER = "disk"
REPEATS = 101


@dataclass(frozen=True, slots=True)
class Case:
    """What is looked up among how much; ``hybrid``: with three groups of recurrent layers."""

    prompt_tokens: int
    catalog_chunks: int
    hybrid: bool = False
    tenant: str | None = None


CASES = (
    Case(20_000, 100_000),
    Case(200_000, 10_000),
    Case(200_000, 100_000),
    Case(200_000, 100_000, hybrid=True),
    Case(200_000, 100_000, hybrid=True, tenant="a"),
)


@dataclass(slots=True)
class _Request:
    """The part of vLLM's request that a lookup reads."""

    request_id: str
    num_tokens: int
    block_hashes: list[bytes]
    kv_transfer_params: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool = False


def run(
    say: Callable[[str], None],
    cases: Sequence[Case] = CASES,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Return the figures: medians of thread time on the wall."""
    rows = []
    for case in cases:
        say(f"{case.prompt_tokens} tokens, {case.catalog_chunks} chunks")
        rows.append(_measure(case, clock))
    return {"rows": rows}


def _measure(case: Case, clock: Callable[[], float]) -> dict[str, Any]:
    hashes = [
        hashlib.sha256(i.to_bytes(8, "little")).digest()
        for i in range(case.prompt_tokens // BLOCK_TOKENS)
    ]
    params = None if case.tenant is None else {PARAMS_KEY: {"tenant": case.tenant}}
    salt = read_options(params, None).salt
    half = _scheduler_half(SaltedHashes(hashes, salt) if salt else hashes, case)
    expected = BLOCK_TOKENS if case.hybrid else case.prompt_tokens // CHUNK_TOKENS * CHUNK_TOKENS
    times_s = []
    for number in range(REPEATS):
        request = _Request(f"bench-{number}", case.prompt_tokens + 1, hashes, params)
        begin_s = clock()
        found, _ = half.lookup(request, 0)
        times_s.append(clock() - begin_s)
        if found != expected:
            raise KVTierError(f"the lookup found {found} tokens of {expected}")
    return {
        "prompt_tokens": case.prompt_tokens,
        "catalog_chunks": case.catalog_chunks,
        "groups": 1 + len(STATES) if case.hybrid else 1,
        "salted": bool(salt),
        "scheduler_ms": round(statistics.median(times_s) * 1000, 4),
    }


def _scheduler_half(hashes: Sequence[bytes], case: Case) -> SchedulerHalf:
    chain = [
        chunk_key(hashes[end // BLOCK_TOKENS - 1], GROUP)
        for end in range(CHUNK_TOKENS, case.prompt_tokens + 1, CHUNK_TOKENS)
    ]
    states = [chunk_key(hashes[0], group) for group in STATES] if case.hybrid else []
    kept = len(chain) + len(states)
    others = [
        chunk_key(
            hashlib.sha256(b"other" + i.to_bytes(8, "little")).digest(),
            i % (1 + len(STATES)) if case.hybrid else GROUP,
        )
        for i in range(case.catalog_chunks - kept)
    ]
    catalog = Catalog([TIER])
    catalog.add_pages(len(chain) * CHUNK_BLOCKS)
    for number, key in enumerate(chain + states + others):
        if number < len(chain) and number % 2:
            entry = catalog.begin_save(key, CHUNK_BLOCKS)
            assert entry is not None
            catalog.filled(entry, ok=True)
            catalog.unpin(entry)
        else:
            catalog.tier_added(TIER, key, 0, CHUNK_BLOCKS)
    half = SchedulerHalf(_geometry(case), catalog, lambda *_: None, time.monotonic)
    half.settle([RankReport(0, 0, (TierNews(TIER, complete=True, online=True),))])
    return half


def _geometry(case: Case) -> Geometry:
    region = Region("layer", 0, 4096, 4096)
    kinds = [GroupKind.FULL, *[GroupKind.RECURRENT for _ in STATES]] if case.hybrid else (
        [GroupKind.FULL]
    )  # fmt: skip
    return Geometry(
        groups=tuple(
            GroupGeometry(i, k, BLOCK_TOKENS, None, (region,)) for i, k in enumerate(kinds)
        ),
        hash_block_tokens=BLOCK_TOKENS,
        hit_alignment_tokens=BLOCK_TOKENS,
        scheduler_block_tokens=BLOCK_TOKENS,
        chunk_tokens=CHUNK_TOKENS,
        num_blocks=1 << 20,
        layout="LBNHC",
        n_engine_groups=len(kinds),
    )
