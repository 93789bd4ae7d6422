"""How much memory this process may use, and refusing to ask for more."""

from __future__ import annotations

import os
import resource

from .errors import ConfigError

_GIB = 1 << 30


def memory_limit_bytes(proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> int:
    """Return the smallest limit that holds for this process: cgroups, RLIMIT_AS, the machine.

    Reads a few small files; limits that cannot be read do not count.

    Args:
        proc: where procfs is mounted.
        cgroups: where the cgroup file systems are mounted (v1 below ``memory``).
    """
    limits = [_total_bytes(proc), *_cgroup_limits(proc, cgroups)]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft)
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else 1 << 62


def check_memory(asked_bytes: int, setting_name: str, limit_bytes: int | None = None) -> None:
    """Refuse a setting that asks for more memory than this process may use.

    Args:
        asked_bytes: what would be allocated.
        setting_name: the setting to name in the error.
        limit_bytes: the limit; measured when None.

    Raises:
        ConfigError: it asks for more.
    """
    limit = memory_limit_bytes() if limit_bytes is None else limit_bytes
    if asked_bytes > limit:
        raise ConfigError(
            f"{setting_name}: asks for {asked_bytes / _GIB:.2f} GiB of host memory,"
            f" this process may use {limit / _GIB:.2f} GiB; lower {setting_name}"
            " or raise the limit of its container"
        )


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(1 << 16)
    except OSError:
        return ""


def _total_bytes(proc: str) -> int | None:
    for line in _read(f"{proc}/meminfo").splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == "MemTotal:" and words[1].isdigit():
            return int(words[1]) * 1024
    return None


def _cgroup_limits(proc: str, cgroups: str) -> list[int]:
    """Return the limits of this process's cgroups and all above them, v1 and v2."""
    limits = []
    for line in _read(f"{proc}/self/cgroup").splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        _, controllers, path = parts
        if controllers == "":
            roots, name = [cgroups, f"{cgroups}/unified"], "memory.max"
        elif "memory" in controllers.split(","):
            roots, name = [f"{cgroups}/memory"], "memory.limit_in_bytes"
        else:
            continue
        for root in roots:
            limits += [_limit(f"{root}{level}/{name}") for level in _levels(path)]
    return [limit for limit in limits if limit is not None]


def _levels(path: str) -> list[str]:
    """Return a cgroup path and every path above it; in a container only the top may be visible."""
    names = [name for name in os.path.normpath("/" + path).split("/") if name not in ("", "..")]
    return ["".join(f"/{name}" for name in names[:count]) for count in range(len(names), -1, -1)]


def _limit(path: str) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None  # v2 says "max" where there is none
