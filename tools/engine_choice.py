"""Options of an engine that people type, checked before one is started with them."""

from __future__ import annotations

import os

from .exit_codes import ExitCode
from .reporting import CommandError

DTYPES = ("float32", "float", "bfloat16", "float16", "half", "auto")
"""What vLLM takes for the type of weights and KV; the default first."""


def check_engine(model: str | None, dtype: str = DTYPES[0]) -> None:
    """Refuse what no engine starts with; a name that may be a repository's is left to vLLM.

    Raises:
        CommandError: one line that names what there is.
    """
    if dtype not in DTYPES:
        raise CommandError(f"no dtype {dtype!r}; there are {', '.join(DTYPES)}", ExitCode.USAGE)
    if model is None:
        return
    if os.path.isdir(model):
        if not os.path.isfile(os.path.join(model, "config.json")):
            raise CommandError(f"--model {model}: has no config.json", ExitCode.USAGE)
    elif not os.path.exists(model) and (model.startswith((".", "/", "~")) or model.count("/") > 1):
        raise CommandError(f"--model {model}: no such folder", ExitCode.USAGE)
