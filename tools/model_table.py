"""Public models by name: the fields of their config.json that decide the size of their KV."""

from __future__ import annotations

from typing import Any


def _plain(layers: int, kv_heads: int, head_dim: int, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "dtype": "bfloat16",
        **more,
    }


def _gemma3(layers: int, kv_heads: int, head_dim: int, window: int) -> dict[str, Any]:
    more = {"model_type": "gemma3_text", "sliding_window": window, "sliding_window_pattern": 6}
    return _plain(layers, kv_heads, head_dim, **more)


def _gpt_oss(layers: int) -> dict[str, Any]:
    types = ["sliding_attention", "full_attention"] * (layers // 2)
    return _plain(layers, 8, 64, model_type="gpt_oss", sliding_window=128, layer_types=types)


def _llama4() -> dict[str, Any]:
    types = (["chunked_attention"] * 3 + ["full_attention"]) * 12
    return _plain(
        48, 8, 128, model_type="llama4_text", attention_chunk_size=8192, layer_types=types
    )


def _mla(layers: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "deepseek_v3",
        "num_hidden_layers": layers,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "dtype": "bfloat16",
        **more,
    }


def _qwen3_next() -> dict[str, Any]:
    return _plain(
        48,
        2,
        256,
        model_type="qwen3_next",
        full_attention_interval=4,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
    )


MODELS: dict[str, dict[str, Any]] = {
    "deepseek-ai/DeepSeek-R1": _mla(61),
    "deepseek-ai/DeepSeek-V3": _mla(61),
    "deepseek-ai/DeepSeek-V3.2": _mla(61, index_head_dim=128),
    "google/gemma-3-1b-it": _gemma3(26, 1, 256, 512),
    "google/gemma-3-4b-it": _gemma3(34, 4, 256, 1024),
    "google/gemma-3-12b-it": _gemma3(48, 8, 256, 1024),
    "google/gemma-3-27b-it": _gemma3(62, 16, 128, 1024),
    "HuggingFaceTB/SmolLM2-135M-Instruct": _plain(30, 3, 64),
    "HuggingFaceTB/SmolLM2-360M-Instruct": _plain(32, 5, 64),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": _plain(24, 32, 64),
    "meta-llama/Meta-Llama-3-8B-Instruct": _plain(32, 8, 128),
    "meta-llama/Meta-Llama-3-70B-Instruct": _plain(80, 8, 128),
    "meta-llama/Llama-3.1-8B-Instruct": _plain(32, 8, 128),
    "meta-llama/Llama-3.1-70B-Instruct": _plain(80, 8, 128),
    "meta-llama/Llama-3.1-405B-Instruct": _plain(126, 8, 128),
    "meta-llama/Llama-3.2-1B-Instruct": _plain(16, 8, 64),
    "meta-llama/Llama-3.2-3B-Instruct": _plain(28, 8, 128),
    "meta-llama/Llama-3.3-70B-Instruct": _plain(80, 8, 128),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": _llama4(),
    "microsoft/phi-4": _plain(40, 10, 128),
    "mistralai/Mistral-7B-Instruct-v0.3": _plain(32, 8, 128),
    "mistralai/Mistral-Small-24B-Instruct-2501": _plain(40, 8, 128),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": _plain(32, 8, 128),
    "mistralai/Mixtral-8x22B-Instruct-v0.1": _plain(56, 8, 128),
    "moonshotai/Kimi-K2-Instruct": _mla(61),
    "openai/gpt-oss-20b": _gpt_oss(24),
    "openai/gpt-oss-120b": _gpt_oss(36),
    "Qwen/Qwen2.5-7B-Instruct": _plain(28, 4, 128),
    "Qwen/Qwen2.5-32B-Instruct": _plain(64, 8, 128),
    "Qwen/Qwen2.5-72B-Instruct": _plain(80, 8, 128),
    "Qwen/Qwen3-0.6B": _plain(28, 8, 128),
    "Qwen/Qwen3-1.7B": _plain(28, 8, 128),
    "Qwen/Qwen3-4B": _plain(36, 8, 128),
    "Qwen/Qwen3-8B": _plain(36, 8, 128),
    "Qwen/Qwen3-14B": _plain(40, 8, 128),
    "Qwen/Qwen3-32B": _plain(64, 8, 128),
    "Qwen/Qwen3-30B-A3B": _plain(48, 4, 128),
    "Qwen/Qwen3-235B-A22B": _plain(94, 4, 128),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": _plain(48, 4, 128),
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": _plain(62, 8, 128),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": _qwen3_next(),
    "zai-org/GLM-4.5": _plain(92, 8, 128),
    "zai-org/GLM-4.5-Air": _plain(46, 8, 128),
}
