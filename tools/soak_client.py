"""The soak's side of an engine in a child process. Thread-safe."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
from collections import deque
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .soak_types import Ask, ChunkUse, EngineGone, Reply, SoakError

if TYPE_CHECKING:
    from collections.abc import Mapping

START_TIMEOUT_S = 900.0
ANSWER_TIMEOUT_S = 900.0
LOG_LINES = 60


class ChildEngine:
    """An engine in a process of its own.

    Replies are matched to requests by number. When the process ends, whatever waits raises
    `EngineGone`.

    Args:
        log_path: what the engine prints goes to the end of this file; None keeps the last lines.
        environment: added to this process's.
    """

    def __init__(
        self, log_path: str | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        self.facts: dict[str, Any] = {}
        self._environment = {**os.environ, **(environment or {})}
        self._lock = threading.Lock()
        self._waiting: dict[str, queue.Queue[dict[str, Any]]] = {}
        self._numbers = itertools.count()
        self._log: deque[str] = deque(maxlen=LOG_LINES)
        self._log_path = log_path
        self._spawn()

    def _spawn(self) -> None:
        self._gone = False
        self._used = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvtier.tools.soak_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            bufsize=1,
            start_new_session=True,  # Ctrl-C is the soak's to handle
            env=self._environment,
        )
        self._readers = [
            threading.Thread(target=self._read_replies, daemon=True),
            threading.Thread(target=self._read_log, daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        self._import: str | None = self._send({"do": "import"})

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return not self._gone and self._process.poll() is None

    def living(self) -> ChildEngine:
        """Return this engine.

        Raises:
            SoakError: it has ended; nobody starts another.
        """
        if not self.alive:
            raise SoakError(f"the engine ended by itself: {self.log_tail()}")
        return self

    def log_tail(self, lines: int = 12) -> str:
        """Return the last lines that the engine printed."""
        return "\n".join(list(self._log)[-lines:])

    def open(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Start an engine with these `EngineOptions` fields. Blocking, up to minutes.

        Raises:
            SoakError: it does not start; holds what it said.
        """
        if self._used and "speculative_config" in options.get("more", {}):
            # n-gram speculation brings numba, beside which vLLM starts no second engine.
            self.close()
            self._spawn()
        self._used = True
        name, self._import = self._import, None
        if name is not None:
            self._wait(name, START_TIMEOUT_S)
        row = self._wait(self._send({"do": "open", "options": dict(options)}), START_TIMEOUT_S)
        self.facts = row["facts"]
        return self.facts

    def shut(self) -> None:
        """Close the engine, but not the process."""
        self._wait(self._send({"do": "close"}), ANSWER_TIMEOUT_S)

    def ask(self, ask: Ask) -> Reply:
        """Run one request to its end, or until it is given up. Blocking."""
        waiting = self._send({"do": "ask", "ask": asdict(ask)})
        if ask.abort_after_s is None:
            return _reply(self._wait(waiting, ANSWER_TIMEOUT_S))
        try:
            row = self._wait(waiting, ask.abort_after_s, keep=True)
        except TimeoutError:
            self._wait(self._send({"do": "abort", "ask_id": waiting}), ANSWER_TIMEOUT_S)
            row = self._wait(waiting, ANSWER_TIMEOUT_S)
        return _reply(row)

    def ask_together(self, asks: list[Ask]) -> list[Reply]:
        """Run several at once."""
        names = [self._send({"do": "ask", "ask": asdict(ask)}) for ask in asks]
        return [_reply(self._wait(name, ANSWER_TIMEOUT_S)) for name in names]

    def sample(self) -> dict[str, float]:
        """Return counters and gauges of now."""
        return dict(self._wait(self._send({"do": "sample"}), ANSWER_TIMEOUT_S)["sample"])

    def quiet(self) -> list[str]:
        """Wait until nothing is outstanding; return what is still held, in words."""
        return list(self._wait(self._send({"do": "quiet"}), ANSWER_TIMEOUT_S)["held"])

    def fault(self, kind: str, on: bool) -> None:
        """Begin or end a fault inside the process."""
        self._wait(self._send({"do": "fault", "kind": kind, "on": on}), ANSWER_TIMEOUT_S)

    def kill(self) -> None:
        """End the process at once, as a crash does."""
        with contextlib.suppress(OSError):
            self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End the process, the engine first. Idempotent."""
        with contextlib.suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
        for reader in self._readers:
            reader.join(5)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    # -- lines ---------------------------------------------------------------

    def _send(self, command: dict[str, Any]) -> str:
        name = f"soak{next(self._numbers)}"
        line = json.dumps({**command, "id": name}) + "\n"
        with self._lock:
            if self._gone:
                raise EngineGone("the engine's process has ended")
            self._waiting[name] = queue.Queue()
            try:
                assert self._process.stdin is not None
                self._process.stdin.write(line)
                self._process.stdin.flush()
            except (OSError, ValueError):
                del self._waiting[name]
                raise EngineGone("the engine's process has ended") from None
        return name

    def _wait(self, name: str, timeout_s: float, *, keep: bool = False) -> dict[str, Any]:
        waiting = self._waiting[name]
        try:
            row = waiting.get(timeout=timeout_s)
        except queue.Empty:
            if keep:
                raise TimeoutError from None
            self._waiting.pop(name, None)
            raise SoakError(f"the engine has not answered for {timeout_s:.0f} s") from None
        self._waiting.pop(name, None)
        if "gone" in row:
            raise EngineGone("the engine's process has ended")
        if "error" in row:
            raise SoakError(f"the engine says: {row['error']}")
        return row

    def _read_replies(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            row = json.loads(line)
            waiting = self._waiting.get(row.get("id"))
            if waiting is not None:
                waiting.put(row)
        with self._lock:
            self._gone = True
            left = list(self._waiting.values())
        for waiting in left:
            waiting.put({"gone": True})

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        with contextlib.ExitStack() as stack:
            log = None
            if self._log_path is not None:
                log = stack.enter_context(open(self._log_path, "a", encoding="utf-8"))
            for line in self._process.stderr:
                self._log.append(line.rstrip("\n"))
                if log is not None:
                    log.write(line)
                    log.flush()


def _reply(row: dict[str, Any]) -> Reply:
    return Reply(
        tokens=tuple(row["tokens"]),
        top=tuple(tuple((int(t), float(x)) for t, x in place) for place in row["top"]),
        prompt_tokens=row["prompt_tokens"],
        ttft_s=row["ttft_s"],
        total_s=row["total_s"],
        device_tokens=row["device_tokens"],
        restored=row["restored"],
        loads=tuple(ChunkUse(**load) for load in row["loads"]),
        aborted=row["aborted"],
    )
