"""Users who play sessions against an engine, and compare every answer with the right one."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .soak_truth import Difference, compare
from .soak_types import Ask, ChunkUse, EngineGone, Reply, Script, SoakError, Turn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from .soak_types import Client

PASSES_PER_SALT = 2
KEPT_LOADS = 300  # requests whose loads are remembered, of each salt
KEPT_SALTS = 3
MIN_ABORT_S = 0.005


@dataclass(frozen=True, slots=True)
class DriverOptions:
    """How the script is played.

    Attributes:
        users: sessions under way at a time.
        abort_share: of the requests, given up half-way and asked again.
        passes: how often all sessions are played; None until told to stop.
        seed: of order, pauses and aborts.
    """

    users: int = 2
    abort_share: float = 0.06
    passes: int | None = None
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Result:
    """One answer, compared.

    Attributes:
        at_s: when it was complete, from the phase's start.
        round: of the script, from 1.
        salt: what kept it apart from other rounds.
        difference: from the right answer; None when it is right.
        earlier_loads: of a wrong answer: chunks loaded before, for prompts that begin like this
            one, where the device's cache hit now: they may be what was hit.
    """

    at_s: float
    round: int
    turn: Turn
    salt: str
    reply: Reply
    difference: Difference | None
    earlier_loads: tuple[ChunkUse, ...] = ()


@dataclass(slots=True)
class Tally:
    """What was asked."""

    asked: int = 0
    answered: int = 0
    wrong: int = 0
    aborted: int = 0
    asked_again: int = 0  # after the engine had gone
    sessions: int = 0
    rounds: int = 0

    def as_dict(self) -> dict[str, int]:
        """Return the fields of the report."""
        return {
            "asked": self.asked,
            "answered": self.answered,
            "wrong": self.wrong,
            "aborted": self.aborted,
            "asked_again": self.asked_again,
            "sessions": self.sessions,
            "rounds": self.rounds,
        }


@dataclass(slots=True)
class _Gate:
    """Lets users ask, or holds them all off."""

    wake: threading.Condition = field(default_factory=threading.Condition)
    asking: int = 0
    held: bool = False


class Traffic:
    """Plays a script with several users, each in a thread of its own.

    From one pair of rounds to the next the salt changes: everything is new to the engine, the
    right answers stay. Inside a pair every prompt comes back.

    Args:
        script: what to ask, and what is right.
        client: gives the engine; may block while it is started again.
        limit: how far logprobs of right answers may lie apart.
        on_result: called with each result, under a lock.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        script: Script,
        client: Callable[[], Client],
        options: DriverOptions,
        limit: float,
        on_result: Callable[[Result], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tally = Tally()
        self.failure: Exception | None = None
        self._script = script
        self._client = client
        self._options = options
        self._limit = limit
        self._on_result = on_result
        self._clock = clock
        self._began_s = clock()
        self._stop = threading.Event()
        self._gate = _Gate()
        self._lock = threading.Lock()
        self._plays = self._all_plays()
        self._loaded: dict[str, deque[tuple[tuple[int, ...], tuple[ChunkUse, ...]]]] = {}
        self._users = [
            threading.Thread(target=self._user, args=(number,), name=f"soak-user-{number}")
            for number in range(options.users)
        ]

    def start(self) -> None:
        """Let the users begin."""
        for user in self._users:
            user.start()

    @property
    def running(self) -> bool:
        """Whether a user is at work."""
        return any(user.is_alive() for user in self._users)

    def stop(self) -> None:
        """End after the requests that are under way; blocking."""
        self._stop.set()
        self.resume()
        for user in self._users:
            if user.ident is not None:
                user.join()

    def pause(self, timeout_s: float) -> bool:
        """Hold all users off; return whether nobody asks any more."""
        gate = self._gate
        with gate.wake:
            gate.held = True
            return gate.wake.wait_for(lambda: gate.asking == 0, timeout_s)

    def resume(self) -> None:
        """Let the users go on."""
        with self._gate.wake:
            self._gate.held = False
            self._gate.wake.notify_all()

    # -- users ---------------------------------------------------------------

    def _all_plays(self) -> Iterator[tuple[int, tuple[Turn, ...]]]:
        number = 0
        while self._options.passes is None or number < self._options.passes:
            number += 1
            self.tally.rounds = number
            order = list(self._script.sessions)
            random.Random(f"{self._options.seed}/round/{number}").shuffle(order)  # noqa: S311
            for session in order:
                yield number, session

    def _next_play(self) -> tuple[int, tuple[Turn, ...]] | None:
        with self._lock:
            return None if self._stop.is_set() else next(self._plays, None)

    def _user(self, number: int) -> None:
        rng = random.Random(f"{self._options.seed}/user/{number}")  # noqa: S311
        try:
            while (play := self._next_play()) is not None:
                which, session = play
                salt = f"soak-{self._options.seed}-{(which - 1) // PASSES_PER_SALT}"
                for turn in session:
                    if self._stop.wait(turn.think_s):
                        return
                    self._play_turn(which, turn, salt, rng)
                with self._lock:
                    self.tally.sessions += 1
        except Exception as error:  # noqa: BLE001 - whoever watches the traffic raises it
            self.failure = self.failure or error
            self._stop.set()

    def _play_turn(self, which: int, turn: Turn, salt: str, rng: random.Random) -> None:
        ask = Ask(turn.prompt, turn.answer_tokens, salt)
        right = self._script.truth[turn.session, turn.number]
        if rng.random() < self._options.abort_share:
            after_s = max(MIN_ABORT_S, rng.random() * right.total_s)
            reply = self._ask(replace(ask, abort_after_s=after_s))
            if reply is None or not reply.aborted:
                self._settle(which, turn, salt, right, reply)
                return
            with self._lock:
                self.tally.aborted += 1
                self._remember(salt, turn, reply)
        self._settle(which, turn, salt, right, self._ask(ask))

    def _ask(self, ask: Ask) -> Reply | None:
        gate = self._gate
        while True:
            with gate.wake:
                gate.wake.wait_for(lambda: not gate.held)
                if self._stop.is_set():
                    return None
                gate.asking += 1
            try:
                with self._lock:
                    self.tally.asked += 1
                return self._client().ask(ask)
            except EngineGone:
                with self._lock:
                    self.tally.asked_again += 1
            finally:
                with gate.wake:
                    gate.asking -= 1
                    gate.wake.notify_all()

    def _settle(self, which: int, turn: Turn, salt: str, right: Reply, reply: Reply | None) -> None:
        if reply is None:  # told to stop
            return
        difference = compare(right, reply, self._limit)
        with self._lock:
            self.tally.answered += 1
            self.tally.wrong += difference is not None
            earlier: tuple[ChunkUse, ...] = ()
            if difference is not None:
                loaded = self._loaded.get(salt, ())
                earlier = earlier_loads(turn.prompt, reply.device_tokens, loaded)
            at_s = self._clock() - self._began_s
            result = Result(at_s, which, turn, salt, reply, difference, earlier)
            self._remember(salt, turn, reply)
            self._on_result(result)

    def _remember(self, salt: str, turn: Turn, reply: Reply) -> None:
        """Keep what was loaded: the device's cache may serve it to later requests."""
        if reply.loads:
            loaded = self._loaded.setdefault(salt, deque(maxlen=KEPT_LOADS))
            loaded.append((turn.prompt, reply.loads))
        while len(self._loaded) > KEPT_SALTS:
            self._loaded.pop(next(iter(self._loaded)))


def earlier_loads(
    prompt: Sequence[int],
    device_tokens: int,
    loaded: Iterable[tuple[Sequence[int], Sequence[ChunkUse]]],
) -> tuple[ChunkUse, ...]:
    """Return chunks, loaded for other requests, that the device's cache may have hit now."""
    found: dict[str, ChunkUse] = {}
    for other, loads in loaded:
        same = 0
        for a, b in zip(prompt[:device_tokens], other, strict=False):
            if a != b:
                break
            same += 1
        found.update((load.key, load) for load in loads if load.start_tokens < same)
    return tuple(sorted(found.values(), key=lambda load: load.start_tokens))


def mismatch_row(result: Result, engine: str, faults: list[str]) -> dict[str, Any]:
    """Return a wrong answer as the report has it, not charged to anybody yet."""
    difference = result.difference
    assert difference is not None
    finite = difference.logprob_distance < float("inf")
    return {
        "engine": engine,
        "at_s": round(result.at_s, 2),
        "session": result.turn.session,
        "turn": result.turn.number,
        "round": result.round,
        "salt": result.salt,
        "prompt_tokens": len(result.turn.prompt),
        "answer_position": difference.position,
        "position": len(result.turn.prompt) + difference.position,
        "expected_token": difference.expected,
        "got_token": difference.got,
        "logprob_difference": round(difference.logprob_distance, 6) if finite else None,
        "device_tokens": result.reply.device_tokens,
        "restored": dict(result.reply.restored),
        "chunks": [load.as_dict() for load in result.reply.loads],
        "earlier_chunks": [load.as_dict() for load in result.earlier_loads],
        "suspects": [],
        "faults": faults,
        "party": "",
        "why": "",
    }


def check_plays(script: Script) -> None:
    """Refuse a script without turns.

    Raises:
        SoakError: there is nothing to ask.
    """
    if not script.sessions or not script.turns:
        raise SoakError("there is nothing to ask: no session has a turn")
