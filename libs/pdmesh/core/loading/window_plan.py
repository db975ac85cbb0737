"""Decides into which parts of one buffer the bytes of all weight files are read (S86, S87).

The bytes of a file are cut into windows of whole tensors. Windows are placed alternately at the
start and at the end of the buffer. The buffer has room for any two successive windows. So one
window is read while the ranks copy the weights of the window before it. One buffer serves all
files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from pdmesh.core.loading.weight_header import StoredTensor, WeightHeader

WINDOW_BYTES: Final = 64 << 20
ALIGNMENT: Final = 64  # of a window in the buffer, in bytes; no number format needs more


@dataclass(frozen=True, slots=True)
class WeightWindow:
    """Bytes `begin` to `end` of a file. They are read to position `place` in the buffer.

    The ranks get `tensors` in this order.
    """

    file: str
    begin: int
    end: int
    place: int
    tensors: tuple[StoredTensor, ...]

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class WindowPlan:
    buffer_bytes: int
    windows: tuple[WeightWindow, ...]


def plan_windows(headers: Sequence[WeightHeader], window_bytes: int = WINDOW_BYTES) -> WindowPlan:
    """Windows of at most `window_bytes`. A longer tensor has a window to itself."""
    runs = [(header.file, run) for header in headers for run in _runs(header, window_bytes)]
    sizes = [_aligned(run[-1].end - run[0].begin) for _, run in runs]
    buffer_bytes = max((a + b for a, b in pairwise(sizes)), default=sum(sizes))
    windows = tuple(
        WeightWindow(
            file,
            run[0].begin,
            run[-1].end,
            buffer_bytes - size if number % 2 else 0,
            handing_order(run),
        )
        for number, ((file, run), size) in enumerate(zip(runs, sizes, strict=True))
    )
    return WindowPlan(buffer_bytes, windows)


def handing_order(tensors: Sequence[StoredTensor]) -> tuple[StoredTensor, ...]:
    """The tensors in the file's order, except that the smallest one comes last.

    `WeightStream` must copy the last tensor, so this tensor should be small.
    """
    last = min(tensors, key=lambda tensor: tensor.num_bytes)
    return (*(tensor for tensor in tensors if tensor is not last), last)


def _runs(header: WeightHeader, window_bytes: int) -> Iterator[list[StoredTensor]]:
    run: list[StoredTensor] = []
    for tensor in header.tensors:
        if run and tensor.end - run[0].begin > window_bytes:
            yield run
            run = []
        run.append(tensor)
    if run:
        yield run


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
