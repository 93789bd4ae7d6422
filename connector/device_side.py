"""What the arena and the mover need of the device that holds the KV cache."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..storage.errors import GeometryError
from ..storage.ram import Arena
from .mover import HostMover, Mover
from .regions import RegionTable

if TYPE_CHECKING:
    from .worker import ArenaPlan

logger = logging.getLogger("kvtier.device")


class HostSide:
    """KV cache in host memory: nothing to pin.

    Attributes:
        on_segment: the arena's hook.
        copy_threads: threads that should copy, each way. A copy takes its thread's time.
    """

    on_segment = None
    copy_threads = 1

    def open_mover(self, tables: Mapping[int, RegionTable], arena: Arena) -> Mover:
        """Return the mover between blocks and pages."""
        return HostMover(tables, arena)

    def close(self) -> None:
        """Give back what no mover took over: nothing."""


class CudaSide:
    """KV cache on a CUDA device: each of the arena's segments is pinned as it grows.

    Attributes:
        copy_threads: see `HostSide`; here a second one queues its copies while the
            device is at the first one's, which takes about as long to be noticed.

    Args:
        device: torch's device of the KV cache.
        plan: how the arena is cut, for messages.

    Raises:
        GeometryError: the device cannot be driven from here.
    """

    copy_threads = 2

    def __init__(self, device: Any, plan: ArenaPlan) -> None:
        from .cuda_driver import CudaDriver, DriverError  # noqa: PLC0415 (loads libcuda)
        from .pinning import Pinning  # noqa: PLC0415 (the same)

        self._ordinal = int(device.index or 0)
        try:
            self._driver = CudaDriver(self._ordinal)
        except (OSError, DriverError) as err:
            raise GeometryError(f"device {device} cannot be driven through libcuda: {err}") from err
        self._pinning = Pinning(self._driver, plan.n_pages * plan.page_bytes)
        self.on_segment = self._pinning.on_segment

    def open_mover(self, tables: Mapping[int, RegionTable], arena: Arena) -> Mover:
        """Return the mover between blocks and pages; may compile a kernel."""
        from .cuda_device import open_cuda_mover  # noqa: PLC0415 (only where there is a device)
        from .cuda_driver import DriverError  # noqa: PLC0415 (the same)

        driver, pinning, ordinal = self._driver, self._pinning, self._ordinal
        try:
            return open_cuda_mover(tables, arena, driver, pinning, ordinal=ordinal)
        except DriverError as err:
            raise GeometryError(f"CUDA device {ordinal} cannot copy for kvtier: {err}") from err

    def close(self) -> None:
        """Unpin what no mover took over (a mover's own `close` does that)."""
        self._pinning.close()
