"""Puts the CUDA mover together: how each group is copied, and with which stream as the engine's."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .cuda_driver import CudaDriver, DriverError
from .mover import PageAddresses
from .mover_cuda import CopyWay, CudaLimits, CudaMover, Kernel
from .pinning import Pinning

if TYPE_CHECKING:
    from .regions import RegionTable

logger = logging.getLogger("kvtier.mover")

SMALL_ROW_BYTES = 28 * 1024  # below it the copy engines fall behind the bus


def open_cuda_mover(
    tables: Mapping[int, RegionTable],
    pages: PageAddresses,
    driver: CudaDriver,
    pinning: Pinning,
    *,
    ordinal: int,
    limits: CudaLimits | None = None,
    ways: Mapping[int, CopyWay] | None = None,
) -> CudaMover:
    """Return a mover for the CUDA device ``ordinal``, with torch's streams as the engine's.

    Blocks for the seconds that compiling a kernel can take. ``ways`` is for measurements.

    Raises:
        DriverError: the device cannot be used.
    """
    import torch  # noqa: PLC0415 - heavy; whoever has CUDA tensors has it loaded

    chosen = {group: choose_way(table, driver.can_batch) for group, table in tables.items()}
    chosen.update(ways or {})
    kernels = {}
    for group, way in chosen.items():
        if way in {CopyWay.KERNEL, CopyWay.KERNELS}:
            kernel = _kernel(tables[group], driver, ordinal)
            if kernel is None:
                chosen[group] = CopyWay.FLAT
            else:
                kernels[group] = kernel
    return CudaMover(
        tables,
        pages,
        driver,
        pinning,
        compute_stream=lambda: int(torch.cuda.current_stream(ordinal).cuda_stream),
        ways=chosen,
        kernels=kernels,
        limits=limits,
    )


def choose_way(table: RegionTable, can_batch: bool) -> CopyWay:
    """Return how a group is copied, by a driver that has batches or has not."""
    if not can_batch:  # one by one takes Python's time for every row
        return CopyWay.KERNELS
    return CopyWay.KERNEL if int(table.length.min()) < SMALL_ROW_BYTES else CopyWay.FLAT


def _kernel(table: RegionTable, driver: CudaDriver, ordinal: int) -> Kernel | None:
    """Return a group's kernel, compiled; None where that cannot be (the batch copies then do)."""
    try:
        import torch  # noqa: PLC0415

        from .copy_kernel import RowKernel  # noqa: PLC0415 - needs triton

        rows = RowKernel(table, torch.device("cuda", ordinal))
        with torch.cuda.device(ordinal):
            for to_device in (True, False):
                rows.copy(np.empty(0, np.int64), np.empty(0, np.uint64), to_device=to_device)
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - torch, triton or the compiler it starts
        logger.warning("copies by a kernel are not to be had, batch copies do them: %s", error)
        return None
    return partial(_launch, rows, ordinal, driver)


def _launch(
    rows: Any,
    ordinal: int,
    driver: CudaDriver,
    stream: int,
    block_ids: NDArray[np.int64],
    pages: NDArray[np.uint64],
    to_device: bool,
) -> None:
    import torch  # noqa: PLC0415

    driver.use()
    try:
        external = torch.cuda.ExternalStream(stream, device=ordinal)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(external):
            rows.copy(block_ids, pages, to_device=to_device)
    except Exception as error:  # whatever it is, the mover must fence what it has queued
        raise DriverError("copy kernel", 0, str(error)) from error
    driver.use()  # torch may have switched devices
