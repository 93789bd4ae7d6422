"""Which content a request's LoRA adapter has, as far as that can be told of a running engine.

The engine names adapters by name and path, in its own prefix hashes too; here their content
gets a name. The engine reads an adapter's files when it is first needed, and perhaps again
later, and tells nobody when. Where they change under a running engine nobody knows any more
what a request, or a block that the device still holds, is computed with.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Any

from ..storage.errors import KVTierError
from .weights import WeightsCache, WeightsError, lora_fingerprint

MAX_REMEMBERED = 10_000  # adapters
_UNCERTAIN = ""


class AdapterError(KVTierError):
    """What an adapter's KV is cannot be told, so it is neither served nor stored."""


class Adapters:
    """Remembers what every adapter was when a request first used it. Scheduler thread only.

    Args:
        cache: where fingerprints of files are remembered; None: a memory of its own.
    """

    def __init__(self, cache: WeightsCache | None = None) -> None:
        self._cache = WeightsCache() if cache is None else cache
        self._contents: OrderedDict[tuple[str, str], str] = OrderedDict()  # by name and path
        self._paths: OrderedDict[int, str] = OrderedDict()  # by the engine's number

    def fingerprint(self, request: Any) -> str | None:
        """Return the content of a request's adapter in a word; None without one.

        Lists a folder; reads its files when they are new.

        Raises:
            KVTierError: one line that says why it cannot be told.
        """
        lora = getattr(request, "lora_request", None)
        if lora is None:
            return None
        name, path, number = str(lora.lora_name), str(lora.lora_path), int(lora.lora_int_id)
        content = lora_fingerprint(local_adapter_path(path), self._cache)
        if getattr(lora, "load_inplace", False):
            self._paths.pop(number, None)
        if not _stays(self._contents, (name, path), content):
            raise AdapterError(
                f"the files of adapter {name!r} ({path}) changed under the running engine, which "
                "may still use the old ones; restart it or load the new ones from another path"
            )
        if not _stays(self._paths, number, path):
            raise AdapterError(
                f"adapter {name!r} came with another path ({path}) under its old number {number}; "
                "the engine goes on with what it has loaded"
            )
        return content


def _stays(known: OrderedDict[Any, str], key: Any, value: str) -> bool:
    """Remember ``value`` for ``key``; False once and for ever when it was another one before."""
    if known.setdefault(key, value) != value:
        known[key] = _UNCERTAIN
    known.move_to_end(key)
    if len(known) > MAX_REMEMBERED:
        known.popitem(last=False)
    return known[key] == value


def local_adapter_path(path: str) -> str:
    """Return where an adapter lies on this machine: a path, or a hub id's snapshot.

    Asks no network.

    Raises:
        WeightsError: not on this machine.
    """
    path = os.path.expanduser(path)
    if os.path.isabs(path) or os.path.exists(path):
        return path
    try:
        from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 (comes with vLLM)

        found = try_to_load_from_cache(path, "adapter_config.json")
    except (ImportError, ValueError):  # or no repository id
        found = None
    if not isinstance(found, str):
        raise WeightsError(f"adapter {path!r} is not on this machine")
    return os.path.dirname(found)
