"""The half that faces vLLM.

`KVTierConnector` is resolved when asked for, so that importing this package
costs nothing: vLLM's API server and the command line import it too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .connector import KVTierConnector

__all__ = ["KVTierConnector"]


def __getattr__(name: str) -> Any:
    """Import the connector class on first use (`kv_connector_module_path` names this package)."""
    if name == "KVTierConnector":
        from .connector import KVTierConnector  # noqa: PLC0415 (imports vLLM)

        return KVTierConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
