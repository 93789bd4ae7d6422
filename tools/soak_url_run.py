"""A soak of a server that the user has started: the same traffic, truth and report.

What is right is asked of a server without any cache, or of the same server with a salt of its own
for each request: then neither vLLM's cache nor kvtier has anything for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from . import models
from .reporting import CommandError
from .soak_driver import DriverOptions, Result, Traffic, check_plays
from .soak_faults import DiskCorrupt, Fault, FaultRunner, plan_faults
from .soak_judge import KVTIER, UNCLEAR, charge
from .soak_listener import Listener
from .soak_options import SoakOptions
from .soak_record import COMPUTED, DEVICE, Record
from .soak_run import play
from .soak_script import (
    Asker,
    build_script,
    example_text,
    learn_noise,
    open_sessions,
    stream_opener,
    traffic_options,
)
from .soak_steady import folder_bytes, process_sample
from .soak_truth import TruthStore
from .soak_types import Ask, Reply, Script, SoakError, Turn
from .soak_url import UrlEngine
from .soak_watch import Watch, tidy

SAFE_VOCAB_TOKENS = 1000  # where nothing is known of the tokenizer
PROBE = Ask(tuple(range(5, 53)), 16)  # its answer tells weights apart that go by one name
HIT_TOKENS, LOCAL, LOOKED_UP = "hit_tokens.", "local_hit_tokens", "lookup_tokens"


class UrlSoak:
    """One soak of a server.

    Args:
        options: what to run.
        listener: told of progress.
        stopped: set to end early, with a report.
    """

    def __init__(self, options: SoakOptions, listener: Listener, stopped: threading.Event) -> None:
        assert options.url is not None
        self._options = options
        self._listener = listener
        self._stopped = stopped
        self.record = Record(options)
        self._server = UrlEngine(options.url, options.model)
        self.record.setup["model"] = self._server.model
        if options.oracle_url is not None:
            self._oracle = UrlEngine(options.oracle_url, options.model)
        else:
            self._oracle = UrlEngine(options.url, options.model, uncached=True)
        self._last: Mapping[str, float] | None = None
        self._first: Mapping[str, float] | None = None
        self._unseen = ""  # why the metrics could not be had
        self._began_s = 0.0

    def run(self) -> dict[str, Any]:
        """Run it; return the report. Blocking.

        Raises:
            CommandError, SoakError: a server does not answer, and nothing was learnt yet.
        """
        options, record = self._options, self.record
        max_tokens = min(self._server.max_model_tokens, self._oracle.max_model_tokens)
        max_tokens = min(max_tokens, options.context_tokens or max_tokens)
        store = TruthStore(
            options.truth_folder or models.cache_dir() / "soak",
            {
                "model": self._oracle.model,
                "url": options.oracle_url or options.url,
                "version": self._oracle.version(),
                "probe": list(self._oracle.ask(PROBE).tokens),
                "max_model_tokens": max_tokens,
                "format": 2,
            },
        )
        self._listener.phase("right answers, without any cache")
        script = self._script(store, max_tokens)
        if not self._stopped.is_set():
            check_plays(script)
            try:
                self._soak(script)
            except SoakError as error:
                record.failures.append((UNCLEAR, str(error)))
            if not record.samples and not self._stopped.is_set():
                text = f"the server's metrics were not to be had: {self._unseen or 'too short'}"
                record.failures.append((UNCLEAR, text))
            self._charge(script)
        return record.finish(interrupted=self._stopped.is_set())

    def _charge(self, script: Script) -> None:
        """Try wrong turns again without kvtier, and say whose fault they are."""
        rows, limit = self.record.mismatches, self._options.limit(self.record.noise)
        again = (self._asks(self._oracle, "uncached"), self._asks(self._server, "own"))
        try:
            charge(
                rows,
                script,
                limit,
                *((None, None) if self._stopped.is_set() else again),
                loads_known=False,
            )
        except SoakError as error:
            self.record.failures.append((UNCLEAR, str(error)))
            charge(rows, script, limit, None, None, loads_known=False)

    def _script(self, store: TruthStore, max_tokens: int) -> Script:
        options = self._options
        asked = [0]

        def alone(ask: Ask) -> Reply:
            asked[0] += 1
            return self._oracle.ask(ask)

        def together(asks: Sequence[Ask]) -> list[Reply]:
            with ThreadPoolExecutor(len(asks)) as pool:
                return list(pool.map(alone, asks))

        asker = Asker(alone, together)
        open_stream = stream_opener(options, self._encoder(), SAFE_VOCAB_TOKENS)
        noise, speed = learn_noise(store, lambda: asker, open_stream, options, max_tokens)
        shape = traffic_options(options, max_tokens, speed)
        budget_s = 1.4 * options.sessions * options.turns * shape.context_tokens / speed + 10.0
        script = build_script(
            open_sessions(options, shape, open_stream),
            store,
            lambda: asker,
            budget_s,
            self._stopped.is_set,
            lambda n, left_s: self._listener.progress(
                budget_s - left_s, budget_s, f"{n} right answers"
            ),
        )
        self.record.script(script, noise, asked[0], len(store))
        return script

    def _encoder(self) -> Any:
        try:
            return self._server.tokens if self._server.tokens(example_text(1)) else None
        except SoakError:
            return None

    def _asks(self, engine: UrlEngine, name: str) -> Any:
        def ask_sessions(sessions: Sequence[Sequence[Turn]]) -> list[Reply]:
            last = []
            for number, turns in enumerate(sessions):
                salt = f"soak-{name}-{time.time_ns():x}-{number}"
                asks = [Ask(t.prompt, t.answer_tokens, salt, kvtier=False) for t in turns]
                last += [engine.ask(ask) for ask in asks][-1:]
            return last

        return ask_sessions

    # -- traffic -----------------------------------------------------------

    def _soak(self, script: Script) -> None:
        options, record = self._options, self.record
        folder = options.kvtier.get("disk")
        record.settings(dict(options.kvtier), script, folder)
        record.folder = None  # a server goes on writing: its store is `kvtier verify`'s to check
        self._began_s = time.monotonic()
        kinds: dict[str, Fault] = {}
        if folder is not None:
            kinds["disk-corrupt"] = DiskCorrupt(str(folder))
        faults = FaultRunner(
            plan_faults(options.faults, options.duration_s, options.seed),
            kinds,
            self._counters,
            self._clock,
            options.seed,
        )

        def note(result: Result) -> None:
            faults.note(result.at_s, result.difference is None)
            record.answer(KVTIER, result, faults.active(result.at_s), count_hits=False)

        traffic = Traffic(
            script,
            lambda: self._server,
            DriverOptions(options.users, options.abort_share, None, options.seed),
            options.limit(record.noise),
            note,
        )
        self._first = self._last = self._counters()
        every_s = options.sample_s or min(30.0, max(1.0, options.duration_s / 300))
        watch = Watch(self._source, self._clock, every_s)
        self._listener.phase("kvtier")
        watch.start()
        faults.start()
        try:
            play(traffic, self._listener, self._stopped, options.duration_s)
        finally:
            faults.stop()
            watch.stop()
            record.tally, record.faults = traffic.tally, faults.rows
            record.duration_s = self._clock()
            watch.look()
            record.samples = watch.samples
            record.counters = grown(self._counters() or self._last, self._first)
        if watch.failure is not None:
            raise SoakError(f"the server's metrics: {watch.failure}")

    def _clock(self) -> float:
        return time.monotonic() - self._began_s

    def _counters(self) -> dict[str, float] | None:
        try:
            told = self._server.sample()
        except CommandError:
            return None
        return {name: v for name, v in told.items() if not name.startswith("gauge.")}

    def _source(self) -> dict[str, float] | None:
        """Return a sample; None where the server, busy or gone, does not tell."""
        try:
            told = self._server.sample()
        except CommandError as error:
            self._unseen = str(error)
            return None
        found: dict[str, float] = {"incarnation": 1, **tidy(told)}
        if self._options.metrics_pid is not None:
            found.update(process_sample(self._options.metrics_pid))
        folder = self._options.kvtier.get("disk")
        if folder is not None:
            found["disk_bytes"] = folder_bytes(str(folder))
        counters = {n: v for n, v in told.items() if n[:6] != "gauge."}
        since = grown(counters, self._last)
        self._last = counters
        self._first = counters if self._first is None else self._first
        tokens = {
            name.removeprefix(HIT_TOKENS): int(v)
            for name, v in since.items()
            if name.startswith(HIT_TOKENS)
        }
        restored = sum(tokens.values())
        tokens[DEVICE] = int(since.get(LOCAL, 0))
        tokens[COMPUTED] = max(0, int(since.get(LOOKED_UP, 0)) - restored - tokens[DEVICE])
        self.record.hits.add(self._clock(), tokens)
        return found


def grown(now: Mapping[str, float] | None, before: Mapping[str, float] | None) -> dict[str, float]:
    """Return how much counters grew between two looks; nothing where there were not two."""
    if now is None or before is None:
        return {}
    # a server that was started anew begins at nothing again
    return {name: max(0.0, value - before.get(name, 0.0)) for name, value in now.items()}
