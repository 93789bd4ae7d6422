"""`kvtier config check`: what an engine's start would say to a configuration."""

from __future__ import annotations

import json
import os
from typing import Any

from ..connector import config as connector_config
from ..storage.errors import ConfigError
from .exit_codes import ExitCode
from .reporting import CommandError, note, print_json, table

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
    effective = config.effective()
    if as_json:
        print_json({"ok": True, "effective": effective})
    else:
        table(("setting", "value"), [(name, str(value)) for name, value in effective.items()])
    return ExitCode.OK


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
