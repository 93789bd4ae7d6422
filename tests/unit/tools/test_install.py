from __future__ import annotations

from importlib.metadata import distribution, entry_points
from pathlib import Path

import kvtier
import kvtier.connector
import kvtier.storage
import kvtier.tools

CHECKOUT = Path(__file__).parents[3]


def test_the_installed_package_is_this_checkout():
    """Tests run against the files beside them, not another checkout's editable install."""
    for package in (kvtier.connector, kvtier.storage, kvtier.tools):
        folder = CHECKOUT / package.__name__.rpartition(".")[2]
        assert Path(package.__file__).resolve() == folder / "__init__.py"
    assert Path(kvtier.__file__).resolve() == CHECKOUT / ".src" / "kvtier" / "__init__.py"


def test_entry_points_name_what_is_there():
    """The command and vLLM's plugin are installed and can be imported."""
    assert distribution("kvtier").version == kvtier.__version__
    for group, name in (("console_scripts", "kvtier"), ("vllm.general_plugins", "kvtier")):
        (point,) = entry_points(group=group, name=name)
        assert callable(point.load())
