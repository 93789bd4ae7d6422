"""References on device blocks, through vLLM's own block pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class BlockPins:
    """Takes and gives back references of device blocks. Scheduler thread only."""

    def __init__(self) -> None:
        self._pool: Any = None

    def bind(self, pool: Any) -> None:
        """Use vLLM's ``BlockPool``, before the first pin."""
        self._pool = pool

    def pin(self, blocks: Sequence[int]) -> None:
        """Keep blocks from being given to anybody else."""
        self._pool.touch([self._pool.blocks[b] for b in blocks])

    def unpin(self, blocks: Sequence[int]) -> None:
        """Let go of what `pin` took; the blocks of one prefix in token order."""
        # End of the prefix first, as the engine frees: its head is reused last.
        self._pool.free_blocks([self._pool.blocks[b] for b in reversed(blocks)])
