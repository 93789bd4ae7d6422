"""Asks running engines to bring records up into RAM, and waits until they have."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..connector.control import FORMAT, SUFFIX, VERSION, check_owner, connect, readable
from ..connector.warm_request import MAX_KEYS
from ..storage.key import key_name
from .exit_codes import ExitCode
from .reporting import CommandError
from .scrape import HTTP_ERRORS, call, plain, safe_url, server_root

_CONNECT_S = 2.0
_POLL_S = 0.05
_WAKE_S = 30.0


@dataclass(slots=True)
class EngineAnswer:
    """What one engine has said so far.

    Attributes:
        name: of its socket: its process id is in it.
        said: its last line; empty before the first one.
        lost: it hung up before it was done.
    """

    name: str
    connection: socket.socket
    said: dict[str, Any] = field(default_factory=dict)
    lost: bool = False
    _rest: bytes = b""

    @property
    def state(self) -> str:
        """Where it is: waiting, running, done, cancelled, other_namespace, refused, lost."""
        state = str(self.said.get("state", "waiting"))
        return "lost" if self.lost and state in {"waiting", "running"} else state

    @property
    def over(self) -> bool:
        """Whether nothing more will be heard."""
        return self.state not in {"waiting", "running"}

    def listen(self) -> None:
        """Take in what has come, without waiting."""
        if not readable(self.connection):
            return
        try:
            data = self.connection.recv(1 << 16)
        except OSError:
            data = b""
        self.lost = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            value = json.loads(line)
            if isinstance(value, dict):
                self.said = value

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for ``--json``."""
        return {
            "engine": self.name,
            "state": self.state,
            "loaded": self.said.get("loaded", 0),
            "in_ram": self.said.get("in_ram", 0),
            "skipped": dict(self.said.get("skipped", {})),
            "why": self.said.get("why"),
        }


def wish(tier: str, namespace: bytes, keys: Sequence[tuple[bytes, int]]) -> bytes:
    """Return the line that asks for records, the most wanted first.

    Raises:
        CommandError: too many.
    """
    if len(keys) > MAX_KEYS:
        raise CommandError(
            f"{len(keys):,} records are too many to warm at once ({MAX_KEYS:,}); --up-to takes less"
        )
    value = {
        "format": FORMAT,
        "version": VERSION,
        "do": "warm",
        "tier": tier,
        "namespace": namespace.hex(),
        "keys": [[key_name(key), end] for key, end in keys],
    }
    return json.dumps(value).encode() + b"\n"


def ask(folder: str, line: bytes) -> list[EngineAnswer]:
    """Hand a line to every engine that listens in a folder.

    Raises:
        CommandError: the folder is not there, not safe, or nobody listens.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise CommandError(
            f"{folder}: {error.strerror}: no engine listens there; see the setting `control`",
            ExitCode.UNREACHABLE,
        ) from None
    found = []
    try:
        check_owner(fd, folder)
        for name in sorted(os.listdir(folder)):
            if name.endswith(SUFFIX):
                try:
                    connection = connect(fd, name, _CONNECT_S)
                    connection.sendall(line)
                except OSError:
                    continue  # an engine that ended; the next one to start sweeps
                found.append(EngineAnswer(name.removesuffix(SUFFIX), connection))
    finally:
        os.close(fd)
    if not found:
        raise CommandError(f"{folder}: no engine listens there", ExitCode.UNREACHABLE)
    return found


def wait(
    answers: Sequence[EngineAnswer],
    wait_s: float,
    wake: Callable[[], None] | None,
    progress: Callable[[str], None],
) -> None:
    """Wait until all have answered; ``wake`` is called once when an engine does not begin."""
    until_s = time.monotonic() + wait_s
    wake_at_s = time.monotonic() + min(1.0, wait_s / 2)
    while True:
        for answer in answers:
            if not answer.over:
                answer.listen()
        if all(answer.over for answer in answers) or time.monotonic() >= until_s:
            return
        asleep = any(answer.state == "waiting" for answer in answers)
        if wake is not None and asleep and time.monotonic() >= wake_at_s:
            wake()
            wake = None
        loaded = sum(answer.said.get("loaded", 0) for answer in answers)
        progress(f"{loaded:,} chunks in RAM")
        time.sleep(_POLL_S)


def close(answers: Sequence[EngineAnswer]) -> None:
    """Hang up; engines stop what they have not begun."""
    for answer in answers:
        answer.connection.close()


def wake_server(url: str) -> None:
    """Make an idle vLLM server take a step: one token for a prompt of one word.

    Raises:
        CommandError: it does not answer.
    """
    base = server_root(url)
    try:
        model = _json(f"{base}/v1/models")["data"][0]["id"]
        _json(f"{base}/v1/completions", {"model": model, "prompt": "a", "max_tokens": 1})
    except (*HTTP_ERRORS, KeyError, IndexError, TypeError) as error:
        where = safe_url(base)
        raise CommandError(f"{where} was not woken: {plain(error)}", ExitCode.UNREACHABLE) from None


def _json(url: str, body: object = None) -> Any:
    with call(url, _WAKE_S, body) as answer:
        return json.loads(answer.read(1 << 20))
