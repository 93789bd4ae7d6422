"""Connectors that are wrong on purpose, for soaks that must find it. Loaded by name in a child.

`EngineFault` stands for a fault of vLLM's own prefix caching: a block that was hit on the device
is changed. `BitFlip` is kvtier with one bit of a chunk flipped before its checksum is made.
`Both` is kvtier with the bit flipped, in an engine that has the fault.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from soak_connectors_names import FLIPPED_START, MARK  # its folder is on the child's path
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from kvtier.connector.connector import KVTierConnector


@dataclass
class Blocks(base.KVConnectorMetadata):
    blocks: list[int] = field(default_factory=list)


class Damager:
    """The engine's fault: notes hits on the scheduler's side, damages on the worker's."""

    def __init__(self, block_tokens):
        self.block_tokens = block_tokens
        self.due = []
        self.caches = []

    def hit(self, request, blocks, local_tokens):
        prompt = request.prompt_token_ids
        if local_tokens > MARK and len(prompt) > MARK and prompt[MARK] % 2 == 0:
            last = local_tokens // self.block_tokens - 1
            self.due.append(blocks.get_block_ids()[0][last])

    def damage(self, n_blocks):
        for block in self.due:
            for cache in self.caches:
                axis = list(cache.shape).index(n_blocks)
                cache.select(axis, block).mul_(-1)
        self.due.clear()


_THE_FAULT: list[Damager] = []  # scheduler and worker are two objects of one process


def the_fault(vllm_config):
    if not _THE_FAULT:
        _THE_FAULT.append(Damager(vllm_config.cache_config.block_size))
    return _THE_FAULT[0]


class EngineFault(base.KVConnectorBase_V1, base.SupportsHMA):
    """Does nothing but break what vLLM's own prefix cache hit."""

    def __init__(self, vllm_config, role, kv_cache_config=None):
        super().__init__(vllm_config, role, kv_cache_config)
        self._fault = the_fault(vllm_config)
        self._fault.due.clear()
        self._n_blocks = kv_cache_config.num_blocks

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self._local = num_computed_tokens
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self._fault.hit(request, blocks, self._local)

    def build_connector_meta(self, scheduler_output):
        return Blocks()

    def register_kv_caches(self, kv_caches):
        self._fault.caches = list(kv_caches.values())

    def start_load_kv(self, forward_context, **kwargs):
        self._fault.damage(self._n_blocks)

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        pass

    def request_finished_all_groups(self, request, block_ids):
        return False, None


class BitFlip(KVTierConnector):
    """kvtier whose disk tier is handed one flipped bit, before the checksum is made."""

    def register_kv_caches(self, kv_caches):
        super().register_kv_caches(kv_caches)
        open_tiers = self._worker._open_tiers

        def opened(namespace):
            tiers = open_tiers(namespace)
            for tier in tiers:
                tier.put = flipping(tier.put)
            return tiers

        self._worker._open_tiers = opened


def flipping(put):
    def wrapped(spec, payload, *, replace=False):
        if spec.start_tokens == FLIPPED_START:
            # One exponent bit of one value: 256 times as large, and no NaN that would spread to
            # requests which have nothing to do with it.
            bits = np.frombuffer(payload[0], np.uint32)
            bits[np.flatnonzero(bits >> 23 & 0xFF == 128)[0]] ^= np.uint32(1 << 26)
        return put(spec, payload, replace=replace)

    return wrapped


class Both(BitFlip):
    """The flipped bit, in an engine that has the fault."""

    def __init__(self, vllm_config, role, kv_cache_config=None):
        super().__init__(vllm_config, role, kv_cache_config)
        self._fault = the_fault(vllm_config)
        self._fault.due.clear()
        self._n_blocks = kv_cache_config.num_blocks
        self._locals = {}

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self._locals[request.request_id] = num_computed_tokens
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens == 0:
            self._fault.hit(request, blocks, self._locals.pop(request.request_id, 0))
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def register_kv_caches(self, kv_caches):
        super().register_kv_caches(kv_caches)
        self._fault.caches = list(kv_caches.values())

    def start_load_kv(self, forward_context, **kwargs):
        self._fault.damage(self._n_blocks)
