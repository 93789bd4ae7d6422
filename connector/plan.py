"""What crosses between the scheduler half and the worker halves: plain data.

A `Plan` goes to every rank with each step, a `RankReport` comes back from
each. Both are pickled between processes and shared as they are inside one, so
neither is changed after it has been handed over.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..storage.jobs import AuditJob, Event, LoadJob, SaveJob


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """The namespace that records belong to from now on.

    Attributes:
        digest: 16 bytes; of this engine's own tiers.
        generation: raised by each reset of this engine.
        description: what makes the digest, in words.
        shared_digest: of the tiers that engines share, whose cache epoch is their own;
            None while that is not known: they are neither read nor written.
        shared_description: likewise.
    """

    digest: bytes
    generation: int
    description: dict[str, object]
    shared_digest: bytes | None = None
    shared_description: dict[str, object] | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What the workers do beside this step.

    Attributes:
        idle: no forward runs in this step, so a worker may wait a moment for loads.
        namespace: set with the first plan and whenever it changes.
        cancels: load jobs nobody waits for any more.
        touches: per lower tier, keys used from above, most recent last.
        removals: per lower tier, records found bad, with the reason.
    """

    idle: bool = False
    namespace: NamespaceInfo | None = None
    saves: tuple[SaveJob, ...] = ()
    loads: tuple[LoadJob, ...] = ()
    cancels: tuple[int, ...] = ()
    touches: tuple[tuple[str, tuple[bytes, ...]], ...] = ()
    removals: tuple[tuple[str, bytes, str], ...] = ()
    audits: tuple[AuditJob, ...] = ()


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank has to say after one step.

    ``holder`` names whose records it reads: ranks with identical bytes (replicated
    KV heads, MLA) share one set of records, which the first of them writes.
    """

    rank: int
    ready_pages: int
    events: tuple[Event, ...] = ()
    holder: int = 0
