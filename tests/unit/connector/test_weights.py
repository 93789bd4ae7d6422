"""Fingerprints of weights: what they notice, what they cost, what copies share."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from kvtier.connector import weights
from kvtier.connector.weights import WeightsCache, WeightsError

TENSOR = 64 << 10


def write_shard(path: Path, names: list[str], seed: int = 0) -> None:
    """Write a safetensors file with tensors of random bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for i, name in enumerate(names):
        header[name] = {
            "dtype": "U8", "shape": [TENSOR], "data_offsets": [i * TENSOR, (i + 1) * TENSOR]
        }  # fmt: skip
    text = json.dumps(header).encode()
    generator = __import__("random").Random(seed)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _ in names:
            file.write(generator.randbytes(TENSOR))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 64}')
    (folder / "tokenizer.json").write_text("{}")
    for shard in range(2):
        names = [f"layers.{shard * 20 + i}.weight" for i in range(20)]
        write_shard(folder / f"model-{shard}.safetensors", names, seed=shard)
    return folder


@pytest.fixture(params=["whole", "sampled"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test as for a small checkpoint, and as for a large one."""
    if request.param == "sampled":
        monkeypatch.setattr(weights, "WHOLE_BYTES", 0)
    return request.param


def fingerprint(path: Path) -> str:
    return weights.weights_fingerprint(str(path), WeightsCache())


def change(path: Path, offset: int, length: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(length)
        file.seek(offset)
        file.write(bytes(b ^ 0xFF for b in old))


def test_copies_agree_wherever_they_lie(model: Path, tmp_path: Path, mode: str) -> None:
    """The same files elsewhere, with other times, have the same fingerprint."""
    copy = tmp_path / "elsewhere"
    shutil.copytree(model, copy)
    os.utime(copy / "model-0.safetensors", ns=(1, 1))
    assert fingerprint(model) == fingerprint(copy)


def test_every_tensor_counts(model: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """New values in any single tensor, sizes as before, give another fingerprint."""
    monkeypatch.setattr(weights, "BUDGET_SAMPLES", 40)  # one for each of the 40 tensors
    before = fingerprint(model)
    shard = model / "model-1.safetensors"
    (header_bytes,) = struct.unpack("<Q", shard.read_bytes()[:8])
    seen = {before}
    for tensor in range(20):
        offset = 8 + header_bytes + tensor * TENSOR
        change(shard, offset, TENSOR)
        seen.add(fingerprint(model))
        change(shard, offset, TENSOR)
    assert len(seen) == 21
    assert fingerprint(model) == before


@pytest.mark.parametrize("what", ["config", "header", "name", "more", "less", "code", "longer"])
def test_everything_around_the_weights_counts(model: Path, mode: str, what: str) -> None:
    """Configuration, headers, names, number and sizes of shards, and code of the model."""
    before = fingerprint(model)
    shard = model / "model-0.safetensors"
    if what == "config":
        (model / "config.json").write_text('{"hidden_size": 65}')
    elif what == "header":
        change(shard, 20)
    elif what == "name":
        shard.rename(model / "model-7.safetensors")
    elif what == "more":
        write_shard(model / "model-2.safetensors", ["x"])
    elif what == "less":
        shard.unlink()
    elif what == "code":
        (model / "modeling_x.py").write_text("x = 1")
    else:
        with shard.open("ab") as file:
            file.write(b"\0")
    assert fingerprint(model) != before


def test_what_does_not_change_the_model_does_not_count(model: Path, mode: str) -> None:
    """Tokenizer, readme and folders beside the weights change nothing."""
    before = fingerprint(model)
    (model / "tokenizer.json").write_text('{"a": 1}')
    (model / "README.md").write_text("x")
    (model / "original").mkdir()
    assert fingerprint(model) == before


def test_small_checkpoints_are_read_whole(model: Path) -> None:
    """One flipped bit anywhere in a small checkpoint is noticed."""
    before = fingerprint(model)
    shard = model / "model-0.safetensors"
    for offset in (shard.stat().st_size - 1, shard.stat().st_size // 3):
        change(shard, offset)
        assert fingerprint(model) != before
        change(shard, offset)


@pytest.mark.parametrize("memory", ["process", "file"])
def test_an_edit_that_samples_miss_is_noticed_in_place(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    """Other times under one path with equal samples: told apart, also after a restart."""
    monkeypatch.setattr(weights, "WHOLE_BYTES", 0)
    monkeypatch.setattr(weights, "_sample_ranges", lambda *_: [])
    monkeypatch.setattr(weights, "_edges", lambda _: [])
    note = str(tmp_path / "weights.json") if memory == "file" else None
    cache = WeightsCache(note)
    first = weights.weights_fingerprint(str(model), cache)
    change(model / "model-0.safetensors", 100_000)
    os.utime(model / "model-0.safetensors", ns=(5, 5))
    again = WeightsCache(note) if memory == "file" else cache
    second = weights.weights_fingerprint(str(model), again)
    assert second != first
    third = WeightsCache(note) if memory == "file" else again
    assert weights.weights_fingerprint(str(model), third) == second


@pytest.mark.parametrize("memory", ["process", "file"])
def test_an_edit_that_samples_miss_is_noticed_after_other_weights(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    """A path that had other weights in between: what looks like its first ones is not taken so."""
    monkeypatch.setattr(weights, "WHOLE_BYTES", 0)
    monkeypatch.setattr(weights, "_sample_ranges", lambda *_: [(200_000, 100)])
    monkeypatch.setattr(weights, "_edges", lambda _: [])
    note = str(tmp_path / "weights.json") if memory == "file" else None
    cache = WeightsCache(note)
    shard = model / "model-0.safetensors"

    def now(time_ns: int) -> str:
        os.utime(shard, ns=(time_ns, time_ns))
        return weights.weights_fingerprint(
            str(model), WeightsCache(note) if memory == "file" else cache
        )

    first = now(5)
    change(shard, 200_000)
    others = {now(6)}
    change(shard, 200_000)  # as before where it is sampled,
    change(shard, 100_000)  # and not elsewhere
    others.add(now(7))
    assert first not in others
    assert len(others) == 2


def test_nothing_is_read_twice(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While path, sizes, times and inodes stay, the content is not read again."""
    cache = WeightsCache()
    first = weights.weights_fingerprint(str(model), cache)
    monkeypatch.setattr(weights, "_content_digest", None)
    assert weights.weights_fingerprint(str(model), cache) == first


def test_a_damaged_note_costs_only_the_memory(model: Path, tmp_path: Path) -> None:
    """A note that is no JSON, or cannot be written, does not stop a start."""
    note = tmp_path / "weights.json"
    for text in ("{", "[]", '{"x": 1}', ""):
        note.write_text(text)
        got = weights.weights_fingerprint(str(model), WeightsCache(str(note)))
        assert got == fingerprint(model)
    gone = WeightsCache(str(tmp_path / "no" / "folder" / "weights.json"))
    assert weights.weights_fingerprint(str(model), gone) == fingerprint(model)
    assert not list(tmp_path.glob(".weights-*"))


def test_hub_blobs_stand_for_their_content(model: Path, tmp_path: Path) -> None:
    """A link into a Hugging Face cache is known by the hash in its name, without reading."""
    prints = []
    for digest in ("a" * 64, "b" * 64):
        blobs = tmp_path / digest[0] / "blobs"
        snapshot = tmp_path / digest[0] / "snapshot"
        blobs.mkdir(parents=True)
        snapshot.mkdir()
        shutil.copy(model / "config.json", snapshot)
        shutil.copy(model / "model-0.safetensors", blobs / digest)
        (snapshot / "model.safetensors").symlink_to(blobs / digest)
        prints.append(fingerprint(snapshot))
    assert prints[0] != prints[1]


def test_a_large_checkpoint_is_sampled_within_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However large the shards, the bytes read stay within what two seconds allow."""
    read_bytes = 0
    reads = 0
    real = os.pread

    def counted(fd: int, length: int, offset: int) -> bytes:
        nonlocal read_bytes, reads
        read_bytes, reads = read_bytes + length, reads + 1
        return real(fd, length, offset)

    (tmp_path / "config.json").write_text("{}")
    for shard in range(20):
        names = {
            f"layers.{shard}.{i}": {
                "dtype": "U8", "shape": [1], "data_offsets": [i * 10_000_000, (i + 1) * 10_000_000]
            }
            for i in range(500)
        }  # fmt: skip
        text = json.dumps(names).encode()
        with (tmp_path / f"model-{shard:02}.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + 5_000_000_000)  # sparse: 100 GB in all
    monkeypatch.setattr(os, "pread", counted)
    fingerprint(tmp_path)
    assert reads < weights.BUDGET_SAMPLES + 20 * 8
    assert read_bytes < 20 << 20


@pytest.mark.parametrize("suffix", [".bin", ".gguf", ".safetensors"])
def test_shards_without_a_known_header_are_sampled_all_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """A file whose inside is not understood is sampled by place."""
    monkeypatch.setattr(weights, "WHOLE_BYTES", 0)
    file = tmp_path / f"model{suffix}"
    file.write_bytes(bytes(8 << 20))
    before = fingerprint(tmp_path)
    for part in range(8):
        change(file, part << 20, 1 << 20)
        assert fingerprint(tmp_path) != before
        change(file, part << 20, 1 << 20)
    assert fingerprint(file) != ""


def test_weights_that_are_not_there_are_refused(tmp_path: Path) -> None:
    """No path, or a folder without weights, raises one line instead of a fingerprint."""
    for path in (tmp_path / "gone", tmp_path):
        with pytest.raises(WeightsError, match=str(path)):
            fingerprint(path)


def test_models_by_path_and_by_name(model: Path, tmp_path: Path) -> None:
    """A path is itself; a name that no cache has is refused without asking the network."""
    assert weights.local_model_path(str(model), None) == str(model)
    with pytest.raises(WeightsError, match="nobody/nothing"):
        weights.local_model_path("nobody/nothing", None, str(tmp_path))


def test_a_name_is_found_in_the_local_hub_cache(model: Path, tmp_path: Path) -> None:
    """A hub id resolves to the snapshot of the revision asked for."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "models--some--model"
    snapshot = repo / "snapshots" / commit
    shutil.copytree(model, snapshot)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    assert weights.local_model_path("some/model", None, str(tmp_path)) == str(snapshot)
    assert weights.local_model_path("some/model", commit, str(tmp_path)) == str(snapshot)
    with pytest.raises(WeightsError):
        weights.local_model_path("some/model", "other", str(tmp_path))


def test_adapters_have_fingerprints_of_their_own(model: Path, tmp_path: Path) -> None:
    """An adapter replaced under its old path, with the same sizes, is noticed."""
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"r": 8}')
    write_shard(adapter / "adapter_model.safetensors", ["a", "b"], seed=1)
    cache = WeightsCache()
    before = weights.lora_fingerprint(str(adapter), cache)
    write_shard(adapter / "adapter_model.safetensors", ["a", "b"], seed=2)
    assert weights.lora_fingerprint(str(adapter), cache) != before


def test_made_up_weights_depend_on_seed_and_configuration() -> None:
    """Dummy weights are told apart by what they are made from."""
    prints = {weights.dummy_fingerprint(text, seed) for text in "ab" for seed in (0, 1, None)}
    assert len(prints) == 6
