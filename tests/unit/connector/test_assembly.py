"""Opening the tiers of a namespace: what stays and what is opened anew."""

from __future__ import annotations

import builtins
import os
import tempfile
import threading

import pytest

from kvtier.connector import assembly, folders
from kvtier.connector import namespace_source as subject
from kvtier.connector.assembly import TierOpener
from kvtier.connector.config import load
from kvtier.connector.geometry import Geometry, GroupGeometry, GroupKind, Region
from kvtier.connector.namespace_source import NamespaceSource
from kvtier.connector.plan import NamespaceInfo
from kvtier.storage.errors import ConfigError, KVTierError

OWN, OTHER, SHARED = b"o" * 16, b"x" * 16, b"s" * 16


@pytest.fixture
def opener(tmp_path):
    given = {"disk": str(tmp_path / "store"), "disk_capacity": "1GiB", "ram": "64MiB"}
    given["redis"] = "redis://127.0.0.1:1"
    made = TierOpener(load(given, check_machine=False), 0, 1, 2, None)
    opened = []

    def tiers(digest, generation=0, shared=None):
        found = made(NamespaceInfo(digest, generation, {}, shared, None))
        opened.extend(found)
        return list(found)

    yield tiers
    for tier in opened:
        tier.close()


def test_the_folder_stays_when_only_a_shared_tier_comes(opener):
    """A Redis that answers late costs the folder nothing: not its index, not what it does."""
    (disk,) = opener(OWN)
    again, redis = opener(OWN, shared=SHARED)
    assert again is disk
    assert redis.name == "redis"


@pytest.mark.parametrize(("digest", "generation"), [(OTHER, 0), (OWN, 1), (OTHER, 1)])
def test_another_namespace_has_a_folder_of_its_own(opener, digest, generation):
    """After a clear, or under another digest, nothing of the tier before is used."""
    (disk,) = opener(OWN)
    (after,) = opener(digest, generation)
    assert after is not disk


def test_what_could_not_be_opened_is_opened_anew(opener, monkeypatch):
    """Whoever gets nothing closes what was open; that is not handed out again."""
    (disk,) = opener(OWN)

    def broken(*_):
        raise KVTierError("no")

    with monkeypatch.context() as patch:
        patch.setattr(assembly.shared_tiers, "open_redis", broken)
        with pytest.raises(KVTierError):
            opener(OWN, shared=SHARED)
    after, _ = opener(OWN, shared=SHARED)
    assert after is not disk


# -- pages ------------------------------------------------------------------------------------


def test_the_catalog_begins_where_the_worker_s_staging_ends():
    """Halves that see blocks of unequal size cut RAM unequally; what a rank stages in is its own.

    The scheduler's copy of vLLM's configuration has one size for layers of several (DeepSeek's
    sparse attention); where pages are padded, it takes them for larger than they are.
    """
    made = load({"ram": "1GiB", "disk": "/d", "disk_capacity": "1GiB"}, check_machine=False)
    sizes = {"l.0": 1_800_000, "l.1": 1_400_000}
    seen = [geometry_of(sizes), geometry_of(dict.fromkeys(sizes, 1 << 21))]
    of_worker, of_scheduler = (assembly.arena_plan(made, each, 1) for each in seen)
    assert of_worker.staging_pages > of_scheduler.staging_pages
    half = assembly.build_scheduler(made, seen[1], lambda _: None, 1)
    for _ in range(2):
        assert half.pages_begin(of_worker.staging_pages)
    half.pages_ready(0, of_worker.n_pages)
    assert half.pages_begin(of_worker.staging_pages)
    assert half.catalog.begin_save(b"k" * 33, 1).pages.tolist() == [of_worker.staging_pages]
    assert not half.pages_begin(of_worker.staging_pages + 1)
    half.shutdown()


def geometry_of(sizes):
    regions = tuple(Region(name, 0, 1 << 21, size) for name, size in sizes.items())
    group = GroupGeometry(0, GroupKind.FULL, 16, None, regions)
    return Geometry((group,), 16, 16, 16, 256, 1000, "LBHNC", 1)


# -- a folder whose server is gone -------------------------------------------------------------


class Dead:
    """Stands for the calls that touch files: those below a folder hang until told."""

    def __init__(self, patch, root):
        self.root, self.gate, self.touched = str(root), threading.Event(), 0
        for module, names in (
            (os, ("stat", "lstat", "open", "mkdir", "listdir", "scandir", "access")),
            (os.path, ("exists", "isdir", "isfile", "lexists")),
            (builtins, ("open",)),
            (tempfile, ("mkstemp",)),
        ):
            for name in names:
                patch.setattr(module, name, self.hanging(getattr(module, name)))

    def hanging(self, real):
        def call(path, *args, **more):
            if self.root in str(path) or self.root in str(more.get("dir", "")):
                self.touched += 1
                self.gate.wait()
            return real(path, *args, **more)

        return call


@pytest.fixture
def dead(tmp_path):
    root = tmp_path / "dead"
    root.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        dead = Dead(patch, root)
        patch.setattr(folders, "WAIT_S", 0.2)
        patch.setattr(subject.ns, "static_fields", lambda *_, **__: {"model": "m"})
        yield dead
        dead.gate.set()


def test_a_folder_that_hangs_lets_the_engine_start(dead, caplog):
    """What an engine's start does with its folders ends in time, also where they never answer."""
    given = {"disk": f"{dead.root}/store", "disk_capacity": "1GiB", "ram": "1MiB"}
    given["record"] = f"{dead.root}/record"
    done = threading.Event()
    made = []

    def start():
        config = load(given)
        made.append(NamespaceSource(None, None, None, config))
        made.append(assembly.open_control(config))
        done.set()

    threading.Thread(target=start, daemon=True).start()
    assert done.wait(10)
    assert dead.touched
    assert made[1] is None
    assert sum("does not answer" in record.getMessage() for record in caplog.records) == 2


def test_a_folder_that_answers_is_checked(tmp_path):
    """A folder that can be had is looked at as before."""
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(ConfigError, match="is no folder"):
        load({"disk": str(file), "disk_capacity": "1GiB"})
