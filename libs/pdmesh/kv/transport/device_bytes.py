"""A range of bytes in a GPU's memory; it is used like a numpy array of bytes in host memory.

The transport, the agent and the copies take either (`base.KvBytes`). Nothing here imports torch: a
range is made by `kv.device.arena`, where there is a device.
"""

from __future__ import annotations

from typing import Any, Protocol


class DeviceWork(Protocol):
    """What is done with a range on its device. Each call returns when it is done.

    Any: torch's tensors, one-dimensional, contiguous, of uint8.
    """

    def checksum(self, tensor: Any) -> bytes:
        """`kv.device.digest.digest` of the bytes."""
        ...

    def to_host(self, tensor: Any) -> bytes: ...

    def fill(self, tensor: Any, data: memoryview) -> None: ...


class DeviceBytes:
    """A view, not a copy. Slices are views of the same memory."""

    __slots__ = ("_work", "tensor")

    def __init__(self, tensor: Any, work: DeviceWork) -> None:
        self.tensor, self._work = tensor, work

    @property
    def size(self) -> int:
        return int(self.tensor.numel())

    def __getitem__(self, part: slice) -> DeviceBytes:
        return DeviceBytes(self.tensor[part], self._work)

    @property
    def exposed(self) -> Any:
        """What UCX takes: an object with the buffer protocol or `__cuda_array_interface__`."""
        return self.tensor if self.tensor.is_cuda else self.tensor.numpy()

    def checksum(self) -> bytes:
        return self._work.checksum(self.tensor)

    def to_host(self) -> bytes:
        return self._work.to_host(self.tensor)

    def fill(self, data: memoryview) -> None:
        """Raises ValueError unless `data` is as long as the range."""
        if len(data) != self.size:
            raise ValueError(f"{len(data)} bytes for a range of {self.size}")
        self._work.fill(self.tensor, data)
