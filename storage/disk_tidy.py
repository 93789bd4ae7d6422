"""Removing the folders of records that are gone.

A clear, new weights or a new version leave a namespace behind whose records are
evicted in time; its folders would stay for ever, thousands of them for each, and
every walk would look into them all. Whoever needs a folder again makes it, so one
may go at any time; it goes once nothing has happened in it for a while.
"""

from __future__ import annotations

import contextlib
import os
import time

from .disk_layout import (
    NAMESPACE_FILE,
    TMP_FOLDER,
    iter_record_files,
    iter_tmp_files,
    list_namespaces,
)

FOLDER_IDLE_S = 600.0
NAMESPACE_IDLE_S = 86400.0
_MAX_NAMESPACES = 64  # looked at after one walk
JOURNAL = "journal"


def remove_empty(root: str, folders: list[str], *, without: bytes) -> None:
    """Remove idle empty folders, and the namespaces of which nothing else is left. Blocking.

    Args:
        root: the store.
        folders: of records, found empty.
        without: a namespace that stays, whatever is in it.
    """
    parents = {os.path.dirname(folder) for folder in folders if _remove_idle(folder)}
    for parent in parents:
        with contextlib.suppress(OSError):
            os.rmdir(parent)  # its time is that of what was just removed from it
    with contextlib.suppress(OSError):
        bare = [s.namespace for s in list_namespaces(root) if s.namespace != without]
        for namespace in [n for n in bare if _is_bare(f"{root}/{n.hex()}")][:_MAX_NAMESPACES]:
            remove_namespace(root, namespace)


def _remove_idle(folder: str) -> bool:
    try:
        if time.time() - os.lstat(folder).st_mtime > FOLDER_IDLE_S:
            os.rmdir(folder)
            return True
    except OSError:
        pass
    return False


def _is_bare(folder: str) -> bool:
    """Whether a namespace has no folders of records and was left alone for long."""
    try:
        for name in os.listdir(folder):
            path = f"{folder}/{name}"
            if time.time() - os.lstat(path).st_mtime < NAMESPACE_IDLE_S:
                return False
            if os.path.isdir(path) and not {TMP_FOLDER, JOURNAL}.issuperset(os.listdir(path)):
                return False
    except OSError:
        return False
    return True


def remove_namespace(root: str, namespace: bytes) -> None:
    """Remove what is kept of a namespace without records; does nothing while it has any."""
    if next(iter_record_files(root, namespace), None) is not None:
        return
    folder = f"{root}/{namespace.hex()}"
    if any(path.startswith(f"{folder}/") for path, _, _ in iter_tmp_files(root)):
        return
    for parent, folders, files in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):  # what an engine makes meanwhile stays
            for name in folders:
                os.rmdir(f"{parent}/{name}")
            for name in files:
                if name in {NAMESPACE_FILE, JOURNAL}:
                    os.unlink(f"{parent}/{name}")
    with contextlib.suppress(OSError):
        os.rmdir(folder)
