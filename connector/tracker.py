"""One request as the scheduler half follows it, and what is set for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .audit import AuditOptions, AuditTracker
from .lookup import MissReason
from .plan import NamespaceInfo
from .prober import Prober
from .request_options import RequestOptions, SaltedHashes
from .save_tracker import SaveTracker
from .write_back import WritePolicy

if TYPE_CHECKING:
    from .control import ControlServer
    from .recorder import Recorder


@dataclass(frozen=True, slots=True)
class SharedOptions:
    """What the scheduler half needs of the tiers that engines share.

    Attributes:
        tiers: their names.
        open_probers: makes the probers for a namespace.
        clear: deletes, in the background, what a namespace keeps on them.
        namespace_changed: whether the namespace must be asked for again.
    """

    tiers: tuple[str, ...] = ()
    open_probers: Callable[[NamespaceInfo], Sequence[Prober]] | None = None
    clear: Callable[[NamespaceInfo], None] | None = None
    namespace_changed: Callable[[], bool] | None = None


@dataclass(slots=True)
class SchedulerOptions:
    """What of the configuration concerns this half.

    Attributes:
        promote: keep chunks loaded from lower tiers in RAM.
        load_policy: of the gate.
        deadline_s: fixed deadline of every load; None derives it from measured speed.
        lookup_deadline_s: longest wait for a shared tier's answer.
        shared: of the tiers that engines share.
        adapter_of: fingerprint of a request's LoRA adapter, or None; raises what
            makes the request unfit for the cache.
        audit: which hits are computed and compared.
        recorder: writes a line for each finished request; closed by the scheduler half.
        control: brings what people ask for; closed by the scheduler half.
    """

    promote: bool = True
    load_policy: str = "auto"
    deadline_s: float | None = None
    lookup_deadline_s: float = 0.05
    write: WritePolicy = field(default_factory=WritePolicy)
    shared: SharedOptions = field(default_factory=SharedOptions)
    adapter_of: Callable[[Any], str | None] | None = None
    audit: AuditOptions = field(default_factory=AuditOptions)
    recorder: Recorder | None = None
    control: ControlServer | None = None


@dataclass(slots=True)
class Tracker:
    """What is known of one request."""

    request: Any
    save: SaveTracker
    options: RequestOptions
    local_tokens: int = 0
    hit_tokens: int = 0  # promised in the last lookup
    reason: MissReason = MissReason.NONE
    failures: int = 0
    ram_only: bool = False  # a lower tier failed this request: it is not asked again
    asked_since_s: float | None = None  # since when lookups answer "ask again"
    probed: bool = False
    late: bool = False  # the shared tiers' last answer did not come in time
    load_job: int | None = None
    load_began_s: float = 0.0
    hits: dict[str, int] = field(default_factory=dict)  # tokens by source, last admission
    counted: bool = False
    audit: AuditTracker = field(default_factory=AuditTracker)
    admitted: bool = False  # and not computing yet
    damaged_from: int | None = None  # hashes before this one are told, see `ShortCopies`

    @property
    def hashes(self) -> Sequence[bytes]:
        """The request's block hashes now, as kvtier keys them."""
        hashes: Sequence[bytes] = self.request.block_hashes
        return SaltedHashes(hashes, self.options.salt) if self.options.salt else hashes
