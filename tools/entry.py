"""Where the `kvtier` command begins: light, so that Ctrl-C is met while the rest is imported."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
    try:
        from .cli import main as run

        run()
    except KeyboardInterrupt:
        print("kvtier: interrupted", file=sys.stderr)
        sys.exit(130)  # ExitCode.INTERRUPTED, which may not be there yet
