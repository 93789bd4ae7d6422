"""Tiny random models whose output shows damaged KV, for the real engine.

With the usual initialisation such models print one token for ever and all logprobs look
alike. These have a larger one, so that a changed block changes logprobs and, but for the
recurrent family, tokens. Made once per configuration into the model cache, seeded, no network.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from kvtier.tools.models import made_once

SEED = 20
VOCAB_TOKENS = 1024
CONTEXT_TOKENS = 8192
SLIDING_WINDOW_TOKENS = 64
CHUNKED_LOCAL_TOKENS = 128


@dataclass(frozen=True)
class TinyModel:
    """One family: how transformers spells it, and what vLLM needs to run it on the CPU."""

    name: str
    config_class: str
    config: dict
    dtype: str = "float32"
    groups: int = 1  # KV cache groups that vLLM makes of it
    shows_damage_in_tokens: bool = True

    def folder(self, root: Path | None = None) -> Path:
        """Return its Hugging Face folder, made on first use."""
        digest = hashlib.sha256(
            json.dumps([self.config_class, self.config, self.dtype, SEED], sort_keys=True).encode()
        ).hexdigest()[:12]
        return made_once(f"{self.name}-{digest}", self._make, root)

    def _make(self, out: Path) -> None:
        import torch
        import transformers

        config = getattr(transformers, self.config_class)(**self.config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, self.dtype)
            )
        model.save_pretrained(out)


def _common(**overrides: object) -> dict:
    return {
        "vocab_size": VOCAB_TOKENS,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": CONTEXT_TOKENS,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
        **overrides,
    }


LLAMA = TinyModel("tiny-llama", "LlamaConfig", _common(initializer_range=0.15))

GEMMA3 = TinyModel(
    "tiny-gemma3",
    "Gemma3TextConfig",
    _common(
        initializer_range=0.05,
        tie_word_embeddings=False,
        query_pre_attn_scalar=64,
        sliding_window=SLIDING_WINDOW_TOKENS,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    groups=2,
)

GPT_OSS = TinyModel(
    "tiny-gpt-oss",
    "GptOssConfig",
    _common(
        initializer_range=0.15,
        intermediate_size=256,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=SLIDING_WINDOW_TOKENS,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    groups=2,
)

MLA = TinyModel(
    "tiny-mla",
    "DeepseekV2Config",
    {
        "vocab_size": VOCAB_TOKENS,
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 3,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,  # with the rotary part what vLLM's CPU kernel is made for
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": CONTEXT_TOKENS,
        "initializer_range": 0.1,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    },
    dtype="bfloat16",
)

QWEN3_NEXT = TinyModel(
    "tiny-qwen3-next",
    "Qwen3NextConfig",
    _common(
        initializer_range=0.1,
        num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
    ),
    dtype="bfloat16",
    groups=2,
    shows_damage_in_tokens=False,
)


@dataclass(frozen=True)
class RecurrentDrafting(TinyModel):
    """Qwen3-Next with a draft layer; embeddings so large that a few drafts are right."""

    @property
    def speculation(self) -> dict:
        """What vLLM is to be told."""
        return {"method": "mtp", "num_speculative_tokens": 2}

    def _make(self, out: Path) -> None:
        import torch
        from safetensors.torch import load_file, save_file

        super()._make(out)
        weights = load_file(str(out / "model.safetensors"))
        weights["model.embed_tokens.weight"] *= 40
        n, dtype = self.config["hidden_size"], getattr(torch, self.dtype)
        layer = "model.layers.3."
        head = {
            name.replace(layer, "mtp.layers.0."): value.clone()
            for name, value in weights.items()
            if name.startswith(layer)
        }
        for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            head[f"mtp.{norm}.weight"] = torch.zeros(n, dtype=dtype)
        reads_embedding = torch.cat([40 * torch.eye(n), torch.zeros(n, n)], 1)
        head["mtp.fc.weight"] = reads_embedding.to(dtype).contiguous()
        save_file(weights | head, str(out / "model.safetensors"), metadata={"format": "pt"})


QWEN3_NEXT_MTP = RecurrentDrafting(
    "tiny-qwen3-next-mtp",
    QWEN3_NEXT.config_class,
    {**QWEN3_NEXT.config, "num_nextn_predict_layers": 1},
    dtype="bfloat16",
    groups=3,
    shows_damage_in_tokens=False,
)

QWEN3_NEXT_DEEP = TinyModel(  # as published ones: three recurrent groups, several layers each
    "tiny-qwen3-next-deep",
    QWEN3_NEXT.config_class,
    {
        **QWEN3_NEXT.config,
        "num_hidden_layers": 8,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
    },
    dtype="bfloat16",
    groups=4,
    shows_damage_in_tokens=False,
)

LLAMA4 = TinyModel(
    "tiny-llama4",
    "Llama4TextConfig",
    _common(
        initializer_range=0.1,
        intermediate_size_mlp=512,
        num_local_experts=2,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        attention_chunk_size=CHUNKED_LOCAL_TOKENS,
    ),
    groups=2,
)


@dataclass(frozen=True)
class SelfDrafting(TinyModel):
    """A target of one layer whose draft head is that layer once more, reading embeddings alone.

    So most of the head's drafts are right, as long as the KV that it attends to is: the two
    compute the same but for a position of shift and a norm, which embeddings of length one
    make an identity.
    """

    method: str = "eagle"

    @property
    def speculation(self) -> dict:
        """What vLLM is to be told."""
        if self.method == "mtp":
            return {"method": "mtp", "num_speculative_tokens": 2}
        head = str(self.folder() / "head")
        return {"method": "eagle", "model": head, "num_speculative_tokens": 3}

    def _make(self, out: Path) -> None:
        from safetensors.torch import load_file, save_file

        super()._make(out)
        weights = load_file(str(out / "model.safetensors"))
        embedding = weights["model.embed_tokens.weight"]
        embedding /= embedding.pow(2).mean(-1, keepdim=True).sqrt()
        if self.method == "mtp":
            weights |= self._mtp(weights)
        else:
            self._save_eagle(weights, out / "head")
        save_file(weights, str(out / "model.safetensors"), metadata={"format": "pt"})

    def _reads_embedding(self):
        import torch

        n = self.config["hidden_size"]
        return torch.cat([torch.eye(n), torch.zeros(n, n)], 1).contiguous()

    def _mtp(self, weights: dict) -> dict:
        import torch

        layer, head = "model.layers.0.", "model.layers.1."
        ones = torch.ones(self.config["hidden_size"])
        copied = {
            name.replace(layer, head): value.clone()
            for name, value in weights.items()
            if name.startswith(layer)
        }
        return copied | {
            f"{head}enorm.weight": ones,
            f"{head}hnorm.weight": ones.clone(),
            f"{head}eh_proj.weight": self._reads_embedding(),
            f"{head}shared_head.norm.weight": weights["model.norm.weight"].clone(),
            f"{head}shared_head.head.weight": weights["lm_head.weight"].clone(),
            f"{head}embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        }

    def _save_eagle(self, weights: dict, folder: Path) -> None:
        from safetensors.torch import save_file

        head = {
            name.removeprefix("model."): value.clone()
            for name, value in weights.items()
            if name.startswith("model.layers.0.") and "input_layernorm" not in name
        }
        folder.mkdir()
        save_file(head | {"fc.weight": self._reads_embedding()}, str(folder / "model.safetensors"))
        config = json.loads((folder.parent / "config.json").read_text())
        config["architectures"] = ["EagleLlamaForCausalLM"]
        (folder / "config.json").write_text(json.dumps(config))


_ONE_LAYER = _common(initializer_range=0.15, num_hidden_layers=1, tie_word_embeddings=False)

LLAMA_EAGLE = SelfDrafting("tiny-llama-eagle", "LlamaConfig", _ONE_LAYER)

GLM4_MTP = SelfDrafting(
    "tiny-glm4-mtp",
    "Glm4MoeConfig",
    {
        **_ONE_LAYER,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 0,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "n_group": 1,
        "topk_group": 1,
        "partial_rotary_factor": 0.5,
    },
    method="mtp",
)


def make_adapter(folder: Path, seed: int) -> str:
    """A LoRA adapter of rank 8 on every attention projection, strong enough to be seen."""
    import torch
    from safetensors.torch import save_file

    rng = torch.Generator().manual_seed(seed)
    config = LLAMA.config
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
    folder.mkdir(exist_ok=True)
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


ALL = (LLAMA, GEMMA3, GPT_OSS, QWEN3_NEXT, LLAMA4)
