"""An arena for KV in a GPU's memory: gather writes it, UCX moves it, scatter reads it.

RMM allocates the memory with cudaMalloc. torch's allocator would not do, because it may map memory
in pieces (`expandable_segments`) that cuda_ipc and GPUDirect cannot reach. Checksums and small
copies run on a separate CUDA stream, so they do not wait for the model.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import structlog
import torch

from pdmesh.core.instance.arena import ArenaRange
from pdmesh.kv.device import digest
from pdmesh.kv.transport.device_bytes import DeviceBytes

log = structlog.get_logger(__name__)


class DeviceArena:
    """An `ArenaMemory` on `device`.

    For tests, `device` may be "cpu". The code then treats host memory like a GPU's memory. Raises
    OSError if the device has too little memory.
    """

    def __init__(self, size: int, device: Any) -> None:
        self._size, self._device = size, torch.device(device)
        self._bytes = _allocated(max(size, 1), self._device)
        self._work = _Work(self._device)

    @property
    def size(self) -> int:
        return self._size

    def view(self, r: ArenaRange) -> DeviceBytes:
        if r.offset < 0 or r.length < 0 or r.offset + r.length > self._size:
            raise IndexError(f"{r} is outside an arena of {self._size} bytes")
        return DeviceBytes(self._bytes[r.offset : r.offset + r.length], self._work)

    def close(self) -> None:
        """Release the memory. The device frees it when the last view is gone."""
        self._bytes = torch.empty(0, dtype=torch.uint8)


class _Work:
    """The `DeviceWork` of an arena, on a separate stream. Thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def checksum(self, tensor: Any) -> bytes:
        if self._stream is None:
            return digest.digest(tensor.numpy())
        from pdmesh.kv.device.digest_kernel import sums_of

        with self._on_stream():
            plain, weighted = sums_of(tensor).tolist()  # waits for the stream
        return digest.finished(plain, weighted, tensor.numel())

    def to_host(self, tensor: Any) -> bytes:
        with self._on_stream():
            data: bytes = tensor.cpu().numpy().tobytes()
        return data

    def fill(self, tensor: Any, data: memoryview) -> None:
        source = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        with self._on_stream():
            tensor.copy_(source)
            if self._stream is not None:
                self._stream.synchronize()

    @contextlib.contextmanager
    def _on_stream(self) -> Any:
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield


def _allocated(size: int, device: torch.device) -> Any:
    if device.type != "cuda":
        return torch.zeros(size, dtype=torch.uint8, device=device)
    import rmm

    try:
        with torch.cuda.device(device):
            memory = rmm.DeviceBuffer(size=size, mr=rmm.mr.CudaMemoryResource())
            found = torch.as_tensor(memory, device=device)  # the tensor keeps `memory` alive
            torch.cuda.synchronize(device)
    except MemoryError as error:
        raise OSError(f"{size} bytes of the GPU's memory: {error}") from error
    log.info("kv.arena.on_device", num_bytes=size, device=str(device))
    return found.view(torch.uint8)
