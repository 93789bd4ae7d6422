"""How many bytes of KV a model has, from its config.json. No weights, no engine.

What is counted is what the engine's KV cache pages hold: keys and values of full attention and
of sliding windows, the latent of MLA, and recurrent states (gated delta net, Mamba 1 and 2).
Sizes are of all ranks together, with heads that ranks hold twice counted twice.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..storage.errors import KVTierError
from .model_table import MODELS
from .replay_chunks import Shape

ENGINE_BLOCK_TOKENS = 16
DEFAULT_CHUNK_TOKENS = 256
_ENDINGS = ("", "-instruct", "-it")  # of names, that people leave out
MOST = 1 << 40  # no count in a config.json is larger
INDEXER_SCALE_BYTES = 4  # one float32 for each 128 values of a sparse-attention index
DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}


class ModelError(KVTierError):
    """A model's KV cannot be told; one line says what is missing."""


class LayerKind(str, Enum):
    """What a layer keeps."""

    FULL = "full attention"
    WINDOW = "sliding window"
    LOCAL = "chunked local attention"
    STATE = "recurrent state"


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers of one kind.

    Attributes:
        n: how many.
        token_bytes: of one layer and token; 0 for states.
        window_tokens: what a window reaches, or the length of a local chunk.
        state_bytes: of one layer's state; 0 for attention.
    """

    kind: LayerKind
    n: int
    token_bytes: int = 0
    window_tokens: int = 0
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ModelKV:
    """KV of one model, all ranks together."""

    name: str
    layers: tuple[Layers, ...]

    def of(self, kind: LayerKind) -> list[Layers]:
        """Return the layers of a kind."""
        return [layers for layers in self.layers if layers.kind is kind]

    @property
    def full_token_bytes(self) -> int:
        """Bytes that one more token adds for ever."""
        return sum(layers.n * layers.token_bytes for layers in self.of(LayerKind.FULL))

    @property
    def window_token_bytes(self) -> int:
        """Bytes that one more token adds in layers that forget it again."""
        kinds = (LayerKind.WINDOW, LayerKind.LOCAL)
        return sum(one.n * one.token_bytes for one in self.layers if one.kind in kinds)

    @property
    def block_tokens(self) -> int:
        """Tokens of the engine's block; with states, so many that a state fits into it."""
        states, full = self.of(LayerKind.STATE), self.of(LayerKind.FULL)
        if not states or not full:
            return ENGINE_BLOCK_TOKENS
        page_bytes = max(layers.state_bytes for layers in states)
        tokens = math.ceil(page_bytes / full[0].token_bytes)
        return math.ceil(tokens / ENGINE_BLOCK_TOKENS) * ENGINE_BLOCK_TOKENS

    @property
    def state_bytes(self) -> int:
        """Bytes of one snapshot of all recurrent states, padded to the engine's blocks."""
        full = self.of(LayerKind.FULL)
        return sum(
            layers.n * (self.block_tokens * full[0].token_bytes if full else layers.state_bytes)
            for layers in self.of(LayerKind.STATE)
        )

    def shape(self, chunk_tokens: int = DEFAULT_CHUNK_TOKENS) -> Shape:
        """Return what kvtier stores and loads of it, with chunks of at least so many tokens."""
        block = self.block_tokens
        chunk_blocks = math.ceil(chunk_tokens / block)
        stored, loaded = float(self.full_token_bytes), self.state_bytes
        for layers in self.of(LayerKind.WINDOW):
            # A chunk keeps what a hit at its end or later can need.
            kept = min(chunk_blocks, math.ceil((layers.window_tokens - 1) / block))
            stored += layers.n * layers.token_bytes * kept / chunk_blocks
            loaded += layers.n * layers.token_bytes * (layers.window_tokens - 1)
        for layers in self.of(LayerKind.LOCAL):
            stored += layers.n * layers.token_bytes
            loaded += layers.n * layers.token_bytes * layers.window_tokens // 2  # on average
        return Shape(
            stored_bytes_per_token=math.ceil(stored),
            loaded_bytes_per_token=self.full_token_bytes,
            loaded_bytes=loaded,
            state_bytes=self.state_bytes,
            state_every_tokens=block if self.state_bytes else 0,
            chunk_tokens=chunk_blocks * block,
        )


def find_model(model: str, kv_dtype: str = "auto", n_ranks: int = 1) -> ModelKV:
    """Return the KV of a model folder, a config.json, or a public model's name.

    Args:
        model: path or name; of a name the part after the slash is enough.
        kv_dtype: the engine's `--kv-cache-dtype`.
        n_ranks: tensor parallel size.

    Raises:
        ModelError: not known, or of a kind that is not.
    """
    path = os.path.expanduser(model)
    if os.path.isdir(path):
        path = os.path.join(path, "config.json")
    if os.path.isfile(path):
        try:
            with open(path, encoding="utf-8") as file:
                config = json.load(file)
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"{path} is no readable config.json: {error}") from None
        if not isinstance(config, dict):
            raise ModelError(f"{path} is no JSON object")
        return from_config(model, config, kv_dtype, n_ranks)
    short = {name.rpartition("/")[2].lower(): name for name in MODELS}
    lower = model.lower()
    exact = {name.lower(): name for name in MODELS} | short
    spellings = (f"{first}{lower}{last}" for first in ("", "meta-") for last in _ENDINGS)
    name = next((exact[one] for one in spellings if one in exact), None)
    if name is None:
        near = difflib.get_close_matches(lower, list(short), n=1, cutoff=0.4)
        hint = f"did you mean {short[near[0]]!r}? " if near else ""
        raise ModelError(
            f"model {model!r} is neither a folder with config.json nor a known name; {hint}"
            "give the folder (`kvtier replay` also takes --bytes-per-token)"
        )
    return from_config(name, MODELS[name], kv_dtype, n_ranks)


def from_config(
    name: str, config: dict[str, Any], kv_dtype: str = "auto", n_ranks: int = 1
) -> ModelKV:
    """Return the KV of a model from the object in its config.json.

    Raises:
        ModelError: a field is missing, or a kind of layer is not known.
    """
    inner = config.get("text_config")
    text = {**config, **inner} if isinstance(inner, dict) else config
    try:
        reader = _Reader(name, text, kv_dtype, n_ranks)
        counts: dict[LayerKind, int] = {}
        for kind in reader.kinds():
            counts[kind] = counts.get(kind, 0) + 1
        if not counts:
            raise ModelError(f"{name}: no layer of it keeps KV")
        return ModelKV(name, tuple(reader.layers(kind, n) for kind, n in counts.items()))
    except (TypeError, ValueError, KeyError, ArithmeticError, AttributeError) as error:
        raise ModelError(f"{name}: config.json has a value that no model has: {error}") from None


_KINDS = {
    "full_attention": LayerKind.FULL,
    "attention": LayerKind.FULL,
    "indexed_attention": LayerKind.FULL,
    "sliding_attention": LayerKind.WINDOW,
    "chunked_attention": LayerKind.LOCAL,
    "linear_attention": LayerKind.STATE,
    "mamba": LayerKind.STATE,
    "mamba2": LayerKind.STATE,
    "*": LayerKind.FULL,
    "M": LayerKind.STATE,
}
_KEEP_NOTHING = {"mlp", "moe", "-", "E"}


class _Reader:
    """Reads one config."""

    def __init__(self, name: str, config: dict[str, Any], kv_dtype: str, n_ranks: int) -> None:
        self._name = name
        self._config = config
        self._n_ranks = n_ranks
        own = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        self._dtype_bytes = self._bytes_of(own.removeprefix("torch."))
        self._kv_bytes = self._dtype_bytes if kv_dtype == "auto" else self._bytes_of(kv_dtype)

    def _bytes_of(self, dtype: str) -> int:
        if dtype not in DTYPE_BYTES:
            raise ModelError(
                f"{self._name}: dtype {dtype!r} is not one of {', '.join(DTYPE_BYTES)}"
            )
        return DTYPE_BYTES[dtype]

    def _int(self, *keys: str) -> int:
        for key in keys:
            value = self._config.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value < MOST:
                return value
        raise ModelError(f"{self._name}: config.json has no {' or '.join(keys)}")

    def kinds(self) -> list[LayerKind]:
        """Return what each layer keeps; layers that keep nothing are left out."""
        config = self._config
        types = (
            config.get("layer_types")
            or config.get("layers_block_type")
            or config.get("hybrid_override_pattern")
        )
        if types is None:
            return self._kinds_by_pattern(self._int("num_hidden_layers", "n_layer"))
        found = []
        shared = int(config.get("num_kv_shared_layers") or 0)  # the last ones reuse others' KV
        for one in list(types)[: len(types) - shared]:
            if one in _KEEP_NOTHING:
                continue
            if one not in _KINDS:
                raise ModelError(f"{self._name}: layers of type {one!r} are not known here")
            found.append(_KINDS[one])
        return found

    def _kinds_by_pattern(self, n: int) -> list[LayerKind]:
        config = self._config
        kind = str(config.get("model_type", ""))
        if "linear_num_value_heads" in config:
            every = int(config.get("full_attention_interval", 4))
            return [LayerKind.STATE if (i + 1) % every else LayerKind.FULL for i in range(n)]
        if "attn_layer_period" in config:  # Jamba
            period, offset = int(config["attn_layer_period"]), int(config["attn_layer_offset"])
            return [LayerKind.FULL if i % period == offset else LayerKind.STATE for i in range(n)]
        if kind == "falcon_h1":
            return [LayerKind.FULL, LayerKind.STATE] * n  # every layer has both
        if kind in {"mamba", "mamba2", "falcon_mamba"}:
            return [LayerKind.STATE] * n
        return self._windows(n, kind)

    def _windows(self, n: int, model_type: str) -> list[LayerKind]:
        config = self._config
        if not config.get("sliding_window") or config.get("use_sliding_window") is False:
            return [LayerKind.FULL] * n
        patterns = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "cohere2": 4}
        every = int(config.get("sliding_window_pattern") or patterns.get(model_type, 0))
        if not every:
            return [LayerKind.WINDOW] * n
        return [LayerKind.WINDOW if (i + 1) % every else LayerKind.FULL for i in range(n)]

    def layers(self, kind: LayerKind, n: int) -> Layers:
        """Return the sizes of ``n`` layers of a kind."""
        if kind is LayerKind.STATE:
            return Layers(kind, n, state_bytes=self._state_bytes())
        window = 0
        if kind is LayerKind.WINDOW:
            window = self._int("sliding_window")
        elif kind is LayerKind.LOCAL:
            window = self._int("attention_chunk_size")
        return Layers(kind, n, token_bytes=self._token_bytes(), window_tokens=window)

    def _token_bytes(self) -> int:
        config = self._config
        if config.get("kv_lora_rank"):
            latent = self._int("kv_lora_rank") + self._int("qk_rope_head_dim")
            index = int(config.get("index_head_dim") or 0)
            index += math.ceil(index / 128) * INDEXER_SCALE_BYTES  # fp8 values and their scales
            return self._n_ranks * (latent * self._kv_bytes + index)  # every rank holds all of it
        heads = self._int("num_key_value_heads", "num_attention_heads", "n_head")
        dim = config.get("head_dim")
        if not isinstance(dim, int) or dim < 1:
            queries = self._int("num_attention_heads", "n_head")
            dim = self._int("hidden_size", "n_embd") // queries
        heads = max(heads, self._n_ranks)  # fewer heads than ranks: some ranks hold the same one
        return 2 * heads * dim * self._kv_bytes

    def _state_bytes(self) -> int:
        """Return one layer's state: the convolution's last inputs and the recurrent matrix."""
        config = self._config
        wide = str(config.get("mamba_ssm_dtype") or config.get("mamba_ssm_cache_dtype") or "")
        matrix_bytes = DTYPE_BYTES.get(wide, self._dtype_bytes)
        if "linear_num_value_heads" in config:
            keys = self._int("linear_num_key_heads") * self._int("linear_key_head_dim")
            heads, dim = self._int("linear_num_value_heads"), self._int("linear_value_head_dim")
            columns, width = 2 * keys + heads * dim, self._int("linear_conv_kernel_dim")
            matrix = heads * dim * self._int("linear_key_head_dim")
        elif "mamba_n_heads" in config or "mamba_num_heads" in config:  # Mamba 2
            heads = self._int("mamba_n_heads", "mamba_num_heads")
            inner = heads * self._int("mamba_d_head", "mamba_head_dim")
            rows = self._int("mamba_d_state", "ssm_state_size")
            columns = inner + 2 * self._int("mamba_n_groups", "n_groups") * rows
            width, matrix = self._int("mamba_d_conv", "conv_kernel"), inner * rows
        else:  # Mamba 1
            inner = self._int("mamba_expand", "expand") * self._int("hidden_size")
            columns, width = inner, self._int("mamba_d_conv", "conv_kernel")
            matrix = inner * self._int("mamba_d_state", "state_size")
        return columns * (width - 1) * self._dtype_bytes + matrix * matrix_bytes
