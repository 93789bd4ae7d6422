"""The namespace read from vLLM's own configuration: what people set is really seen in it."""

from __future__ import annotations

import json
import warnings

import pytest

from kvtier.connector import engine_api, identity, namespace
from kvtier.connector.geometry import Geometry, GroupGeometry, GroupKind, Region
from kvtier.connector.weights import WeightsCache

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's own
    arg_utils = pytest.importorskip("vllm.engine.arg_utils")

pytestmark = pytest.mark.filterwarnings("ignore")

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
}
GEOMETRY = Geometry(
    (GroupGeometry(0, GroupKind.FULL, 32, None, (Region("l", 0, 4096, 4096),)),),
    32, 32, 32, 256, 100, "LBHNC", 1,
)  # fmt: skip

CHANGES = {
    "nothing": {},
    "rope": {"hf_overrides": {"rope_theta": 500.0}},
    "rope scaling": {"hf_overrides": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}},
    "dtype": {"dtype": "bfloat16"},
    "KV dtype": {"kv_cache_dtype": "bfloat16"},
    "block size": {"block_size": 64},
    "tensor parallel": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    "pipeline parallel": {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
    "hash algorithm": {"prefix_caching_hash_algo": "sha256_cbor"},
    "revision": {"revision": "other"},
    "implementation": {"model_impl": "transformers"},
    "dummy weights": {"load_format": "dummy"},
    "adapters": {"enable_lora": True},
    "speculation": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 2,
            "prompt_lookup_max": 3,
        }
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}weights")
    return folder


def configuration(model, **more):
    more = {"dtype": "float32", "block_size": 32, **more}
    return arg_utils.EngineArgs(
        model=str(model), skip_tokenizer_init=True, **more
    ).create_engine_config()


def fields_of(vllm_config):
    class Groups:
        kv_cache_groups = ()

    return {
        "model": identity.model_fields(vllm_config, WeightsCache()),
        "cache": identity.cache_fields(vllm_config, GEOMETRY),
        "parallel": identity.parallel_fields(vllm_config, Groups),
        "speculation": identity.speculation_fields(vllm_config, WeightsCache()),
        "adapters": identity.adapter_fields(vllm_config),
        "hash_algorithm": vllm_config.cache_config.prefix_caching_hash_algo,
    }


def test_what_people_set_is_another_namespace(model, monkeypatch):
    """Each argument of vLLM's that changes KV, changed alone; and nothing changes by itself."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    digests = {}
    for name, change in CHANGES.items():
        digests[name] = namespace.digest_of(fields_of(configuration(model, **change)))
    again = namespace.digest_of(fields_of(configuration(model)))
    assert digests["nothing"] == again
    assert len(set(digests.values())) == len(CHANGES), digests


def test_every_name_that_is_read_exists(model, monkeypatch):
    """A field that vLLM has renamed would read as None for ever, and tell nothing apart."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = configuration(model, **CHANGES["speculation"])
    asked = {}

    class Watched:
        def __init__(self, real):
            self._real = real

        def __getattr__(self, name):
            missing = not hasattr(self._real, name)
            asked.setdefault(type(self._real).__name__, {})[name] = missing
            return getattr(self._real, name)

    class Whole:
        def __getattr__(self, name):
            real = getattr(config, name)
            return Watched(real) if name.endswith("_config") and real is not None else real

    fields_of(Whole())
    missing = {f"{owner}.{n}" for owner, names in asked.items() for n, no in names.items() if no}
    assert missing <= {"CacheConfig.calculate_kv_scales"}, missing  # only older engines have it


@pytest.mark.parametrize("isa", ["vec", "amx"])
def test_cpu_packing_is_what_the_attention_chooses(model, monkeypatch, isa):
    """The instruction set decides how blocks are packed; another one is another packing."""
    from types import SimpleNamespace

    from vllm.v1.attention.backends import cpu_attn

    seen = []

    def choose(dtype, block_size, head_size=None, kv_cache_dtype=None):
        seen.append((str(dtype), block_size, head_size))
        return isa

    monkeypatch.setattr(cpu_attn, "_get_attn_isa", choose)
    config = configuration(model)
    full = type("FullAttentionSpec", (), {"block_size": 32, "head_size": 64})()
    state = type("MambaSpec", (), {"block_size": 32})()
    assert engine_api.cpu_packing(config, [full, state]) == [isa, "none"]
    assert seen == [("torch.float32", 32, 64)]
    config.device_config = SimpleNamespace(device_type="cuda")
    assert engine_api.cpu_packing(config, [full]) is None
