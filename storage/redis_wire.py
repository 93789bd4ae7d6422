"""One connection to a Redis server: payload bytes straight between socket and pages.

redis-py opens the connection and introduces us (TLS, authentication,
database); after that `Wire` owns the socket and speaks RESP2 by itself, so
that a value lands in RAM pages without a copy and leaves them without one.

On a plain socket waiting is left to the kernel (``SO_RCVTIMEO``): a stripe is
then one blocking call with the interpreter lock released once, where Python's
own timeouts poll before every part that arrives. TLS sockets use Python's.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time
from typing import TYPE_CHECKING, Any, NoReturn

from .errors import DamageReason, RecordDamaged, TierError, TierRefused, TierUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    Part: TypeAlias = bytes | bytearray | memoryview
    Answer: TypeAlias = "int | bytes | list[Answer] | ServerError | None"

_LINE_BYTES = 1 << 16
_ANSWER_BYTES = 16 << 20  # an answer that is not a payload is never longer
_ANSWER_DEPTH = 4
_IOVECS = 512  # half of what Linux takes
_SLOW_BYTES_PER_S = 5e6  # a transfer slower than this is as good as dead
_REFUSALS = frozenset({"OOM", "READONLY", "MISCONF", "NOREPLICAS"})


class ServerError:
    """An error that the server answered, as a value."""

    __slots__ = ("code", "text")

    def __init__(self, text: str) -> None:
        self.text = text[:200]
        self.code = text.split(" ", 1)[0]


class MovedError(Exception):
    """The slot of this key lives on another node (for good)."""


class MigratingError(Exception):
    """The slot of this key is moving between two nodes just now."""


def raise_error(
    error: ServerError, where: str, *, writing: bool = False, hops: bool = False
) -> NoReturn:
    """Raise what an error answer means to a tier.

    Args:
        error: the answer.
        where: the server, for the message.
        writing: not being allowed to means that saves are refused.
        hops: the caller looks elsewhere when the key is not on this node.

    Raises:
        RecordDamaged: the key holds another type.
        TierRefused: the server takes no writes now.
        TierUnavailable: anything else.
        MovedError, MigratingError: of a cluster, with ``hops``.
    """
    if hops and error.code == "MOVED":
        raise MovedError(error.text)
    if hops and error.code in {"ASK", "TRYAGAIN"}:
        raise MigratingError(error.text)
    if error.code == "WRONGTYPE":
        raise RecordDamaged(DamageReason.NOT_A_FILE, "the key holds another type")
    text = f"redis {where}: {error.text}"
    refused = error.code in _REFUSALS or (writing and error.code == "NOPERM")
    raise (TierRefused if refused else TierUnavailable)(text)


def command(*args: bytes | int) -> bytes:
    """Return one command as RESP; numbers are written in decimal."""
    parts = [b"*%d\r\n" % len(args)]
    for arg in args:
        text = b"%d" % arg if isinstance(arg, int) else arg
        parts.append(b"$%d\r\n%b\r\n" % (len(text), text))
    return b"".join(parts)


class Wire:
    """A connection in use by one thread at a time.

    Attributes:
        pending: answers asked for and not read yet; the connection can only be
            used again at 0.
        reused: it served another call before.
        stale: it was found closed before the first byte of an answer, so that
            the call may be made again on a fresh one.
    """

    def __init__(self, connection: Any, where: str, timeout_s: float) -> None:
        self._connection = connection
        self._sock: socket.socket = connection._sock  # noqa: SLF001 - redis-py has no public name
        self._tls = isinstance(self._sock, ssl.SSLSocket)
        self._where = where
        self._timeout_s = timeout_s
        self._buffer = bytearray(_LINE_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._deadline_s = 0.0
        self._heard = False
        self.pending = 0
        self.reused = False
        self.stale = False
        self.broken = False
        if self._tls:
            self._sock.settimeout(timeout_s)
        else:
            self._sock.settimeout(None)
            limit = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def begin(self, total_bytes: int) -> None:
        """Start a call that moves about ``total_bytes``: sets its deadline."""
        self._heard = False
        self._deadline_s = time.monotonic() + self._timeout_s + total_bytes / _SLOW_BYTES_PER_S

    def send(self, parts: Sequence[Part], answers: int) -> None:
        """Send ``parts``, which ask for so many ``answers``."""
        self.pending += answers
        try:
            if self._tls:
                for part in parts:
                    self._sock.sendall(part)
                    self._check_deadline()
                return
            left = [memoryview(part) for part in parts]
            while left:
                sent = self._sock.sendmsg(left[:_IOVECS])
                left = _after(left, sent)
                if left:
                    self._check_deadline()
        except OSError as error:
            raise self._lost(error) from error

    def answer(self) -> Answer:
        """Read one whole answer that is not a payload."""
        value = self._value(_ANSWER_DEPTH)
        self.pending -= 1
        return value

    def bulk_bytes(self) -> int | ServerError | None:
        """Read the start of a value: its length, None when there is none, or an error.

        A length is followed by exactly one `read_into` of that many bytes (in
        any number of calls) and `bulk_end`.
        """
        line = self._line(24)
        if line[:1] == b"-":
            self.pending -= 1
            return ServerError(line[1:].decode("utf-8", "replace"))
        size = self._number(line, b"$")
        if size >= 0:
            return size
        self.pending -= 1
        return None

    def read_into(self, views: Sequence[memoryview]) -> None:
        """Fill ``views``, in order, with the next bytes of a value."""
        left = [view for view in views if len(view)]
        while left and self._start < self._end:
            n = min(len(left[0]), self._end - self._start)
            left[0][:n] = self._view[self._start : self._start + n]
            self._start += n
            left = _after(left, n)
        while left:
            left = _after(left, self._receive(left))

    def bulk_end(self) -> None:
        """Read what ends a value."""
        if self._exactly(2) != b"\r\n":
            raise self._nonsense("a value that does not end")
        self.pending -= 1

    def shutdown(self) -> None:
        """Wake the thread that uses this connection; it finds it closed."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self.broken = True
        self._connection.disconnect()

    # -- reading ----------------------------------------------------------

    def _value(self, depth: int) -> Answer:
        line = self._line(512)
        kind = line[:1]
        if kind == b"+":
            return line[1:]
        if kind == b"-":
            return ServerError(line[1:].decode("utf-8", "replace"))
        if kind == b":":
            return self._number(line, b":")
        if kind == b"$":
            size = self._number(line, b"$")
            if size < 0:
                return None
            if size > _ANSWER_BYTES:
                raise self._nonsense(f"an answer of {size} bytes")
            text = self._exactly(size)
            if self._exactly(2) != b"\r\n":
                raise self._nonsense("a value that does not end")
            return text
        count = self._number(line, b"*")
        if count > _ANSWER_BYTES >> 4 or depth == 0:
            raise self._nonsense(f"a list of {count} answers")
        return [self._value(depth - 1) for _ in range(count)] if count >= 0 else None

    def _number(self, line: bytes, kind: bytes) -> int:
        digits = line[1:]
        if line[:1] != kind or len(digits) > 20 or not digits.removeprefix(b"-").isdigit():
            raise self._nonsense(f"{line[:40]!r}")
        return int(digits)

    def _line(self, ahead_bytes: int) -> bytes:
        """Return the next line; read at most about ``ahead_bytes`` past what is there."""
        while True:
            at = self._buffer.find(b"\r\n", self._start, self._end)
            if at >= 0:
                line = bytes(self._view[self._start : at])
                self._start = at + 2
                return line
            self._fill(ahead_bytes)

    def _exactly(self, size: int) -> bytes:
        if size > _LINE_BYTES // 2:
            whole = bytearray(size)
            self.read_into([memoryview(whole)])
            return bytes(whole)
        while self._end - self._start < size:
            self._fill(max(size - (self._end - self._start), 16))
        self._start += size
        return bytes(self._view[self._start - size : self._start])

    def _fill(self, ahead_bytes: int) -> None:
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end + ahead_bytes > _LINE_BYTES:
            kept = bytes(self._view[self._start : self._end])
            self._view[: len(kept)] = kept
            self._start, self._end = 0, len(kept)
        if self._end == _LINE_BYTES:
            raise self._nonsense("an endless line")
        self._end += self._receive([self._view[self._end : self._end + ahead_bytes]], some=True)

    def _receive(self, views: Sequence[memoryview], *, some: bool = False) -> int:
        """Receive into ``views``: at least one byte, on a plain socket all unless ``some``."""
        try:
            if self._tls:
                n = self._sock.recv_into(views[0])
            elif len(views) == 1:
                n = self._sock.recv_into(views[0], 0, 0 if some else socket.MSG_WAITALL)
            else:
                n = self._sock.recvmsg_into(views[:_IOVECS], 0, socket.MSG_WAITALL)[0]
        except OSError as error:
            raise self._lost(error) from error
        if n == 0:
            raise self._lost(ConnectionResetError("closed by the server"))
        self._heard = True
        self._check_deadline()
        return n

    def _check_deadline(self) -> None:
        if time.monotonic() > self._deadline_s:
            raise self._lost(TimeoutError())

    def _lost(self, error: OSError) -> TierError:
        self.broken = True
        if isinstance(error, (TimeoutError, BlockingIOError)):
            return TierUnavailable(f"redis {self._where}: no answer in {self._timeout_s:g} s")
        self.stale = self.reused and not self._heard
        return TierUnavailable(f"redis {self._where}: connection lost: {error}")

    def _nonsense(self, what: str) -> TierError:
        self.broken = True
        return TierUnavailable(f"redis {self._where}: not the protocol: {what}")


def _after(views: list[memoryview], n: int) -> list[memoryview]:
    """Return ``views`` without their first ``n`` bytes."""
    for i, view in enumerate(views):
        if n < len(view):
            return [view[n:], *views[i + 1 :]] if n else views[i:]
        n -= len(view)
    return []
