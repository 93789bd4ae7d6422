"""The exceptions of kvtier.

Past the edge of a tier or of the configuration only these are raised::

    KVTierError
    |-- ConfigError            a setting is wrong: names setting, value, what to do
    |-- GeometryError          the engine's KV layout is not one we can address
    |-- AddressError           block ids or spans that cannot be right
    |-- RecordError            one record cannot be served; the tier is fine
    |   |-- RecordMissing
    |   |-- RecordDamaged      .reason says what disagreed
    |   `-- RecordRefused      cannot be written now; others can
    `-- TierError              the tier cannot serve now
        |-- TierRefused        writes refused (full, read-only); reads go on
        |   `-- TierLocked     another process keeps locked what writers share
        `-- TierUnavailable    neither reads nor writes
"""

from __future__ import annotations

from enum import Enum


class KVTierError(Exception):
    """Base of every exception that kvtier raises on purpose."""


class ConfigError(KVTierError):
    """A setting is wrong; the message is one line that says what to do."""


class GeometryError(KVTierError):
    """The engine's KV cache layout is not one that kvtier can address."""


class AddressError(KVTierError):
    """Block ids out of range, or spans that are no whole number of blocks."""


class DamageReason(str, Enum):
    """What disagreed when a record was checked; also a metric label."""

    NOT_A_FILE = "not_a_file"  # a directory, device node or wrong Redis type
    TRUNCATED = "truncated"
    LENGTHENED = "lengthened"
    MAGIC = "magic"  # not a record at all
    FORMAT = "format"  # a version that this build does not read
    HEADER = "header_checksum"
    NAMESPACE = "namespace"
    IDENTITY = "identity"  # another record's bytes under this name
    LENGTH = "length"  # header's lengths do not fit what is expected
    PAYLOAD = "payload_checksum"
    CODEC = "codec"  # payload does not decode to the raw length
    KEY = "encryption_key"  # sealed with a key that is not ours, or not sealed where we seal
    SEAL = "seal"  # does not authenticate: not what a holder of the key wrote


class RecordError(KVTierError):
    """One record cannot be served; the tier itself is fine."""


class RecordMissing(RecordError):
    """No record under this key."""


class RecordDamaged(RecordError):
    """A record that does not verify; not one of its bytes may be used."""

    def __init__(self, reason: DamageReason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason


class RecordRefused(RecordError):
    """This record cannot be written now, where others can (its node of a cluster is gone)."""


class TierError(KVTierError):
    """The tier cannot serve now."""


class TierRefused(TierError):
    """The tier refuses writes (full, read-only); reads go on."""


class TierLocked(TierRefused):
    """Another process keeps locked what writers share."""


class TierUnavailable(TierError):
    """The tier can neither be read nor written now."""
