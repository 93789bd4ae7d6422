"""Plans: KV sizes against numbers worked out by hand, and what follows from them."""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from kvtier.connector import config
from kvtier.tools.model_sizes import MODELS, ModelError, find_model, from_config
from kvtier.tools.plan import TraceWish, Wish, pays_from, plan, settings_text
from kvtier.tools.plan_chart import size_ticks
from kvtier.tools.replay_chunks import Shape
from kvtier.tools.replay_tiers import Sizes, Speeds

GIB = 1 << 30

# name: bytes a token in layers that keep all, and in layers that keep a window; by hand as
# 2 (key and value) x heads x head size x 2 bytes x layers.
BY_HAND = {
    "Llama-3-8B": (131_072, 0),
    "Llama-3.1-8B": (2 * 8 * 128 * 2 * 32, 0),
    "Llama-3.1-70B": (327_680, 0),
    "meta-llama/Llama-3.1-405B-Instruct": (516_096, 0),
    "llama-3.2-1b": (32_768, 0),
    "Qwen3-0.6B": (114_688, 0),
    "Qwen3-8B": (147_456, 0),
    "Qwen3-32B": (262_144, 0),
    "Qwen3-30B-A3B": (2 * 4 * 128 * 2 * 48, 0),
    "Qwen3-235B-A22B": (192_512, 0),
    "Qwen3-Next-80B-A3B": (2 * 2 * 256 * 2 * 12, 0),
    "gpt-oss-20b": (2 * 8 * 64 * 2 * 12, 2 * 8 * 64 * 2 * 12),
    "gpt-oss-120b": (36_864, 36_864),
    "gemma-3-27b": (2 * 16 * 128 * 2 * 10, 2 * 16 * 128 * 2 * 52),
    "gemma-3-12b": (65_536, 327_680),
    "DeepSeek-V3": ((512 + 64) * 2 * 61, 0),
    "SmolLM2-135M": (23_040, 0),
    "phi-4": (204_800, 0),
    "Llama-4-Scout-17B-16E": (2 * 8 * 128 * 2 * 12, 2 * 8 * 128 * 2 * 36),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_known_models_have_the_sizes_worked_out_by_hand(name):
    """The bytes a token of public models, full attention and windows apart."""
    kv = find_model(name)
    assert (kv.full_token_bytes, kv.window_token_bytes) == BY_HAND[name]


@pytest.mark.parametrize("name", MODELS)
def test_every_known_model_has_a_size(name):
    """No entry of the table lacks a field."""
    assert find_model(name).shape().stored_bytes_per_token > 0


def test_fp8_and_ranks_change_sizes():
    """fp8 halves attention; ranks that share a head, and MLA, hold it more than once."""
    assert find_model("Llama-3.1-8B", "fp8").full_token_bytes == 65_536
    assert find_model("Llama-3.1-8B", n_ranks=8).full_token_bytes == 131_072
    assert find_model("Llama-3.1-8B", n_ranks=16).full_token_bytes == 262_144
    assert find_model("DeepSeek-V3", n_ranks=8).full_token_bytes == 8 * 70_272


def test_a_hybrid_model_by_hand():
    """Qwen3-Next: the state of a layer, the block that it forces, and a whole snapshot."""
    kv = find_model("Qwen3-Next-80B-A3B")
    matrix = 32 * 128 * 128  # value heads x value size x key size
    inputs = 3 * (2 * 16 * 128 + 32 * 128)  # three inputs of the convolution of width four
    (states,) = [layers for layers in kv.layers if layers.state_bytes]
    assert (states.n, states.state_bytes) == (36, 2 * (matrix + inputs))
    assert kv.block_tokens == 544  # 1,097,728 bytes / 2,048 a token, up to a multiple of 16
    assert kv.state_bytes == 36 * 544 * 2048
    shape = kv.shape()
    assert (shape.chunk_tokens, shape.state_every_tokens) == (544, 544)
    assert shape.loaded_bytes == kv.state_bytes


def test_windows_are_stored_in_part_and_loaded_once():
    """gpt-oss: of a chunk of 256 tokens the windowed layers keep the last 8 blocks of 16."""
    shape = find_model("gpt-oss-20b").shape(256)
    assert shape.stored_bytes_per_token == 24_576 + 24_576 // 2
    assert shape.loaded_bytes_per_token == 24_576
    assert shape.loaded_bytes == 24_576 * 127
    wide = find_model("gemma-3-4b").shape(256)  # a window of 1,024 keeps all of a chunk
    assert wide.stored_bytes_per_token == 20_480 + 118_784


CONFIGS = {
    "head size from hidden size": (
        {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64,
         "torch_dtype": "float32"}, 2 * 4 * 16 * 4 * 2, 0, 0),
    "inside text_config": (
        {"text_config": {"num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 8}},
        32, 0, 0),
    "a window switched off": (
        {"num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 9,
         "use_sliding_window": False}, 64, 0, 0),
    "a window everywhere": (
        {"num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 9},
        0, 64, 0),
    "Mamba 2 in turns": (
        {"layers_block_type": ["mamba", "attention"], "num_key_value_heads": 1, "head_dim": 8,
         "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1,
         "mamba_d_conv": 4}, 32, 0, 2 * (2 * 8 * 4 + 3 * (16 + 2 * 4))),
    "Nemotron-H pattern, wide states": (
        {"hybrid_override_pattern": "M-*", "num_key_value_heads": 1, "head_dim": 8,
         "mamba_num_heads": 2, "mamba_head_dim": 8, "ssm_state_size": 4, "n_groups": 1,
         "conv_kernel": 4, "mamba_ssm_cache_dtype": "float32"},
        32, 0, 4 * 64 + 2 * 3 * 24),
    "Jamba": (
        {"num_hidden_layers": 8, "attn_layer_period": 8, "attn_layer_offset": 4,
         "num_key_value_heads": 1, "num_attention_heads": 4, "hidden_size": 32,
         "mamba_expand": 2, "mamba_d_state": 16, "mamba_d_conv": 4},
        32, 0, 2 * (64 * 16 + 3 * 64)),
    "sparse attention's index": (
        {"num_hidden_layers": 1, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
         "index_head_dim": 128}, 1152 + 132, 0, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_are_read(name, tmp_path):
    """A folder's config.json gives the sizes worked out by hand; of states those of one layer."""
    config_json, full, window, state = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(config_json))
    for given in (tmp_path, tmp_path / "config.json"):
        kv = find_model(str(given))
        assert (kv.full_token_bytes, kv.window_token_bytes) == (full, window)
        assert max(layers.state_bytes for layers in kv.layers) == state


@pytest.mark.parametrize(
    ("config_json", "reason"),
    [
        ({}, "no num_hidden_layers or n_layer"),
        ({"num_hidden_layers": 2}, "no num_key_value_heads"),
        ({"layer_types": ["retention"]}, "layers of type 'retention' are not known"),
        ({"num_hidden_layers": 1, "dtype": "int3"}, "dtype 'int3' is not one of"),
        ({"layer_types": ["mlp"]}, "no layer of it keeps KV"),
    ],
)
def test_what_a_config_lacks_is_said(config_json, reason):
    """One line names what is missing."""
    with pytest.raises(ModelError, match=reason):
        from_config("m", config_json)


@pytest.mark.parametrize("base", [*CONFIGS, "gpt-oss-20b", "Qwen3-Next-80B-A3B", "DeepSeek-V3.2"])
def test_a_config_of_any_shape_is_read_or_refused(base):
    """Any value in any field: a size, or one line that says what is wrong; never a traceback."""
    good = CONFIGS[base][0] if base in CONFIGS else MODELS[find_model(base).name]
    for field in good:
        for value in (None, 0, -3, 2.5, True, "x", [], {}, [None], ["x", 5], 10**30, {"a": 1}):
            with contextlib.suppress(ModelError):
                assert from_config("m", {**good, field: value}).layers


def test_a_hit_pays_from_where_loading_is_quicker():
    """2 ms of latency and 1 ms a token loading lose to 2 ms a token of prefill up to two tokens."""
    speeds = Speeds(prefill_tokens_per_s=500.0, latency_s=0.002)
    shape = Shape(100, 100)
    assert pays_from(shape, speeds, 100_000.0) == 2
    assert pays_from(Shape(100, 100, loaded_bytes=1000), speeds, 100_000.0) == 12
    assert pays_from(shape, speeds, 50_000.0) is None


def wish(model, ram=64 * GIB, disk=2048 * GIB, **more):
    return Wish(find_model(model), Sizes(ram, disk), Speeds(20e9, 5e9, 2e9, 0.0, 10_000.0), **more)


def test_a_long_session_by_hand():
    """200,000 tokens of Llama 3.1 8B: bytes, sessions a tier, and both times."""
    result = plan(wish("Llama-3.1-8B", session_tokens=200_000), None)
    assert result["session_bytes"] == 200_000 * 131_072
    ram, disk = result["tiers"]
    assert (ram["tokens"], disk["tokens"]) == (524_288, 16_777_216)
    assert (ram["sessions"], disk["sessions"]) == (2.6, 83.9)
    assert ram["session_load_s"] == pytest.approx(200_000 * 131_072 / 20e9)
    assert disk["session_load_s"] == pytest.approx(200_000 * 131_072 / 5e9)
    assert ram["session_prefill_s"] == 20.0
    assert "curve" not in result


def write_sessions(path):
    """Two sessions at the same time; each asks for its 1,280 tokens three times."""
    turns = [{"t": i * 10.0, "in": 1281, "out": 1, "hash_runs": [[0, 20]]} for i in range(3)]
    line = {"block_size": 64, "tool_tokens": 0, "system_tokens": 0, "requests": turns}
    path.write_text((json.dumps(line) + "\n") * 2)
    return str(path)


def test_the_curve_by_hand(tmp_path):
    """Room for one session: least recently used hits nothing, the optimum one of the two."""
    path = write_sessions(tmp_path / "s.jsonl")
    one = 20 * 64 * 131_072
    result = plan(wish("Llama-3.1-8B", one, one), TraceWish(path))
    by_size = {point["bytes"]: point for point in result["curve"]}
    total = 6 * 1281
    assert by_size[one]["planned"]
    assert by_size[one]["hit_rate"] == 0
    assert by_size[one]["best_hit_rate"] == 2 * 1280 / total
    assert by_size[2 * one]["hit_rate"] == by_size[2 * one]["best_hit_rate"] == 4 * 1280 / total
    assert result["trace"]["distinct_bytes"] == 2 * one
    assert result["session_tokens"] == 1281
    rates = [point["hit_rate"] for point in result["curve"]]
    assert rates == sorted(rates)


def test_the_curve_of_a_hybrid_model_is_replayed(tmp_path):
    """Hits end where a state is: two blocks of 576 tokens, with room for all."""
    path = write_sessions(tmp_path / "s.jsonl")
    result = plan(wish("Qwen3-Next-80B-A3B"), TraceWish(path))
    last = result["curve"][-1]
    assert last["hit_rate"] == 4 * 1152 / (6 * 1281)
    assert last["best_hit_rate"] == 4 * 1280 / (6 * 1281)


@pytest.mark.parametrize(
    ("ram", "disk"), [(64 * GIB, 0), (0, 1 << 40), (64 * GIB, 1 << 40)], ids=str
)
def test_the_settings_are_accepted(ram, disk):
    """What is printed to paste is one shell word of JSON that the connector reads."""
    text = settings_text(wish("Llama-3.1-8B", ram, disk, chunk_tokens=512))
    option, value = shlex.split(text)
    assert option == "--kv-transfer-config"
    given = json.loads(value)
    assert given["kv_connector"] == "KVTierConnector"
    read = config.load(given["kv_connector_extra_config"], check_machine=False)
    assert (read.ram_bytes, read.disk_capacity_bytes or 0) == (ram, disk)
    assert read.chunk_tokens == 512


def kvtier(*arguments):
    done = subprocess.run(
        [str(Path(sys.executable).parent / "kvtier"), "plan", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_the_command(tmp_path):
    """`kvtier plan`: tables, settings, JSON with the same numbers, and a picture."""
    path, png = write_sessions(tmp_path / "s.jsonl"), tmp_path / "c.png"
    common = ("--model", "Qwen3-8B", "--ram", "64GiB", "--disk", "2TiB", "--trace", path)
    code, out, err = kvtier(*common, "--png", png)
    assert (code, err) == (0, "")
    assert "Qwen/Qwen3-8B: 144.0 KiB of KV a token" in out
    assert out.splitlines()[-1].startswith("--kv-transfer-config '{")
    assert png.read_bytes().startswith(b"\x89PNG")
    code, out, _ = kvtier(*common, "--json")
    assert code == 0
    result = json.loads(out)
    assert set(result) == {
        "model", "session_tokens", "session_bytes", "tiers", "kv_transfer_config", "trace", "curve",
    }  # fmt: skip
    assert result["model"]["stored_bytes_per_token"] == 147_456


def test_the_picture_shows_the_curves(tmp_path):
    """The PNG has the lines' colours where the rates are, and its marks."""
    image = pytest.importorskip("PIL.Image")
    from kvtier.tools.plan_chart import (
        BOTTOM,
        COLOURS,
        HEIGHT,
        LEFT,
        RIGHT,
        TOP,
        WIDTH,
        Curve,
        draw_curves,
    )

    path = tmp_path / "c.png"
    draw_curves(str(path), "t", [Curve("a", ((GIB, 0.0), (2 * GIB, 0.5), (4 * GIB, 1.0)))])
    with image.open(path) as drawn:
        middle = ((LEFT + WIDTH - RIGHT) // 2, (TOP + HEIGHT - BOTTOM) // 2)
        assert "#{:02x}{:02x}{:02x}".format(*drawn.getpixel(middle)) == COLOURS[0]
        assert drawn.size == (WIDTH, HEIGHT)
        part = drawn.crop((LEFT + 50, TOP + 20, middle[0] - 50, HEIGHT - BOTTOM - 20))
        assert len(part.getcolors()) > 8  # no text there: the line's edges are smooth


def test_the_last_size_of_the_axis_is_named():
    """The axis ends at a size that is marked, and holds every size that is drawn."""
    for low in range(20, 40):
        for high in range(low, low + 40):
            marked = size_ticks(low, high)
            assert marked[0] == low
            assert marked[-1] >= max(high, low + 1)
            assert 2 <= len(marked) <= 11
            assert len({b - a for a, b in pairwise(marked)}) == 1


@pytest.mark.parametrize(
    ("options", "code", "reason"),
    [
        (["--model", "Qwen3-9B", "--ram", "1GiB"], 2, "did you mean 'Qwen/Qwen3-8B'"),
        (["--model", "Qwen3-8B"], 2, "give --ram, --disk or both"),
        (["--model", "Qwen3-8B", "--ram", "big"], 2, "--ram 'big' is no size"),
        (["--model", "Qwen3-8B", "--ram", "1GiB", "--png", "x.png"], 2, "--png needs --trace"),
        (["--model", "Qwen3-8B", "--ram", "1GiB", "--trace", "/no/such"], 2, "/no/such: No such"),
    ],
)
def test_wrong_use_is_one_line(options, code, reason):
    """What is wrong is said in one line, with its exit code."""
    found, out, err = kvtier(*options)
    assert (found, out) == (code, "")
    assert reason in err
    assert err.count("\n") == 1
