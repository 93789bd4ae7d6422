"""Settings: one table, one checked object.

Settings come from vLLM's `kv_connector_extra_config`. Its key `config` names a
TOML file with the same keys; keys given beside it win over the file's. What is
wrong stops the start with one line that names the setting, its value and what to
do. The table `SETTINGS` is the only list of keys: docs, `kvtier config check`
and the messages are made from it.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import sys
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from ..storage.errors import ConfigError
from ..storage.keyring import KeyRing, read_key_ring
from ..storage.memory_limit import check_memory
from ..storage.redis_url import RedisSettings, parse_redis_url
from .control import FOLDER as CONTROL_FOLDER
from .folders import answers
from .settings import SETTINGS
from .values import Setting, format_size, redact_url, shown_value

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SETTINGS", "Config", "ConfigError", "load", "redact_url"]

CONFIG_KEY = "config"
_NOT_OF_THE_SERVER = ("redis_codec", "redis_write")
_LOGINS = ("redis_user", "redis_password", "redis_sentinel_user", "redis_sentinel_password")
DISK_SHARE = 0.8  # of the free space, proposed where no capacity is given


@dataclass(frozen=True, slots=True)
class Config:
    """Checked settings; see `SETTINGS` for what each means. Sizes in bytes."""

    ram_bytes: int
    disk: str | None
    disk_capacity_bytes: int | None
    redis: str | None = field(repr=False)
    size_scope: str
    chunk_tokens: int
    disk_codec: str
    redis_codec: str
    encryption_key_file: str | None
    encryption_key_env: str | None
    load_policy: str
    load_deadline_s: float | None
    lookup_deadline_s: float
    staging_bytes: int
    save_queue_bytes: int
    load_threads: int
    save_threads: int
    disk_write: str
    redis_write: str
    min_uses: int
    promote: bool
    audit_rate: float
    audit_tolerance: float | None
    record_folder: str | None
    record_bytes: int
    control_folder: str | None
    tenant_salt: str | None = field(repr=False)
    redis_prefix: str | None
    redis_user: str | None
    redis_password: str | None = field(repr=False)
    redis_db: int | None
    redis_ttl_s: float | None
    redis_stripe_bytes: int | None
    redis_connections: int | None
    redis_timeout_s: float | None
    redis_connect_timeout_s: float | None
    redis_tls_ca: str | None
    redis_tls_cert: str | None
    redis_tls_key: str | None
    redis_tls_verify: bool | None
    redis_sentinel_user: str | None
    redis_sentinel_password: str | None = field(repr=False)

    def per_rank(self, size_bytes: int, n_ranks: int) -> int:
        """Return one rank's part of a size setting."""
        return size_bytes if self.size_scope == "per_rank" else size_bytes // max(1, n_ranks)

    def arena_bytes(self, n_ranks: int) -> int:
        """Return the host memory that all ranks allocate: staging is cut out of `ram`."""
        if self.ram_bytes:
            return self.per_rank(self.ram_bytes, n_ranks) * n_ranks
        return 2 * self.staging_bytes * n_ranks

    def key_ring(self) -> KeyRing | None:
        """Read the encryption keys, where any are set.

        Raises:
            ConfigError: one line, without a word of what was read.
        """
        return read_key_ring(self.encryption_key_file, self.encryption_key_env)

    def redis_settings(self) -> RedisSettings:
        """Return what URL and `redis_...` settings together say; the latter win.

        Raises:
            ConfigError: one line without secrets.
        """
        assert self.redis is not None
        start = "redis_"
        given = {
            setting.name.removeprefix(start): getattr(self, setting.field)
            for setting in SETTINGS
            if setting.name.startswith(start) and setting.name not in _NOT_OF_THE_SERVER
        }
        try:
            return parse_redis_url(self.redis, **given)
        except ConfigError as err:
            raise ConfigError(
                f"kvtier setting 'redis' = {redact_url(self.redis)!r}: {err}"
            ) from None

    def effective(self) -> dict[str, Any]:
        """Return the settings as people write them, secrets redacted; for the log and the CLI."""
        values = asdict(self)
        out: dict[str, Any] = {}
        for setting in SETTINGS:
            value = values[setting.field]
            if setting.kind == "size" and value is not None:
                value = format_size(value)
            elif setting.kind == "url" and value is not None:
                value = redact_url(value)
            elif setting.kind == "secret" and value is not None:
                value = "***"
            elif setting.kind == "folder or off" and value == "":
                value = "off"
            elif setting.kind == "milliseconds":
                value = round(value * 1000, 3)
            out[setting.name] = value
        out["load_deadline"] = "auto" if self.load_deadline_s is None else self.load_deadline_s
        return out

    def in_force(self) -> dict[str, Any]:
        """Return `effective` with what its open defaults stand for, those of the URL included."""
        out = self.effective()
        if self.control_folder is None and self.disk is not None and self.ram_bytes:
            out["control"] = os.path.join(self.disk, CONTROL_FOLDER)
        if self.redis is None:
            return out
        server = self.redis_settings()
        for setting in SETTINGS:
            name = setting.name
            if not name.startswith("redis_") or name in (*_NOT_OF_THE_SERVER, *_LOGINS):
                continue
            value = getattr(server, setting.field.removeprefix("redis_"))
            out[name] = format_size(value) if setting.kind == "size" else value
        out["redis_ttl"] = server.ttl_s or 0.0  # as people write "never"
        if not server.tls:
            out["redis_tls_verify"] = None
        return out


def load(extra: Mapping[str, Any], *, n_ranks: int = 1, check_machine: bool = True) -> Config:
    """Check settings and return them.

    Args:
        extra: `kv_connector_extra_config`, or the same keys from elsewhere.
        n_ranks: ranks of one engine; sizes count for all of them together unless
            `size_scope` says otherwise.
        check_machine: also check paths and memory of this machine.

    Raises:
        ConfigError: one line that names the setting, the value and what to do.
    """
    given = _merge_file(dict(extra))
    for key, value in given.items():
        if key not in _BY_NAME:
            raise ConfigError(_unknown(key, value))
    values = {
        setting.field: setting.parse(given[setting.name])
        if given.get(setting.name) is not None
        else setting.default
        for setting in SETTINGS
    }
    config = Config(**values)
    _check_tiers(config, given, check_machine=check_machine)
    _check_redis(config, check_machine=check_machine)
    if check_machine:
        _check_folder("disk", config.disk)
        _check_folder("record", config.record_folder)
        _check_folder("control", config.control_folder or None)
        config.key_ring()
        _check_memory(config, n_ranks)
    return config


_BY_NAME: dict[str, Setting] = {setting.name: setting for setting in SETTINGS}
_SECRET = re.compile(r"pas+w|pwd|secret|token|key", re.IGNORECASE)


def _unknown(key: object, value: object) -> str:
    names = [*_BY_NAME, CONFIG_KEY]
    near = difflib.get_close_matches(str(key), names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(names))}"
    meant = _BY_NAME.get(near[0]) if near else None
    secret = _SECRET.search(str(key)) or (meant is not None and meant.kind == "secret")
    shown = "***" if secret else shown_value(value)
    return f"kvtier setting {key!r} = {shown!r} does not exist; {hint}"


def _merge_file(extra: dict[str, Any]) -> dict[str, Any]:
    path = extra.pop(CONFIG_KEY, None)
    if path is None:
        return extra
    if not isinstance(path, str):
        raise ConfigError(f"kvtier setting 'config' = {path!r}: give the path of a TOML file")
    return {**read_toml(path), **extra}


def read_toml(path: str) -> dict[str, Any]:
    """Return the settings in a TOML file; its top level, or its table ``[kvtier]``.

    Raises:
        ConfigError: not readable, or no TOML.
    """
    if sys.version_info >= (3, 11):
        import tomllib  # noqa: PLC0415 (only where a file is named)
    else:
        import tomli as tomllib  # noqa: PLC0415 (the same parser for Python 3.10)
    try:
        with open(os.path.expanduser(path), "rb") as file:
            data = tomllib.load(file)
    except OSError as error:
        raise ConfigError(
            f"kvtier setting 'config' = {path!r}: {error.strerror or error}; give a readable file"
        ) from None
    except (ValueError, RecursionError) as error:  # no UTF-8, too deep, numbers too long
        raise ConfigError(f"kvtier setting 'config' = {path!r} is no TOML: {error}") from None
    inner = data.get("kvtier")
    if isinstance(inner, dict) and len(data) == 1:
        data = inner
    if CONFIG_KEY in data:
        raise ConfigError(f"kvtier setting 'config' in {path!r}: a file cannot name another")
    return dict(data)


def _check_tiers(config: Config, given: Mapping[str, Any], *, check_machine: bool) -> None:
    if not config.ram_bytes and config.disk is None and config.redis is None:
        raise ConfigError(
            "kvtier has no tier: set 'ram' (like \"32GiB\"), or 'disk' with 'disk_capacity'"
        )
    if config.disk is None and config.disk_capacity_bytes is not None:
        raise ConfigError(
            f"kvtier setting 'disk_capacity' = {given['disk_capacity']!r} has no 'disk' beside it; "
            "set 'disk' to a folder"
        )
    if config.disk is not None and config.disk_capacity_bytes is None:
        raise ConfigError(
            f"kvtier setting 'disk' = {config.disk!r} needs 'disk_capacity'; "
            f"{_propose_capacity(config.disk) if check_machine else 'give a size like 500GiB'}"
        )


def _check_redis(config: Config, *, check_machine: bool) -> None:
    if config.redis is None:
        return
    settings = config.redis_settings()
    for name in ("tls_ca", "tls_cert", "tls_key"):
        path = getattr(settings, name)
        if check_machine and path is not None and not os.access(path, os.R_OK):
            raise ConfigError(f"kvtier setting 'redis_{name}' = {path!r} cannot be read")


def _existing_parent(path: str) -> str:
    path = os.path.abspath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def _propose_capacity(path: str) -> str:
    try:
        free_bytes = shutil.disk_usage(_existing_parent(path)).free
    except OSError:
        return "give a size like 500GiB"
    whole = max(1, int(free_bytes * DISK_SHARE) >> 30)
    return f'{format_size(free_bytes)} are free there, for example "{whole}GiB"'


def _check_folder(name: str, path: str | None) -> None:
    if path is None or not answers(path):
        return
    where = f"kvtier setting {name!r} = {path!r}"
    parent = _existing_parent(path)
    if not os.path.isdir(parent):
        raise ConfigError(f"{where}: {parent!r} is no folder; give a folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{where}: no permission to write in {parent!r}; give another folder")


def _check_memory(config: Config, n_ranks: int) -> None:
    """Refuse an arena larger than this process may use, before anything is allocated."""
    check_memory(config.arena_bytes(n_ranks), "ram" if config.ram_bytes else "staging")


assert {f.name for f in fields(Config)} == {s.field for s in SETTINGS}  # the table is complete
