"""Pins on vLLM's own block pool: who else wants the blocks, and a reset of the prefix cache."""

from __future__ import annotations

import pytest

from kvtier.connector.block_pins import BlockPins

block_pool = pytest.importorskip("vllm.v1.core.block_pool")


@pytest.fixture
def pool():
    return block_pool.BlockPool(num_gpu_blocks=10, enable_caching=True, hash_block_size=16)


@pytest.fixture
def pins(pool):
    made = BlockPins()
    made.bind(pool)
    return made


def ids_of(blocks):
    return [block.block_id for block in blocks]


def test_a_pinned_block_is_given_to_nobody(pool, pins):
    """What a request frees while it is pinned comes back with the last pin."""
    blocks = pool.get_new_blocks(4)
    ids = ids_of(blocks)
    pins.pin(ids)
    pins.pin(ids[:2])
    pool.free_blocks(blocks)
    assert pool.get_num_free_blocks() == 5
    assert not set(ids_of(pool.get_new_blocks(5))) & set(ids)
    pins.unpin(ids)
    assert pool.get_num_free_blocks() == 2
    pins.unpin(ids[:2])
    assert pool.get_num_free_blocks() == 4


def test_a_reset_of_the_device_s_cache_is_not_in_the_way_of(pool, pins):
    """Whoever empties the prefix cache (new weights) succeeds as without pins; they stay."""
    blocks = pool.get_new_blocks(4)
    pins.pin(ids_of(blocks))
    pins.pin(ids_of(blocks[:2]))
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache()
    assert pool.get_num_free_blocks() == 5
    assert [block.ref_cnt for block in blocks] == [2, 2, 1, 1]
    pins.unpin(ids_of(blocks))
    pins.unpin(ids_of(blocks[:2]))
    assert pool.get_num_free_blocks() == 9
    assert pool.reset_prefix_cache()


def test_a_reset_fails_while_requests_hold_blocks(pool, pins):
    """Blocks in use are vLLM's own reason; nothing is let go."""
    blocks = pool.get_new_blocks(2)
    pins.pin(ids_of(blocks[:1]))
    assert not pool.reset_prefix_cache()
    assert [block.ref_cnt for block in blocks] == [2, 1]


def test_a_pool_that_cannot_be_told_is_used_all_the_same():
    """An engine whose pool takes no attributes has pins, and resets that wait for them."""

    class Pool:
        __slots__ = ("blocks",)

        def touch(self, blocks):
            for block in blocks:
                block.ref_cnt += 1

    pool = Pool()
    pool.blocks = [type("Block", (), {"ref_cnt": 0})() for _ in range(3)]
    pins = BlockPins()
    pins.bind(pool)
    pins.pin([1])
    assert pool.blocks[1].ref_cnt == 1
