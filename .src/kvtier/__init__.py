"""kvtier: a tiered KV cache offload connector for vLLM."""

__version__ = "0.1.0"
