"""The namespace: every field that changes KV bytes, changed alone, gives another digest."""

from __future__ import annotations

import copy
import dataclasses
import json
import warnings
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.connector import engine_api, identity, namespace
from kvtier.connector.geometry import Geometry, GroupGeometry, GroupKind, Region
from kvtier.connector.weights import WeightsCache, WeightsError


@dataclasses.dataclass(frozen=True)
class FullAttentionSpec:
    block_size: int = 16
    num_kv_heads: int = 2
    head_size: int = 8
    dtype: str = "torch.bfloat16"
    page_size_bytes: int = 1024


class HfConfig(SimpleNamespace):
    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class Backend(Enum):
    FLASH_ATTN = "flash"
    TRITON = "triton"


def write_model(folder: Path, seed: int = 1) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes([seed]) * 1000)
    return folder


class Engine:
    """One engine's configuration objects, as far as the namespace reads them."""

    def __init__(self, tmp_path: Path) -> None:
        model = tmp_path / "model"
        if not model.exists():
            write_model(model)
            write_model(tmp_path / "draft")
        hf = HfConfig(
            hidden_size=64, rope_theta=10_000.0, rope_scaling={"rope_type": "yarn", "factor": 4.0}
        )
        self.vllm = SimpleNamespace(
            model_config=SimpleNamespace(
                model=str(model), revision=None, code_revision=None, dtype="torch.bfloat16",
                quantization=None, quantization_config=None, model_impl="auto",
                disable_sliding_window=False, hf_config=hf, hf_text_config=hf, hf_overrides={},
                max_model_len=4096, seed=0, multimodal_config=None,
            ),
            load_config=SimpleNamespace(load_format="auto", download_dir=None),
            cache_config=SimpleNamespace(
                cache_dtype="auto", kv_cache_dtype_skip_layers=[], mamba_cache_dtype="auto",
                mamba_ssm_cache_dtype="auto", mamba_cache_mode="align", block_size=16,
                prefix_caching_hash_algo="sha256",
            ),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=2, pipeline_parallel_size=1, decode_context_parallel_size=1,
                prefill_context_parallel_size=1, cp_kv_cache_interleave_size=1,
                dcp_kv_cache_interleave_size=1, rank=0, data_parallel_rank=0,
            ),
            attention_config=SimpleNamespace(backend=None, backend_per_kind={}),
            speculative_config=SimpleNamespace(
                method="eagle", model=str(tmp_path / "draft"), revision=None,
                num_speculative_tokens=3, quantization=None, kv_cache_dtype=None,
                draft_model_config=SimpleNamespace(
                    model=str(tmp_path / "draft"), revision=None, dtype="torch.bfloat16", seed=0,
                    hf_config=HfConfig(hidden_size=32),
                ),
            ),
            lora_config=None,
            device_config=SimpleNamespace(device_type="cuda"),
            compilation_config=SimpleNamespace(static_forward_context={}),
        )  # fmt: skip
        self.spec = FullAttentionSpec()
        group = GroupGeometry(
            0,
            GroupKind.FULL,
            16,
            None,
            (Region("l.0", 0, 1024, 1024), Region("l.1", 9, 1024, 1024)),
        )
        self.geometry = Geometry((group,), 16, 16, 16, 256, 100, "LBHNC", 1)
        self.packing: list[str] | None = ["vec"]
        self.replicas = 1
        self.tenant: str | None = None
        self.root = ("sha256", b"\1" * 32)
        self.version = "0.32.0"
        self.epoch = 0
        self.facts = {"backends": {"l.0": "flash"}}

    def change_group(self, **changes: Any) -> None:
        group = dataclasses.replace(self.geometry.groups[0], **changes)
        self.geometry = dataclasses.replace(self.geometry, groups=(group,))

    def change_geometry(self, **changes: Any) -> None:
        self.geometry = dataclasses.replace(self.geometry, **changes)

    def namespace(self, patch: pytest.MonkeyPatch) -> namespace.Namespace:
        patch.setattr(engine_api, "root_hash", lambda _: self.root)
        patch.setattr(engine_api, "engine_version", lambda: self.version)
        patch.setattr(engine_api, "cpu_packing", lambda *_: self.packing)
        config = SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=self.spec)],
            kv_tp_replicas=self.replicas,
        )
        fields = namespace.static_fields(
            self.vllm, config, self.geometry, weights_cache=WeightsCache(), tenant=self.tenant
        )
        root = namespace.root_fields(self.vllm, self.epoch)
        assert root is not None
        return namespace.namespace_of({**fields, **root, "ranks": self.facts})


def setter(path: str, value: Any) -> Any:
    """Return a change that sets an attribute of the vLLM configuration."""

    def apply(engine: Engine) -> None:
        *owners, name = path.split(".")
        owner = engine.vllm
        for part in owners:
            owner = getattr(owner, part)
        assert getattr(owner, name, None) != value
        setattr(owner, name, value)

    return apply


def own(name: str, value: Any) -> Any:
    return lambda engine: setattr(engine, name, value)


def other_weights(engine: Engine) -> None:
    Path(engine.vllm.model_config.model, "model.safetensors").write_bytes(b"\7" * 1000)


def other_draft_weights(engine: Engine) -> None:
    Path(engine.vllm.speculative_config.model, "model.safetensors").write_bytes(b"\7" * 1000)


def other_rope(engine: Engine) -> None:
    engine.vllm.model_config.hf_config.rope_theta = 500_000.0


def other_spec(**changes: Any) -> Any:
    return lambda engine: setattr(engine, "spec", FullAttentionSpec(**changes))


CHANGES = {
    "weights, same sizes": other_weights,
    "draft weights, same sizes": other_draft_weights,
    "revision": setter("model_config.revision", "abc"),
    "code revision": setter("model_config.code_revision", "abc"),
    "dtype": setter("model_config.dtype", "torch.float32"),
    "quantization": setter("model_config.quantization", "fp8"),
    "quantization config": setter("model_config.quantization_config", {"bits": 4}),
    "implementation": setter("model_config.model_impl", "transformers"),
    "sliding window off": setter("model_config.disable_sliding_window", True),
    "rope base": other_rope,
    "context length under a rope that depends on it": setter("model_config.max_model_len", 8192),
    "overrides": setter("model_config.hf_overrides", {"rope_theta": 5}),
    "media processing": setter(
        "model_config.multimodal_config", SimpleNamespace(mm_processor_kwargs={"crops": 4})
    ),
    "KV dtype": setter("cache_config.cache_dtype", "fp8"),
    "KV dtype by layer": setter("cache_config.kv_cache_dtype_skip_layers", ["0"]),
    "state dtype": setter("cache_config.mamba_cache_dtype", "float32"),
    "ssm state dtype": setter("cache_config.mamba_ssm_cache_dtype", "float32"),
    "block size": setter("cache_config.block_size", 32),
    "tensor parallel": setter("parallel_config.tensor_parallel_size", 4),
    "replicated KV": own("replicas", 2),
    "pipeline parallel": setter("parallel_config.pipeline_parallel_size", 2),
    "context parallel": setter("parallel_config.decode_context_parallel_size", 2),
    "prefill context parallel": setter("parallel_config.prefill_context_parallel_size", 2),
    "interleaving": setter("parallel_config.cp_kv_cache_interleave_size", 16),
    "attention asked for": setter("attention_config.backend", Backend.TRITON),
    "attention by kind": setter("attention_config.backend_per_kind", {"full": Backend.TRITON}),
    "CPU packing": own("packing", ["amx"]),
    "class overrides": setter("model_config.model_class_overrides", {"A": "b:C"}),
    "device": setter("device_config.device_type", "rocm"),
    "no speculation": setter("speculative_config", None),
    "speculation method": setter("speculative_config.method", "mtp"),
    "speculated tokens": setter("speculative_config.num_speculative_tokens", 4),
    "draft KV dtype": setter("speculative_config.kv_cache_dtype", "fp8"),
    "draft dtype": setter("speculative_config.draft_model_config.dtype", "torch.float16"),
    "adapters' dtype": setter("lora_config", SimpleNamespace(lora_dtype="torch.float32")),
    "hash lookahead": setter("num_hash_lookahead_tokens", 1),
    "dummy weights": setter("load_config.load_format", "dummy"),
    "spec heads": other_spec(num_kv_heads=4),
    "spec head size": other_spec(head_size=16),
    "spec dtype": other_spec(dtype="torch.float16"),
    "spec page": other_spec(page_size_bytes=2048),
    "group kind": lambda e: e.change_group(kind=GroupKind.SLIDING_WINDOW),
    "group window": lambda e: e.change_group(window_tokens=64),
    "group block": lambda e: e.change_group(block_tokens=32),
    "draft group": lambda e: e.change_group(is_draft=True),
    "page bytes": lambda e: e.change_group(regions=(Region("l.0", 0, 1024, 512),)),
    "layout": lambda e: e.change_geometry(layout="LBNHC"),
    "hash block": lambda e: e.change_geometry(hash_block_tokens=8),
    "chunk": lambda e: e.change_geometry(chunk_tokens=512),
    "hash algorithm": own("root", ("sha256_cbor", b"\1" * 32)),
    "root hash": own("root", ("sha256", b"\2" * 32)),
    "engine version": own("version", "0.33.1"),
    "epoch": own("epoch", 1),
    "tenant": own("tenant", "a"),
    "what ranks say": own("facts", {"backends": {"l.0": "triton"}}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_field_changed_alone_is_another_namespace(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One change, another digest; the plain words differ as well."""
    before = Engine(tmp_path).namespace(monkeypatch)
    engine = Engine(tmp_path)
    CHANGES[name](engine)
    after = engine.namespace(monkeypatch)
    assert after.digest != before.digest
    assert {**after.describe(), "namespace": 0} != {**before.describe(), "namespace": 0}


def test_all_changes_differ_from_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No two changes fall together."""
    seen = set()
    for number, change in enumerate(CHANGES.values()):
        folder = tmp_path / str(number)
        folder.mkdir()
        engine = Engine(
            tmp_path / "shared" if (tmp_path / "shared").exists() else _shared(tmp_path)
        )
        if change in (other_weights, other_draft_weights):
            continue
        change(engine)
        seen.add(engine.namespace(monkeypatch).digest)
    assert len(seen) == len(CHANGES) - 2


def _shared(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    ("env", "value"),
    [("VLLM_SSM_CONV_STATE_LAYOUT", "DS"), ("VLLM_PP_LAYER_PARTITION", "1,3")],
)
def test_environment_that_moves_bytes_counts(
    env: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables that change state layout or which rank has which layer are fields."""
    monkeypatch.delenv(env, raising=False)
    before = Engine(tmp_path).namespace(monkeypatch)
    monkeypatch.setenv(env, value)
    assert Engine(tmp_path).namespace(monkeypatch).digest != before.digest


SAME = {
    "pool size": lambda e: e.change_geometry(num_blocks=999),
    "rank": setter("parallel_config.rank", 1),
    "data parallel rank": setter("parallel_config.data_parallel_rank", 1),
    "patch version": own("version", "0.32.7"),
    "seed": setter("model_config.seed", 5),
    "where a layer lies": lambda e: e.change_group(
        regions=(Region("l.0", 77, 1024, 1024), Region("l.1", 5, 1024, 1024))
    ),
    "library version in the configuration": setter(
        "model_config.hf_config.transformers_version", "9"
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_what_does_not_change_bytes_does_not_split(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines that differ in these share."""
    engine = Engine(tmp_path)
    before = engine.namespace(monkeypatch)
    SAME[name](engine)
    assert engine.namespace(monkeypatch).digest == before.digest


def test_context_length_does_not_split_plain_ropes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where keys do not depend on the context length, engines of different lengths share."""
    digests = set()
    for length in (4096, 8192):
        engine = Engine(tmp_path)
        engine.vllm.model_config.hf_config.rope_scaling = {"rope_type": "llama3"}
        engine.vllm.model_config.max_model_len = length
        digests.add(engine.namespace(monkeypatch).digest)
    assert len(digests) == 1


def test_dummy_weights_depend_on_the_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up weights of two seeds never share."""
    digests = set()
    for seed in (0, 1):
        engine = Engine(tmp_path)
        engine.vllm.load_config.load_format = "dummy"
        engine.vllm.model_config.seed = seed
        digests.add(engine.namespace(monkeypatch).digest)
    assert len(digests) == 2


def test_weights_that_cannot_be_found_share_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is not on this machine raises instead of getting a namespace by its name."""
    engine = Engine(tmp_path)
    engine.vllm.model_config.model = "nobody/nothing"
    with pytest.raises(WeightsError):
        engine.namespace(monkeypatch)


def test_namespace_json_is_plain_and_keeps_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The description is JSON that names the model, and a tenant's word is not in it."""
    engine = Engine(tmp_path)
    engine.tenant = "hunter2"
    made = engine.namespace(monkeypatch)
    text = json.dumps(made.describe())
    assert str(tmp_path / "model") in text
    assert made.digest.hex() in text
    assert "hunter2" not in text
    assert namespace.digest_of(json.loads(json.dumps(dict(made.fields)))) == made.digest


def test_the_digest_is_stable() -> None:
    """Golden: the same fields give the same 16 bytes in every release."""
    digest = namespace.digest_of({"b": [1, "x", None], "a": {"c": True}})
    assert digest.hex() == "725fe2de3fa5dc0d0a7042fda94b2af0"
    assert namespace.digest_of({"a": {"c": True}, "b": [1, "x", None]}) == digest


def test_no_namespace_before_the_root_hash_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before EngineCore has set the root hash there are no root fields."""
    monkeypatch.setattr(engine_api, "root_hash", lambda _: None)
    assert namespace.root_fields(SimpleNamespace()) is None


@pytest.mark.parametrize(
    ("algorithm", "seed", "random"),
    [
        ("sha256", None, False),
        ("sha256_cbor", None, False),
        ("xxhash", None, True),
        ("xxhash_cbor", None, True),
        ("builtin", None, True),
        ("xxhash", "0", False),
    ],
)
def test_a_random_root_is_known_as_such(
    algorithm: str, seed: str | None, random: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hashes that start from a seed of their own are told apart from those that all share."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own
        pytest.importorskip("vllm.v1.core.kv_cache_utils")
    if seed is None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    else:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    config = SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm))
    assert engine_api.root_hash_is_random(config) is random


def test_values_that_print_an_address_do_not_split_starts() -> None:
    """An object without a text of its own counts by its class, a function by its name."""

    class Odd:
        pass

    assert identity.plain(Odd()) == identity.plain(Odd()) == "Odd"
    assert identity.plain({"f": len}) == {"f": "builtins.len"}
    assert identity.plain({3, 1}) == identity.plain({1, 3})
    assert identity.plain([Backend.TRITON, (1, None)]) == ["TRITON", [1, None]]


def test_ranks_tell_their_layers_and_backends(tmp_path: Path) -> None:
    """A rank's facts differ when its layers, their sizes or its backends do, and are plain."""

    class Layer:
        def get_attn_backend(self) -> type:
            return Backend

    engine = Engine(tmp_path)
    facts = [namespace.worker_facts(engine.vllm, engine.geometry)]
    engine.vllm.compilation_config.static_forward_context = {"l.0": Layer(), "moe": object()}
    facts.append(namespace.worker_facts(engine.vllm, engine.geometry))
    engine.change_group(regions=(Region("l.5", 0, 1024, 1024),))
    facts.append(namespace.worker_facts(engine.vllm, engine.geometry))
    texts = {json.dumps(copy.deepcopy(f)) for f in facts}
    assert len(texts) == 3
    assert list(facts[1]["backends"]) == ["l.0"]
