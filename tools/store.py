"""Opening the store that a person names: a folder, or the URL of a Redis server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .exit_codes import ExitCode
from .reporting import CommandError

if TYPE_CHECKING:
    from .store_base import Store


def open_store(target: str, *, create: bool = False) -> Store:
    """Open the store that ``target`` names.

    Args:
        target: a path, or a URL as in the setting ``redis``.
        create: a folder that is not there yet is an empty store.

    Raises:
        CommandError: nothing there, something else, or no URL of ours.
        TierUnavailable: nobody answers.
    """
    if "://" not in target:
        from .store_disk import DiskStore

        return DiskStore(target, create=create)
    if target.partition("://")[0].lower() in {"http", "https"}:
        raise CommandError(
            "a running engine keeps no store that can be walked; `kvtier top URL` shows it",
            ExitCode.USAGE,
        )
    from .store_redis import RedisServerStore

    return RedisServerStore(target)
