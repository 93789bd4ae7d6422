"""Adapters and speculation: what must not be shared, and what must not be stored."""

from __future__ import annotations

import json

import numpy as np
import pytest

from . import models
from .harness import CHUNK_TOKENS, FLOAT32_TOLERANCE, Engine, prompt

N = 6
TOKENS = prompt(420, 70)


def make_adapter(folder, seed):
    """A LoRA adapter of rank 8 on every attention projection, strong enough to be seen."""
    import torch
    from safetensors.torch import save_file

    rng = torch.Generator().manual_seed(seed)
    config = models.LLAMA.config
    hidden, head = config["hidden_size"], config["head_dim"]
    width = {
        "q_proj": head * config["num_attention_heads"],
        "k_proj": head * config["num_key_value_heads"],
        "v_proj": head * config["num_key_value_heads"],
    }
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, out in width.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(8, hidden, generator=rng) * 0.1
            tensors[f"{at}.lora_B.weight"] = torch.randn(out, 8, generator=rng) * 0.1
    folder.mkdir()
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "r": 8,
                "lora_alpha": 16,
                "target_modules": sorted(width),
                "bias": "none",
                "base_model_name_or_path": "tiny",
            }
        )
    )
    return str(folder)


def test_adapters_never_share(tmp_path):
    """Two adapters and the bare model, one prompt: each restores its own KV and nobody else's."""
    from vllm.lora.request import LoRARequest

    adapters = [
        None,
        *(
            LoRARequest(name, i, make_adapter(tmp_path / name, i))
            for i, name in enumerate(("one", "two"), 1)
        ),
    ]
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    with Engine(models.LLAMA, prefix_caching=False, **lora) as engine:
        right = [engine.ask(TOKENS, N, lora=adapter) for adapter in adapters]
    assert min(right[0].distance(right[1]), right[1].distance(right[2])) > 0.01
    with Engine(models.LLAMA, {"ram": "64MiB"}, **lora) as engine:
        for restored in (False, True):
            for adapter, expected in zip(adapters, right, strict=True):
                answer = engine.ask(TOKENS, N, lora=adapter)
                assert answer.distance(expected) <= FLOAT32_TOLERANCE
                assert (answer.restored_tokens >= CHUNK_TOKENS) == restored
                engine.forget()
        engine.assert_clean()


def stored(engine):
    """Key to the values of its blocks, of everything in RAM."""
    engine.drain()
    group = engine.half.geometry.groups[0]
    arena = engine.worker._arena
    out = {}
    for key, entry in engine.half.catalog._entries.items():
        views = arena.buffers(entry.pages.tolist(), group.block_bytes)
        out[key] = np.concatenate([np.frombuffer(view, np.float32) for view in views])
    return out


@pytest.fixture(scope="module")
def repetitive():
    phrase = prompt(23, 71)
    return [(phrase * 20)[:300], prompt(280, 72), (prompt(11, 73) * 30)[:256]]


def test_speculation_stores_what_no_speculation_stores(repetitive):
    """With n-gram speculation, drafts rejected and accepted: the same records, the same bytes."""
    n = 70
    speculative = {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
    with Engine(models.LLAMA, {"ram": "64MiB"}) as engine:
        right = engine.ask_each(repetitive, n)
        plain = stored(engine)
    with Engine(models.LLAMA, {"ram": "64MiB"}, speculative_config=speculative) as engine:
        drafted = []
        update = engine.scheduler.make_spec_decoding_stats

        def counted(*args, **kwargs):
            drafted.append(args)
            return update(*args, **kwargs)

        engine.scheduler.make_spec_decoding_stats = counted
        for restored in (False, True):
            for tokens, expected in zip(repetitive, right, strict=True):
                answer = engine.ask(tokens, n)
                assert answer.tokens == expected.tokens
                assert answer.distance(expected) <= FLOAT32_TOLERANCE
                assert (answer.restored_tokens > 0) == restored
            kept = stored(engine)
            assert kept.keys() == plain.keys()
            for key, values in kept.items():
                assert np.allclose(values, plain[key], atol=1e-3)
            engine.forget()
        assert drafted, "nothing was speculated"
        engine.assert_clean()
