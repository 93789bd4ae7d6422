"""How much of a request may be restored: lookup, shared tiers, gate, audit, in this order.

Scheduler thread only; nothing waits. Where an answer has to come from elsewhere,
the engine is told to ask again, for a bounded time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..storage.catalog import RAM, Catalog
from ..storage.counts import Counts
from ..storage.entry import RamState
from .audit import Auditor
from .gate import Gate
from .geometry import Geometry, GroupKind
from .lookup import NOWHERE, Hit, MissReason, PrefixLookup
from .shared_lookup import SharedLookup
from .tier_states import TierStates
from .tracker import Tracker

SHARED_LOAD_WAIT_S = 10.0  # longest wait for another request's load of the same chunks
MAX_LOAD_FAILURES = 2  # a request that failed so often computes


class Admission:
    """Decides what one request gets, each time the engine asks.

    Args:
        lookup_deadline_s: longest wait for a shared tier's answer.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        geometry: Geometry,
        catalog: Catalog,
        lookup: PrefixLookup,
        shared: SharedLookup,
        gate: Gate,
        auditor: Auditor,
        tier_states: TierStates,
        counts: Counts,
        clock: Callable[[], float],
        *,
        lookup_deadline_s: float,
    ) -> None:
        self._geometry = geometry
        self._catalog = catalog
        self._lookup = lookup
        self._shared = shared
        self._gate = gate
        self._auditor = auditor
        self._tier_states = tier_states
        self._counts = counts
        self._clock = clock
        self._lookup_deadline_s = lookup_deadline_s
        self._bytes_per_token = sum(
            g.padded_block_bytes / g.block_tokens
            for g in geometry.groups
            if g.kind is not GroupKind.RECURRENT
        )

    def refusal(self, tracker: Tracker) -> MissReason | None:
        """Return why this request is not served at all, or None."""
        skips = getattr(tracker.request, "skip_reading_prefix_cache", False)
        if skips or not tracker.options.read or self._gate.policy == "never":
            return MissReason.NOT_READ
        if tracker.failures >= MAX_LOAD_FAILURES:
            return MissReason.LOAD_FAILED
        return None

    def find(self, tracker: Tracker, local_tokens: int) -> Hit | None:
        """Return what may be restored beyond ``local_tokens``; None: ask again."""
        refusal = self.refusal(tracker)
        if refusal is not None:
            return Hit(local_tokens, refusal)
        hashes = tracker.hashes
        limit = self._lookup.limit_tokens(tracker.request.num_tokens)
        self._shared.take()
        hit = self._lookup.find(hashes, local_tokens, limit)
        if tracker.ram_only:
            hit = self._in_ram(hashes, local_tokens, hit.tokens)
        elif hit.tokens < limit:
            asking = self._ask_shared(tracker, hashes, hit.tokens, limit)
            if asking or self._may_be_told(limit - hit.tokens):
                return None
            if tracker.late and hit.reason in NOWHERE:
                hit = Hit(hit.tokens, MissReason.LATE)
        if hit.tokens > local_tokens:
            hit = self._gated(hashes, local_tokens, hit)
        if hit.tokens <= local_tokens:
            return hit
        loading = self._others_load(hashes, local_tokens, hit.tokens)
        if loading and self._may_ask_again(tracker, SHARED_LOAD_WAIT_S):
            return None
        tracker.asked_since_s = None
        if self._auditor.wants(tracker.audit, local_tokens, hit.tokens):
            return Hit(local_tokens, MissReason.AUDIT)
        return hit

    def _in_ram(self, hashes: Sequence[bytes], local_tokens: int, tokens: int) -> Hit:
        """Cut a hit to what RAM alone can bring."""
        runs = self._lookup.sources(hashes, local_tokens, tokens)
        end = runs[0][1] if runs and runs[0][0] == RAM else local_tokens
        # The last run's end may be that of a tail which is not in RAM.
        for limit in (end, end // self._geometry.chunk_tokens * self._geometry.chunk_tokens):
            hit = self._lookup.find(hashes, local_tokens, limit)
            if hit.tokens <= local_tokens:
                break
            pieces = self._lookup.pieces(hashes, local_tokens, hit.tokens) or ()
            if all(self._catalog.source(piece.key) == RAM for piece in pieces):
                return Hit(hit.tokens, MissReason.LOAD_FAILED)
        return Hit(local_tokens, MissReason.LOAD_FAILED)

    def _ask_shared(
        self, tracker: Tracker, hashes: Sequence[bytes], covered_tokens: int, limit_tokens: int
    ) -> bool:
        """Ask the shared tiers once an admission; True while their answer is worth waiting for."""
        if not self._shared.active:
            return False
        ticket = tracker.request.request_id
        if not tracker.probed:
            tracker.probed, tracker.late = True, False
            tracker.asked_since_s = None
            if not self._shared.ask(ticket, hashes, covered_tokens, limit_tokens):
                return False
        if not self._shared.open(ticket):
            return False
        if self._may_ask_again(tracker, self._lookup_deadline_s):
            return True
        self._shared.forget(ticket)
        tracker.late = True
        self._counts.add("lookups_late")
        return False

    def _may_be_told(self, n_tokens: int) -> bool:
        """Whether a step will perhaps tell of so many tokens more, enough to be worth it."""
        return n_tokens >= self._geometry.chunk_tokens and self._tier_states.untold()

    def _gated(self, hashes: Sequence[bytes], local_tokens: int, hit: Hit) -> Hit:
        """Cut a hit to the length that pays."""
        n_tokens = hit.tokens - local_tokens
        if not self._gate.doubts(n_tokens, int(n_tokens * self._bytes_per_token)):
            return hit
        end = local_tokens
        for tier, tokens in self._lookup.sources(hashes, local_tokens, hit.tokens):
            n = tokens - end
            if not self._gate.pays(tier, n, int(n * self._bytes_per_token)):
                self._counts.add("gate_cut_tokens", hit.tokens - end)
                return Hit(self._lookup.find(hashes, local_tokens, end).tokens, MissReason.GATE)
            end = tokens
        return hit

    def _may_ask_again(self, tracker: Tracker, wait_s: float) -> bool:
        now_s = self._clock()
        if tracker.asked_since_s is None:
            tracker.asked_since_s = now_s
        return now_s - tracker.asked_since_s < wait_s

    def _others_load(self, hashes: Sequence[bytes], local_tokens: int, tokens: int) -> bool:
        """Whether another request brings the next chunk to RAM and the device right now."""
        chunk, unit = self._geometry.chunk_tokens, self._geometry.hash_block_tokens
        end = min((local_tokens // chunk + 1) * chunk, tokens // unit * unit)
        for group in self._geometry.groups:
            entry = self._catalog.get(hashes[end // unit - 1] + bytes((group.group_id,)))
            if entry is not None and entry.ram is RamState.FILLING and entry.loads:
                return True
        return False
