"""The real engine in this process: what it must find before vLLM is imported, and its marks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtier.tools.engine import prepare_environment

prepare_environment()
os.environ.setdefault("VLLM_ENABLE_CUDA_COMPATIBILITY", "0")
# With two threads of numba's an engine that speculates with ngram stood still on two busy cores.
os.environ.setdefault("NUMBA_NUM_THREADS", "1")

# Warnings of vLLM, torch and transformers are not ours to fix; ours still fail a test.
NOT_OURS = (
    "ignore::DeprecationWarning",
    "ignore::PendingDeprecationWarning",
    "ignore::FutureWarning",
    "ignore::UserWarning",
    "ignore::ResourceWarning",
    "ignore::SyntaxWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.engine)
            for line in NOT_OURS:
                item.add_marker(pytest.mark.filterwarnings(line), append=False)
