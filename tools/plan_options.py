"""Options that ``kvtier replay`` and ``kvtier plan`` share, and how they are read."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from .exit_codes import ExitCode
from .reporting import CommandError

if TYPE_CHECKING:
    from .replay_chunks import Shape
    from .replay_tiers import Policy, Sizes, Speeds

GIGA = 1e9

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Png = Annotated[
    Optional[str],  # noqa: UP045 (typer reads annotations at run time, on Python 3.10 too)
    typer.Option(metavar="FILE", help="Also draw hit rate over size into a PNG."),
]
Tp = Annotated[int, typer.Option(help="Tensor parallel size.", min=1, max=1024)]
KvDtype = Annotated[str, typer.Option(help="The engine's --kv-cache-dtype.")]
ChunkTokens = Annotated[int, typer.Option(help="Tokens of a chunk.", min=1, max=1 << 20)]
Users = Annotated[int, typer.Option(help="Agent sessions that run at a time.", min=1)]
SharePrefix = Annotated[
    bool,
    typer.Option(
        "--share-prefix",
        help="Take equally long tools and system prompts of agent sessions for the same.",
    ),
]
Jobs = Annotated[int, typer.Option(help="Processes.", min=1, max=256)]
RamSpeed = Annotated[float, typer.Option(help="RAM to device, GB/s, all ranks.", min=0.001)]
DiskRead = Annotated[float, typer.Option(help="Disk reads, GB/s.", min=0.001)]
DiskWrite = Annotated[float, typer.Option(help="Disk writes, GB/s.", min=0.001)]
Prefill = Annotated[float, typer.Option(help="Prefill of the engine, tokens/s.", min=0.001)]
Latency = Annotated[float, typer.Option(help="Least time of any load, ms.", min=0.0)]


class TraceErrors:
    """Gives a trace that is broken, or cannot be read, its exit code and one line."""

    def __init__(self, source: str | None) -> None:
        """Take the file or folder that was named, if any."""
        self._source = None if source is None else os.path.expanduser(source)

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Turn a trace's error into the command's."""
        from .traces import TraceError

        if isinstance(error, TraceError):
            raise CommandError(str(error), ExitCode.WRONG_FORMAT) from None
        if isinstance(error, OSError) and error.filename == self._source:
            raise CommandError(f"{self._source}: {error.strerror}", ExitCode.USAGE) from None


def size_of(option: str, text: str) -> int:
    """Return a size option in bytes."""
    from ..connector.values import parse_size

    try:
        return parse_size(int(text) if text.isdigit() else text)
    except ValueError:
        raise CommandError(f"{option} {text!r} is no size like 64GiB", ExitCode.USAGE) from None


def all_sizes(text: str) -> list[Sizes]:
    """Return the sizes of ``RAM+DISK,RAM,...``."""
    from .replay_tiers import Sizes

    found = []
    for one in text.split(","):
        ram, _, disk = one.strip().partition("+")
        sizes = Sizes(size_of("--sizes", ram), size_of("--sizes", disk) if disk else 0)
        if not sizes.ram_bytes and not sizes.disk_bytes:
            raise CommandError(f"--sizes {one!r} has neither RAM nor disk", ExitCode.USAGE)
        if sizes not in found:
            found.append(sizes)
    return found


def chosen_policies(text: str) -> list[Policy]:
    """Return policies by their names."""
    from .replay_tiers import POLICIES

    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in POLICIES:
            known = "; ".join(f"{policy.name}: {policy.doc}" for policy in POLICIES.values())
            raise CommandError(f"policy {name!r} is not known ({known})", ExitCode.USAGE)
    return [POLICIES[name] for name in names]


def all_speeds(
    ram: float, disk_read: float, disk_write: float, prefill: float, latency_ms: float
) -> Speeds:
    """Return speeds given in GB/s, tokens/s and ms."""
    from .replay_tiers import Speeds

    return Speeds(ram * GIGA, disk_read * GIGA, disk_write * GIGA, latency_ms / 1000, prefill)


def model_shape(
    model: str, bytes_per_token: int, kv_dtype: str, n_ranks: int, chunk_tokens: int
) -> Shape:
    """Return what a model, or a plain number of bytes a token, stores and loads."""
    from .model_sizes import ModelError, find_model
    from .replay_chunks import Shape

    if bytes_per_token:
        return Shape(bytes_per_token, bytes_per_token, chunk_tokens=chunk_tokens)
    try:
        return find_model(model, kv_dtype, n_ranks).shape(chunk_tokens)
    except ModelError as error:
        raise CommandError(str(error), ExitCode.USAGE) from None
