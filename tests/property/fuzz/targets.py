"""Everything of kvtier that reads bytes which somebody else may have written, as one table.

A target takes any bytes. It may raise the exceptions that its row names and no other, and
allocates no more than `MAX_BYTES`, whatever the bytes say of their own lengths.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import xxhash

from kvtier.connector import config
from kvtier.connector.control import parse_wish
from kvtier.storage.disk_layout import pack_namespace, parse_namespace
from kvtier.storage.errors import ConfigError, KVTierError, RecordDamaged, RecordError, TierError
from kvtier.storage.key import chunk_key, key_name, parse_key_name
from kvtier.storage.pins import parse_pin
from kvtier.storage.record import HEADER_BYTES, CodecId, Header, parse_header
from kvtier.storage.redis_layout import HEAD_BYTES, Head, parse_head
from kvtier.storage.redis_url import parse_redis_url
from kvtier.storage.redis_wire import Wire
from kvtier.tools.recorded import find_request
from kvtier.tools.traces_read import read_trace

MAX_BYTES = 64 << 20
NAMESPACE = bytes(range(16))
KEY = chunk_key(bytes(range(32)), 3)
HEADER = Header(
    NAMESPACE, KEY, 1, 256, 512, CodecId.RAW, 2, 1 << 20, 1 << 20, bytes(16), 1_700_000_000_000_000
)


@dataclass(frozen=True)
class Target:
    """One parser.

    Attributes:
        run: gives it the bytes.
        raises: what it may raise.
        seeds: what it reads without complaint, to begin with.
    """

    run: Callable[[bytes], object]
    raises: tuple[type[Exception], ...]
    seeds: tuple[bytes, ...] = ()

    def __call__(self, data):
        """Run it; exceptions that it may raise are fine."""
        with contextlib.suppress(*self.raises):
            self.run(data)


def sealed(parse, length):
    """A parser behind its checksum: the bytes before it are taken as they are."""

    def run(data):
        checked = data[: length - 16].ljust(length - 16, b"\0")
        return parse(checked + xxhash.xxh3_128_digest(checked))

    return run


def sealed_head(data):
    """A head whose both checksums agree."""
    header = data[: HEADER_BYTES - 16].ljust(HEADER_BYTES - 16, b"\0")
    header += xxhash.xxh3_128_digest(header)
    checked = header + data[HEADER_BYTES - 16 :][:16].ljust(16, b"\0")
    head = parse_head(checked + xxhash.xxh3_128_digest(checked))
    assert 1 <= head.stripes <= 1 << 16


def answers(data):
    """A server that says this and hangs up."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data[: 1 << 15])
        theirs.shutdown(socket.SHUT_WR)
        wire = Wire(SimpleNamespace(_sock=ours, disconnect=ours.close), "fuzz", 1.0)
        wire.begin(0)
        payload = memoryview(bytearray(4096))
        while True:
            if data[:1] < b"@":
                wire.answer()
            elif isinstance(n_bytes := wire.bulk_bytes(), int):
                wire.read_into([payload[: min(n_bytes, len(payload))]])
                wire.bulk_end()


FOLDER = tempfile.TemporaryDirectory(prefix="kvtier-fuzz-")


def in_file(name, parse):
    """A parser of files."""
    path = os.path.join(FOLDER.name, name)

    def run(data):
        with open(path, "wb") as file:
            file.write(data)
        return parse(path)

    return run


def settings(data):
    """Settings as vLLM's command line gives them."""
    try:
        given = json.loads(data)
    except (ValueError, RecursionError):
        return
    if isinstance(given, dict):
        given.pop("config", None)  # a path: whatever lies there is not this target's
        config.load(given, check_machine=False)


def as_text(parse):
    """A parser of text."""
    return lambda data: parse(data.decode("utf-8", "replace"))


RECORDING = b"".join(
    json.dumps(line).encode() + b"\n"
    for line in (
        {"format": "kvtier-recording", "version": 1, "block_tokens": 16, "started_at_s": 1.5,
         "hash_algorithm": "sha256", "root_hash": "00"},
        {"t": 0.5, "request": "r1", "session": 0, "prompt_tokens": 40, "output_tokens": 4,
         "hashes": ["00" * 32, "01" * 32], "device_tokens": 0, "hit_tokens": {"ram": 16},
         "miss": "none", "end": "stopped", "namespace": "00" * 16},
        {"t": 1.5, "request": "r2", "session": 0, "prompt_tokens": 60, "output_tokens": 4,
         "base": [0, 2], "hashes": ["02" * 32], "device_tokens": 0, "hit_tokens": {},
         "miss": "none", "end": "stopped", "namespace": None},
    )
)  # fmt: skip

TARGETS = {
    "header": Target(parse_header, (RecordDamaged,), (HEADER.pack(),)),
    "header-sealed": Target(
        sealed(parse_header, HEADER_BYTES), (RecordDamaged,), (HEADER.pack()[:-16],)
    ),
    "head": Target(parse_head, (RecordDamaged,), (Head(HEADER, bytes(8), 1 << 18).pack(),)),
    "head-sealed": Target(
        sealed_head,
        (RecordDamaged,),
        (HEADER.pack()[:-16] + Head(HEADER, bytes(8), 1 << 18).pack()[512 : HEAD_BYTES - 16],),
    ),
    "key": Target(as_text(parse_key_name), (KVTierError,), (key_name(KEY).encode(),)),
    "namespace": Target(
        lambda data: parse_namespace(data, NAMESPACE),
        (KVTierError,),
        (pack_namespace(NAMESPACE, {"model": "x", "layers": [1, 2]}),),
    ),
    "settings": Target(
        settings,
        (ConfigError,),
        (
            b'{"ram": "4GiB", "disk": "/x", "disk_capacity": "1TB", "load_deadline": "auto"}',
            b'{"redis": "redis://a:b@h:1/2", "redis_ttl": 3600, "chunk_tokens": 256}',
        ),
    ),
    "settings-file": Target(
        in_file("settings.toml", lambda path: config.load({"config": path}, check_machine=False)),
        (ConfigError,),
        (b'ram = "4GiB"\ndisk = "/x"\ndisk_capacity = "1TB"\n',),
    ),
    "redis-url": Target(
        as_text(parse_redis_url),
        (ConfigError,),
        (b"rediss://u:p%40@h:6379/3?timeout=1s", b"redis+sentinel://a,b:2/name", b"unix:///s"),
    ),
    "redis-answers": Target(
        answers,
        (TierError, RecordError),
        (b"*2\r\n$1\r\na\r\n:7\r\n", b"+OK\r\n-ERR no\r\n$-1\r\n", b"$4\r\nabcd\r\n"),
    ),
    "trace": Target(
        in_file("trace", read_trace),
        (KVTierError,),
        (RECORDING, b'{"timestamp": 1, "input_length": 9, "output_length": 3, "hash_ids": [1]}\n'),
    ),
    "recording": Target(
        in_file("recording", lambda path: find_request(path, "r1")), (KVTierError,), (RECORDING,)
    ),
    "pin": Target(
        parse_pin,
        (KVTierError,),
        (
            b'{"format": 1, "namespace": "%b", "keys": ["%b"], "tokens": 1, "stored_bytes": 2,'
            b' "created_at_s": 1.5, "note": ""}' % (b"00" * 16, key_name(KEY).encode()),
        ),
    ),
    "wish": Target(
        parse_wish,
        (KVTierError,),
        (
            b'{"format": "kvtier-control", "version": 1, "do": "warm", "tier": "disk",'
            b' "namespace": "%b", "keys": [["%b", 1]]}' % (b"00" * 16, key_name(KEY).encode()),
        ),
    ),
}
