"""Many small commands in as few round trips as can be.

Commands for one server go out in one write and their answers come back in
order; with a cluster every node is asked before the first answer is awaited.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from .errors import TierUnavailable
from .redis_node import BusyError
from .redis_topology import address_of
from .redis_wire import ServerError, command

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .redis_node import Node
    from .redis_servers import Servers
    from .redis_wire import Answer, Wire

_BATCH = 4096  # commands of a round trip; bounds what the answers take
_HOPS = 3
_MOVING = frozenset({"ASK", "TRYAGAIN", "MOVED"})


class Question(NamedTuple):
    """One command and the key whose server answers it."""

    route: bytes
    command: bytes


def ask(servers: Servers, questions: Sequence[Question], *, some: bool = False) -> list[Answer]:
    """Return the answers, in order.

    Args:
        servers: where to ask.
        questions: what.
        some: do with the answers that can be had: None for those of a node of the
            cluster that does not answer while others do, or of a slot that is just moving.

    Raises:
        TierUnavailable: a server does not answer, or the cluster has no peace.
    """
    answers: list[Answer] = [None] * len(questions)
    for start in range(0, len(questions), _BATCH):
        left = list(range(start, min(start + _BATCH, len(questions))))
        for _hop in range(_HOPS):
            left = _round_trip(servers, questions, left, answers, some=some)
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

    with suspecting(servers, node):
        return node.questions.call(work)


@contextlib.contextmanager
def suspecting(servers: Servers, node: Node) -> Iterator[None]:
    """Let ``servers`` know whether the body finds ``node`` unavailable.

    Raises:
        TierUnavailable: it did a moment ago; it is left alone.
    """
    if not servers.usable(node):
        raise left_alone(node)
    try:
        yield
    except BusyError:
        raise
    except TierUnavailable as error:
        servers.failed(node, str(error))
        raise
    except Exception:
        node.answered()  # what it said was not welcome
        raise
    node.answered()


def any_answers(servers: Servers, key: bytes) -> bool:
    """Whether any node of a cluster answers now; asks one after the other."""
    if not servers.is_cluster:
        return False
    for node in servers.nodes():
        with contextlib.suppress(TierUnavailable):
            (answer,) = ask_node(servers, node, [command(b"EXISTS", key)])
            if not isinstance(answer, ServerError) or answer.code == "MOVED":
                return True
    return False


def left_alone(node: Node) -> TierUnavailable:
    """Return what is raised instead of asking a node that failed a moment ago."""
    return TierUnavailable(f"redis {node.where}: did not answer just now")


def _round_trip(
    servers: Servers,
    questions: Sequence[Question],
    wanted: list[int],
    answers: list[Answer],
    *,
    some: bool,
) -> list[int]:
    """Ask ``wanted``; return those that a node sent elsewhere."""
    by_node: dict[Node, list[int]] = {}
    for index in wanted:
        by_node.setdefault(servers.node_of(questions[index].route), []).append(index)
    found, lost = _ask_all({n: i for n, i in by_node.items() if servers.usable(n)}, questions)
    for node, error in lost.items():
        if not isinstance(error, BusyError):
            servers.failed(node, str(error))
    silent = [node for node in by_node if node in lost or node.is_off]
    for node in silent:
        if not (some and servers.others_answer(node)):
            raise lost.get(node) or left_alone(node)
    moved = []
    for index, answer in found.items():
        if isinstance(answer, ServerError) and answer.code == "MOVED":
            moved.append(index)
        elif isinstance(answer, ServerError) and answer.code in _MOVING:
            answers[index] = _follow(servers, questions[index], answer, some=some)
        else:
            answers[index] = answer
    return moved


def _follow(servers: Servers, question: Question, error: ServerError, *, some: bool) -> Answer:
    """Ask where an ``ASK`` answer points to; when that leads nowhere None, if ``some`` will do."""
    there: Answer = error
    address = address_of(error.text) if error.code == "ASK" else None
    if address is not None:
        with contextlib.suppress(TierUnavailable):
            commands = [command(b"ASKING"), question.command]
            there = ask_node(servers, servers.node_at(address), commands)[1]
    if isinstance(there, ServerError) and there.code in _MOVING:
        if not some:
            raise TierUnavailable(f"redis: a slot is moving to another node: {there.text}")
        return None
    return there


def _ask_all(
    by_node: dict[Node, list[int]], questions: Sequence[Question]
) -> tuple[dict[int, Answer], dict[Node, TierUnavailable]]:
    """Ask all nodes side by side; return the answers, and why the others gave none."""
    found: dict[int, Answer] = {}
    lost: dict[Node, TierUnavailable] = {}
    wires: dict[Node, Wire] = {}
    with contextlib.ExitStack() as stack:
        # one order for all threads, so that none waits for another in a circle
        for node in sorted(by_node, key=lambda node: node.where):
            try:
                wires[node] = stack.enter_context(node.questions.use())
                _send(wires[node], by_node[node], questions)
            except TierUnavailable as error:
                lost[node] = error
        for node in wires.keys() - lost.keys():
            wires[node].begin(0)  # another may have used up the time
            try:
                for index in by_node[node]:
                    found[index] = wires[node].answer()
            except TierUnavailable as error:
                lost[node] = error
    for node in [node for node in lost if node in wires and wires[node].stale]:
        node.questions.drop_idle()  # a restarted server closed its kept connections
        with contextlib.suppress(TierUnavailable):
            found.update(node.questions.call(partial(_converse, by_node[node], questions)))
            del lost[node]
    for node in by_node.keys() - lost.keys():
        node.answered()
    return found, lost


def _send(wire: Wire, indexes: Sequence[int], questions: Sequence[Question]) -> None:
    wire.begin(0)
    wire.send([b"".join(questions[index].command for index in indexes)], len(indexes))


def _converse(
    indexes: Sequence[int], questions: Sequence[Question], wire: Wire
) -> dict[int, Answer]:
    _send(wire, indexes, questions)
    return {index: wire.answer() for index in indexes}
