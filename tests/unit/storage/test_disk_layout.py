"""What tools read from a store: namespaces, files, descriptions, in any state."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.storage.disk import DiskTier
from kvtier.storage.disk_layout import (
    iter_record_files,
    list_namespaces,
    pack_namespace,
    parse_namespace,
)
from kvtier.storage.disk_verify import read_header, verify_file
from kvtier.storage.errors import DamageReason, KVTierError, RecordDamaged, RecordMissing
from kvtier.storage.testing import NAMESPACE, OTHER_NAMESPACE, key_of, payload_of, spec_of

DESCRIPTION = {"model": "m", "blocks": 16, "nested": {"a": [1, 2]}}


def test_description_round_trip():
    """A description comes back as it was given."""
    assert parse_namespace(pack_namespace(NAMESPACE, DESCRIPTION), NAMESPACE) == DESCRIPTION


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"{}",
        b"[" * 100_000,
        b'{"format": 2}',
        pack_namespace(OTHER_NAMESPACE, DESCRIPTION),
        json.dumps({"format": 1, "namespace": NAMESPACE.hex()}).encode(),
        json.dumps({"format": 1, "namespace": NAMESPACE.hex(), "description": []}).encode(),
    ],
)
def test_descriptions_that_are_none(data):
    """What is no description of this namespace is our own error."""
    with pytest.raises(KVTierError):
        parse_namespace(data, NAMESPACE)


@given(st.binary(max_size=300))
def test_any_description(data):
    """Any bytes are our own error, nothing else."""
    with pytest.raises(KVTierError):
        parse_namespace(data, NAMESPACE)


def test_listing(tmp_path):
    """Namespaces with their ranks, descriptions, and what is wrong with them."""
    for namespace, rank in [(NAMESPACE, 0), (NAMESPACE, 2), (OTHER_NAMESPACE, 0)]:
        tier = DiskTier(str(tmp_path), namespace, rank, 1 << 24, description=DESCRIPTION)
        tier.put(spec_of(rank), payload_of(rank))
        tier.close()
    (tmp_path / OTHER_NAMESPACE.hex() / "namespace.json").write_text("{")
    (tmp_path / ("ab" * 16)).mkdir()
    os.mkfifo(tmp_path / ("ab" * 16) / "namespace.json")
    (tmp_path / ("cd" * 16)).write_text("a file")
    found = {info.namespace: info for info in list_namespaces(str(tmp_path))}
    assert set(found) == {NAMESPACE, OTHER_NAMESPACE, b"\xab" * 16}
    assert found[NAMESPACE].description == DESCRIPTION
    assert found[NAMESPACE].ranks == (0, 2)
    assert found[OTHER_NAMESPACE].problem
    assert found[b"\xab" * 16].problem
    everything = {(f.namespace, f.rank, f.key) for f in iter_record_files(str(tmp_path))}
    assert everything == {
        (NAMESPACE, 0, key_of(0)),
        (NAMESPACE, 2, key_of(2)),
        (OTHER_NAMESPACE, 0, key_of(0)),
    }
    assert [f.rank for f in iter_record_files(str(tmp_path), NAMESPACE, 2)] == [2]
    assert all(verify_file(f.path, f).ok for f in iter_record_files(str(tmp_path)))


def test_listing_nothing(tmp_path):
    """A root that is not there cannot be listed; a walk of it finds nothing."""
    with pytest.raises(FileNotFoundError):
        list_namespaces(str(tmp_path / "none"))
    assert list(iter_record_files(str(tmp_path / "none"))) == []


def test_single_files(tmp_path):
    """Header and verdict of single files, also of what is no file."""
    with pytest.raises(RecordMissing):
        read_header(str(tmp_path / "none"))
    with pytest.raises(RecordMissing):
        verify_file(str(tmp_path / "none"))
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(RecordDamaged):
        read_header(str(tmp_path / "fifo"))
    assert verify_file(str(tmp_path / "fifo")).reason is DamageReason.NOT_A_FILE
    (tmp_path / "x").write_bytes(b"x" * 10_000)
    assert verify_file(str(tmp_path / "x")).reason is DamageReason.MAGIC


@given(data=st.binary(max_size=2000), position=st.integers(0, 20_000))
def test_verify_any_file(tmp_path_factory, data, position):
    """Any file is intact or damaged for a reason; verify raises nothing."""
    folder = tmp_path_factory.mktemp("any")
    tier = DiskTier(str(folder), NAMESPACE, 0, 1 << 24, poll_s=5.0)
    tier.put(spec_of(1), payload_of(1))
    tier.close()
    (file,) = iter_record_files(str(folder))
    with open(file.path, "r+b") as record:
        record.seek(position)
        before = record.read(len(data))
        record.seek(position)
        record.write(data)
    assert verify_file(file.path, file).ok is (before == data)
