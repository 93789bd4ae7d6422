"""Whether an engine can begin a prompt in its middle, on KV that was computed before.

vLLM turns its own prefix caching off where it cannot, and asks a connector all the same.
"""

from __future__ import annotations

from typing import Any

from .engine_api import layer_specs


def obstacle(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Return in a line why no prompt can go on from stored KV, or None where one can."""
    for group in kv_cache_config.kv_cache_groups:
        if any(getattr(spec, "non_causal", False) for spec in layer_specs(group).values()):
            return "layers of this model attend to later tokens, which a prefix does not have"
    model = getattr(vllm_config, "model_config", None)
    if getattr(model, "is_prefix_caching_supported", None) is False:
        # Pooling over all tokens, for one: the engine stops at a prompt that is not whole.
        return "vLLM does not reuse prefixes of this model, whose answer needs the whole prompt"
    if getattr(getattr(vllm_config, "aux_output_config", None), "enabled", False):
        # What vLLM keeps of these for its own hits is gone sooner; it dies where it finds none.
        return "auxiliary outputs (--enable-return-routed-experts) cannot be restored with KV"
    cache = getattr(vllm_config, "cache_config", None)
    scheduler = getattr(vllm_config, "scheduler_config", None)
    reuses = getattr(cache, "enable_prefix_caching", True)
    continues = getattr(scheduler, "enable_chunked_prefill", True)
    if reuses is False and continues is False:
        # The attention may look at nothing but the tokens of the step (MLA on CPUs does).
        return "prefix caching and chunked prefill are both off: no prompt can begin in its middle"
    return None
