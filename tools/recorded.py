"""One request in the recording of an engine: its prefix hashes, and what the engine did for it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from .exit_codes import ExitCode
from .reporting import CommandError
from .traces_read import RECORDING, RECORDING_VERSION, recordings

MAX_RECORDING_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Recorded:
    """A request that an engine has recorded.

    Attributes:
        request_id: vLLM's, as recorded.
        at_s: when it arrived, Unix time.
        prompt_tokens: length.
        hashes: prefix hash at the end of each whole block, as keys have them.
        block_tokens: of those blocks.
        hash_algorithm, root_hash: how the engine hashed; None where it could not say.
        line: all that was recorded.
        others: further requests of the same name, all of them older.
    """

    request_id: str
    at_s: float
    prompt_tokens: int
    hashes: list[bytes]
    block_tokens: int
    hash_algorithm: str | None
    root_hash: str | None
    line: dict[str, Any]
    others: int

    def as_dict(self) -> dict[str, Any]:
        """Return what the engine did, for ``--json``."""
        said = self.line
        return {
            "request": self.request_id,
            "at_s": self.at_s,
            "namespace": said.get("namespace"),
            "device_tokens": said.get("device_tokens"),
            "hit_tokens": dict(said.get("hit_tokens") or {}),
            "miss": said.get("miss"),
            "end": said.get("end"),
            "others": self.others,
        }


def find_request(path: str, request_id: str) -> Recorded:
    """Return the newest request of this name in a recording, or in a folder of them. Blocking.

    The id may be the one in vLLM's answer or the longer one in its log.

    Raises:
        CommandError: no such request, or no recording.
        OSError.
    """
    path = os.path.expanduser(path)
    parts = [p for run in recordings(path) for p in run] if os.path.isdir(path) else [path]
    found: Recorded | None = None
    n_found = 0
    for part in parts:
        here, n_here = _find_in(part, request_id)
        n_found += n_here
        if here is not None and (found is None or here.at_s >= found.at_s):
            found = here
    if found is None:
        raise CommandError(
            f"{path}: no request {request_id!r} in it; a request is recorded when it ends"
        )
    return Recorded(**{**_fields(found), "others": n_found - 1})


def _fields(found: Recorded) -> dict[str, Any]:
    return {name: getattr(found, name) for name in Recorded.__dataclass_fields__}


def _find_in(path: str, request_id: str) -> tuple[Recorded | None, int]:
    """Return the last request of this name in one file, and how many there are."""
    if os.path.getsize(path) > MAX_RECORDING_BYTES:
        raise CommandError(f"{path} is too large for a recording", ExitCode.WRONG_FORMAT)
    with open(path, "rb") as file:
        *lines, _unfinished = file.read().split(b"\n")
    header: dict[str, Any] = {}
    part: list[bytes] = []
    found: Recorded | None = None
    n_found = 0
    mark = json.dumps(request_id)[1:-1].encode()  # parse only what can be it
    for number, raw in enumerate(lines, 1):
        if b'"format"' in raw:
            header, part = _header(path, number, raw), []
            continue
        if not header:
            break
        part.append(raw)
        if mark in raw:
            line = _object(path, number, raw)
            if _means(str(line.get("request")), request_id):
                n_found += 1
                found = _recorded(path, header, part, line)
    if not header:
        raise CommandError(f"{path} is no recording of kvtier", ExitCode.WRONG_FORMAT)
    return found, n_found


def _means(recorded: str, request_id: str) -> bool:
    """Whether a recorded id is the one that a person has seen.

    vLLM puts a number before the ids of a request's several answers (``0_``), and prompt
    numbers and a random suffix after all (``-0-8a13fa92``).
    """
    number, _, rest = recorded.partition("_")
    name = rest if number.isdigit() else recorded
    return request_id in {recorded, name} or name.startswith(f"{request_id}-")


def _header(path: str, number: int, raw: bytes) -> dict[str, Any]:
    header = _object(path, number, raw)
    if header.get("format") != RECORDING or header.get("version") != RECORDING_VERSION:
        raise CommandError(
            f"{path}: line {number}: no recording of version {RECORDING_VERSION}",
            ExitCode.WRONG_FORMAT,
        )
    return header


def _object(path: str, number: int, raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise CommandError(f"{path}: line {number} is no JSON object", ExitCode.WRONG_FORMAT)
    return value


def _recorded(
    path: str, header: dict[str, Any], part: list[bytes], line: dict[str, Any]
) -> Recorded:
    try:
        hashes = _chain(path, part, line)
        return Recorded(
            str(line["request"]),
            float(header.get("started_at_s", 0.0)) + float(line["t"]),
            int(line["prompt_tokens"]),
            [bytes.fromhex(text) for text in hashes],
            int(header["block_tokens"]),
            header.get("hash_algorithm"),
            header.get("root_hash"),
            line,
            0,
        )
    except (KeyError, ValueError, TypeError) as error:
        raise CommandError(
            f"{path}: request {str(line.get('request'))[:80]!r} is broken: {error!r}",
            ExitCode.WRONG_FORMAT,
        ) from None


def _chain(path: str, part: list[bytes], line: dict[str, Any]) -> list[str]:
    """Return all of a request's hashes, those that it shares with earlier ones included."""
    pieces: list[list[str]] = []
    wanted = None  # how many of this line's hashes are asked for
    at = len(part)
    while True:
        base, shared = line.get("base") or (None, 0)
        own = line["hashes"]
        pieces.append(own if wanted is None else own[: max(0, wanted - shared)])
        if base is None:
            break
        if not 0 <= base < at - 1 + (wanted is not None):
            raise ValueError(f"base {base}")
        wanted = shared if wanted is None else min(wanted, shared)
        at = base
        line = _object(path, base + 1, part[base])
    return [text for piece in reversed(pieces) for text in piece]
