"""Readers of trace files: agent sessions, Mooncake's JSONL, and kvtier's own recordings.

Which one a file is, its first line tells. Gzip is read as it is.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import zlib
from collections.abc import Iterator
from importlib.resources import files
from typing import Any, BinaryIO, cast

import numpy as np

from .traces import Blocks, Trace, TraceBuilder, TraceError, seat

PACKAGED = "agent-sessions"
MOONCAKE_BLOCK_TOKENS = 512
RECORDING = "kvtier-recording"
RECORDING_VERSION = 1
MAX_PROMPT_TOKENS = 1 << 28
MAX_HASH = 1 << 28  # hashes of one session are small numbers

_Lines = Iterator[tuple[str, dict[str, Any]]]


def read_trace(source: str, *, n_users: int = 16, share_prefix: bool = False) -> Trace:
    """Read a trace. Blocking.

    Args:
        source: a file, `PACKAGED` for the sessions that come with kvtier, or a folder of
            recordings, of which the newest engine's are read.
        n_users: agent sessions that run at a time.
        share_prefix: take it that agent sessions with tools and system prompts of the same
            lengths have the same ones.

    Raises:
        TraceError: not a trace, or a broken one; one line says where.
        OSError: the file cannot be read.
    """
    if source == PACKAGED:
        data = files("kvtier.tools") / "data" / "agent-sessions" / "sessions.jsonl.gz"
        with data.open("rb") as file:
            return _read(cast("BinaryIO", file), PACKAGED, n_users, share_prefix=share_prefix)
    path = os.path.expanduser(source)
    if os.path.isdir(path):
        return _read_folder(path)
    with open(path, "rb") as file:
        return _read(file, os.path.basename(path), n_users, share_prefix=share_prefix)


def _read_folder(path: str) -> Trace:
    """Read the parts of the newest engine's recording, one after another."""
    name = os.path.basename(os.path.normpath(path))
    runs = recordings(path)
    if not runs:
        raise TraceError(f"{name}: no recording in this folder")
    with contextlib.ExitStack() as stack:
        parts = [stack.enter_context(open(part, "rb")) for part in runs[-1]]
        lines = (line for part in parts for line in _objects(part, os.path.basename(part.name)))
        first = next(lines, None)
        if first is None:
            raise TraceError(f"{name}: no request in it")
        return _recording(first[1], lines, name)


def recordings(folder: str) -> list[list[str]]:
    """Return the parts of each engine's recording in a folder, the newest engine last.

    Raises:
        OSError: it cannot be listed.
    """
    from ..connector.recording_files import NAME

    runs: dict[str, list[str]] = {}
    for entry in sorted(os.listdir(folder)):
        match = NAME.fullmatch(entry)
        if match is not None:
            runs.setdefault(match["run"], []).append(os.path.join(folder, entry))
    return [runs[run] for run in sorted(runs)]


def _read(file: BinaryIO, name: str, n_users: int, *, share_prefix: bool) -> Trace:
    head = file.read(2)
    file.seek(0)
    stream = cast("BinaryIO", gzip.GzipFile(fileobj=file)) if head == b"\x1f\x8b" else file
    try:
        lines = _objects(stream, name)
        first = next(lines, None)
        if first is None:
            raise TraceError(f"{name}: no request in it")
        if first[1].get("format") == RECORDING:
            return _recording(first[1], lines, name)
        if "hash_ids" in first[1]:
            return _mooncake(first, lines, name)
        if "requests" in first[1]:
            return _agent_sessions(first, lines, name, n_users, share_prefix=share_prefix)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{name}: broken gzip file: {error}") from None
    raise TraceError(
        f"{name}: line 1 is of no known trace (agent sessions, Mooncake, kvtier recording)"
    )


def _objects(stream: BinaryIO, name: str) -> _Lines:
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        where = f"line {number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise TraceError(f"{name}: {where} is no JSON") from None
        if not isinstance(value, dict):
            raise TraceError(f"{name}: {where} is no JSON object")
        yield where, value


def _number(name: str, where: str, value: dict[str, Any], key: str, default: float) -> float:
    given = value.get(key, default)
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 <= given < 1e15:
        raise TraceError(f"{name}: {where}: {key} = {str(given)[:40]} is no number from 0 on")
    return float(given)


def _tokens(name: str, where: str, value: dict[str, Any], key: str) -> int:
    given = value.get(key)
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given <= MAX_PROMPT_TOKENS:
        raise TraceError(f"{name}: {where}: {key} = {str(given)[:40]} is no number of tokens")
    return given


# -- Mooncake ------------------------------------------------------------------


def _mooncake(first: tuple[str, dict[str, Any]], lines: _Lines, name: str) -> Trace:
    """One request a line: timestamp (ms), input_length, output_length, hash_ids."""
    builder = TraceBuilder(name, MOONCAKE_BLOCK_TOKENS)
    for number, (where, line) in enumerate(_again(first, lines)):
        ids = _ids(name, where, line.get("hash_ids"))
        if len(ids) and ids.max() >= builder.n_nodes:
            builder.reserve(int(ids.max()) + 1 - builder.n_nodes)
        builder.add(
            where,
            _number(name, where, line, "timestamp", 0) / 1000,
            number,
            _tokens(name, where, line, "input_length"),
            _tokens(name, where, line, "output_length"),
            ids,
        )
    return builder.build()


def _ids(name: str, where: str, value: object) -> Blocks:
    try:
        ids = np.array(value, dtype=np.int64) if isinstance(value, list) else None
    except (TypeError, ValueError, OverflowError):
        ids = None
    if ids is None or ids.ndim != 1 or (len(ids) and not 0 <= ids.min() <= ids.max() < MAX_HASH):
        raise TraceError(f"{name}: {where}: hash_ids is no list of small numbers")
    return ids


def _again(first: tuple[str, dict[str, Any]], rest: _Lines) -> _Lines:
    yield first
    yield from rest


# -- kvtier's recordings ---------------------------------------------------------


def _recording(header: dict[str, Any], lines: _Lines, name: str) -> Trace:
    """A header line, then one request a line: t, prompt_tokens, output_tokens, hashes.

    Another header line begins another part: ``base`` counts requests from there.
    """
    block_tokens = _recorded_block(header, name, "line 1")
    builder = TraceBuilder(name, block_tokens)
    sessions: dict[str, int] = {}
    part: list[Blocks] = []
    for number, (where, line) in enumerate(lines):
        if "format" in line:
            if _recorded_block(line, name, where) != block_tokens:
                raise TraceError(f"{name}: {where}: another block_tokens than in line 1")
            part = []
            continue
        hashes = line.get("hashes")
        if not isinstance(hashes, list) or not all(isinstance(h, str) for h in hashes):
            raise TraceError(f"{name}: {where}: hashes is no list of texts")
        shared = _shared_start(name, where, line.get("base"), part)
        nodes = np.concatenate([shared, builder.named(hashes)])
        part.append(nodes)
        session = str(line.get("session", f"\0{number}"))
        builder.add(
            where,
            _number(name, where, line, "t", -1),
            sessions.setdefault(session, len(sessions)),
            _tokens(name, where, line, "prompt_tokens"),
            _tokens(name, where, line, "output_tokens"),
            nodes,
        )
    return builder.build()


def _recorded_block(header: dict[str, Any], name: str, where: str) -> int:
    if header.get("format") != RECORDING or header.get("version") != RECORDING_VERSION:
        raise TraceError(
            f"{name}: recording of version {str(header.get('version'))[:20]}, "
            f"this build reads version {RECORDING_VERSION}"
        )
    return _tokens(name, where, header, "block_tokens")


def _shared_start(name: str, where: str, base: object, part: list[Blocks]) -> Blocks:
    """Return the blocks that a request shares with one before it: ``[request, blocks]``."""
    if base is None:
        return np.empty(0, dtype=np.int64)
    if isinstance(base, list) and len(base) == 2 and all(type(n) is int for n in base):
        request, n_blocks = base
        if 0 <= request < len(part) and 0 <= n_blocks <= len(part[request]):
            return part[request][:n_blocks]
    raise TraceError(f"{name}: {where}: base is no [request, blocks] of this part")


# -- agent sessions --------------------------------------------------------------


def _agent_sessions(
    first: tuple[str, dict[str, Any]],
    lines: _Lines,
    name: str,
    n_users: int,
    *,
    share_prefix: bool,
) -> Trace:
    """One session a line; its times count from its own start, its hashes are its own."""
    sessions = [
        (where, session, _calls(name, where, session)) for where, session in _again(first, lines)
    ]
    starts_s = seat((max((c[0] for c in calls), default=0.0) for _, _, calls in sessions), n_users)
    block_tokens = _tokens(name, first[0], first[1], "block_size")
    builder = TraceBuilder(name, block_tokens)
    shared: dict[tuple[int, int], int] = {}
    for number, (where, session, calls) in enumerate(sessions):
        if _tokens(name, where, session, "block_size") != block_tokens:
            raise TraceError(f"{name}: {where}: another block_size than in line 1")
        chains = [_expand(name, where, call) for _, call in calls]
        top = max((int(ids.max()) for ids in chains if len(ids)), default=-1)
        table = np.arange(top + 1, dtype=np.int64) + builder.reserve(top + 1)
        if share_prefix and chains:
            _share(name, where, session, builder, table, chains[0], shared)
        for (at_s, call), ids in zip(calls, chains, strict=True):
            builder.add(
                where,
                starts_s[number] + at_s,
                number,
                _tokens(name, where, call, "in"),
                _tokens(name, where, call, "out"),
                table[ids],
            )
    return builder.build()


def _calls(name: str, where: str, session: dict[str, Any]) -> list[tuple[float, dict[str, Any]]]:
    """Return (time from the session's start, call), sub-agents' calls among them."""
    found = []
    for call in _list(name, where, session):
        at_s = _number(name, where, call, "t", -1)
        if "requests" in call:
            found += [
                (at_s + _number(name, where, inner, "t", -1), inner)
                for inner in _list(name, where, call)
            ]
        else:
            found.append((at_s, call))
    return found


def _list(name: str, where: str, holder: dict[str, Any]) -> list[dict[str, Any]]:
    calls = holder.get("requests")
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise TraceError(f"{name}: {where}: requests is no list of objects")
    return calls


def _expand(name: str, where: str, call: dict[str, Any]) -> Blocks:
    try:
        runs = np.array(call.get("hash_runs"), dtype=np.int64).reshape(-1, 2)
    except (TypeError, ValueError, OverflowError):
        runs = np.full((1, 2), -1, dtype=np.int64)
    if len(runs) and (runs.min() < 0 or runs.sum() > MAX_HASH):
        raise TraceError(f"{name}: {where}: hash_runs is no list of [start, count]")
    parts = [np.arange(start, start + count) for start, count in runs.tolist()]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _share(
    name: str,
    where: str,
    session: dict[str, Any],
    builder: TraceBuilder,
    table: Blocks,
    ids: Blocks,
    shared: dict[tuple[int, int], int],
) -> None:
    """Give the blocks of tools and system prompt the nodes of an equally long one."""
    lengths = (
        _tokens(name, where, session, "tool_tokens"),
        _tokens(name, where, session, "system_tokens"),
    )
    n_blocks = sum(lengths) // builder.block_tokens
    if lengths not in shared:
        shared[lengths] = builder.reserve(n_blocks)
    n_blocks = min(n_blocks, len(ids))
    table[ids[:n_blocks]] = shared[lengths] + np.arange(n_blocks)
