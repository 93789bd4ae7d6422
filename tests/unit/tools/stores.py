"""Stores that the tests of the verbs fill: a folder and a real Redis server, alike."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from kvtier.storage.disk import DiskTier
from kvtier.storage.key import chunk_key
from kvtier.storage.redis import RedisTier
from kvtier.storage.redis_url import parse_redis_url
from kvtier.storage.tier import RecordSpec
from kvtier.tools.cli import app

RAW_BYTES = 16384
NAMESPACES = (b"a" * 16, b"b" * 16)
GOLDEN = Path(__file__).parent / "golden"


def kvtier(*arguments, **options):
    """Run the command; return (exit code, stdout, stderr)."""
    done = subprocess.run(
        [str(Path(sys.executable).parent / "kvtier"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )
    return done.returncode, done.stdout, done.stderr


def here(*arguments):
    """Run the command in this process, which is quicker; return (exit code, stdout, stderr)."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def key(number):
    return chunk_key(hashlib.sha256(str(number).encode()).digest(), number % 2)


def words(name="tiny", **more):
    return {"model": {"path": name, "dtype": "torch.bfloat16"}, **more}


def put(tier, numbers, raw_bytes=RAW_BYTES, compressible=False):
    """Put chunk number n, which covers tokens 256 n to 256 n + 256."""
    payload = mmap.mmap(-1, raw_bytes)
    for number in numbers:
        if compressible:
            payload[:] = bytes(range(256)) * (raw_bytes // 256)
        payload[:8] = number.to_bytes(8, "little")
        with memoryview(payload) as view:
            tier.put(RecordSpec(key(number), 256 * number, 256 * number + 256, raw_bytes), [view])
    tier.close()


class Folder:
    """A disk store."""

    kind = "disk"

    def __init__(self, root):
        self.target = str(root)

    def tier(self, namespace=NAMESPACES[0], rank=0, **options):
        options.setdefault("description", words())
        return DiskTier(self.target, namespace, rank, 1 << 30, **options)

    def damage(self, number, namespace=NAMESPACES[0], rank=0):
        """Turn one bit of a payload; return the record's place."""
        name = key(number)[:-1].hex() + f"-g{number % 2}"
        path = f"{self.target}/{namespace.hex()}/r{rank}/{name[:2]}/{name[2:4]}/{name}.kvt"
        with open(path, "r+b") as file:
            file.seek(4096 + 100)
            byte = file.read(1)
            file.seek(4096 + 100)
            file.write(bytes([byte[0] ^ 1]))
        return path

    def content(self):
        """Everything in the store's records: (namespace, rank, key name) to bytes."""
        return {
            (*path.relative_to(self.target).parts[:2], path.stem): path.read_bytes()
            for path in Path(self.target).rglob("*/r*/*/*/*.kvt")
        }


class Server:
    """A Redis store."""

    kind = "redis"

    def __init__(self, server):
        self.server = server
        self.target = server.url

    def tier(self, namespace=NAMESPACES[0], rank=0, **options):
        options.setdefault("description", words())
        settings = parse_redis_url(self.target, stripe=8192)
        return RedisTier(settings, namespace, rank, **options)

    def damage(self, number, namespace=NAMESPACES[0], rank=0):
        name = f"kvtier:{namespace.hex()}:r{rank}:{{{key(number)[:-1].hex()}}}-g{number % 2}:h"
        with self.server.client() as client:
            value = bytearray(client.get(name))
            value[-1] ^= 1
            client.set(name, bytes(value))
        return name

    def content(self):
        """The records' headers and payloads: (namespace, rank, key name) to bytes."""
        found = {}
        with self.server.client() as client:
            for name in client.scan_iter("kvtier:*:h"):
                parts = name.decode().split(":")
                value = client.get(name)
                generation = value[512:520].hex()
                stored, stripe = (int.from_bytes(value[a : a + 8], "little") for a in (136, 520))
                for i in range(1, -(-stored // stripe)):
                    value += client.get(name[:-1] + f"{generation}:{i}".encode())
                plain = parts[3].replace("{", "").replace("}", "")
                found[parts[1], parts[2], plain] = value
        return found


_COUNTED = re.compile(r"\d+|\d+ [KM]iB|larger|minute|hour|day|week|older")


def shape(value):
    """Return a value's shape: names and types, lists by their first item."""
    if isinstance(value, dict):
        if value and all(_COUNTED.fullmatch(name) for name in value):
            return {"*": shape(next(iter(value.values())))}
        return {name: shape(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


def golden(name, value):
    """Compare a value's shape with the one that is kept; written anew under KVTIER_GOLDEN=write."""
    path = GOLDEN / f"{name}.json"
    found = shape(value)
    if os.environ.get("KVTIER_GOLDEN") == "write":
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(json.dumps(found, indent=2) + "\n")
    assert found == json.loads(path.read_text()), f"the fields of `{name} --json` changed"
