"""Where a disk store keeps what.

::

    ROOT/<namespace hex32>/namespace.json             which model this is, in plain words
    ROOT/<namespace hex32>/r<rank>/<hh>/<hh>/<key>.kvt    records
    ROOT/<namespace hex32>/r<rank>/tmp/<owner>-<n>.tmp    being written
    ROOT/<namespace hex32>/r<rank>/journal            keys whose files changed
    ROOT/quarantine/                                  damaged records, a bounded number
    ROOT/.kvtier/                                     usage counter and locks

``hh`` are the first two bytes of the prefix hash. Folders are 0700, files 0600.
Everything here only names and reads; a folder full of rubbish raises nothing.
"""

from __future__ import annotations

import json
import os
import re
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import KVTierError
from .key import NAMESPACE_BYTES, key_name, parse_key_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

RECORD_SUFFIX = ".kvt"
TMP_FOLDER = "tmp"
TMP_SUFFIX = ".tmp"
NAMESPACE_FILE = "namespace.json"
NAMESPACE_FORMAT = 1
MAX_NAMESPACE_FILE_BYTES = 1 << 20
QUARANTINE = "quarantine"
CONTROL = ".kvtier"
FOLDER_MODE = 0o700
FILE_MODE = 0o600
WITHOUT_CAP_BYTES = 1 << 62  # a tier that a command opens must not evict
TOKEN_AGE_S = 200e-6  # a new chunk looks so much older for each token before it

_NAMESPACE = re.compile(rf"[0-9a-f]{{{2 * NAMESPACE_BYTES}}}")
_RANK = re.compile(r"r(0|[1-9][0-9]{0,8})")
_HEX2 = re.compile(r"[0-9a-f]{2}")


class RecordFile(NamedTuple):
    """One record's file as its name and its inode tell it; the content is not read.

    Attributes:
        path: full path.
        namespace: 16 bytes.
        rank: of the folder it lies in.
        key: chunk key, from the name.
        file_bytes: length of the file.
        used_at_s: last use, Unix time (the file's modification time).
    """

    path: str
    namespace: bytes
    rank: int
    key: bytes
    file_bytes: int
    used_at_s: float


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """One namespace of a store.

    Attributes:
        namespace: 16 bytes.
        path: its folder.
        ranks: ranks that have a folder, ascending.
        description: the plain-text fields of `namespace.json`, or None.
        problem: why there is no description, or None.
    """

    namespace: bytes
    path: str
    ranks: tuple[int, ...]
    description: dict[str, Any] | None
    problem: str | None


def rank_folder(root: str, namespace: bytes, rank: int) -> str:
    """Return the folder of one namespace and rank."""
    return f"{root}/{namespace.hex()}/r{rank}"


def place_of(folder: str) -> tuple[bytes, int]:
    """Inverse of `rank_folder`: the namespace and rank of a folder."""
    _, namespace, rank = folder.rsplit("/", 2)
    return bytes.fromhex(namespace), int(rank[1:])


def record_path(folder: str, key: bytes) -> str:
    """Return the path of a key's record below a rank's folder."""
    name = key_name(key)
    return f"{folder}/{name[:2]}/{name[2:4]}/{name}{RECORD_SUFFIX}"


def key_of_file(name: str) -> bytes | None:
    """Return the key of a record file's name, or None."""
    if not name.endswith(RECORD_SUFFIX):
        return None
    try:
        return parse_key_name(name[: -len(RECORD_SUFFIX)])
    except KVTierError:
        return None


def pack_namespace(namespace: bytes, description: Mapping[str, Any]) -> bytes:
    """Return the content of `namespace.json`."""
    content = {
        "format": NAMESPACE_FORMAT,
        "namespace": namespace.hex(),
        "description": dict(description),
    }
    return json.dumps(content, indent=2, sort_keys=True, default=str).encode() + b"\n"


def parse_namespace(data: bytes, namespace: bytes) -> dict[str, Any]:
    """Return the description in the content of a `namespace.json`.

    Raises:
        KVTierError: it is not the description of this namespace; no other exception.
    """
    try:
        content = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise KVTierError(f"{NAMESPACE_FILE} is not JSON: {error}") from None
    if not isinstance(content, dict) or content.get("format") != NAMESPACE_FORMAT:
        raise KVTierError(f"{NAMESPACE_FILE} is not of format {NAMESPACE_FORMAT}")
    if content.get("namespace") != namespace.hex():
        raise KVTierError(f"{NAMESPACE_FILE} describes another namespace")
    description = content.get("description")
    if not isinstance(description, dict):
        raise KVTierError(f"{NAMESPACE_FILE} has no description")
    return description


def list_namespaces(root: str) -> list[NamespaceInfo]:
    """Return the namespaces of a store, by name. Reads one small file for each.

    Raises:
        OSError: the root itself cannot be listed.
    """
    with os.scandir(root) as entries:
        names = sorted(entry.name for entry in entries if _NAMESPACE.fullmatch(entry.name))
    return [_namespace_info(root, name) for name in names if os.path.isdir(f"{root}/{name}")]


def _namespace_info(root: str, name: str) -> NamespaceInfo:
    path = f"{root}/{name}"
    namespace = bytes.fromhex(name)
    ranks = tuple(sorted(int(entry[1:]) for entry in _listed(path, _RANK)))
    description, problem = None, None
    try:
        description = parse_namespace(_small_file(f"{path}/{NAMESPACE_FILE}"), namespace)
    except (OSError, KVTierError) as error:
        problem = str(error)
    return NamespaceInfo(namespace, path, ranks, description, problem)


def _small_file(path: str) -> bytes:
    """Read a regular file of bounded length; never blocks on a FIFO."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_NAMESPACE_FILE_BYTES:
            raise KVTierError(f"{NAMESPACE_FILE} is not a small file")
        return os.read(fd, MAX_NAMESPACE_FILE_BYTES)
    finally:
        os.close(fd)


def iter_record_files(
    root: str,
    namespace: bytes | None = None,
    rank: int | None = None,
    start: str = "",
    without: tuple[bytes, int] | None = None,
    on_empty: Callable[[str], None] = lambda _: None,
) -> Iterator[RecordFile]:
    """Yield every file that is named like a record and lies where it belongs, ordered by name.

    Streams folder by folder; what vanishes or cannot be listed meanwhile is skipped.

    Args:
        root: the store.
        namespace: only this one, or None for all.
        rank: only this one, or None for all.
        start: only keys whose name begins so; looks only into folders where they can be.
        without: not those of this namespace and rank.
        on_empty: is told of folders in which nothing lies.
    """
    left_out = None if without is None else rank_folder(root, *without)
    names = _listed(root, _NAMESPACE) if namespace is None else [namespace.hex()]
    for name in names:
        ranks = _listed(f"{root}/{name}", _RANK) if rank is None else [f"r{rank}"]
        for rank_name in ranks:
            folder = f"{root}/{name}/{rank_name}"
            if folder == left_out:
                continue
            for first in _listed(folder, _HEX2, start[:2]):
                for second in _listed(f"{folder}/{first}", _HEX2, start[2:4]):
                    yield from _records_in(
                        f"{folder}/{first}/{second}",
                        max(first + second, start, key=len),
                        bytes.fromhex(name),
                        int(rank_name[1:]),
                        on_empty,
                    )


def iter_tmp_files(root: str) -> Iterator[tuple[str, str, int]]:
    """Yield (path, name, bytes) of every file being written, or left half-written.

    Their names begin with the mark of who writes them.
    """
    for path, entry, file_bytes, _ in _files(f"{root}/{CONTROL}"):
        if entry.endswith(TMP_SUFFIX):
            yield path, entry, file_bytes
    for name in _listed(root, _NAMESPACE):
        for rank_name in _listed(f"{root}/{name}", _RANK):
            for path, entry, file_bytes, _ in _files(f"{root}/{name}/{rank_name}/{TMP_FOLDER}"):
                yield path, entry, file_bytes


def iter_nameless_tmp_files(root: str) -> Iterator[tuple[str, float]]:
    """Yield (path, time of the last write) of half-written small files that name no writer."""
    for folder in (root, f"{root}/epochs", f"{root}/pins"):
        for path, entry, _, written_at_s in _files(folder):
            if entry.startswith(".") and entry.endswith(TMP_SUFFIX):
                yield path, written_at_s


def iter_quarantine(root: str) -> Iterator[tuple[str, int, float]]:
    """Yield (path, bytes, time) of what lies in quarantine."""
    for path, _, file_bytes, used_at_s in _files(f"{root}/{QUARANTINE}"):
        yield path, file_bytes, used_at_s


def make_folders(path: str) -> None:
    """Create a folder and what is missing above it, each for its owner only.

    Raises:
        OSError: one cannot be created, or is something else.
    """
    try:
        os.mkdir(path, FOLDER_MODE)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
    except FileNotFoundError:
        make_folders(os.path.dirname(path))
        make_folders(path)


def _listed(folder: str, pattern: re.Pattern[str], start: str = "") -> list[str]:
    """Return the names in a folder that match, in order; none where it cannot be listed."""
    try:
        return sorted(
            name
            for name in os.listdir(folder)
            if name.startswith(start) and pattern.fullmatch(name)
        )
    except OSError:
        return []


def _files(folder: str) -> Iterator[tuple[str, str, int, float]]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    status = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                size = status.st_size if stat.S_ISREG(status.st_mode) else 0
                yield entry.path, entry.name, size, status.st_mtime
    except OSError:
        return


def _records_in(
    folder: str, prefix: str, namespace: bytes, rank: int, on_empty: Callable[[str], None]
) -> list[RecordFile]:
    """Return a folder's records, ordered by name; those that vanish meanwhile are left out."""
    found: list[RecordFile] = []
    empty = True
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                empty = False
                name = entry.name
                key = key_of_file(name) if name.startswith(prefix) else None
                if key is None:
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                n_bytes = status.st_size if stat.S_ISREG(status.st_mode) else 0
                place = (entry.path, namespace, rank, key, n_bytes, status.st_mtime)
                found.append(RecordFile(*place))
    except OSError:
        return found
    if empty:
        on_empty(folder)
    found.sort()
    return found
