"""What holds for every test."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("suite", deadline=None, print_blob=True)
settings.register_profile("ci", parent=settings.get_profile("suite"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "suite")
