"""A process that holds engines for a soak: commands come in, replies go out, one JSON a line.

It is a process of its own so that it can be killed, measured and started again. Engines follow
one another in it; only one is open at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
import time
import traceback
from dataclasses import asdict
from typing import Any

from . import soak_disk_faults
from .engine import EngineOptions, device_name, prepare_environment
from .soak_types import Ask, Reply

IDLE_STEP_S = 0.001
CPU_BLOCK_TOKENS = 32  # the smallest that the CPU takes: short prompts have many blocks


def reply_row(name: str, reply: Reply) -> dict[str, Any]:
    """Return a reply as it goes out."""
    return {"id": name, **asdict(reply)}


class Child:
    """Runs commands between steps.

    Args:
        lines: commands, None at the end.
        say: writes one object.
    """

    def __init__(self, lines: queue.Queue[tuple[float, dict[str, Any]] | None], say: Any) -> None:
        self._lines = lines
        self._say = say
        self._engine: Any = None

    def run(self) -> None:
        """Serve until the commands end."""
        try:
            while self._serve():
                pass
        finally:
            self._close()

    def _serve(self) -> bool:
        engine = self._engine
        moving = engine is not None and (engine.busy or engine.pending)
        try:
            line = self._lines.get(block=not moving)
        except queue.Empty:
            for name, reply in engine.step():
                self._say(reply_row(name, reply))
            if not engine.busy:
                time.sleep(IDLE_STEP_S)
            return True
        if line is None:
            return False
        at_s, command = line
        try:
            result = self._do(command, at_s)
        except Exception as error:  # noqa: BLE001 - told to the soak, which decides
            traceback.print_exc()
            text = " ".join(str(error).split()) or repr(error)
            result = {"error": f"{type(error).__name__}: {text}"[:2000]}
        if result is not None:
            self._say({"id": command["id"], **result})
        return True

    def _do(self, command: dict[str, Any], at_s: float) -> dict[str, Any] | None:
        """Run one command; None when its answer comes later."""
        return getattr(self, f"_do_{command['do']}")(command, at_s)  # type: ignore[no-any-return]

    def _do_import(self, *_: Any) -> dict[str, Any]:
        prepare_environment()
        with contextlib.redirect_stdout(sys.stderr):
            import vllm  # noqa: F401 - so that it is there when the engine is opened
        return {}

    def _do_open(self, command: dict[str, Any], _: float) -> dict[str, Any]:
        return self._open(command["options"])

    def _do_close(self, *_: Any) -> dict[str, Any]:
        self._close()
        return {}

    def _do_ask(self, command: dict[str, Any], at_s: float) -> None:
        ask = command["ask"]
        ask = Ask(**{**ask, "prompt": tuple(ask["prompt"])})
        self._engine.submit(command["id"], ask, at_s)

    def _do_abort(self, command: dict[str, Any], _: float) -> dict[str, Any]:
        reply = self._engine.abort(command["ask_id"])
        if reply is not None:
            self._say(reply_row(command["ask_id"], reply))
        return {}

    def _do_sample(self, *_: Any) -> dict[str, Any]:
        return {"sample": self._engine.sample()}

    def _do_quiet(self, *_: Any) -> dict[str, Any]:
        return {"held": self._engine.quiet()}

    def _do_fault(self, command: dict[str, Any], _: float) -> dict[str, Any]:
        soak_disk_faults.set_fault(command["kind"], command["on"])
        return {}

    def _open(self, options: dict[str, Any]) -> dict[str, Any]:
        from .soak_engine import SoakEngine

        self._close()
        prepare_environment()
        if options.get("block_tokens") is None and device_name() == "cpu":
            options["block_tokens"] = CPU_BLOCK_TOKENS
        connector = options.pop("connector", None)
        more = dict(options.pop("more", {}))
        if connector is not None:
            from vllm.config import KVTransferConfig

            more["kv_transfer_config"] = KVTransferConfig(
                kv_connector=connector["name"],
                kv_connector_module_path=connector["module"],
                kv_role="kv_both",
                kv_connector_extra_config=options.get("kvtier") or {},
            )
        self._engine = SoakEngine(EngineOptions(**options, more=more))
        return {"facts": self._engine.facts()}

    def _close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()


def main() -> None:
    """Serve stdin."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints is no answer
    lock = threading.Lock()

    def say(row: dict[str, Any]) -> None:
        with lock:
            out.write(json.dumps(row) + "\n")
            out.flush()

    lines: queue.Queue[tuple[float, dict[str, Any]] | None] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put((time.perf_counter(), json.loads(line)))
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    with contextlib.suppress(BrokenPipeError):
        Child(lines, say).run()


if __name__ == "__main__":
    main()
