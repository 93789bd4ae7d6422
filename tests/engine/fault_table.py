"""The faults of disk and RAM as one table: a new tier or a new fault is a new row.

Real faults where a test can make them: real files, mounts, descriptors, folders that vanish.
What a healthy machine cannot be made to do (errors of the disk, reads that hang) happens where
kvtier calls the operating system: an `Edge` stands there in the place of ``os``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import stat
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.storage.disk_verify import read_header
from kvtier.storage.record import HEADER_BYTES, parse_header

from .harness import record_files

DEADLINE_S = 2.5
CHUNK = 128
BAD_CHUNK = 2  # damage hits the third chunk of a prompt
GOOD_TOKENS = BAD_CHUNK * CHUNK
STORE_MIB = 96


class Edge:
    """Stands for ``os`` where records are read and written."""

    def __init__(self):
        self.on_read = self.on_write = self.on_link = None

    def __getattr__(self, name):
        return getattr(os, name)

    def preadv(self, fd, buffers, offset):
        if self.on_read is not None:
            self.on_read()
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd, buffers, offset):
        if self.on_write is not None:
            self.on_write()
        return os.pwritev(fd, buffers, offset)

    def link(self, source, target):
        os.link(source, target)
        if self.on_link is not None:
            self.on_link(target)

    def clear(self):
        self.on_read = self.on_write = self.on_link = None


class Place:
    """Where faults happen: the store's folder, the edge to the system, the engine."""

    def __init__(self, root, edge, mounted):
        self.root = root
        self.edge = edge
        self.mounted = mounted  # whether the root lies on a small file system of its own
        self.engine = None
        self.known = set()

    @property
    def mover(self):
        return self.engine.worker._mover

    @property
    def catalog(self):
        return self.engine.half.catalog

    def start(self):
        """What lies there now is not the next prompt's."""
        self.known = set(record_files(self.root))

    def records(self):
        """The records of the prompt under test, by their chunk's number."""
        new = set(record_files(self.root)) - self.known
        return {read_header(path).start_tokens // CHUNK: path for path in new}


class Fault:
    """What happens, how it is undone, and whether it has struck."""

    def __init__(self, place):
        self.place = place
        self.struck = 0

    def load(self):
        """Let it happen to the load that comes next."""
        self.strike()

    def save(self):
        """Let it happen to the save that comes next."""
        self.strike()

    def strike(self):
        raise NotImplementedError

    def mend(self):
        """Undo it; what it destroyed stays destroyed."""
        self.place.edge.clear()


# -- one record is not what it was ---------------------------------------------------------


class Damage(Fault):
    """Somebody else spoils one record; while it is saved, as soon as it has its name."""

    def load(self):
        records = self.place.records()
        self.hit(records[BAD_CHUNK], records[BAD_CHUNK + 1])

    def save(self):
        paths = {}

        def linked(path):
            paths[read_header(path).start_tokens // CHUNK] = path
            if not self.struck and {BAD_CHUNK, BAD_CHUNK + 1} <= paths.keys():
                self.hit(paths[BAD_CHUNK], paths[BAD_CHUNK + 1])

        self.place.edge.on_link = linked

    def hit(self, path, other):
        self.struck += 1
        self.spoil(path, other)

    def spoil(self, path, other):
        raise NotImplementedError


def spoils(spoil):
    """Return a `Damage` that does this to a record; it may use another one's file."""
    return type("Spoilt", (Damage,), {"spoil": lambda _, path, other: spoil(path, other)})


def edit(path, offset, data):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path, offset):
    with open(path, "rb") as file:
        file.seek(offset)
        old = file.read(1)[0]
    edit(path, offset, bytes([old ^ 0x10]))


def longer(path, _):
    with open(path, "ab") as file:
        file.write(bytes(4096))


def instead(make):
    def spoil(path, _):
        os.unlink(path)
        make(path)

    return spoil


def of_another_version(path, _):
    """Every checksum is right; only the version is one that nobody reads."""
    import xxhash

    with open(path, "rb") as file:
        header = bytearray(file.read(HEADER_BYTES))
    header[8:10] = b"\0\0"
    edit(path, 0, bytes(header[:-16]) + xxhash.xxh3_128_digest(bytes(header[:-16])))


def of_another_namespace(path, _):
    """Sound in itself, and somebody else's."""
    from dataclasses import replace

    with open(path, "rb") as file:
        header = parse_header(file.read(HEADER_BYTES))
    edit(path, 0, replace(header, namespace=bytes(16)).pack())


# -- the file system fails -----------------------------------------------------------------


class Errors(Fault):
    """Every read and write fails with this error."""

    code: int

    def strike(self):
        self.place.edge.on_read = self.place.edge.on_write = self.fail

    def fail(self):
        self.struck += 1
        raise OSError(self.code, os.strerror(self.code))


def errors(code):
    """Return an `Errors` with this code."""
    return type("Erring", (Errors,), {"code": code})


class WriteErrors(Errors):
    """Every write fails; reads do not."""

    def strike(self):
        self.place.edge.on_write = self.fail

    def load(self):
        self.strike()
        self.struck += 1  # a load does not meet it


def write_errors(code):
    """Return a `WriteErrors` with this code."""
    return type("Refusing", (WriteErrors,), {"code": code})


class Full(WriteErrors):
    """Somebody else fills the disk, and nothing of ours is there to make room."""

    code = errno.ENOSPC

    @property
    def filler(self):
        return os.path.join(os.path.dirname(self.place.root), "somebody-else")

    def strike(self):
        if not self.place.mounted:
            super().strike()
            return
        with open(self.filler, "ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
        self.struck += 1

    def save(self):
        for path in record_files(self.place.root):
            os.unlink(path)
        shutil.rmtree(os.path.join(self.place.root, "quarantine"), ignore_errors=True)
        self.strike()

    def mend(self):
        super().mend()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.filler)


class ReadOnly(WriteErrors):
    """The folder becomes read-only under a running engine."""

    code = errno.EROFS

    def strike(self):
        root = self.place.root
        if not self.place.mounted:
            super().strike()
            return
        subprocess.run(["mount", "--bind", root, root], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", root], check=True)
        self.struck += 1

    def mend(self):
        super().mend()
        if self.place.mounted and self.struck:
            subprocess.run(["umount", "-l", self.place.root], check=True)


class RootGone(Fault):
    """The folder and all that is in it are removed; while something is saved, in the middle."""

    def strike(self):
        self.struck += 1
        shutil.rmtree(self.place.root, ignore_errors=True)

    def save(self):
        def write():
            if not self.struck:
                self.strike()

        self.place.edge.on_write = write


class NoDescriptors(Fault):
    """This process may open nothing more."""

    def strike(self):
        self.struck += 1
        self.limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, self.limits[1]))

    def mend(self):
        super().mend()
        resource.setrlimit(resource.RLIMIT_NOFILE, self.limits)


class Hanging(Fault):
    """Reads and writes never come back, while it lasts."""

    most = None  # so many calls hang

    def strike(self):
        self.over = threading.Event()
        self.place.edge.on_read = self.place.edge.on_write = self.hang

    def hang(self):
        self.struck += 1
        if self.most is None or self.struck <= self.most:
            self.over.wait(30)

    def mend(self):
        super().mend()
        self.over.set()


class OneHangs(Hanging):
    """One read, or one write, never comes back."""

    most = 1


class Slow(Hanging):
    """Every read and write takes longer than a request may wait."""

    def hang(self):
        self.struck += 1
        self.over.wait(DEADLINE_S + 0.3)


# -- RAM -----------------------------------------------------------------------------------


class NoPage(Fault):
    """Every RAM page is in use."""

    def strike(self):
        self.struck += 1
        catalog = self.place.catalog
        self.entry = catalog.begin_save(b"\xff" * 33, catalog.n_pages)
        assert self.entry is not None

    def mend(self):
        super().mend()
        self.place.catalog.filled(self.entry, False)
        self.place.catalog.unpin(self.entry)


class BadCopy(Fault):
    """Something is wrong with copies between the device and RAM."""

    def strike(self):
        mover = self.place.mover
        for name in ("save", "load"):
            setattr(mover, name, self.instead_of(getattr(mover, name)))

    def instead_of(self, copy):
        def bad(*args, **kwargs):
            self.struck += 1
            return self.go_wrong(copy, *args, **kwargs)

        return bad

    def mend(self):
        super().mend()
        mover = self.place.mover
        for name in ("save", "load"):
            vars(mover).pop(name, None)


class SlowCopy(BadCopy):
    """A copy takes longer than a request may wait, or than the whole request."""

    def go_wrong(self, copy, *args, **kwargs):
        if self.struck == 1:
            threading.Event().wait(DEADLINE_S + 0.3)
        return copy(*args, **kwargs)


class RefusedCopy(BadCopy):
    """A copy cannot be begun."""

    def go_wrong(self, copy, *args, **kwargs):
        raise RuntimeError("no copies today")


class LostCopy(BadCopy):
    """A copy is begun and fails."""

    def go_wrong(self, copy, *args, **kwargs):
        ticket = copy(*args, **kwargs)

        class Lost:
            fenced = ticket.fenced

            def wait(self, timeout_s):
                ticket.wait(timeout_s)
                raise RuntimeError("the copy failed")

        return Lost()


# -- the table -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One fault.

    Attributes:
        tier: where the prompt is restored from.
        load: what is counted when a load meets it; None where it does not trouble loads.
        save: the same for saves; for damage, what the next turn's load counts.
        kept: tokens that the request which meets it in a load restores at least.
        first: tokens that the first turn after a troubled save restores at most; None: any.
        needs_root: makes what only root may.
    """

    tier: str
    name: str
    fault: Callable[[Place], Fault]
    load: str | None
    save: str | None
    kept: int = 0
    first: int | None = None
    needs_root: bool = False


WHOLE = 5 * CHUNK


def damage(name, spoil, reason, **more):
    counted = f"load_failed_chunks.disk.{reason}"
    return Row("disk", name, spoils(spoil), counted, counted, GOOD_TOKENS, GOOD_TOKENS, **more)


def refusing(name, fault):
    return Row("disk", name, fault, None, "save_dropped_chunks.disk.refused", WHOLE)


def outage(name, fault):
    load, save = "load_failed_chunks.disk.unavailable", "save_dropped_chunks.disk.unavailable"
    return Row("disk", name, fault, load, save)


ROWS = (
    damage("missing", lambda path, _: os.unlink(path), "missing"),
    damage("empty", lambda path, _: os.truncate(path, 0), "truncated"),
    damage("truncated", lambda path, _: os.truncate(path, 9000), "truncated"),
    damage("lengthened", longer, "lengthened"),
    damage("header bit", lambda path, _: flip(path, 105), "header_checksum"),
    damage("payload bit", lambda path, _: flip(path, 70_000), "payload_checksum"),
    damage("zeros", lambda path, _: edit(path, 0, bytes(os.path.getsize(path))), "magic"),
    damage("another record", lambda path, other: shutil.copyfile(other, path), "identity"),
    damage("folder", instead(os.mkdir), "not_a_file"),
    damage("fifo", instead(os.mkfifo), "not_a_file"),
    damage("link", instead(lambda path: os.symlink("/dev/zero", path)), "not_a_file"),
    damage(
        "device node",
        instead(lambda path: os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))),
        "not_a_file",
        needs_root=True,
    ),
    damage("old format", of_another_version, "format"),
    damage("other namespace", of_another_namespace, "namespace"),
    refusing("disk full", Full),
    refusing("over quota", write_errors(errno.EDQUOT)),
    refusing("read-only", ReadOnly),
    Row("disk", "root removed", RootGone, "load_failed_chunks.disk.missing", None),
    outage("no descriptors", NoDescriptors),
    outage("input/output error", errors(errno.EIO)),
    outage("stale handle", errors(errno.ESTALE)),
    Row("disk", "slow", Slow, "load_deadline_missed", None),
    Row("disk", "one call hangs", OneHangs, "load_deadline_missed", None),
    Row("disk", "calls hang", Hanging, "load_deadline_missed", "breaker_opened.disk"),
    Row("disk", "no RAM page", NoPage, None, "save_dropped_chunks.ram.no_page", WHOLE),
    Row("ram", "slow copy", SlowCopy, "load_deadline_missed", None),
    Row("ram", "refused copy", RefusedCopy, "load_failed_chunks.device.copy", "save_failed_chunks.device"),  # noqa: E501
    Row("ram", "lost copy", LostCopy, "load_failed_chunks.device.copy", "save_failed_chunks.device"),  # noqa: E501
)  # fmt: skip
