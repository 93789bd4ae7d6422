"""What was saved in steps that computed on blocks which another connector failed to load.

Beside others in vLLM's `MultiConnector` kvtier saves what a step computes. Where one of them
loads in the step itself and fails, the step's output names the blocks; the engine computes
again, but what was computed on them is on its way into the cache by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..storage.jobs import SaveJob

MAX_STEPS = 16  # more than an engine has under way, where it does not tell of a step's end


class SpoiledSteps:
    """Remembers what the steps under way save. Scheduler's thread."""

    def __init__(self) -> None:
        self._keys: deque[tuple[bytes, ...]] = deque(maxlen=MAX_STEPS)

    def planned(self, saves: Sequence[SaveJob]) -> None:
        """A step was planned that saves these."""
        self._keys.append(tuple(chunk.key for job in saves for chunk in job.chunks))

    def over(self) -> None:
        """The oldest step is over, and nothing was wrong with it."""
        if self._keys:
            self._keys.popleft()

    def take(self) -> list[bytes]:
        """Return, and forget, the keys that the steps under way may have saved wrong.

        What is dropped in vain is saved again when it is computed again.
        """
        keys = [key for step in self._keys for key in step]
        self._keys = deque([()] * len(self._keys), maxlen=MAX_STEPS)
        return keys
