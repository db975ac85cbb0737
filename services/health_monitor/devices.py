"""Reads the state of a node's devices from the driver, and from files by tools and operators.

Each of these sources is asked in a thread, because a driver may block. If a source fails or hangs,
the source and all devices known so far are reported as unknown. A node may lack a source, which is
no fault.
`core.health.gpu_faults` decides how serious the driver's answers are.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from pdmesh.core.health.fault_levels import Level, level_of
from pdmesh.core.health.gpu_faults import (
    DriverError,
    GpuCounters,
    GpuFault,
    fault_of_counters,
    fault_of_error,
)
from pdmesh.core.health.node_status import DEVICE_UNKNOWN, DeviceStatus, merged

_MAX_FILE_BYTES: Final = 65_536
_TIMEOUT_S: Final = 5.0


class DeviceSource(Protocol):
    @property
    def name(self) -> str: ...

    def read(self) -> Sequence[DeviceStatus]:
        """The states of all devices that the source knows. May block, and may raise anything."""
        ...


class DeviceReader:
    """Asks all sources at once, each for at most `_TIMEOUT_S`."""

    def __init__(self, sources: Sequence[DeviceSource]) -> None:
        self._sources = sources
        self._asked: dict[str, asyncio.Future[Sequence[DeviceStatus]]] = {}
        self._known: tuple[DeviceStatus, ...] = ()

    async def read(self) -> tuple[DeviceStatus, ...]:
        answers = await asyncio.gather(*(self._ask(source) for source in self._sources))
        self._known = merged(status for answer in answers for status in answer)
        return self._known

    async def _ask(self, source: DeviceSource) -> Sequence[DeviceStatus]:
        """Ask a source.

        If the previous call to the source still hangs, this waits for that call and makes no new
        one. So a source that hangs occupies only one thread.
        """
        asked = self._asked.get(source.name)
        if asked is None:
            asked = self._asked[source.name] = asyncio.ensure_future(asyncio.to_thread(source.read))
        await asyncio.wait([asked], timeout=_TIMEOUT_S)
        if not asked.done():
            return self._unknown(source, f"no answer for {_TIMEOUT_S:g} s")
        del self._asked[source.name]
        error = asked.exception()
        return asked.result() if error is None else self._unknown(source, type(error).__name__)

    def _unknown(self, source: DeviceSource, detail: str) -> Sequence[DeviceStatus]:
        """Report the source as unknown, and also all devices known so far.

        Any of these devices may belong to this source.
        """
        names_ = [source.name, *(device.device for device in self._known)]
        return [DeviceStatus(name, Level.TRANSIENT, DEVICE_UNKNOWN, detail) for name in names_]


class FileDevices:
    """Reads a folder with one file per device.

    A file is named `<device>.json`, and contains {"level": 3, "reason": "...", "detail": "..."}.
    Hardware tools write these files, or an operator who takes a device out of use. A device without
    a file is not reported.
    """

    name = "files"

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def read(self) -> Sequence[DeviceStatus]:
        if not self._directory.is_dir():
            return ()
        return [_from_file(path) for path in sorted(self._directory.glob("*.json"))]


def _from_file(path: Path) -> DeviceStatus:
    try:
        with path.open("rb") as file:
            said = json.loads(file.read(_MAX_FILE_BYTES))
        level = level_of(int(said["level"]))
        reason, detail = str(said.get("reason", "")), str(said.get("detail", ""))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return DeviceStatus(path.stem, Level.TRANSIENT, DEVICE_UNKNOWN, "its file cannot be read")
    if level is not Level.WELL and not reason:
        reason = "DEVICE_FAULT"
    return DeviceStatus(path.stem, level, reason, detail)


class NvmlDevices:
    """Reads NVIDIA devices from the driver.

    Each device is reported twice, under its index and under its UUID, because CUDA_VISIBLE_DEVICES
    may contain either.
    """

    name = "nvml"

    def __init__(self, nvml: Any) -> None:
        """`nvml` is the initialised module pynvml, which has no types."""
        self._nvml = nvml

    @classmethod
    def find(cls) -> NvmlDevices | None:
        """The source for this node. None if pynvml or the driver is missing."""
        try:
            import pynvml
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return None
        return cls(pynvml)

    def read(self) -> Sequence[DeviceStatus]:
        return [
            status
            for index in range(self._nvml.nvmlDeviceGetCount())
            for status in self._read_one(index)
        ]

    def _read_one(self, index: int) -> Iterator[DeviceStatus]:
        nvml, names = self._nvml, [str(index)]
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            names.append(_text(nvml.nvmlDeviceGetUUID(handle)))
            found = fault_of_counters(self._counters(handle))
        except nvml.NVMLError as exc:
            found = self._fault_of(exc)
        for name in names:
            yield DeviceStatus(name, *found)

    def _counters(self, handle: Any) -> GpuCounters:
        nvml = self._nvml
        rows = self._ask(nvml.nvmlDeviceGetRemappedRows, handle) or (0, 0, 0, 0)
        _, _, is_pending, has_failed = rows
        uncorrected = self._ask(
            nvml.nvmlDeviceGetTotalEccErrors,
            handle,
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            nvml.NVML_VOLATILE_ECC,
        )
        reasons = self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
        return GpuCounters(
            row_remapping_failed=bool(has_failed),
            row_remapping_pending=bool(is_pending),
            num_uncorrected_errors=uncorrected or 0,
            is_slowed_by_heat=bool(reasons & nvml.nvmlClocksThrottleReasonHwThermalSlowdown),
        )

    def _ask(self, question: Any, *about: Any) -> Any:
        """The driver's answer. None if the device does not support this question."""
        nvml = self._nvml
        try:
            return question(*about)
        except nvml.NVMLError as exc:
            if exc.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                return None
            raise

    def _fault_of(self, error: Any) -> GpuFault:
        nvml = self._nvml
        known = {
            nvml.NVML_ERROR_GPU_IS_LOST: DriverError.GPU_IS_LOST,
            nvml.NVML_ERROR_RESET_REQUIRED: DriverError.RESET_REQUIRED,
        }
        return fault_of_error(known.get(error.value, DriverError.OTHER), str(error))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
