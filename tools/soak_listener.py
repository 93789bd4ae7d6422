"""What a soak tells while it runs."""

from __future__ import annotations


class Listener:
    """Told what happens, for a display; does nothing by itself."""

    def phase(self, text: str) -> None:
        """Note that a phase begins."""

    def progress(self, done_s: float, of_s: float, text: str) -> None:
        """Note how far the phase is."""
