"""References on device blocks, through vLLM's own block pool."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any


class BlockPins:
    """Takes and gives back references of device blocks. Scheduler thread only."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._held: Counter[int] = Counter()

    def bind(self, pool: Any) -> None:
        """Use vLLM's ``BlockPool``, before the first pin.

        Its `reset_prefix_cache`, which refuses while any block is referenced, is made to look
        past pins: whoever has new weights must be able to forget the old KV, whatever is being
        saved at the moment, and an engine in this process makes no step that would end a save.
        """
        self._pool = pool
        reset = getattr(pool, "reset_prefix_cache", None)
        if reset is not None:
            with contextlib.suppress(AttributeError):  # a class that takes no attributes
                pool.reset_prefix_cache = lambda: self._without_pins(reset)

    def _without_pins(self, reset: Callable[[], bool]) -> bool:
        """Reset as if nothing was pinned; nobody is given a block meanwhile."""
        blocks = [self._pool.blocks[b] for b in self._held.elements()]
        self._pool.free_blocks(blocks)
        try:
            return reset()
        finally:
            self._pool.touch(blocks)

    def pin(self, blocks: Sequence[int]) -> None:
        """Keep blocks from being given to anybody else."""
        self._pool.touch([self._pool.blocks[b] for b in blocks])
        self._held.update(blocks)

    def unpin(self, blocks: Sequence[int]) -> None:
        """Let go of what `pin` took; the blocks of one prefix in token order."""
        # End of the prefix first, as the engine frees: its head is reused last.
        self._pool.free_blocks([self._pool.blocks[b] for b in reversed(blocks)])
        for block in blocks:
            self._held[block] -= 1
            if not self._held[block]:
                del self._held[block]
