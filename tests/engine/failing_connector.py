"""A connector that promises tokens, loads nothing and says so: vLLM loads it by name."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1 import base


@dataclass
class Blocks(base.KVConnectorMetadata):
    blocks: list[int] = field(default_factory=list)


class FailingLoads(base.KVConnectorBase_V1, base.SupportsHMA):
    """Promises `promised_tokens` of every new prompt, within the step, while that is not 0."""

    promised_tokens = 0

    def __init__(self, vllm_config, role, kv_cache_config=None):
        super().__init__(vllm_config, role, kv_cache_config)
        self._due, self._failed, self._seen = [], set(), set()

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        if request.request_id in self._seen:
            return 0, False  # once: vLLM asks again after the failure
        return max(0, self.promised_tokens - num_computed_tokens), False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens:
            self._seen.add(request.request_id)
            self._due += blocks.get_block_ids()[0][: self.promised_tokens // 32]

    def build_connector_meta(self, scheduler_output):
        due, self._due = self._due, []
        return Blocks(due)

    def start_load_kv(self, forward_context, **kwargs):
        self._failed |= set(self._get_connector_metadata().blocks)

    def get_block_ids_with_load_errors(self):
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        pass

    def request_finished_all_groups(self, request, block_ids):
        return False, None
