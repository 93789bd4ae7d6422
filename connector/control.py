"""A Unix socket by which people ask a running engine for something: ``kvtier warm``.

vLLM gives connectors no way to be asked. The scheduler's process listens on a socket of its own
in a folder that engines share, so a command finds every engine that lives, and none that does
not. Both are for their owner only, the other end's user is checked, what it may send is bounded,
and all that it can ask for is that records which this engine would serve anyway are in RAM
earlier. One line of JSON goes in; lines come back until it is over, or the other end hangs up,
which cancels it.

One thread, one visitor at a time; the scheduler thread never waits for either. An engine that
computes nothing does not step: it sees a wish with its next request.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import select
import socket
import stat
import struct
import threading
import time
from queue import Full, Queue
from typing import Any

from ..storage.disk_layout import make_folders
from ..storage.errors import KVTierError
from ..storage.key import NAMESPACE_BYTES, parse_key_name
from .warm_request import MAX_KEYS, WarmRequest

logger = logging.getLogger("kvtier.control")

FORMAT = "kvtier-control"
VERSION = 1
FOLDER = "control"  # below a disk tier's folder
SUFFIX = ".sock"
MAX_LINE_BYTES = 4 << 20
MAX_WAITING = 4
READ_TIMEOUT_S = 5.0
TELL_EVERY_S = 0.2
CLOSE_S = 3.0
_BACKLOG = 8
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class ControlServer:
    """Listens for one engine.

    Args:
        folder: where the socket lies; created when missing, for its owner only.

    Raises:
        OSError, KVTierError: it cannot be, or the folder is not safe.
    """

    def __init__(self, folder: str) -> None:
        self.wishes: Queue[WarmRequest] = Queue(MAX_WAITING)
        make_folders(folder)
        self._folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            check_owner(self._folder_fd, folder)
            _sweep(folder, self._folder_fd)
            self._name = f"{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"
            self._socket = _listen(self._folder_fd, self._name)
        except BaseException:
            os.close(self._folder_fd)
            raise
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-control", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                visitor, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError as error:  # too many open files, for a while
                logger.debug("kvtier: nobody can visit the control socket: %r", error)
                self._closing.wait(TELL_EVERY_S)
                continue
            with visitor:
                try:
                    self._serve(visitor)
                except Exception as error:  # noqa: BLE001 - a visitor must not end the thread
                    logger.debug("kvtier: a visitor of the control socket left: %r", error)

    def _serve(self, visitor: socket.socket) -> None:
        visitor.settimeout(READ_TIMEOUT_S)
        if _user(visitor) not in {os.geteuid(), 0}:
            return
        try:
            request = parse_wish(_line(visitor))
        except KVTierError as error:
            _tell(visitor, {"state": "refused", "why": str(error)})
            return
        try:
            self.wishes.put_nowait(request)
        except Full:
            _tell(visitor, {"state": "refused", "why": "too many wait already"})
            return
        try:
            while not request.over:
                told_s = time.monotonic()
                _tell(visitor, request.as_dict())
                if self._closing.is_set() or (
                    readable(visitor, TELL_EVERY_S) and not visitor.recv(1 << 16)
                ):
                    break
                # What more a visitor says is not listened to, and must not hurry us.
                self._closing.wait(TELL_EVERY_S - (time.monotonic() - told_s))
            _tell(visitor, request.as_dict())
        finally:
            request.cancel()

    def close(self) -> None:
        """Stop listening, take the socket away. Waits a bounded time. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join(CLOSE_S)
        self._socket.close()
        with contextlib.suppress(OSError):
            os.unlink(self._name, dir_fd=self._folder_fd)
        os.close(self._folder_fd)


def parse_wish(data: bytes) -> WarmRequest:
    """Return what a line asks for.

    Raises:
        KVTierError: not understood; one line.
    """
    try:
        said: Any = json.loads(data)
        if said["format"] != FORMAT or said["version"] != VERSION or said["do"] != "warm":
            raise KVTierError(f"not a question of {FORMAT} {VERSION}")
        keys = tuple((parse_key_name(name), int(end)) for name, end in said["keys"])
        namespace = bytes.fromhex(said["namespace"])
        tier = str(said["tier"])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise KVTierError(f"not a question of {FORMAT} {VERSION}") from None
    if len(keys) > MAX_KEYS or len(namespace) != NAMESPACE_BYTES:
        raise KVTierError(f"more than {MAX_KEYS} keys, or no namespace")
    return WarmRequest(tier, namespace, keys)


def check_owner(folder_fd: int, folder: str) -> None:
    """Refuse a folder in which others could put a socket of theirs.

    Raises:
        KVTierError: it belongs to somebody else, or others may write there.
    """
    status = os.fstat(folder_fd)
    if status.st_uid not in {os.geteuid(), 0} or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise KVTierError(f"{folder} is not for its owner only")


def connect(folder_fd: int, name: str, timeout_s: float) -> socket.socket:
    """Connect to a socket in an open folder.

    Raises:
        OSError: nobody listens (ConnectionRefusedError: nobody will).
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.settimeout(timeout_s)
    try:
        made.connect(_address(folder_fd, name))
    except BaseException:
        made.close()
        raise
    return made


def _address(folder_fd: int, name: str) -> str:
    return f"/proc/self/fd/{folder_fd}/{name}"  # a socket's address may have 107 bytes


def _listen(folder_fd: int, name: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    early = f"{name}.new"  # under its name only when it listens: `_sweep` of another engine
    try:
        made.bind(_address(folder_fd, early))
        os.chmod(early, 0o600, dir_fd=folder_fd)
        made.listen(_BACKLOG)
        os.rename(early, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
        made.settimeout(TELL_EVERY_S)
    except BaseException:
        made.close()
        raise
    return made


def _sweep(folder: str, folder_fd: int) -> None:
    """Remove sockets of engines that ended without doing so."""
    for name in os.listdir(folder):
        if name.endswith(SUFFIX):
            try:
                connect(folder_fd, name, TELL_EVERY_S).close()
            except ConnectionRefusedError:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=folder_fd)
            except OSError:
                continue


def _user(visitor: socket.socket) -> int:
    data = visitor.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(data)[1])


def _line(visitor: socket.socket) -> bytes:
    data = bytearray()
    while not data.endswith(b"\n"):
        piece = visitor.recv(1 << 16)
        if not piece or len(data) + len(piece) > MAX_LINE_BYTES:
            raise KVTierError("no line, or one that is too long")
        data += piece
    return bytes(data)


def _tell(visitor: socket.socket, value: dict[str, Any]) -> None:
    visitor.sendall(json.dumps(value).encode() + b"\n")


def readable(connection: socket.socket, wait_s: float = 0.0) -> bool:
    """Whether something has come, or the other end has hung up, within a time."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(wait_s * 1000))
