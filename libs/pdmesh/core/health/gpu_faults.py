"""Maps the answers of NVIDIA's driver about a GPU to fault levels (P/D-Serve 3.4, S33, S34)."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, NamedTuple

from pdmesh.core.health.fault_levels import Level
from pdmesh.core.health.node_status import DEVICE_UNKNOWN


@dataclass(frozen=True, slots=True)
class GpuCounters:
    """The driver's counters of one GPU.

    A counter that the GPU lacks keeps its default, which means no fault.
    """

    row_remapping_failed: bool = False  # no spare rows are left in its memory
    row_remapping_pending: bool = False  # rows are replaced at its next reset
    num_uncorrected_errors: int = 0  # errors of the GPU's memory since its last reset
    is_slowed_by_heat: bool = False


class DriverError(enum.Enum):
    """Why the driver did not answer."""

    GPU_IS_LOST = enum.auto()
    RESET_REQUIRED = enum.auto()
    OTHER = enum.auto()


class GpuFault(NamedTuple):
    """`reason` is empty if there is no fault."""

    level: Level
    reason: str
    detail: str


NO_FAULT: Final = GpuFault(Level.WELL, "", "")


def fault_of_counters(counters: GpuCounters) -> GpuFault:
    """The worst fault of one GPU."""
    if counters.row_remapping_failed:
        return GpuFault(Level.NODE, "DEVICE_ROWS_USED_UP", "row remapping failed")
    if counters.row_remapping_pending:
        detail = "row remapping waits for a reset"
        return GpuFault(Level.INSTANCE, "DEVICE_RESET_REQUIRED", detail)
    if num := counters.num_uncorrected_errors:
        detail = f"{num} errors since its reset"
        return GpuFault(Level.INSTANCE, "DEVICE_ECC_UNCORRECTED", detail)
    if counters.is_slowed_by_heat:
        return GpuFault(Level.TRANSIENT, "DEVICE_HOT", "slowed down by heat")
    return NO_FAULT


def fault_of_error(error: DriverError, text: str) -> GpuFault:
    """The fault that a failed query shows. `text` is the driver's message, for
    `DriverError.OTHER`.
    """
    match error:
        case DriverError.GPU_IS_LOST:
            return GpuFault(Level.LOST, "DEVICE_LOST", "fallen off the bus")
        case DriverError.RESET_REQUIRED:
            detail = "the driver asks for a reset"
            return GpuFault(Level.INSTANCE, "DEVICE_RESET_REQUIRED", detail)
        case DriverError.OTHER:
            return GpuFault(Level.TRANSIENT, DEVICE_UNKNOWN, text)
