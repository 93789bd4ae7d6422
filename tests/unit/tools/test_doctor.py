"""`kvtier doctor`: what is fine, what is not, and what to do about it."""

from __future__ import annotations

import json
import os

import pytest

from kvtier.connector import config
from kvtier.storage import memory_limit
from kvtier.tools import doctor, doctor_engine
from kvtier.tools.redis_server import RedisServer

from .stores import golden, kvtier

HYBRID = {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]}
PLAIN = {"model_type": "llama", "num_hidden_layers": 2}


def by_name(findings):
    return {finding.name: finding for finding in findings}


def found_by(*arguments, env=None):
    code, out, err = kvtier("doctor", *arguments, "--json", env=env)
    data = json.loads(out)
    return code, {f["name"]: f for f in data["findings"]}, data, err


def test_a_sound_set_up_has_no_problem(tmp_path):
    """Exit 0, every check there, and whatever is not ok says what to do."""
    config = json.dumps({"ram": "8MiB", "disk": str(tmp_path), "disk_capacity": "64MiB"})
    code, found, data, err = found_by(config)
    assert code == 0, err
    assert data["ok"]
    golden("doctor", data)
    for name in ("python", "configuration", "memory", "pinning", "disk", "O_DIRECT", "room"):
        assert name in found
    assert found["vLLM"]["level"] == "ok"
    assert found["hashes"]["level"] == "ok"
    assert all(f["todo"] for f in data["findings"] if f["level"] != "ok")
    assert os.listdir(tmp_path) == []
    code, out, _ = kvtier("doctor", config)
    assert code == 0
    assert "an engine would start with it" in out


@pytest.mark.parametrize("tiers", [{}, {"disk": True}])
def test_staging_is_counted_once(monkeypatch, tmp_path, tiers):
    """It is cut out of `ram`; only without `ram` does it take memory of its own, for each rank."""
    seen = []
    monkeypatch.setattr(doctor, "memory", lambda n: seen.append(n) or doctor.ok("memory", ""))
    monkeypatch.setattr(doctor, "pinning", lambda n: seen.append(n) or doctor.ok("pinning", ""))
    disk = {"disk": str(tmp_path), "disk_capacity": "64MiB"} if tiers else {}

    def taken(n_ranks, **settings):
        seen.clear()
        list(doctor.tiers(config.load({**disk, **settings}, n_ranks=n_ranks), n_ranks))
        assert len(seen) == 2
        return set(seen)

    assert taken(1, ram="16MiB", staging="4MiB") == {16 << 20}
    assert taken(2, ram="16MiB", staging="4MiB") == {16 << 20}
    assert taken(2, ram="16MiB", size_scope="per_rank") == {32 << 20}
    if tiers:
        assert taken(2, staging="4MiB") == {16 << 20}


def test_a_limit_that_config_accepts_is_no_problem_of_memory(monkeypatch):
    """RAM tiers up to the limit: `configuration` and `memory` say the same."""
    monkeypatch.setattr(memory_limit, "memory_limit_bytes", lambda: 64 << 20)
    for ram, level in (("64MiB", doctor.Level.HINT), ("65MiB", None)):
        found = by_name(doctor.examine({"ram": ram}, {}))
        assert (found["configuration"].level is doctor.Level.OK) == (level is not None)
        assert (found["memory"].level if "memory" in found else None) is level


def test_a_folder_that_does_not_exist_is_a_hint(tmp_path):
    """A disk that is not mounted must not pass for room on the file system below it."""
    there = by_name(doctor.disk(str(tmp_path), 1 << 20))
    assert there["disk"].level is doctor.Level.OK
    made = by_name(doctor.disk(str(tmp_path / "not" / "there"), 1 << 20))
    assert made["disk"].level is doctor.Level.HINT
    assert f"{tmp_path}/not/there does not exist" in made["disk"].text
    mount = doctor._mount(str(tmp_path))[0]
    assert f"would be made in {tmp_path}, on the file system of {mount}" in made["disk"].text
    assert "mounted" in made["disk"].todo
    assert made["room"].level is doctor.Level.OK
    assert os.listdir(tmp_path) == []


def test_the_mount_is_that_of_the_folder():
    """The longest mount point above it, and what kind of file system that is."""
    assert doctor._mount("/proc/self")[0] == "/proc"
    assert doctor._file_system("/proc/self") == "proc"
    assert doctor._mount("/")[0] == "/"


def test_what_will_not_work_is_a_finding(tmp_path):
    """A wrong setting, a disk too small: exit 3, and what to change."""
    code, found, _, _ = found_by(json.dumps({"rom": "1GiB"}))
    assert code == 3
    assert found["configuration"]["level"] == "problem"
    config = {"disk": str(tmp_path / "new"), "disk_capacity": "1000TiB", "staging": "4MiB"}
    code, found, _, _ = found_by(json.dumps(config))
    assert code == 3
    assert found["room"]["level"] == "problem"
    assert "disk_capacity" in found["room"]["todo"]


def test_hashes_that_no_other_process_has_are_a_problem(monkeypatch):
    """Xxhash without a seed; with PYTHONHASHSEED it is fine."""
    for algorithm, environ, level in (
        ("sha256", {}, doctor.Level.OK),
        ("sha256_cbor", {}, doctor.Level.OK),
        ("xxhash", {}, doctor.Level.PROBLEM),
        ("xxhash", {"PYTHONHASHSEED": "random"}, doctor.Level.PROBLEM),
        ("xxhash", {"PYTHONHASHSEED": "7"}, doctor.Level.OK),
    ):
        engine = {"prefix_caching_hash_algo": algorithm}
        assert by_name(doctor_engine.hashes(engine, environ))["hashes"].level is level
    monkeypatch.setattr(doctor_engine, "engine_folder", lambda: None)
    assert by_name(doctor_engine.hashes({}, {}))["hashes"].level is doctor.Level.PROBLEM


@pytest.mark.parametrize(
    ("unit", "block", "model", "level"),
    [
        (None, 256, HYBRID, "ok"),
        (32, 256, HYBRID, "problem"),
        (32, 256, {"text_config": HYBRID}, "problem"),
        (32, 256, None, "problem"),
        (32, None, HYBRID, "problem"),
        (256, 256, HYBRID, "ok"),
        (32, 256, PLAIN, "ok"),
    ],
)
def test_the_known_copy_on_write_fault_is_found(unit, block, model, level):
    """A match unit below the block on a hybrid model, as long as this vLLM has the fault."""
    pytest.importorskip("vllm")
    engine = {"prefix_match_unit": unit, "block_size": block, "model_config": model}
    (finding,) = doctor_engine.known_faults(engine)
    assert finding.level.value == level
    assert (finding.todo is None) == (level == "ok")


def test_a_vllm_that_has_mended_the_fault_is_believed(tmp_path, monkeypatch):
    """Telling views apart by shape and stride is the mend."""
    folder = tmp_path / "v1" / "worker"
    folder.mkdir(parents=True)
    monkeypatch.setattr(doctor_engine, "engine_folder", lambda: str(tmp_path))
    engine = {"prefix_match_unit": 32, "block_size": 256, "model_config": HYBRID}
    for key, level in (
        ("(cache.device, cache.data_ptr())", "problem"),
        ("(cache.device, cache.data_ptr(), cache.shape, cache.stride())", "ok"),
    ):
        (folder / "utils.py").write_text(
            f"def copy_kv_cache_blocks_inplace(x):\n    key = {key}\n    y = cache.stride(0)\n"
        )
        (finding,) = doctor_engine.known_faults(engine)
        assert finding.level.value == level


def test_no_vllm_is_a_problem(monkeypatch):
    """Nothing else about the engine is guessed then."""
    monkeypatch.setattr(doctor_engine, "engine_folder", lambda: None)
    (finding,) = doctor_engine.versions()
    assert finding.level is doctor.Level.PROBLEM


def test_features_are_looked_for_where_the_installed_vllm_has_them():
    """Every feature that kvtier needs is found in the engine that the tests run with."""
    pytest.importorskip("vllm")
    found = by_name(doctor_engine.versions())
    assert all(finding.level is doctor.Level.OK for finding in found.values()), found


def test_redis_is_reached_written_and_judged(tmp_path):
    """A server without a limit, with noeviction, with a limit; nobody there; never a password."""
    base = {"ram": "8MiB", "staging": "4MiB"}
    for options, level in (
        ([], "hint"),
        (["--maxmemory", "64mb", "--maxmemory-policy", "noeviction"], "hint"),
        (["--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru"], "hint"),
        (["--maxmemory", "64mb", "--maxmemory-policy", "volatile-lru"], "ok"),
    ):
        with RedisServer(*options) as server:
            code, found, _, _ = found_by(json.dumps({**base, "redis": server.url}))
            assert code == 0
            assert found["redis writes"]["level"] == "ok"
            assert found["redis memory"]["level"] == level
            with server.client() as client:
                assert client.keys() == []
    url = "redis://me:s3cret@127.0.0.1:1"
    code, found, data, err = found_by(json.dumps({**base, "redis": url}))
    assert code == 3
    assert found["redis"]["level"] == "problem"
    assert "s3cret" not in json.dumps(data) + err


def test_redis_is_reached_with_all_of_its_settings(tmp_path):
    """Password and life of records may stand beside the URL: they count here as in an engine."""
    options = ("--requirepass", "s3cret", "--maxmemory", "64mb")
    with RedisServer(*options, "--maxmemory-policy", "volatile-lru") as server:
        config = {"ram": "8MiB", "staging": "4MiB", "redis": server.url}
        code, found, data, err = found_by(json.dumps({**config, "redis_password": "s3cret"}))
        assert (code, found["redis writes"]["level"]) == (0, "ok"), found
        assert found["redis memory"]["level"] == "ok"
        assert "s3cret" not in json.dumps(data) + err
        for_ever = {**config, "redis_password": "s3cret", "redis_ttl": 0}
        _, found, _, _ = found_by(json.dumps(for_ever))
        assert found["redis memory"]["level"] == "hint"
        assert "redis_ttl" in found["redis memory"]["todo"]
        assert found_by(json.dumps(config))[0] == 3


def test_a_file_system_that_does_not_suit_is_a_hint(monkeypatch, tmp_path):
    """A network file system or memory: works, and what is better."""
    for kind, level in (("nfs4", doctor.Level.HINT), ("tmpfs", doctor.Level.HINT), ("ext4", None)):
        monkeypatch.setattr(doctor, "_file_system", lambda _folder, kind=kind: kind)
        found = by_name(doctor.disk(str(tmp_path), 1 << 20))
        assert (found["file system"].level if "file system" in found else None) is level


def test_a_folder_that_cannot_be_written_is_a_problem(monkeypatch, tmp_path):
    """Said with the system's own words."""

    def refuse(**_options):
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(doctor.tempfile, "mkstemp", refuse)
    found = list(doctor.disk(str(tmp_path), 1 << 20))
    assert [(f.name, f.level) for f in found] == [("disk", doctor.Level.PROBLEM)]
    assert "Permission denied" in found[0].text
