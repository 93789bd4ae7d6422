"""`kvtier explain`: hashes as vLLM computes them, and each reason that a store can show."""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier.connector import prefix_hash
from kvtier.connector.lookup import MissReason
from kvtier.connector.plan import NamespaceInfo
from kvtier.connector.recorder import Recorder
from kvtier.connector.request_options import RequestOptions
from kvtier.storage.errors import RecordMissing
from kvtier.storage.key import chunk_key, key_name
from kvtier.storage.tier import RecordSpec
from kvtier.tools.recorded import find_request
from kvtier.tools.redis_server import RedisServer
from kvtier.tools.store_disk import DiskStore
from kvtier.tools.store_redis import RedisServerStore

from .stores import NAMESPACES, Folder, Server, golden, here, kvtier

BLOCK, CHUNK = 16, 64
ROOT = hashlib.sha256(pickle.dumps("vllm-none-hash", protocol=5)).digest()
FULL = [{"group": 0, "kind": "full", "window_tokens": None}]


def described(groups=FULL, dtype="torch.bfloat16", ranks=1, root=ROOT, **more):
    return {
        "model": {"path": "tiny", "dtype": dtype},
        "cache": {"hash_block_tokens": BLOCK, "chunk_tokens": CHUNK},
        "groups": groups,
        "parallel": {"tensor_parallel_size": ranks, "pipeline_parallel_size": 1},
        "hash_algorithm": "sha256",
        "root_hash": root.hex(),
        "hash_lookahead_tokens": 0,
        **more,
    }


def chain(tokens, root=ROOT):
    """The oracle: SHA-256 of pickled (parent, tokens, extra), spelt out."""
    out, parent = {}, root
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        value = (parent, tuple(tokens[start : start + BLOCK]), None)
        parent = hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()
        out[start + BLOCK] = parent
    return out


@pytest.fixture
def prompt(tmp_path):
    tokens = [random.Random(7).randrange(32000) for _ in range(300)]
    path = tmp_path / "prompt.json"
    path.write_text(json.dumps({"prompt_token_ids": tokens}))
    return path, tokens


def test_what_was_there_and_went_is_told_from_what_never_was(tmp_path, prompt):
    """Evicted or deleted, a chunk of a folder is remembered; one of another prompt is not."""
    path, tokens = prompt
    (tmp_path / "store").mkdir()
    store = Folder(tmp_path / "store")
    hashes = save(store, tokens, [64, 128, 192])
    name = key_name(chunk_key(hashes[128], 0))
    assert kvtier("rm", store.target, name)[0] == 0
    found = asked(store, path)["namespaces"][0]
    assert (found["hit_tokens"], found["reason"]) == (64, "evicted")
    assert "token 128" in found["detail"]
    other = tmp_path / "other.json"
    other.write_text(json.dumps([*tokens[:64], *range(100)]))
    found = asked(store, other)["namespaces"][0]
    assert (found["hit_tokens"], found["reason"]) == (64, "not_stored")
    (journal,) = (tmp_path / "store").rglob("journal")
    journal.write_bytes(b"\xff\n")
    assert asked(store, path)["namespaces"][0]["reason"] == "gap"


@pytest.fixture(params=["disk", "redis"])
def store(request, tmp_path):
    if request.param == "disk":
        (tmp_path / "store").mkdir()
        yield Folder(tmp_path / "store")
        return
    with RedisServer() as server:
        yield Server(server)


def save(
    store, tokens, ends, group=0, namespace=NAMESPACES[0], rank=0, description=None, root=ROOT
):
    import mmap

    hashes = chain(tokens, root)
    tier = store.tier(namespace, rank, description=description or described())
    for end in ends:
        start = (end - 1) // CHUNK * CHUNK
        key = chunk_key(hashes[end], group)
        tier.put(RecordSpec(key, start, end, 4096), [memoryview(mmap.mmap(-1, 4096))])
    tier.close()
    return hashes


def asked(store, path, *more, code=0):
    found, out, err = kvtier("explain", store.target, path, "--json", *more)
    assert found == code, err
    data = json.loads(out)
    text = kvtier("explain", store.target, path, *more)
    assert text[0] == code
    return data


def test_hashes_are_those_of_the_engine():
    """VLLM's own functions give the same chain, also with a salt and an adapter."""
    kv_cache_utils = pytest.importorskip("vllm.v1.core.kv_cache_utils")
    from vllm.utils.hashing import get_hash_fn_by_name

    tokens = list(range(100))
    for algorithm in ("sha256", "sha256_cbor"):
        engine = get_hash_fn_by_name(algorithm)
        kv_cache_utils.init_none_hash(engine)
        root = bytes(kv_cache_utils.NONE_HASH)
        ours, _ = prefix_hash.hash_function(algorithm)
        for extra, options in (
            (None, {}),
            ([("cache_salt", "s")], {"cache_salt": "s"}),
            ([("lora", "a", "/p")], {"lora": ("a", "/p")}),
        ):
            expected, parent = [], None
            for start in range(0, 96, 16):
                keys = tuple(k for k in extra or () if k[0] == "lora" or start == 0) or None
                parent = kv_cache_utils.hash_block_tokens(
                    engine, parent, tokens[start : start + 16], keys
                )
                expected.append(bytes(parent))
            assert prefix_hash.block_hashes(ours, root, tokens, 16, **options) == expected


def test_without_vllm_sha256_is_spelt_out(monkeypatch):
    """The same hashes where no engine is installed; other algorithms are refused."""
    with_engine = prefix_hash.hash_function("sha256")[0]((b"x", (1, 2), None))
    monkeypatch.setattr(prefix_hash, "_vllm_hashing", lambda: None)
    ours, whose = prefix_hash.hash_function("sha256")
    assert whose == "kvtier"
    assert ours((b"x", (1, 2), None)) == with_engine
    with pytest.raises(prefix_hash.KVTierError):
        prefix_hash.hash_function("sha256_cbor")


def test_a_whole_hit(store, prompt):
    """All chunks and a tail up to the last block: nothing more can be restored."""
    path, tokens = prompt
    save(store, tokens, [64, 128, 192, 256, 288])
    data = asked(store, path)
    golden("explain", data)
    (found,) = data["namespaces"]
    assert (found["hit_tokens"], found["reason"]) == (288, "none")
    assert found["records_found"] == 5
    text = here("explain", store.target, path)[1]
    assert "  everything that can be restored is there\n" in text
    assert "because" not in text


def test_where_the_chain_ends_and_why(store, prompt):
    """Never stored; nothing after a point; a gap with later chunks still there."""
    path, tokens = prompt
    other = [t + 1 for t in tokens]
    save(store, other, [64, 128])
    (found,) = asked(store, path)["namespaces"]
    assert (found["hit_tokens"], found["reason"]) == (0, "never_stored")
    save(store, tokens, [64, 128])
    (found,) = asked(store, path)["namespaces"]
    assert (found["hit_tokens"], found["reason"]) == (128, "not_stored")
    save(store, tokens, [256])
    (found,) = asked(store, path)["namespaces"]
    assert (found["hit_tokens"], found["reason"]) == (128, "gap")
    assert "192" in found["detail"]


def test_a_damaged_chunk_ends_the_hit(store, prompt):
    """The payload is read: a bit turned in it ends the hit before that chunk."""
    path, tokens = prompt
    hashes = save(store, tokens, [64, 128, 192])
    name = key_name(chunk_key(hashes[128], 0))
    if store.kind == "disk":
        (file,) = Path(store.target).rglob(f"{name}.kvt")
        content = bytearray(file.read_bytes())
        content[4100] ^= 1
        file.write_bytes(content)
    else:
        key = f"kvtier:{NAMESPACES[0].hex()}:r0:{{{hashes[128].hex()}}}-g0:h"
        with store.server.client() as client:
            value = bytearray(client.get(key))
            value[-1] ^= 1
            client.set(key, bytes(value))
    (found,) = asked(store, path, code=3)["namespaces"]
    assert (found["hit_tokens"], found["reason"]) == (64, "damaged")
    assert name in found["detail"]
    (found,) = asked(store, path, "--no-check")["namespaces"]
    assert found["hit_tokens"] == 192
    if store.kind == "disk":
        assert kvtier("verify", store.target, "--fix")[0] == 0
        (found,) = asked(store, path)["namespaces"]
        assert (found["hit_tokens"], found["reason"]) == (64, "quarantined")


def test_a_description_that_cannot_be_read_is_a_finding(store, prompt):
    """Exit 3, and the namespace is named once."""
    path, tokens = prompt
    save(store, tokens, [64])
    if store.kind == "disk":
        Path(store.target, NAMESPACES[0].hex(), "namespace.json").write_text("{nothing")
    else:
        with store.server.client() as client:
            client.set(f"kvtier:ns:{NAMESPACES[0].hex()}", "{nothing")
    (found,) = asked(store, path, code=3)["namespaces"]
    assert (found["hit_tokens"], found["reason"]) == (None, "damaged")
    code, out, _ = here("explain", store.target, path)
    assert (code, out.count(NAMESPACES[0].hex())) == (3, 1)


def test_a_chunk_that_goes_while_it_is_read_is_no_damage(store, prompt, monkeypatch):
    """A record that an engine evicts between the look and the read: evicted, exit 0."""
    path, tokens = prompt
    save(store, tokens, [64, 128])

    def check(self, record):
        raise RecordMissing("gone")

    kind = DiskStore if store.kind == "disk" else RedisServerStore
    monkeypatch.setattr(kind, "check", check)
    code, out, _ = here("explain", store.target, path, "--json")
    (found,) = json.loads(out)["namespaces"]
    assert (code, found["hit_tokens"], found["reason"]) == (0, 0, "evicted")


def test_another_namespace_and_the_field_that_differs(store, prompt):
    """The chunks are there for another dtype: both namespaces are told, and what differs."""
    path, tokens = prompt
    save(store, tokens, [64])
    float32 = described(dtype="torch.float32", root=b"r" * 32)
    save(
        store, tokens, [64, 128, 192], namespace=NAMESPACES[1], description=float32, root=b"r" * 32
    )
    first, second = asked(store, path)["namespaces"]
    assert (first["hit_tokens"], second["hit_tokens"]) == (64, 192)
    assert first["differs_from_best"]["namespace"] == NAMESPACES[1].hex()
    assert first["differs_from_best"]["fields"]["model.dtype"] == [
        "torch.bfloat16",
        "torch.float32",
    ]
    assert second["differs_from_best"] is None


def test_groups_that_need_a_window_or_a_state(store, prompt):
    """Windows need only what they reach; a state must be exactly at the boundary."""
    path, tokens = prompt
    groups = [*FULL, {"group": 1, "kind": "sliding_window", "window_tokens": 40}]
    save(store, tokens, [64, 128, 192], description=described(groups))
    save(store, tokens, [128, 192], group=1)
    (found,) = asked(store, path)["namespaces"]
    assert found["hit_tokens"] == 192
    groups = [*FULL, {"group": 1, "kind": "recurrent", "window_tokens": None}]
    space = b"c" * 16
    save(store, tokens, [64, 128, 192], namespace=space, description=described(groups))
    save(store, tokens, [128], group=1, namespace=space, description=described(groups))
    (found,) = asked(store, path, "--namespace", space.hex())["namespaces"]
    assert (found["hit_tokens"], found["reason"]) == (128, "state_missing")


def test_a_rank_that_lacks_its_record_ends_the_hit(store, prompt):
    """A chunk counts only when all ranks have it."""
    path, tokens = prompt
    both = described(ranks=2)
    save(store, tokens, [64, 128], description=both)
    save(store, tokens, [64], rank=1, description=both)
    (found,) = asked(store, path)["namespaces"]
    assert (found["hit_tokens"], found["reason"]) == (64, "rank_missing")
    assert "[1]" in found["detail"]


def test_ranks_that_hold_the_same_store_it_once(store, prompt):
    """Of four ranks in pairs of equal ones two records a chunk are all that there is."""
    path, tokens = prompt
    pairs = described()
    pairs["parallel"] = {"tensor_parallel_size": 4, "pipeline_parallel_size": 1, "kv_replicas": 2}
    for rank, ends in ((0, [64, 128]), (1, [64])):
        save(store, tokens, ends, rank=rank, description=pairs)
    (found,) = asked(store, path)["namespaces"]
    assert (found["hit_tokens"], found["reason"]) == (64, "rank_missing")


def test_a_salt_or_a_tenant_makes_other_keys(store, prompt):
    """With the salt that the request had nothing is found, without it everything."""
    path, tokens = prompt
    save(store, tokens, [64, 128])
    for option in (["--cache-salt", "s"], ["--tenant", "t"]):
        (found,) = asked(store, path, *option)["namespaces"]
        assert (found["hit_tokens"], found["reason"]) == (0, "never_stored")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("1 2 3", 0),
        ("1, 2,\n3", 0),
        ("[1, 2]", 0),
        ('{"prompt": [1, 2]}', 0),
        ('{"count": 2, "max_model_len": 2048, "tokens": [1, 2], "token_strs": null}', 0),
        ("hello", 2),
        ("[1, 2.5]", 2),
        ('{"a": 1}', 2),
        ('{"prompt": "some words"}', 2),
    ],
)
def test_token_ids_are_read_in_any_plain_form(tmp_path, text, code):
    """JSON list, object, vLLM's /tokenize, or numbers; anything else is wrong use in one line."""
    store, path = Folder(tmp_path / "store"), tmp_path / "tokens"
    (tmp_path / "store").mkdir()
    path.write_text(text)
    found, _, err = kvtier("explain", store.target, path)
    assert found == code
    assert len(err.splitlines()) == (1 if code else 0)


# -- by request id ---------------------------------------------------------------------


def record(folder, requests, namespace=NAMESPACES[0], root=ROOT):
    """Let a recorder write requests (id, tokens, arrival), as an engine's does."""
    info = NamespaceInfo(namespace, 0, described(root=root))
    made = Recorder(str(folder), 64 << 20, BLOCK)
    for request_id, tokens, at_s in requests:
        request = SimpleNamespace(
            request_id=request_id,
            arrival_time=time.time() + at_s,
            num_prompt_tokens=len(tokens),
            num_tokens=len(tokens) + 4,
            block_hashes=list(chain(tokens, root).values()),
            status=SimpleNamespace(name="FINISHED_LENGTH_CAPPED"),
        )
        tracker = SimpleNamespace(
            options=RequestOptions(),
            local_tokens=16,
            hits={"disk": 128},
            reason=MissReason.NOT_STORED,
        )
        made.finished(request, tracker, info)
    made.close()


def by_id(store, recording, request_id, *more):
    where = ("--request", request_id, "--recording", recording, *more)
    code, out, err = here("explain", store.target, *where, "--json")
    assert code == 0, err
    code, text, _ = here("explain", store.target, *where)
    assert code == 0
    return json.loads(out), text


def test_a_recorded_request_is_explained_like_its_tokens(store, prompt, tmp_path):
    """The id is enough: the same verdict, and what the engine did at the time."""
    path, tokens = prompt
    save(store, tokens, [64, 128])
    save(store, tokens, [64, 128, 192], namespace=NAMESPACES[1], description=described(ranks=2))
    other = [t + 1 for t in tokens]
    record(
        tmp_path / "rec",
        [
            ("chatcmpl-7-ab12", tokens[:100], 0),
            ("chatcmpl-1-ab12", tokens[:64], 1),
            ("chatcmpl-1-cd34", [*tokens[:160], *other[160:]], 2),
        ],
    )
    record(tmp_path / "rec", [("chatcmpl-1-ef56", tokens, 3)])
    record(tmp_path / "rec", [("chatcmpl-1-aa00", other, -5)])
    record(
        tmp_path / "rec",
        [
            ("chatcmpl-17-ab12", other, 4),
            ("cmpl-5-0-ab12", tokens, 5),
            ("1_chatcmpl-6-ab12", tokens[:200], 6),
        ],
    )
    by_tokens = asked(store, path)
    golden("explain", by_tokens)
    assert by_tokens["request"] is None
    found, text = by_id(store, tmp_path / "rec", "chatcmpl-1")
    for verdict in (*by_tokens["namespaces"], *found["namespaces"]):
        verdict.pop("hash_function")
    assert found["namespaces"] == by_tokens["namespaces"]
    assert found["prompt_tokens"] == 300
    said = found["request"]
    assert abs(said.pop("at_s") - time.time() - 3) < 60
    assert said == {
        "request": "chatcmpl-1-ef56",
        "namespace": NAMESPACES[0].hex(),
        "device_tokens": 16,
        "hit_tokens": {"disk": 128},
        "miss": "not_stored",
        "end": "length_capped",
        "others": 3,
    }
    assert "16 tokens on the device, 128 from disk" in text
    assert "because: not stored" in text
    found, _ = by_id(store, tmp_path / "rec", "chatcmpl-1-cd34")
    assert found["prompt_tokens"] == 300
    assert found["namespaces"][0]["hit_tokens"] == 128
    for name, recorded in (("cmpl-5", "cmpl-5-0-ab12"), ("chatcmpl-6", "1_chatcmpl-6-ab12")):
        found, _ = by_id(store, tmp_path / "rec", name, "--no-check")
        assert found["request"]["request"] == recorded
    found, _ = by_id(store, tmp_path / "rec", "chatcmpl-17-ab12", "--no-check")
    assert found["namespaces"][0]["reason"] == "never_stored"


def test_recorded_hashes_of_another_kind(store, prompt, tmp_path):
    """A namespace that hashes in another way is not explained with hashes that mean nothing."""
    _, tokens = prompt
    save(store, tokens, [64])
    record(tmp_path / "rec", [("r-1", tokens, 0)], root=b"another" * 4)
    found, _ = by_id(store, tmp_path / "rec", "r-1")
    assert [v["reason"] for v in found["namespaces"]] == ["unknown"]
    assert "another way" in found["namespaces"][0]["detail"]


def test_hashes_are_put_together_from_earlier_requests(tmp_path):
    """A request that shares with one that shares: each by its own part."""
    header = {"format": "kvtier-recording", "version": 1, "block_tokens": 16, "started_at_s": 5.0}
    rows = [(None, "aa bb cc dd"), ([0, 2], "ee ff 77"), ([1, 3], "88"), ([2, 4], ""), ([3, 2], "")]
    lines = [header]
    for number, (base, hashes) in enumerate(rows):
        line = {"t": 1, "request": f"r-{number}", "prompt_tokens": 64, "hashes": hashes.split()}
        lines.append(line if base is None else {**line, "base": base})
    path = tmp_path / "recording.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = [find_request(str(path), f"r-{n}") for n in range(5)]
    assert [f.at_s for f in found] == [6.0] * 5
    assert [" ".join(h.hex() for h in f.hashes) for f in found] == [
        "aa bb cc dd",
        "aa bb ee ff 77",
        "aa bb ee 88",
        "aa bb ee 88",
        "aa bb",
    ]


def test_requests_that_cannot_be_found(prompt, tmp_path):
    """One line each: no such request, no recording, half a question, a broken line."""
    path, tokens = prompt
    store = tmp_path / "store"
    store.mkdir()
    record(tmp_path / "rec", [("r-1", tokens, 0), ("r-2", tokens, 0)])
    (file,) = (tmp_path / "rec").iterdir()
    broken = tmp_path / "broken.jsonl"
    broken.write_text(file.read_text().replace('"base":[0,', '"base":[7,'))
    for arguments, code, words in (
        (("--request", "r-3", "--recording", file), 1, "no request 'r-3'"),
        (("--request", "r-1", "--recording", tmp_path / "none"), 2, "No such file"),
        (("--request", "r-1", "--recording", path), 5, "no recording"),
        (("--request", "r-1"), 2, "--request needs --recording"),
        ((), 2, "give token ids"),
        ((path, "--recording", file), 2, "goes with --request"),
        (("--request", "r-2", "--recording", broken), 5, "is broken"),
    ):
        got, _, err = here("explain", store, *arguments)
        assert (got, words in err, err.count("\n")) == (code, True, 1), (arguments, err)
