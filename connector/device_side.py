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
    """KV cache in host memory: nothing to pin."""

    on_segment = None

    def open_mover(self, tables: Mapping[int, RegionTable], arena: Arena) -> Mover:
        """Return the mover between blocks and pages."""
        return HostMover(tables, arena)


class CudaSide:
    """KV cache on a CUDA device: each of the arena's segments is pinned as it grows.

    Args:
        device: torch's device of the KV cache.
        plan: how the arena is cut, for messages.

    Raises:
        GeometryError: the device cannot be driven from here.
    """

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
