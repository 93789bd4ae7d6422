"""`kvtier config check`: what an engine's start would say to a configuration."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from ..connector import config as connector_config
from ..storage.errors import ConfigError
from .exit_codes import ExitCode
from .reporting import CommandError, note, print_json

TRANSFER_CONFIG_KEY = "kv_connector_extra_config"


def check_config(source: str, *, n_ranks: int, machine: bool, as_json: bool) -> ExitCode:
    """Check ``source``, print the outcome, return the exit code.

    Raises:
        CommandError: the source cannot be read as a configuration at all.
    """
    settings = read_settings(source)
    try:
        config = connector_config.load(settings, n_ranks=n_ranks, check_machine=machine)
    except ConfigError as error:
        if as_json:
            print_json({"ok": False, "error": str(error)})
        else:
            note(str(error))
        return ExitCode.FINDINGS
    in_force = config.in_force()
    if as_json:
        print_json({"ok": True, "effective": in_force})
        return ExitCode.OK
    for name, value in in_force.items():
        if value is not None and not _is_idle(name, in_force):
            hidden = "  # not shown" if "***" in str(value) else ""
            print(f"{name} = {_toml(value)}{hidden}")
    note(
        "ok: an engine would start with it"
        if machine
        else "ok: the settings are right; this machine was not looked at"
    )
    return ExitCode.OK


def _is_idle(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether a setting is of a part that is not there."""
    part = name.partition("_")[0]
    return part in {"disk", "redis", "record"} and settings[part] is None


def _toml(value: object) -> str:
    """Return a value of a setting as TOML spells it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value)


def read_settings(source: str) -> dict[str, Any]:
    """Return the settings in a TOML or JSON file, or in JSON text.

    A whole `--kv-transfer-config` is taken as well: its extra config is what counts.

    Raises:
        CommandError: no such file, or no JSON object.
    """
    if source.lstrip().startswith("{"):
        return _json_settings(source, "the argument")
    if not os.path.exists(source):
        raise CommandError(f"{source}: no such file, and not a JSON object", ExitCode.USAGE)
    if source.endswith(".json"):
        with open(source, encoding="utf-8") as file:
            return _json_settings(file.read(), source)
    return {"config": source}


def _json_settings(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise CommandError(f"{where} is no JSON: {error}", ExitCode.USAGE) from None
    if not isinstance(value, dict):
        raise CommandError(f"{where} is no JSON object", ExitCode.USAGE)
    inner = value.get(TRANSFER_CONFIG_KEY)
    return dict(inner) if isinstance(inner, dict) else value
