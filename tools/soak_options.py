"""What a soak runs: options, and the settings that follow from them and from the model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .engine_choice import check_engine
from .exit_codes import ExitCode
from .reporting import CommandError
from .soak_truth import Noise

DISK_FAULTS = ("disk-corrupt", "disk-full", "disk-slow")
REDIS_FAULTS = ("redis-kill", "redis-hang", "redis-evict")
ENGINE_FAULTS = ("engine-kill",)
STORAGE_FAULTS = ("disk-corrupt",)  # with --storage-only
ALL_FAULTS = (*DISK_FAULTS, *REDIS_FAULTS, *ENGINE_FAULTS)
MIB = 1 << 20
MAX_CONTEXT_TOKENS = 8192  # by default; `context_tokens` may ask for more
OWN_SERVER = "start"


@dataclass(frozen=True, slots=True)
class SoakOptions:
    """What to run.

    Attributes:
        minutes: of traffic through the engine with kvtier.
        report: folder of report.html, report.json and the engine's log.
        model: folder or name; None takes SmolLM2 from its package.
        url: an OpenAI-compatible server instead of an engine of the soak's own.
        oracle_url: a server without any cache, for the right answers of ``url``.
        metrics_pid: process to watch beside ``url``.
        traffic: ``synthetic``, ``agent-sessions`` or a trace file.
        context_tokens: longest prompt and answer; None fits it to model and time.
        device_tokens: size of the device's cache; None makes sessions push each other out.
        kvtier: the connector's settings, over what the soak would choose.
        redis: URL, or `OWN_SERVER`; None for none, unless a fault needs one.
        faults: which.
        three_way: also play the script with vLLM's own prefix cache alone.
        engine: further arguments of `vllm.LLM`, for all engines.
        connector: another connector class for the engine under test, for tests of the soak
            itself: name, module.
        plain_connector: likewise for the engine with vLLM's own cache.
        truth_folder: where right answers are kept between runs.
        tolerance: how far logprobs of right answers may lie apart; None goes by dtype and noise.
        sample_s, quiet_s: how often to look, how often to wait for rest; None fits the time.
    """

    minutes: float
    report: Path
    model: str | None = None
    dtype: str = "float32"
    url: str | None = None
    oracle_url: str | None = None
    metrics_pid: int | None = None
    traffic: str = "synthetic"
    sessions: int = 6
    turns: int = 4
    answer_tokens: int = 8
    users: int = 2
    abort_share: float = 0.06
    context_tokens: int | None = None
    device_tokens: int | None = None
    block_tokens: int | None = None
    kvtier: Mapping[str, Any] = field(default_factory=dict)
    redis: str | None = None
    faults: tuple[str, ...] = ()
    three_way: bool = True
    seed: int = 1
    engine: Mapping[str, Any] = field(default_factory=dict)
    connector: tuple[str, str] | None = None
    plain_connector: tuple[str, str] | None = None
    truth_folder: Path | None = None
    tolerance: float | None = None
    sample_s: float | None = None
    quiet_s: float | None = None

    @property
    def duration_s(self) -> float:
        """Seconds of traffic through kvtier."""
        return 60.0 * self.minutes

    def limit(self, noise: Noise) -> float:
        """Return how far logprobs of right answers may lie apart."""
        return noise.tolerance(self.dtype) if self.tolerance is None else self.tolerance

    def check(self, *, storage_only: bool = False) -> None:
        """Refuse what cannot be.

        Raises:
            CommandError: one line that says what to change.
            ConfigError: settings that no engine would start with.
        """
        unknown = [name for name in self.faults if name not in ALL_FAULTS]
        if unknown:
            raise CommandError(
                f"no fault {unknown[0]!r}; there are {', '.join(ALL_FAULTS)}", ExitCode.USAGE
            )
        if storage_only:
            self._check_storage_only()
            return
        if self.url is None and (self.oracle_url is not None or self.metrics_pid is not None):
            raise CommandError("--oracle-url and --pid go with --url", ExitCode.USAGE)
        if self.metrics_pid is not None and not os.path.isdir(f"/proc/{self.metrics_pid}"):
            raise CommandError(f"--pid {self.metrics_pid}: no such process", ExitCode.USAGE)
        if self.url is None:
            check_engine(self.model, self.dtype)
            self._check_settings()
        else:
            self._check_url()
        if self.redis not in (None, OWN_SERVER) and set(self.faults) & set(REDIS_FAULTS):
            raise CommandError(
                "faults of Redis are made on a server of the soak's own: leave out --redis",
                ExitCode.USAGE,
            )

    def _check_url(self) -> None:
        mine = [name for name in self.faults if name != "disk-corrupt"]
        if mine:
            raise CommandError(
                f"{mine[0]} needs an engine of the soak's own, without --url", ExitCode.USAGE
            )
        if self.faults and "disk" not in self.kvtier:
            raise CommandError(
                "disk-corrupt of a server at --url needs its folder: "
                """--kvtier '{"disk": "FOLDER"}'""",
                ExitCode.USAGE,
            )

    def _check_storage_only(self) -> None:
        if self.url is not None:
            raise CommandError("--storage-only has no engine, so no --url", ExitCode.USAGE)
        other = [name for name in self.faults if name not in STORAGE_FAULTS]
        if other:
            raise CommandError(
                f"--storage-only makes {', '.join(STORAGE_FAULTS)}, not {other[0]}; it kills "
                "its process anyhow",
                ExitCode.USAGE,
            )
        if self.faults and self.redis is not None:
            raise CommandError("disk-corrupt needs the disk: leave out --redis", ExitCode.USAGE)

    def _check_settings(self) -> None:
        """Say now what an engine would say after minutes."""
        from ..connector.config import load

        own = {"ram": "64MiB", "disk": str(self.report / "store"), "disk_capacity": "64MiB"}
        if self.redis not in (None, OWN_SERVER):
            own["redis"] = str(self.redis)
        load({**own, **self.kvtier}, check_machine=False)

    @property
    def redis_server(self) -> str | None:
        """Which Redis: none, a URL, or one of the soak's own."""
        needs = self.url is None and bool(set(self.faults) & set(REDIS_FAULTS))
        return self.redis or (OWN_SERVER if needs else None)


def model_context(model: str) -> int:
    """Return the longest context of a model folder, as its configuration says, or the default."""
    config = _config(model)
    for holder in (config, config.get("text_config", {})):
        value = holder.get("max_position_embeddings")
        if isinstance(value, int) and value > 0:
            return value
    return MAX_CONTEXT_TOKENS


def _config(model: str) -> dict[str, Any]:
    try:
        with open(os.path.join(model, "config.json"), encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def model_identity(model: str) -> dict[str, Any]:
    """Return what makes the answers of a model folder what they are: configuration and files."""
    files = {}
    if os.path.isdir(model):
        for name in sorted(os.listdir(model)):
            stat = os.stat(os.path.join(model, name))
            if name.endswith((".safetensors", ".bin", ".json", ".gguf")):
                files[name] = [stat.st_size, int(stat.st_mtime)]
    return {"model": os.path.realpath(model) if files else model, "files": files}


def kvtier_settings(
    options: SoakOptions,
    *,
    kv_bytes_per_token: int,
    working_tokens: int,
    context_tokens: int,
    disk: str,
    redis: str | None,
) -> dict[str, Any]:
    """Return the connector's settings: tiers too small for the traffic, so that all of them work.

    RAM holds three quarters of the sessions, the device half of that, the disk one and a half times
    all of them, which is less than two pairs of rounds bring. What ``options.kvtier`` says wins.
    """
    all_bytes = kv_bytes_per_token * working_tokens
    settings: dict[str, Any] = {
        "ram": max(8 * MIB, int(0.75 * all_bytes)),
        "disk": disk,
        "disk_capacity": max(64 * MIB, int(1.5 * all_bytes)),
        "staging": max(16 * MIB, min(256 * MIB, all_bytes)),
        "load_policy": "always",  # the soak is about right answers, not about what pays
        "chunk_tokens": max(64, min(256, context_tokens // 8)),
    }
    if redis is not None:
        settings.update(redis=redis, redis_prefix="kvtier-soak", redis_timeout=1.0)
    return {**settings, **options.kvtier}


def device_tokens_for(
    options: SoakOptions, facts: Mapping[str, Any], working_tokens: int, longest_tokens: int
) -> int:
    """Return the size of the device's cache: room for all users, not for all sessions.

    Each group of a hybrid model takes blocks of its own from the one pool.
    """
    if options.device_tokens is not None:
        return options.device_tokens
    block_tokens = int(facts["block_tokens"])
    longest_blocks = -(-longest_tokens // block_tokens) + 1
    users_tokens = options.users * longest_blocks * block_tokens
    return int(facts["groups"]) * max(users_tokens, int(0.35 * working_tokens))
