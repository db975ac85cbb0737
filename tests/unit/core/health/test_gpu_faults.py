"""Each answer of NVIDIA's driver has a fault level, and the worst of several answers counts."""

from __future__ import annotations

import pytest

from pdmesh.core.health.fault_levels import EJECTS_FROM, Level
from pdmesh.core.health.gpu_faults import (
    NO_FAULT,
    DriverError,
    GpuCounters,
    fault_of_counters,
    fault_of_error,
)
from pdmesh.core.health.node_status import DEVICE_UNKNOWN


@pytest.mark.req("S34")
@pytest.mark.parametrize(
    ("counters", "level", "reason"),
    [
        (GpuCounters(row_remapping_failed=True), Level.NODE, "DEVICE_ROWS_USED_UP"),
        (GpuCounters(row_remapping_pending=True), Level.INSTANCE, "DEVICE_RESET_REQUIRED"),
        (GpuCounters(num_uncorrected_errors=1), Level.INSTANCE, "DEVICE_ECC_UNCORRECTED"),
        (GpuCounters(is_slowed_by_heat=True), Level.TRANSIENT, "DEVICE_HOT"),
        (GpuCounters(True, True, 7, True), Level.NODE, "DEVICE_ROWS_USED_UP"),
        (GpuCounters(False, False, 7, True), Level.INSTANCE, "DEVICE_ECC_UNCORRECTED"),
    ],
)
def test_the_worst_counter_decides(counters: GpuCounters, level: Level, reason: str) -> None:
    assert fault_of_counters(counters)[:2] == (level, reason)


def test_a_gpu_whose_counters_are_well_has_no_fault() -> None:
    assert fault_of_counters(GpuCounters()) == NO_FAULT


@pytest.mark.req("S33", "S34")
def test_a_driver_that_does_not_answer_ejects_nothing_unless_it_says_why() -> None:
    assert fault_of_error(DriverError.GPU_IS_LOST, "x").level is Level.LOST
    assert fault_of_error(DriverError.RESET_REQUIRED, "x").level is Level.INSTANCE
    other = fault_of_error(DriverError.OTHER, "error 999")
    assert (other.reason, other.detail) == (DEVICE_UNKNOWN, "error 999")
    assert other.level < EJECTS_FROM
