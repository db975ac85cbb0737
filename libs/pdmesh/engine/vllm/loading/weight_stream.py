"""Hands the tensors of weight files to a model, file by file, in every rank of a node.

A window is a run of tensors in one file. One rank, the reader, reads window i+1 into shared memory
while all ranks copy the weights of window i. Between two windows the ranks wait for each other, so
that no window is overwritten while a rank still copies it.

A tensor is a view of the buffer, and valid until the next tensor is asked for. If a model keeps a
tensor nevertheless, the buffer stays in memory, and another buffer is allocated.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from mmap import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pdmesh.core.loading.weight_files import check_complete
from pdmesh.core.loading.weight_header import StoredTensor, WeightHeader, WeightsUnreadable
from pdmesh.core.loading.window_plan import WINDOW_BYTES, WeightWindow, WindowPlan, plan_windows
from pdmesh.engine.vllm.loading import shared_buffer
from pdmesh.engine.vllm.loading.node_ranks import WAIT_S, LoneRank, NodeRanks
from pdmesh.engine.vllm.loading.window_reader import (
    OpenFile,
    WindowReader,
    open_file,
    read_header,
)

if TYPE_CHECKING:
    import torch

# Names of torch's number formats; a build of torch may lack some.
_TORCH_NAMES: Final = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "U16": "uint16", "I16": "int16", "F16": "float16",
    "BF16": "bfloat16", "U32": "uint32", "I32": "int32", "F32": "float32", "U64": "uint64",
    "I64": "int64", "F64": "float64", "C64": "complex64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class WeightStreamOptions:
    """`wait_s` limits the wait for one window, and the wait for the slowest rank."""

    window_bytes: int = WINDOW_BYTES
    wait_s: float = WAIT_S
    open_file: OpenFile = open_file
    overlaps: bool = True  # False only to measure what overlapping gains


@dataclass(slots=True)
class StreamReport:
    """Measurements of one stream at this rank. Times are in seconds."""

    num_files: int = 0
    num_windows: int = 0
    num_bytes: int = 0
    num_allocations: int = 0
    buffer_bytes: int = 0
    waited_s: float = 0.0  # for the reader and for slower ranks
    handed_s: float = 0.0  # while the model copied weights

    @contextmanager
    def waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.waited_s += time.perf_counter() - began


class WeightStream:
    """The tensors of some files of one folder, in order. It can be iterated once, in each rank."""

    def __init__(
        self,
        folder: Path,
        files: Sequence[str],
        index: Mapping[str, str] | None = None,
        ranks: NodeRanks | None = None,
        options: WeightStreamOptions | None = None,
    ) -> None:
        self._folder, self._files, self._index = folder, files, index
        self._ranks: NodeRanks = ranks or LoneRank()
        self._options = options or WeightStreamOptions()
        self.report = StreamReport(num_files=len(files))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Raises WeightsUnreadable, RankLost, and EngineFailed if there is no memory."""
        plan = plan_windows(self._headers(), self._options.window_bytes)
        self.report.num_windows = len(plan.windows)
        self.report.num_bytes = sum(window.num_bytes for window in plan.windows)
        if not plan.windows:
            return
        reader = WindowReader(self._folder, self._options.open_file) if self._is_reader else None
        try:
            yield from self._windows(plan, reader)
        finally:
            if reader is not None:
                reader.close()

    @property
    def _is_reader(self) -> bool:
        return self._ranks.is_reader

    def _headers(self) -> list[WeightHeader]:
        fault, headers = None, list[WeightHeader]()
        if self._is_reader:
            try:
                headers = [
                    read_header(self._folder / name, self._options.open_file)
                    for name in self._files
                ]
                check_complete(headers, self._index)
            except WeightsUnreadable as error:
                fault = error
        self._agree(fault)
        told = self._ranks.from_reader(json.dumps([asdict(each) for each in headers]).encode())
        return headers if self._is_reader else [_header(each) for each in json.loads(told)]

    def _windows(
        self, plan: WindowPlan, reader: WindowReader | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        buffer = self._allocate(plan)
        lease: weakref.ref[Any] | None = None  # to the previous window; dead if no tensor is kept
        windows = plan.windows
        self._start(reader, windows[0], buffer)
        for number, window in enumerate(windows):
            following = windows[number + 1] if number + 1 < len(windows) else None
            fault = reader.wait(window, self._options.wait_s) if reader is not None else None
            is_kept = self._agree(fault, is_kept=lease is not None and lease() is not None)
            own = buffer
            if is_kept and following is not None:
                buffer = self._allocate(plan)
            if following is not None and self._options.overlaps:
                self._start(reader, following, buffer)
            memory = _memory(own, window)
            lease = weakref.ref(memory)
            yield from self._handed(window, memory)
            del memory, own
            if following is not None and not self._options.overlaps:
                self._agree(None)
                self._start(reader, following, buffer)

    def _start(self, reader: WindowReader | None, window: WeightWindow, buffer: mmap) -> None:
        if reader is not None:
            place = memoryview(buffer)[window.place : window.place + window.num_bytes]
            reader.start(window, place)

    def _allocate(self, plan: WindowPlan) -> mmap:
        self.report.num_allocations += 1
        self.report.buffer_bytes = plan.buffer_bytes
        return shared_buffer.allocate(plan.buffer_bytes, self._ranks)

    def _agree(self, fault: WeightsUnreadable | None, *, is_kept: bool = False) -> bool:
        """Wait for all ranks. Returns whether any of them keeps a tensor of the previous window.

        Raises the reader's fault, in all ranks.
        """
        with self.report.waiting():
            is_any_kept, is_fault = self._ranks.highest([is_kept, fault is not None])
            if is_fault:
                told = json.dumps([fault.file, fault.problem] if fault is not None else [])
                raise WeightsUnreadable(*json.loads(self._ranks.from_reader(told.encode())))
        return bool(is_any_kept)

    def _handed(self, window: WeightWindow, memory: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the window's tensors. The last tensor is a copy.

        The consumer's loop still refers to the last tensor when it asks for the next one. A view
        would therefore look like a tensor that the model keeps.
        """
        import torch

        began = time.perf_counter()
        whole = torch.from_numpy(memory)
        *others, last = window.tensors
        for tensor in others:
            yield tensor.name, _view(whole, tensor, window)
        yield last.name, _view(whole, last, window).clone()
        if whole._version:  # other ranks see what this one writes
            raise WeightsUnreadable(
                window.file,
                "the model changes loaded weights in place; use vLLM's loader (WEIGHTS_LOADER)",
            )
        self.report.handed_s += time.perf_counter() - began


def _header(told: Mapping[str, Any]) -> WeightHeader:
    tensors = tuple(
        StoredTensor(**{**each, "shape": tuple(each["shape"])}) for each in told["tensors"]
    )
    return WeightHeader(told["file"], told["data_begin"], told["file_bytes"], tensors)


def _memory(buffer: mmap, window: WeightWindow) -> Any:
    """The window's part of the buffer, as an array that lives as long as any of its tensors."""
    import numpy as np

    return np.frombuffer(buffer, np.uint8, count=window.num_bytes, offset=window.place)


def _view(whole: torch.Tensor, tensor: StoredTensor, window: WeightWindow) -> torch.Tensor:
    """Raises WeightsUnreadable if torch has no such number format."""
    import torch

    dtype = getattr(torch, _TORCH_NAMES[tensor.dtype], None)
    if dtype is None:
        raise WeightsUnreadable(window.file, f"torch has no {tensor.dtype}, as {tensor.name} has")
    if not tensor.num_bytes:
        return torch.empty(tensor.shape, dtype=dtype)
    part = whole[tensor.begin - window.begin : tensor.end - window.begin]
    if part.storage_offset() % dtype.itemsize:  # the format does not require alignment
        part = part.clone()
    return part.view(dtype).reshape(tensor.shape)
