"""The status file of a node (S33).

The worst report on a device counts, a damaged file is ignored, and each instance gets the signals
of its own devices.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.atomic_file import write_atomically
from pdmesh.core.health.fault_levels import Level
from pdmesh.core.health.node_status import (
    DEVICE_UNKNOWN,
    STATUS_OLD,
    STATUS_TORN,
    DeviceStatus,
    NodeStatus,
    TornStatus,
    dump,
    merged,
    parse,
    signals_for,
    signals_from_file,
)
from pdmesh.instance.incarnation.self_restart import device_names, node_reader
from pdmesh.services.health_monitor.devices import FileDevices, NvmlDevices

pytestmark = pytest.mark.req("S33")
BROKEN = DeviceStatus("1", Level.NODE, "DEVICE_ROWS_USED_UP", "row remapping failed")
STATUS = NodeStatus("node-a", 1000.0, 2.0, (DeviceStatus("0"), BROKEN))


def test_the_worst_report_on_a_device_counts() -> None:
    hot = DeviceStatus("1", Level.TRANSIENT, "DEVICE_HOT")
    assert merged([hot, DeviceStatus("0"), BROKEN, DeviceStatus("1")]) == STATUS.devices


def test_an_instance_hears_only_of_its_own_devices() -> None:
    (signal,) = signals_for(["1", "2"], STATUS.devices)
    assert (signal.reason, signal.level, signal.is_proof) == (BROKEN.reason, Level.NODE, True)
    assert signals_for(["0"], STATUS.devices) == ()


def test_a_whole_file_is_read_as_it_was_written() -> None:
    assert parse(dump(STATUS)) == STATUS


@given(st.integers(0, len(dump(STATUS)) - 3), st.sampled_from(["cut", "flip"]))
def test_an_incomplete_file_gives_no_status(at: int, how: str) -> None:
    """The file is cut at any place, or one character is changed. Changed white space is not
    tested.
    """
    text = dump(STATUS)
    torn = (
        text[:at]
        if how == "cut"
        else text[:at] + ("x" if text[at] != "x" else "y") + text[at + 1 :]
    )
    if how == "flip" and text[at].isspace():
        return
    with pytest.raises(TornStatus):
        parse(torn)
    (signal,) = signals_from_file(torn, ["0", "1"], 1000.0)
    assert (signal.reason, signal.level) == (STATUS_TORN, Level.TRANSIENT)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda c: st.lists(c, max_size=3) | st.dictionaries(st.text(max_size=8), c, max_size=3),
        max_leaves=8,
    )
)
def test_no_json_is_a_status_by_chance(value: object) -> None:
    with pytest.raises(TornStatus):
        parse(json.dumps(value))


def test_an_old_file_says_nothing_of_the_devices() -> None:
    (signal,) = signals_from_file(dump(STATUS), ["1"], 1006.1)
    assert (signal.reason, signal.level) == (STATUS_OLD, Level.TRANSIENT)
    assert signals_from_file(dump(STATUS), ["0"], 1005.9) == ()


def test_an_instance_reads_its_nodes_file_if_there_is_one(tmp_path: Path) -> None:
    file = tmp_path / "node-status.json"
    read = node_reader(file, ["1"], lambda: 1001.0)
    assert read() == ()
    write_atomically(file, dump(STATUS))
    assert [s.reason for s in read()] == [BROKEN.reason]
    file.write_bytes(b"\xff\xfe torn")
    assert [s.reason for s in read()] == [STATUS_TORN]


def test_devices_are_named_by_setting_then_cuda_then_the_container_then_the_instance() -> None:
    container = {"NVIDIA_VISIBLE_DEVICES": "GPU-c"}  # the value that Kubernetes' device plugin sets
    environment = {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b", **container}
    assert device_names("2, 3", "p0", environment) == ["2", "3"]
    assert device_names("", "p0", environment) == ["GPU-a", "GPU-b"]
    assert device_names("", "p0", container) == ["GPU-c"]
    for names_no_device in ("all", "none", "void", ""):
        assert device_names("", "p0", {"NVIDIA_VISIBLE_DEVICES": names_no_device}) == ["p0"]
    assert device_names("", "p0", {}) == ["p0"]


def test_a_device_file_that_cannot_be_read_is_unknown_and_never_well(tmp_path: Path) -> None:
    source = FileDevices(tmp_path / "devices")
    assert source.read() == ()
    (tmp_path / "devices").mkdir()
    (tmp_path / "devices" / "0.json").write_text('{"level": 3, "reason": "DEVICE_RESET"}')
    (tmp_path / "devices" / "1.json").write_text('{"level": 0')
    (tmp_path / "devices" / "2.json").write_text('{"level": 0}')
    (tmp_path / "devices" / "3.json").write_text('{"level": 2}')
    assert [(s.device, s.level, s.reason) for s in source.read()] == [
        ("0", Level.INSTANCE, "DEVICE_RESET"),
        ("1", Level.TRANSIENT, DEVICE_UNKNOWN),
        ("2", Level.WELL, ""),
        ("3", Level.PROCESS, "DEVICE_FAULT"),
    ]


class FakeNvml(SimpleNamespace):
    """Has pynvml's functions, which answer from a table of devices. A number in the table is an
    error to raise.
    """

    class NVMLError(Exception):
        def __init__(self, value: int) -> None:
            super().__init__(f"error {value}")
            self.value = value

    NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_FUNCTION_NOT_FOUND = 3, 13
    NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED, NVML_ERROR_UNKNOWN = 15, 16, 999
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_VOLATILE_ECC = 0
    nvmlClocksThrottleReasonHwThermalSlowdown = 64  # noqa: N815

    def _answer(self, handle: int, key: str) -> Any:
        value = self.devices[handle].get(key, 3)
        if isinstance(value, int) and key not in ("ecc", "throttle"):
            raise self.NVMLError(value)
        return value

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if error := self.devices[index].get("error"):
            raise self.NVMLError(error)
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetRemappedRows(self, handle: int) -> Any:
        return self._answer(handle, "rows")

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> Any:
        return self.devices[handle].get("ecc", 0)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> Any:
        return self.devices[handle].get("throttle", 0)


@pytest.mark.req("S34")
@pytest.mark.parametrize(
    ("device", "level", "reason"),
    [
        ({}, Level.WELL, ""),
        ({"rows": (1, 0, 0, 0)}, Level.WELL, ""),
        ({"rows": (1, 0, 1, 0)}, Level.INSTANCE, "DEVICE_RESET_REQUIRED"),
        ({"rows": (1, 1, 1, 1)}, Level.NODE, "DEVICE_ROWS_USED_UP"),
        ({"ecc": 2}, Level.INSTANCE, "DEVICE_ECC_UNCORRECTED"),
        ({"throttle": 64}, Level.TRANSIENT, "DEVICE_HOT"),
        ({"throttle": 4}, Level.WELL, ""),
        ({"error": 15}, Level.LOST, "DEVICE_LOST"),
        ({"error": 16}, Level.INSTANCE, "DEVICE_RESET_REQUIRED"),
        ({"error": 999}, Level.TRANSIENT, DEVICE_UNKNOWN),
        ({"rows": 999}, Level.TRANSIENT, DEVICE_UNKNOWN),
    ],
)
def test_each_message_of_the_driver_has_a_level(
    device: dict[str, object], level: Level, reason: str
) -> None:
    statuses = NvmlDevices(FakeNvml(devices=[device])).read()
    assert {(s.level, s.reason) for s in statuses} == {(level, reason)}
    assert statuses[0].device == "0"
