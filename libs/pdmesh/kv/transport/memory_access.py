"""The few bytes that the host itself reads or writes of a range, wherever it lies."""

from __future__ import annotations

import numpy as np

from pdmesh.kv.transport.base import ByteArray, KvBytes
from pdmesh.kv.transport.device_bytes import DeviceBytes


def host_view(data: KvBytes) -> memoryview:
    """The bytes; a copy if they lie in a GPU's memory."""
    return memoryview(data.to_host()) if isinstance(data, DeviceBytes) else data.data


def fill(buffer: KvBytes, data: memoryview) -> None:
    """Write `data`, which is as long as the buffer."""
    if isinstance(buffer, DeviceBytes):
        buffer.fill(data)
    else:
        buffer[:] = np.frombuffer(data, np.uint8)


def flip_bit(data: KvBytes) -> None:
    """Change a bit of the first byte, for a test."""
    first = bytearray(host_view(data[:1]))
    first[0] ^= 1
    fill(data[:1], memoryview(first))


def in_host(data: KvBytes) -> ByteArray:
    """The range, for caches in the host's memory. Raises TypeError if it lies in a GPU's."""
    if isinstance(data, DeviceBytes):
        raise TypeError("caches in the host's memory, and an arena in a GPU's")
    return data
