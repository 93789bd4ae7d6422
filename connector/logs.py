"""Where kvtier's lines go in an engine: where vLLM's go, in the same form."""

from __future__ import annotations

import logging


def use_engine_log() -> None:
    """Give the logger ``kvtier`` what vLLM's has, unless somebody has set logging up.

    Without it lines below WARNING are lost, and the others come without time and level.
    Idempotent; does nothing where vLLM is told to leave logging alone, or to say no more than
    errors: that kvtier turned something off is said all the same.
    """
    ours, theirs = logging.getLogger("kvtier"), logging.getLogger("vllm")
    if ours.handlers or ours.level != logging.NOTSET or not theirs.handlers:
        return
    if theirs.level > logging.WARNING:
        return
    ours.setLevel(theirs.level)
    if logging.getLogger().handlers:
        return  # the application collects everything there
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.propagate = False
