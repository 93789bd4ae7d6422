"""kvtier as one of several connectors, in vLLM's MultiConnector."""

from __future__ import annotations

from . import models
from .harness import CHUNK_TOKENS, FLOAT32_TOLERANCE, Engine, prompt

N = 6


def test_what_was_computed_on_blocks_that_another_failed_to_load_is_never_served(
    tmp_path, monkeypatch
):
    """It is computed again; what kvtier saved of the first time is gone, what came before stays."""
    from vllm.config import KVTransferConfig

    from .failing_connector import FailingLoads

    good, spoiled = prompt(700, 9001), prompt(700, 9002)
    with Engine(models.LLAMA, prefix_caching=False) as engine:
        right = engine.ask_each([good, spoiled], N)
    ours = {
        "kv_connector": "KVTierConnector", "kv_connector_module_path": "kvtier.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "ram": "64MiB", "disk": str(tmp_path), "disk_capacity": "1GiB",
            "load_policy": "always", "chunk_tokens": CHUNK_TOKENS,
        },
    }  # fmt: skip
    failing = {
        "kv_connector": "FailingLoads", "kv_role": "kv_both",
        "kv_connector_module_path": FailingLoads.__module__,
    }  # fmt: skip
    both = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"connectors": [failing, ours]},
    )
    with Engine(models.LLAMA, kv_transfer_config=both) as engine:
        assert engine.ask(good, N).distance(right[0]) <= FLOAT32_TOLERANCE
        engine.forget()
        monkeypatch.setattr(FailingLoads, "promised_tokens", 128)
        engine.ask(spoiled, N)
        monkeypatch.setattr(FailingLoads, "promised_tokens", 0)
        engine.forget()
        for tokens, expected, least in ((good, right[0], 2 * CHUNK_TOKENS), (spoiled, right[1], 0)):
            for _ in range(2):
                answer = engine.ask(tokens, N)
                assert answer.distance(expected) <= FLOAT32_TOLERANCE
                assert answer.restored_tokens >= least
                engine.forget()
        assert answer.restored_tokens >= 2 * CHUNK_TOKENS  # it healed
        engine.drain()
        assert engine.stats["spoiled_chunks"] > 0
