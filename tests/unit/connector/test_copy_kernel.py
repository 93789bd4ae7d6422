"""The kernel for small rows: compiled for a device that is not here, and run without one."""

from __future__ import annotations

import importlib.util
import sys

import numpy as np
import pytest

triton = pytest.importorskip("triton")

from kvtier.connector import copy_kernel  # noqa: E402

from .mover_contract import NUM_BLOCKS, Pages, device_block, make_device  # noqa: E402

SEED = 90_210
HOPPER = ("cuda", 90, 32)  # backend, compute capability, threads of a warp

pytestmark = pytest.mark.filterwarnings("ignore")  # triton's own


@pytest.fixture
def interpreted(monkeypatch):
    """The module once more, its kernel run by triton's interpreter on host memory."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    spec = importlib.util.spec_from_file_location("interpreted_kernel", copy_kernel.__file__)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("to_device", [True, False])
def test_compiles_for_a_device(monkeypatch, tmp_path, to_device):
    """The kernel is code that triton compiles to machine code, copying eight bytes a lane."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = copy_kernel._copy_rows
    kinds = {"n_jobs": "i32", "n_rows": "i32", "TO_DEVICE": "constexpr", "WORDS": "constexpr"}
    source = ASTSource(
        kernel,
        {name: kinds.get(name, "*i64") for name in kernel.arg_names},
        constexprs={"TO_DEVICE": to_device, "WORDS": 512},
    )
    built = triton.compile(source, target=GPUTarget(*HOPPER))
    assert built.asm["cubin"]
    assert "ld.global.b64" in built.asm["ptx"]
    assert "st.global.b64" in built.asm["ptx"]


@pytest.mark.parametrize("layout", ["layer outermost", "block outermost", "unequal distances",
                                    "one region", "wide rows"])  # fmt: skip
@pytest.mark.parametrize("programs", [1, 5])
def test_moves_exactly_the_blocks(interpreted, layout, programs):
    """Blocks and pages hold the same bytes after each way, and no other byte has changed."""
    import torch

    print("seed", SEED)
    rng = np.random.default_rng(SEED)
    device = make_device(layout, rng)
    table = device.tables[3]
    pages = Pages(NUM_BLOCKS, -(-table.block_bytes // 4096) * 4096)
    kernel = interpreted.RowKernel(table, torch.device("cpu"), programs)
    blocks, page_ids = np.array([5, 3, 13]), np.array([1, 0, 7])
    before = [pages.bytes_of(p) for p in range(NUM_BLOCKS)]
    memory = device.memory.copy()
    kernel.copy(blocks, pages.addresses(page_ids), to_device=False)
    for block, page in zip(blocks.tolist(), page_ids.tolist(), strict=True):
        padding = before[page][table.block_bytes :]
        assert pages.bytes_of(page) == device_block(table, block) + padding
    assert np.array_equal(device.memory, memory)
    for page in set(range(NUM_BLOCKS)) - set(page_ids.tolist()):
        assert pages.bytes_of(page) == before[page]

    targets = np.array([2, 9, 4])
    others = {b: device_block(table, b) for b in range(NUM_BLOCKS) if b not in targets}
    kernel.copy(targets, pages.addresses(page_ids), to_device=True)
    for target, page in zip(targets.tolist(), page_ids.tolist(), strict=True):
        assert device_block(table, target) == pages.bytes_of(page)[: table.block_bytes]
    assert all(device_block(table, block) == data for block, data in others.items())


def test_refuses_rows_that_are_no_words():
    """Rows that do not divide into words of eight bytes are refused, and batch copies do them."""
    table = make_device("odd lengths in padded slots", np.random.default_rng(SEED)).tables[3]
    with pytest.raises(ValueError, match="8 bytes"):
        copy_kernel.RowKernel(table, "cpu")
