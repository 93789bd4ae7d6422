"""A disk store as tools see it: found, listed, summed up, checked. Read-only but for `repair`."""

from __future__ import annotations

import os
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..storage.disk_layout import (
    CONTROL,
    QUARANTINE,
    NamespaceInfo,
    RecordFile,
    iter_quarantine,
    iter_record_files,
    iter_tmp_files,
    list_namespaces,
)
from ..storage.disk_verify import VerifyResult, verify_file
from ..storage.errors import RecordMissing
from ..storage.key import key_name
from .exit_codes import ExitCode
from .reporting import CommandError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WITHOUT_CAP_BYTES = 1 << 62  # a tier opened to repair must not evict
AGE_LIMITS_S = {"hour": 3600.0, "day": 86400.0, "week": 7 * 86400.0}


@dataclass(slots=True)
class NamespaceSummary:
    """What one namespace holds, from names and inodes alone."""

    info: NamespaceInfo
    records: int = 0
    stored_bytes: int = 0
    oldest_use_s: float | None = None
    newest_use_s: float | None = None
    by_group: Counter[int] = field(default_factory=Counter)
    by_rank: Counter[int] = field(default_factory=Counter)
    by_age: Counter[str] = field(default_factory=Counter)

    def add(self, file: RecordFile, now_s: float) -> None:
        """Count one record."""
        self.records += 1
        self.stored_bytes += file.file_bytes
        self.by_group[file.key[-1]] += 1
        self.by_rank[file.rank] += 1
        age_s = now_s - file.used_at_s
        self.by_age[next((n for n, s in AGE_LIMITS_S.items() if age_s < s), "older")] += 1
        self.oldest_use_s = min(self.oldest_use_s or file.used_at_s, file.used_at_s)
        self.newest_use_s = max(self.newest_use_s or file.used_at_s, file.used_at_s)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for ``--json``."""
        return {
            "namespace": self.info.namespace.hex(),
            "description": self.info.description,
            "problem": self.info.problem,
            "ranks": list(self.info.ranks),
            "records": self.records,
            "stored_bytes": self.stored_bytes,
            "oldest_use_s": self.oldest_use_s,
            "newest_use_s": self.newest_use_s,
            "records_by_group": {str(g): n for g, n in sorted(self.by_group.items())},
            "records_by_rank": {str(r): n for r, n in sorted(self.by_rank.items())},
            "records_by_last_use": {
                name: self.by_age[name] for name in (*AGE_LIMITS_S, "older") if self.by_age[name]
            },
        }


def open_store(target: str) -> str:
    """Return the root of the store that ``target`` names.

    An empty folder is an empty store.

    Raises:
        CommandError: nothing there (unreachable), or something else (wrong format).
    """
    if "://" in target:
        raise CommandError(f"{target}: only folders can be inspected, not URLs", ExitCode.USAGE)
    root = os.path.abspath(os.path.expanduser(target))
    if not os.path.lexists(root):
        raise CommandError(f"{target}: no such folder", ExitCode.UNREACHABLE)
    if not os.path.isdir(root):
        raise CommandError(f"{target} is no folder, so no kvtier store", ExitCode.WRONG_FORMAT)
    names = os.listdir(root)
    if names and not list_namespaces(root) and not {CONTROL, QUARANTINE} & set(names):
        raise CommandError(
            f"{target} is no kvtier store: none of its {len(names)} entries is a namespace",
            ExitCode.WRONG_FORMAT,
        )
    return root


def pick_namespace(root: str, prefix: str | None) -> bytes | None:
    """Return the one namespace whose hex form begins with ``prefix``; None for all.

    Raises:
        CommandError: none, or several.
    """
    if prefix is None:
        return None
    found = [info for info in list_namespaces(root) if info.namespace.hex().startswith(prefix)]
    if len(found) != 1:
        which = "no namespace begins" if not found else f"{len(found)} namespaces begin"
        raise CommandError(f"{which} with {prefix!r}; see `kvtier stat`", ExitCode.USAGE)
    return found[0].namespace


def summarise(root: str, now_s: float | None = None) -> dict[str, Any]:
    """Return what a store holds; walks every folder, reads no record."""
    now_s = time.time() if now_s is None else now_s
    summaries = []
    for info in list_namespaces(root):
        summary = NamespaceSummary(info)
        for file in iter_record_files(root, info.namespace):
            summary.add(file, now_s)
        summaries.append(summary)
    quarantine = list(iter_quarantine(root))
    unfinished = list(iter_tmp_files(root))
    return {
        "store": root,
        "records": sum(s.records for s in summaries),
        "stored_bytes": sum(s.stored_bytes for s in summaries),
        "namespaces": [summary.as_dict() for summary in summaries],
        "quarantine": {
            "files": len(quarantine),
            "bytes": sum(n_bytes for _, n_bytes, _ in quarantine),
        },
        "unfinished": {
            "files": len(unfinished),
            "bytes": sum(n_bytes for _, _, n_bytes in unfinished),
        },
        "free_bytes": os.statvfs(root).f_bavail * os.statvfs(root).f_frsize,
    }


def find_records(root: str, name: str) -> list[RecordFile]:
    """Return the files of the one key that is, or begins with, ``name``; one a rank and namespace.

    Raises:
        CommandError: no such key, or several.
    """
    found = [f for f in iter_record_files(root) if key_name(f.key).startswith(name)]
    keys = {file.key for file in found}
    if not keys:
        raise CommandError(f"no record's key begins with {name!r}; `kvtier ls` prints them")
    if len(keys) > 1 and not any(key_name(key) == name for key in keys):
        raise CommandError(f"{len(keys)} keys begin with {name!r}; give more of it", ExitCode.USAGE)
    return [file for file in found if len(keys) == 1 or key_name(file.key) == name]


@dataclass(slots=True)
class Verification:
    """What a verification has found so far."""

    records: int = 0
    bytes_read: int = 0
    damaged: list[tuple[RecordFile, VerifyResult]] = field(default_factory=list)
    quarantined: int = 0
    complete: bool = False

    def as_dict(self, root: str) -> dict[str, Any]:
        """Return the fields for ``--json``."""
        return {
            "store": root,
            "records": self.records,
            "bytes_read": self.bytes_read,
            "complete": self.complete,
            "quarantined": self.quarantined,
            "damaged": [
                {
                    "path": file.path,
                    "namespace": file.namespace.hex(),
                    "rank": file.rank,
                    "key": key_name(file.key),
                    "reason": result.reason.value if result.reason else None,
                    "detail": result.detail,
                }
                for file, result in self.damaged
            ],
        }


def verify(
    root: str,
    namespace: bytes | None,
    progress: Callable[[Verification], None],
    result: Verification,
    stop_at_s: float | None = None,
) -> None:
    """Read and check every record; fill ``result`` as it goes, so that Ctrl-C loses nothing.

    Args:
        root: the store.
        namespace: only this one, or None for all.
        progress: called after each record.
        result: filled.
        stop_at_s: `time.monotonic` at which to stop; ``result.complete`` stays False.
    """
    for file in iter_record_files(root, namespace):
        if stop_at_s is not None and time.monotonic() >= stop_at_s:
            return
        try:
            checked = verify_file(file.path, file)
        except RecordMissing:  # evicted meanwhile
            continue
        result.records += 1
        result.bytes_read += checked.bytes_read
        if not checked.ok:
            result.damaged.append((file, checked))
        progress(result)
    result.complete = True


def repair(root: str, result: Verification) -> None:
    """Move what was found damaged into quarantine, the way an engine would.

    Raises:
        TierUnavailable: a record could not be moved.
    """
    from ..storage.disk import DiskTier

    for place in sorted({(file.namespace, file.rank) for file, _ in result.damaged}):
        with closing(DiskTier(root, *place, WITHOUT_CAP_BYTES)) as tier:
            for file, checked in result.damaged:
                if (file.namespace, file.rank) == place and checked.reason is not None:
                    tier.quarantine(file.key, checked.reason.value)
                    result.quarantined += 1


def listing(root: str, namespace: bytes | None) -> Iterator[dict[str, Any]]:
    """Yield every record as `kvtier ls` tells it, folder by folder."""
    for file in iter_record_files(root, namespace):
        yield {
            "namespace": file.namespace.hex(),
            "rank": file.rank,
            "key": key_name(file.key),
            "group": file.key[-1],
            "stored_bytes": file.file_bytes,
            "used_at_s": file.used_at_s,
        }
