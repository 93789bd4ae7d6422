"""A real engine in a process of its own, for benchmarks that compare several in one run."""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING, Any, TypeVar

from .engine import Engine, EngineError, EngineOptions

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

T = TypeVar("T")
START_S = 300.0
WORK_S = 900.0
STOP_S = 60.0


class EngineChild:
    """One engine in a process of its own: vLLM runs one at a time in a process. A context manager.

    Raises:
        EngineError: the engine did not start, or died; with its own message.
    """

    def __init__(self, options: EngineOptions) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        # Not a daemon: vLLM may start processes of its own.
        self._process = context.Process(target=_serve, args=(theirs, options))
        self._process.start()
        theirs.close()
        self._answer(START_S)

    def __enter__(self) -> EngineChild:  # noqa: PYI034 (Python 3.10 has no typing.Self)
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()  # the child ends
        self._process.join(STOP_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def do(self, work: Callable[..., T], *arguments: Any) -> T:
        """Return ``work(engine, *arguments)``, run in the child; blocking.

        Args:
            work: a function of a module.
            arguments: its own beside the engine; these, and what it returns, are sent.
        """
        self._pipe.send((work, arguments))
        result: T = self._answer(WORK_S)
        return result

    def _answer(self, timeout_s: float) -> Any:
        try:
            if not self._pipe.poll(timeout_s):
                raise EngineError(f"the engine gave no sign of life for {timeout_s:.0f} s")
            ok, value = self._pipe.recv()
        except (EOFError, OSError):
            raise EngineError("the engine's process died; run it alone to see why") from None
        if not ok:
            raise EngineError(str(value))
        return value


def _serve(pipe: Connection, options: EngineOptions) -> None:
    """Do what is asked until the other end is closed; in the child."""
    try:
        with Engine(options) as engine:
            pipe.send((True, None))
            while True:
                try:
                    work, arguments = pipe.recv()
                except EOFError:
                    return
                pipe.send((True, work(engine, *arguments)))
    except Exception as error:  # noqa: BLE001 - told by whoever asked
        pipe.send((False, f"{type(error).__name__}: {error}"))
