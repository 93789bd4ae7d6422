"""What the workers say of their lower tiers: index complete, online, what came and went.

Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from ..storage.catalog import Catalog
from ..storage.jobs import TierNews
from .plan import RankReport
from .shared_lookup import SharedLookup

NEWS_AGE_S = 1.0  # what comes to a tier while no step is made for so long, nobody has told
INDEX_WAIT_S = 10.0  # longest wait for the tiers' indexes, all lookups together


class TierStates:
    """Keeps the catalog in step with every rank's tiers.

    Args:
        shared: is told what a shared tier was found to hold, and when to doubt it.
        clock: monotonic seconds.
        asked: tiers that are asked what they hold, and do not tell by themselves.
    """

    def __init__(
        self,
        catalog: Catalog,
        shared: SharedLookup,
        n_ranks: int,
        clock: Callable[[], float],
        asked: Collection[str] = (),
    ) -> None:
        self._catalog = catalog
        self._shared = shared
        self._clock = clock
        self._incomplete = {(tier, rank) for tier in catalog.tiers for rank in range(n_ranks)}
        self._offline: set[tuple[str, int]] = set()
        self._wait_until_s: float | None = None
        self._telling = [tier for tier in catalog.tiers if tier not in asked]
        self._steps_out = 0  # planned, and not over yet
        self._stepped_at_s = clock()

    def step_begins(self) -> None:
        """A step is planned: at its end the workers say what they know."""
        self._steps_out += 1

    def step_ends(self) -> None:
        """What the workers said with a step has been taken in."""
        self._steps_out = max(0, self._steps_out - 1)
        self._stepped_at_s = self._clock()

    def untold(self) -> bool:
        """Whether the engine has rested so long that a tier may hold what a step will tell of.

        An engine that computes nothing does not step, and hears nothing of what others save.
        """
        if self._steps_out or self._clock() - self._stepped_at_s <= NEWS_AGE_S:
            return False
        return any(not self._catalog.is_offline(tier) for tier in self._telling)

    def settle(self, news: TierNews, report: RankReport) -> None:
        """Take in what one rank says of one tier."""
        place = (news.tier, report.rank)
        if news.reset:
            self._catalog.forget_tier(news.tier, report.holder)
            self._wait_until_s = None
        for key in news.removed:
            self._catalog.tier_removed(news.tier, key, report.holder)
        for key in news.added:
            self._catalog.tier_added(news.tier, key, report.holder)
        self._shared.learned(news.tier, news.added)
        if news.complete:
            self._incomplete.discard(place)
        elif news.reset:
            self._incomplete.add(place)
        if news.online == (place in self._offline):
            (self._offline.discard if news.online else self._offline.add)(place)
            offline = any(tier == news.tier for tier, _ in self._offline)
            self._catalog.set_offline(news.tier, offline)
            if not offline:
                self._shared.doubt(news.tier)

    def never_mind(self, tiers: Collection[str]) -> None:
        """Nothing will be heard of these tiers: do not wait for them."""
        self._incomplete = {place for place in self._incomplete if place[0] not in tiers}

    def starting(self) -> bool:
        """Whether indexes are still being read, for a bounded time, so that first lookups hit."""
        if not self._incomplete - self._offline:
            return False
        now_s = self._clock()
        if self._wait_until_s is None:
            self._wait_until_s = now_s + INDEX_WAIT_S
        return now_s < self._wait_until_s
