"""Checks of this machine and a configuration before serving: each finding says what to do."""

from __future__ import annotations

import errno
import importlib.metadata
import importlib.util
import os
import resource
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from ..storage.errors import ConfigError
from .reporting import size

if TYPE_CHECKING:
    from ..connector.config import Config

PYTHONS = ((3, 10), (3, 13))
ENGINES = ((0, 27), (0, 32))
"""vLLM versions, first and last, that kvtier's tests have run with."""
_SPARE_BYTES = 1 << 30  # of memory, for everything that is not the arena
_ALIGN_BYTES = 4096


class Level(str, Enum):
    """How a check ended."""

    OK = "ok"
    HINT = "hint"  # works, and could be better
    PROBLEM = "problem"  # will not work, or not as meant


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, what was found, what to do about it."""

    name: str
    level: Level
    text: str
    todo: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for ``--json``."""
        return {
            "name": self.name,
            "level": self.level.value,
            "text": self.text,
            "todo": self.todo,
        }


def ok(name: str, text: str) -> Finding:
    """Return a finding that asks for nothing."""
    return Finding(name, Level.OK, text)


def hint(name: str, text: str, todo: str) -> Finding:
    """Return a finding about what could be better."""
    return Finding(name, Level.HINT, text, todo)


def problem(name: str, text: str, todo: str) -> Finding:
    """Return a finding about what will not work."""
    return Finding(name, Level.PROBLEM, text, todo)


def examine(
    settings: Mapping[str, Any] | None,
    engine: Mapping[str, Any],
    *,
    n_ranks: int = 1,
    environ: Mapping[str, str] = os.environ,
) -> Iterator[Finding]:
    """Yield findings, one after another as they are made. Blocking; writes one small file a tier.

    Args:
        settings: kvtier's, or None to look at the machine alone.
        engine: vLLM's options that matter here, as `EngineOptions` names them.
        n_ranks: ranks of the engine.
        environ: of the engine.
    """
    from . import doctor_engine

    yield python()
    yield from doctor_engine.versions()
    yield from doctor_engine.hashes(engine, environ)
    yield from doctor_engine.known_faults(engine)
    if settings is None:
        yield memory(0)
        yield pinning(0)
        return
    try:
        from ..connector.config import load

        config = load(settings, n_ranks=n_ranks)
    except ConfigError as error:
        yield problem("configuration", str(error), "see `kvtier config check`")
        return
    yield ok("configuration", "an engine would start with it")
    yield from tiers(config, n_ranks)


def tiers(config: Config, n_ranks: int) -> Iterator[Finding]:
    """Yield what is found of the tiers of a checked configuration."""
    arena_bytes = config.arena_bytes(n_ranks)
    yield memory(arena_bytes)
    yield pinning(arena_bytes)
    if config.disk is not None:
        yield from disk(config.disk, config.disk_capacity_bytes or 0)
    else:
        yield hint(
            "disk",
            "no disk tier: what leaves RAM is gone, and so is all at a restart",
            "set 'disk' and 'disk_capacity'",
        )
    if config.redis is not None:
        from . import doctor_redis

        yield from doctor_redis.redis(config)


def python() -> Finding:
    """Look at the interpreter."""
    found = sys.version_info[:2]
    text = f"Python {found[0]}.{found[1]}"
    if PYTHONS[0] <= found <= PYTHONS[1]:
        return ok("python", text)
    return problem("python", text, "use Python 3.10 to 3.13")


def memory(asked_bytes: int) -> Finding:
    """Compare what the tiers take with what this process may use."""
    from ..storage.memory_limit import memory_limit_bytes

    limit_bytes = memory_limit_bytes()
    text = f"tiers take {size(asked_bytes)}, this process may use {size(limit_bytes)}"
    if asked_bytes > limit_bytes:
        return problem("memory", text, "lower 'ram', or raise the limit of the container")
    if asked_bytes + _SPARE_BYTES > limit_bytes:
        return hint("memory", text, "leave some GiB for the engine: lower 'ram'")
    return ok("memory", text)


def pinning(asked_bytes: int) -> Finding:
    """Compare what the tiers want to pin with the limit on locked memory."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if not os.path.exists("/dev/nvidiactl"):
        return ok("pinning", "no CUDA device here, so nothing is pinned")
    limit = "no limit" if soft == resource.RLIM_INFINITY else size(soft)
    text = f"tiers pin {size(asked_bytes)}, limit on locked memory: {limit}"
    if soft != resource.RLIM_INFINITY and soft < asked_bytes:
        return hint(
            "pinning",
            text,
            "CUDA often pins beyond this limit; if the engine's log says that it could not, "
            "raise it (ulimit -l unlimited, or --ulimit memlock=-1 for a container)",
        )
    return ok("pinning", text)


def disk(path: str, capacity_bytes: int) -> Iterator[Finding]:
    """Look at the disk tier's folder: writable, O_DIRECT, room, what lies there."""
    wanted = folder = os.path.abspath(os.path.expanduser(path))
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    try:
        fd, probe = tempfile.mkstemp(prefix=".kvtier-doctor-", dir=folder)
    except OSError as error:
        yield problem(
            "disk",
            f"{folder}: {error.strerror}",
            "give this user the right to write there, or name another folder",
        )
        return
    try:
        os.write(fd, bytes(_ALIGN_BYTES))
        yield _written(wanted, folder)
        yield _direct(probe)
        yield _links(probe)
    finally:
        os.close(fd)
        os.unlink(probe)
    yield _room(folder, path, capacity_bytes)
    kind = _file_system(folder)
    if kind in {"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p"}:
        yield hint(
            "file system",
            f"{folder} lies on {kind}",
            "use a local disk: locks and speed of a network file system are not what "
            "the disk tier counts on; Redis is the tier to share",
        )
    elif kind == "tmpfs":
        yield hint(
            "file system",
            f"{folder} lies in memory (tmpfs)",
            "it takes memory and is gone with a reboot: name a folder on a disk",
        )


def _written(wanted: str, folder: str) -> Finding:
    if wanted == folder:
        return ok("disk", f"{folder} can be written to")
    return hint(
        "disk",
        f"{wanted} does not exist: it would be made in {folder}, on the file system of "
        f"{_mount(folder)[0]}",
        "is the disk mounted? If that is the one you mean, nothing is to be done",
    )


def _direct(probe: str) -> Finding:
    try:
        os.close(os.open(probe, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return hint(
            "O_DIRECT",
            "this file system has none: reads and writes go through the page cache",
            "works; a disk with ext4 or xfs is faster under load",
        )
    return ok("O_DIRECT", "works here")


def _links(probe: str) -> Finding:
    try:
        os.link(probe, f"{probe}.link")
    except OSError as error:
        return hint(
            "hard links",
            f"refused: {error.strerror}",
            "works; the count of bytes is then right only after each walk",
        )
    os.unlink(f"{probe}.link")
    return ok("hard links", "work here")


def _room(folder: str, path: str, capacity_bytes: int) -> Finding:
    from ..storage.disk_layout import iter_record_files

    there = os.statvfs(folder)
    free_bytes = there.f_bavail * there.f_frsize
    held_bytes = sum(file.file_bytes for file in iter_record_files(os.path.abspath(path)))
    text = (
        f"{size(capacity_bytes)} wanted, {size(held_bytes)} in use by it, {size(free_bytes)} free"
    )
    if held_bytes + free_bytes < capacity_bytes:
        return problem(
            "room",
            text,
            f"set 'disk_capacity' to at most "
            f"{(held_bytes + free_bytes) * 9 // 10 >> 30}GiB, or free some",
        )
    return ok("room", text)


def _file_system(folder: str) -> str:
    """Return the kind of file system that a folder lies on, as the kernel names it."""
    return _mount(folder)[1]


def _mount(folder: str) -> tuple[str, str]:
    """Return where the file system of a folder is mounted, and its kind."""
    best = ("/", "unknown")
    real = os.path.realpath(folder)
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="replace") as file:
            for line in file:
                _, where, kind, *_ = line.split(" ")
                inside = real == where or real.startswith(where.rstrip("/") + "/")
                if inside and len(where) >= len(best[0]):
                    best = (where, kind)
    except (OSError, ValueError):
        return "/", "unknown"
    return best


def installed(package: str) -> str | None:
    """Return a package's version, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
