"""What the tests of the disk tier share. Sees a store only as files, never through its code."""

import os
import time

from kvtier.storage.testing import NAMESPACE, key_of


def file_of(root, number, namespace=NAMESPACE, rank=0):
    """Where the record of a test key lies, spelt out."""
    name = key_of(number)[:-1].hex() + "-g0"
    return f"{root}/{namespace.hex()}/r{rank}/{name[:2]}/{name[2:4]}/{name}.kvt"


def held_bytes(root):
    """Bytes of all records, quarantined ones and temporary files, as the directory says."""
    total = 0
    for folder, _, files in os.walk(root):
        for name in files:
            if name.endswith((".kvt", ".tmp")):
                try:
                    total += os.lstat(f"{folder}/{name}").st_size
                except FileNotFoundError:
                    continue
    return total


def files_ending(root, suffix):
    """All files with that ending."""
    return [
        f"{folder}/{name}"
        for folder, _, files in os.walk(root)
        for name in files
        if name.endswith(suffix)
    ]


def eventually(check, timeout_s=10.0):
    """Wait until a check holds; return whether it did."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if check():
            return True
        time.sleep(0.01)
    return bool(check())
