"""Entry point of `vllm.general_plugins`: makes the short name known to vLLM."""

from __future__ import annotations

CONNECTOR_NAME = "KVTierConnector"  # equal to the class name: vLLM finds stats classes by it
MODULE_PATH = "kvtier.connector"


def register() -> None:
    """Register the connector under its short name; again and again is fine.

    vLLM calls this once in every process of an engine. Imports nothing of kvtier's
    that costs time; the class itself is imported when an engine asks for it.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415 (slow)
        KVConnectorFactory,
    )

    try:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, MODULE_PATH, CONNECTOR_NAME)
    except ValueError:
        # A duplicate: this process has loaded the plugin before.
        if CONNECTOR_NAME not in getattr(KVConnectorFactory, "_registry", {CONNECTOR_NAME: None}):
            raise
