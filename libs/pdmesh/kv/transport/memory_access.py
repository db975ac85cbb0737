"""Reads and writes a few KV bytes from the host, in the host's memory or in a GPU's memory."""

from __future__ import annotations

import numpy as np

from pdmesh.kv.transport.base import ByteArray, KvBytes
from pdmesh.kv.transport.device_bytes import DeviceBytes


def host_view(data: KvBytes) -> memoryview:
    """A view of bytes in the host's memory, or a copy of bytes in a GPU's memory."""
    return memoryview(data.to_host()) if isinstance(data, DeviceBytes) else data.data


def fill(buffer: KvBytes, data: memoryview) -> None:
    """Write `data`, which must be as long as the buffer."""
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
    """Return `data` itself. Raises TypeError if its bytes lie in a GPU's memory."""
    if isinstance(data, DeviceBytes):
        raise TypeError("caches in the host's memory, and an arena in a GPU's")
    return data
