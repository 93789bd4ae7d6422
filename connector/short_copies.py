"""Requests whose KV the engine's own copy-on-write may have damaged: they are not stored.

Where a prefix hit ends inside a block the engine copies the block, and some engines leave a part of
it behind (`engine_api.copies_fall_short`). What is computed from there on is wrong, in the device's
prefix cache too, from where later requests take it. The engine's answers are its own; here it is
kept out of the store, which would serve it for ever, and to engines that compute right.

What was loaded is not copied, so hits of kvtier's own that end inside a block are sound.
Scheduler thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from .geometry import Geometry, GroupKind

if TYPE_CHECKING:
    from .tracker import Tracker

MAX_REMEMBERED = 1 << 17  # prefix hashes


class ShortCopies:
    """Follows which prefixes the device may hold damaged KV of.

    Attributes:
        on: whether this engine's copies fall short.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.on = False
        self._unit = geometry.hash_block_tokens
        self._blocks = {
            g.block_tokens for g in geometry.groups if g.kind is not GroupKind.RECURRENT
        }
        self._damaged: OrderedDict[bytes, None] = OrderedDict()

    def scheduled(self, tracker: Tracker, valid_tokens: int) -> None:
        """Look at a request that computes in this step, up to ``valid_tokens``.

        In its first step after an admission its computed tokens are its hit.
        """
        hashes = tracker.hashes
        if tracker.admitted:
            tracker.admitted = False
            hit = tracker.request.num_computed_tokens
            own = tracker.local_tokens if tracker.hits else hit  # what the device brought
            copied = any(own % block for block in self._blocks)
            known = own >= self._unit and hashes[own // self._unit - 1] in self._damaged
            if tracker.damaged_from is None and (copied or known):
                tracker.damaged_from = own // self._unit
                tracker.save.blocked = True
        if tracker.damaged_from is not None:
            for damaged in hashes[tracker.damaged_from : valid_tokens // self._unit]:
                self._damaged[damaged] = None
                self._damaged.move_to_end(damaged)
            tracker.damaged_from = max(tracker.damaged_from, valid_tokens // self._unit)
            while len(self._damaged) > MAX_REMEMBERED:
                self._damaged.popitem(last=False)
