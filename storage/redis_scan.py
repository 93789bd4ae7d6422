"""Walking our own keys on one server: SCAN and small batches, never KEYS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import TierUnavailable
from .redis_ask import Question, ask, ask_node
from .redis_layout import HEAD_BYTES, Head, head_of
from .redis_wire import ServerError, command, raise_error

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .redis_node import Node
    from .redis_servers import Servers

_SCAN_KEYS = 512  # looked at by one SCAN; keeps the server busy for well under a millisecond
_BATCH = 64


@dataclass(frozen=True)
class FoundHead:
    """One head as a walk finds it.

    Attributes:
        name: the Redis key.
        head: None when it does not parse.
        stored_bytes: of the whole record; of the value alone when it does not parse.
        idle_s: since it was last used; 0 where the server does not say.
    """

    name: bytes
    head: Head | None
    stored_bytes: int
    idle_s: int


def head_names(servers: Servers, node: Node, pattern: bytes) -> Iterator[list[bytes]]:
    """Yield the names that match, in batches; a name may come twice.

    Raises:
        TierUnavailable: the server does not answer.
    """
    cursor = b"0"
    while True:
        line = command(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", _SCAN_KEYS)
        answer = ask_node(servers, node, [line])[0]
        if isinstance(answer, ServerError):
            raise_error(answer, node.where)
        found = answer if isinstance(answer, list) and len(answer) == 2 else [None, None]
        cursor_answer, names = found
        if not isinstance(cursor_answer, bytes) or not isinstance(names, list):
            raise TierUnavailable(f"redis {node.where}: not the protocol: what SCAN answers")
        cursor = cursor_answer
        for start in range(0, len(names), _BATCH):
            yield [name for name in names[start : start + _BATCH] if isinstance(name, bytes)]
        if cursor == b"0":
            return


def heads_of(servers: Servers, node: Node, names: Sequence[bytes]) -> Iterator[FoundHead]:
    """Yield what the heads called ``names`` say; those that vanished meanwhile are left out.

    Looking does not count as use where the server knows ``CLIENT NO-TOUCH``.
    """
    questions = [command(b"CLIENT", b"NO-TOUCH", b"ON")]
    for name in names:
        questions += [
            command(b"OBJECT", b"IDLETIME", name),
            command(b"STRLEN", name),
            command(b"GETRANGE", name, 0, HEAD_BYTES - 1),
        ]
    questions.append(command(b"CLIENT", b"NO-TOUCH", b"OFF"))
    answers = ask_node(servers, node, questions)[1:-1]
    for index, name in enumerate(names):
        idle, length, start = answers[3 * index : 3 * index + 3]
        gone = isinstance(length, ServerError) and length.code != "WRONGTYPE"
        if gone or idle is None or (length == 0 and not isinstance(idle, int)):
            continue  # one that is there and empty has an age
        head = head_of(start)
        alone = length if isinstance(length, int) else 0
        yield FoundHead(
            name,
            head,
            HEAD_BYTES + head.header.stored_bytes if head else alone,
            idle if isinstance(idle, int) else 0,
        )


def unlink_all(servers: Servers, node: Node, pattern: bytes) -> int:
    """Delete every value that matches, in small batches; return how many were there.

    Raises:
        TierRefused, TierUnavailable: not all could be deleted.
    """
    deleted = 0
    for names in head_names(servers, node, pattern):
        # one command for each: in a cluster they lie in different slots, which may move
        for answer in ask(servers, [Question(n, command(b"UNLINK", n)) for n in names]):
            if isinstance(answer, ServerError):
                raise_error(answer, node.where, writing=True)
            deleted += answer == 1
    return deleted
