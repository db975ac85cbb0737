"""A range of bytes in a GPU's memory. It is used like a numpy array of bytes.

The KV transport, the KV agent and `kv.device.copies` accept both types (`base.KvBytes`). This
module does not import torch. `kv.device.arena` makes the ranges, on machines that have a device.
"""

from __future__ import annotations

from typing import Any, Protocol


class DeviceWork(Protocol):
    """The operations on a range's tensor. Each call returns when the device has finished.

    A tensor is a torch tensor of uint8, one-dimensional and contiguous. Its type is Any because
    this module does not import torch.
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
        """The bytes as UCX accepts them: with the buffer protocol or `__cuda_array_interface__`."""
        return self.tensor if self.tensor.is_cuda else self.tensor.numpy()

    def checksum(self) -> bytes:
        return self._work.checksum(self.tensor)

    def to_host(self) -> bytes:
        return self._work.to_host(self.tensor)

    def fill(self, data: memoryview) -> None:
        """Write `data` to the range. Raises ValueError unless both have the same length."""
        if len(data) != self.size:
            raise ValueError(f"{len(data)} bytes for a range of {self.size}")
        self._work.fill(self.tensor, data)
