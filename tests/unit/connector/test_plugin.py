"""The connector is found by its short name and by its module path, without cost at import."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest

from kvtier.connector import plugin


def test_importing_the_package_imports_no_engine() -> None:
    """Importing kvtier.connector and its plugin loads neither vLLM nor torch."""
    code = (
        "import sys, kvtier.connector, kvtier.connector.plugin, kvtier.connector.config, "
        "kvtier.connector.engine_api, kvtier.connector.geometry; "
        "print([m for m in ('vllm', 'torch') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"


def test_registering_twice_is_fine_and_both_ways_give_one_class() -> None:
    """The short name and the module path resolve to the same class, however often registered."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own
        factory = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.factory")
        plugin.register()
        plugin.register()
        from kvtier.connector import KVTierConnector

        named = factory.KVConnectorFactory.get_connector_class_by_name("KVTierConnector")
    assert named is KVTierConnector
    assert named.__name__ == plugin.CONNECTOR_NAME


def test_an_unknown_name_is_an_attribute_error() -> None:
    """The package has no other lazy names."""
    import kvtier.connector as package

    with pytest.raises(AttributeError, match="nothing_here"):
        _ = package.nothing_here
