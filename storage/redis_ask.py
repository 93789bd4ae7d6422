"""Many small commands in as few round trips as can be.

Commands for one server go out in one write and their answers come back in
order; with a cluster every node is asked before the first answer is awaited.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

from .errors import TierUnavailable
from .redis_wire import ServerError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .redis_servers import Node, Servers
    from .redis_wire import Answer, Wire

_BATCH = 4096  # commands of a round trip; bounds what the answers take
_HOPS = 3


class Question(NamedTuple):
    """One command and the key whose server answers it."""

    route: bytes
    command: bytes


def ask(servers: Servers, questions: Sequence[Question]) -> list[Answer]:
    """Return the answers, in order; None from a slot that is just moving.

    Raises:
        TierUnavailable: a server does not answer, or the cluster has no peace.
    """
    answers: list[Answer] = [None] * len(questions)
    for start in range(0, len(questions), _BATCH):
        left = list(range(start, min(start + _BATCH, len(questions))))
        for _hop in range(_HOPS):
            left = _round_trip(servers, questions, left, answers)
            if not left:
                break
            servers.moved()
        else:
            raise TierUnavailable("redis: keys keep moving; is this node of a cluster? "
                                  "then use redis+cluster://")  # fmt: skip
    return answers


def ask_node(servers: Servers, node: Node, commands: Sequence[bytes]) -> list[Answer]:
    """Send ``commands`` to one server in one go and return the answers."""

    def work(wire: Wire) -> list[Answer]:
        wire.begin(0)
        wire.send([b"".join(commands)], len(commands))
        return [wire.answer() for _ in commands]

    with suspecting(servers):
        return node.questions.call(work)


@contextlib.contextmanager
def suspecting(servers: Servers) -> Iterator[None]:
    """Let ``servers`` know when the body finds one unavailable."""
    try:
        yield
    except TierUnavailable:
        servers.failed()
        raise


def _round_trip(
    servers: Servers, questions: Sequence[Question], wanted: list[int], answers: list[Answer]
) -> list[int]:
    """Ask ``wanted``; return those that a node sent elsewhere."""
    by_node: dict[Node, list[int]] = {}
    for index in wanted:
        by_node.setdefault(servers.node_of(questions[index].route), []).append(index)
    with suspecting(servers):
        if len(by_node) == 1:
            (node,) = by_node
            found = node.questions.call(lambda wire: _converse({wire: wanted}, questions))
        else:
            found = _ask_all(by_node, questions)
    moved = []
    for index, answer in found.items():
        code = answer.code if isinstance(answer, ServerError) else ""
        if code == "MOVED":
            moved.append(index)
        answers[index] = None if code in {"ASK", "TRYAGAIN"} else answer
    return moved


def _ask_all(by_node: dict[Node, list[int]], questions: Sequence[Question]) -> dict[int, Answer]:
    for attempt in range(2):
        wires: dict[Wire, list[int]] = {}
        with contextlib.ExitStack() as stack:
            # one order for all threads, so that none waits for another in a circle
            for node in sorted(by_node, key=lambda node: node.where):
                wires[stack.enter_context(node.questions.use())] = by_node[node]
            try:
                return _converse(wires, questions)
            except TierUnavailable:
                if attempt or not any(wire.stale for wire in wires):
                    raise
        for node in by_node:
            node.questions.drop_idle()
    raise AssertionError("unreachable")


def _converse(wires: dict[Wire, list[int]], questions: Sequence[Question]) -> dict[int, Answer]:
    for wire, indexes in wires.items():
        wire.begin(0)
        wire.send([b"".join(questions[index].command for index in indexes)], len(indexes))
    return {index: wire.answer() for wire, indexes in wires.items() for index in indexes}
