"""A running engine as its metrics show it: what each tier holds and moves, and what goes wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .exit_codes import ExitCode
from .reporting import CommandError, size

if TYPE_CHECKING:
    from .scrape import Page

P = "kvtier:"


@dataclass(frozen=True, slots=True)
class View:
    """Two looks at one engine, some seconds apart; rates are of the time between them."""

    now: Page
    before: Page | None
    seconds: float

    def rate(self, name: str, **labels: str) -> float | None:
        """Return how much a counter grew a second; None at the first look."""
        if self.before is None or self.seconds <= 0:
            return None
        grown = self.now.total(name, **labels) - self.before.total(name, **labels)
        return max(0.0, grown) / self.seconds  # a restart begins at nothing again

    def as_dict(self, where: str) -> dict[str, Any]:
        """Return everything that is shown; fields are there whatever the engine counts."""
        page = self.now
        lookups, hits = page.total(f"{P}lookups_total"), page.total(f"{P}hits_total")
        asked = page.total(f"{P}lookup_tokens_total")
        return {
            "engine": where,
            "seconds": round(self.seconds, 3) if self.before else None,
            "requests": {
                "running": page.total("vllm:num_requests_running"),
                "waiting": page.total("vllm:num_requests_waiting"),
                "lookups": lookups,
                "hits": hits,
                "lookups_per_s": self.rate(f"{P}lookups_total"),
            },
            "tokens": {
                "looked_up": asked,
                "local_hits": page.total(f"{P}local_hit_tokens_total"),
                "restored": page.total(f"{P}hit_tokens_total"),
                "restored_share": page.total(f"{P}hit_tokens_total") / asked if asked else None,
                "restored_per_s": self.rate(f"{P}hit_tokens_total"),
            },
            "tiers": [self._tier(name) for name in self._tiers()],
            "ram_pages": page.by(f"{P}ram_pages", "state"),
            "save_queue_bytes": page.total(f"{P}save_queue_bytes"),
            "pinned_device_blocks": page.total(f"{P}pinned_device_blocks"),
            "evicted_chunks": page.total(f"{P}ram_evicted_chunks_total"),
            "evicted_lost_chunks": page.total(f"{P}ram_evicted_lost_chunks_total"),
            "loads_failed": page.total(f"{P}loads_failed_total"),
            "load_deadline_missed": page.total(f"{P}load_deadline_missed_total"),
            "misses": page.by(f"{P}misses_total", "reason"),
        }

    def _tiers(self) -> list[str]:
        found: set[str] = set()
        for name in ("resident_chunks", "tier_online", "load_bytes_total", "save_bytes_total"):
            found |= set(self.now.by(P + name, "tier"))
        order = {"ram": 0, "disk": 1, "redis": 2}
        return sorted(found, key=lambda tier: (order.get(tier, 9), tier))

    def _tier(self, tier: str) -> dict[str, Any]:
        page = self.now
        online = page.by(f"{P}tier_online", "tier").get(tier)
        opened = page.total(f"{P}breaker_opened_total", tier=tier)
        closed = page.total(f"{P}breaker_closed_total", tier=tier)
        refusing = page.total(f"{P}refusal_began_total", tier=tier) > page.total(
            f"{P}refusal_ended_total", tier=tier
        )
        return {
            "tier": tier,
            "online": None if online is None else online > 0,
            "breaker": "open" if opened > closed else "closed",
            "breaker_opened": opened,
            "refuses_saves": refusing,
            "chunks": page.total(f"{P}resident_chunks", tier=tier),
            "bytes": page.total(f"{P}resident_bytes", tier=tier),
            "hit_tokens": page.total(f"{P}hit_tokens_total", tier=tier),
            "hit_tokens_per_s": self.rate(f"{P}hit_tokens_total", tier=tier),
            "load_bytes_per_s": self.rate(f"{P}load_bytes_total", tier=tier),
            "load_bytes_per_thread_s": _quotient(page, "load", tier),
            "save_bytes_per_s": self.rate(f"{P}save_bytes_total", tier=tier),
            "save_bytes_per_thread_s": _quotient(page, "save", tier),
            "load_failed_chunks": page.total(f"{P}load_failed_chunks_total", tier=tier),
            "save_dropped_chunks": page.total(f"{P}save_dropped_chunks_total", tier=tier),
        }


def _quotient(page: Page, what: str, tier: str) -> float | None:
    thread_s = page.total(f"{P}{what}_s_total", tier=tier)
    return page.total(f"{P}{what}_bytes_total", tier=tier) / thread_s if thread_s else None


def require_kvtier(page: Page, where: str) -> None:
    """Refuse the page of a server that is no engine with kvtier.

    Raises:
        CommandError: says what is missing.
    """
    names = page.names()
    if any(name.startswith(P) for name in names):
        return
    what = (
        "this vLLM has not counted anything of kvtier yet: is the connector configured?"
        if any(name.startswith("vllm:") for name in names)
        else "this is no vLLM server"
    )
    raise CommandError(f"{where}: {what}", ExitCode.WRONG_FORMAT)


def lines(state: dict[str, Any]) -> list[str]:
    """Return the view as lines for a terminal."""
    requests, tokens, pages = state["requests"], state["tokens"], state["ram_pages"]
    share = "" if tokens["restored_share"] is None else f" ({tokens['restored_share']:.0%})"
    reasons = sorted(state["misses"].items(), key=lambda item: -item[1])
    text = f"""{state["engine"]}
requests: {requests["running"]:.0f} running, {requests["waiting"]:.0f} waiting; \
{requests["lookups"]:,.0f} looked up, {requests["hits"]:,.0f} with a hit
tokens: {tokens["restored"]:,.0f} of {tokens["looked_up"]:,.0f} restored{share}, \
{_per_s(tokens["restored_per_s"])} a second; {tokens["local_hits"]:,.0f} from the device's own cache

{_row("tier", "state", "chunks", "size", "hit tok/s", "load/s", "save/s", "failed", "dropped")}"""
    rows = [
        _row(
            tier["tier"],
            _state(tier),
            f"{tier['chunks']:,.0f}",
            size(tier["bytes"]),
            _per_s(tier["hit_tokens_per_s"]),
            _bytes(tier["load_bytes_per_s"]),
            _bytes(tier["save_bytes_per_s"]),
            f"{tier['load_failed_chunks']:,.0f}",
            f"{tier['save_dropped_chunks']:,.0f}",
        )
        for tier in state["tiers"]
    ]
    below = f"""
RAM pages: {pages.get("free", 0):,.0f} free, {pages.get("held", 0):,.0f} hold chunks, \
{pages.get("pinned", 0):,.0f} in use by transfers, of {pages.get("all", 0):,.0f}; \
{state["evicted_chunks"]:,.0f} chunks evicted, {state["evicted_lost_chunks"]:,.0f} of them lost
waiting to be written: {size(state["save_queue_bytes"])}; device blocks held: \
{state["pinned_device_blocks"]:,.0f}; loads failed: {state["loads_failed"]:,.0f}, \
too late: {state["load_deadline_missed"]:,.0f}
hits ended by: {", ".join(f"{reason} {n:,.0f}" for reason, n in reasons if n) or "-"}"""
    return [*text.splitlines(), *rows, *below.splitlines()]


def _row(*cells: str) -> str:
    widths = (-8, -10, 10, 11, 10, 13, 13, 8, 8)
    return "".join(
        cell.ljust(-width) if width < 0 else cell.rjust(width)
        for cell, width in zip(cells, widths, strict=True)
    )


def _state(tier: dict[str, Any]) -> str:
    if tier["breaker"] == "open" or tier["online"] is False:
        return "OFF"
    return "no saves" if tier["refuses_saves"] else "on"


def _per_s(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _bytes(value: float | None) -> str:
    return "-" if value is None else f"{size(value)}/s"
