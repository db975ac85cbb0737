"""Copies between a GPU's paged KV blocks and an arena, while the model computes (S50).

The copies run on a side stream. If the arena is on the device, the side stream gathers directly
into it. If the arena is page-locked host memory, the side stream gathers into a scratch buffer on
the device, and the copy engine copies from there to the host. The compute units stay free for the
model. The streams wait for each other on the device, by events, so the calling thread only queues
the work. Another thread waits for the end of each copy and calls the copy's callback.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import structlog
import torch

from pdmesh.kv.device.operators import DeviceBlocks
from pdmesh.kv.transport.base import ByteArray, KvBytes
from pdmesh.kv.transport.device_bytes import DeviceBytes

log = structlog.get_logger(__name__)

SCRATCH_BYTES = 256 << 20
OnDone = Callable[[], None] | None  # with None, the call waits until its copy ends
_Span = tuple[int, int]  # first, count
_Waiting = tuple[Any, Callable[[], None]]  # a torch Event and its callback


class DeviceCopies:
    """The copies of one cache. Create it on the model's thread. Callbacks run on a separate thread.

    The queue of waiting copies has no limit, but each range of the arena has at most one copy.
    """

    def __init__(self, blocks: DeviceBlocks, device: Any) -> None:
        self._blocks, self._device = blocks, device
        self._model = torch.cuda.current_stream(device)
        self._stream = torch.cuda.Stream(device)
        self._scratch = torch.empty(0, dtype=torch.uint8, device=device)  # see `_parts`
        self._lock = threading.Lock()  # one copy at a time queues its use of `_scratch`
        self._waiting: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, name="pdmesh-copies", daemon=True)
        self._thread.start()

    def gather(
        self, block_ids: Sequence[int], out: KvBytes, layers: _Span, on_done: OnDone
    ) -> None:
        """Gather the blocks, with everything that the model's stream has written so far.

        Later work on the model's stream waits for the gather, but not for the copy to the host.
        """
        model = torch.cuda.current_stream(self._device)
        with self._lock, torch.cuda.stream(self._stream):
            self._stream.wait_stream(model)
            ids = self._ids(block_ids)
            if isinstance(out, DeviceBytes):
                self._blocks.gather(ids, out.tensor, layers)
                parts, gathered = [], self._mark()
            else:
                target = torch.from_numpy(out)
                parts = self._parts(len(block_ids), layers, self._num_heads)
            for part, start, size in parts:
                scratch = self._scratch[:size]
                self._blocks.gather(ids, scratch, part)
                gathered = self._mark()
                target[start : start + size].copy_(scratch, non_blocking=True)
            copied = self._mark()
        model.wait_event(gathered)
        self._at_end(copied, on_done)

    def scatter(
        self, source: KvBytes, block_ids: Sequence[int], heads: _Span, on_done: OnDone
    ) -> None:
        """Queue a scatter that is complete before any work queued later on the model's stream."""
        scattered = self._queue_scatter(source, block_ids, (0, self._blocks.num_layers), heads)
        torch.cuda.current_stream(self._device).wait_event(scattered)
        self._at_end(scattered, on_done)

    def scatter_now(
        self, source: KvBytes, block_ids: Sequence[int], layers: _Span, heads: _Span | None
    ) -> None:
        """Scatter, and return when the scatter is complete. Not for the model's thread.

        No request may have begun to read the blocks.
        """
        self._queue_scatter(source, block_ids, layers, heads or (0, self._num_heads)).synchronize()

    def _queue_scatter(
        self, source: KvBytes, block_ids: Sequence[int], layers: _Span, heads: _Span
    ) -> Any:
        with self._lock, torch.cuda.stream(self._stream):
            # The current step may still read the blocks for the request that had them before.
            self._stream.wait_stream(self._model)
            ids = self._ids(block_ids)
            if isinstance(source, DeviceBytes):
                self._blocks.scatter(source.tensor, ids, layers, heads)
                return self._mark()
            landed = torch.from_numpy(source)
            for part, start, size in self._parts(len(block_ids), layers, heads[1]):
                scratch = self._scratch[:size]
                scratch.copy_(landed[start : start + size], non_blocking=True)
                self._blocks.scatter(scratch, ids, part, heads)
            return self._mark()

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join()

    @property
    def _num_heads(self) -> int:
        return self._blocks.where.heads.count

    def _ids(self, block_ids: Sequence[int]) -> Any:
        ids = torch.tensor(block_ids, dtype=torch.int64).pin_memory()
        return ids.to(self._device, non_blocking=True)

    def _parts(
        self, num_blocks: int, layers: _Span, num_heads: int
    ) -> list[tuple[_Span, int, int]]:
        """Divide the layers into parts that fit the scratch buffer: (layers, begin, bytes) each.

        `begin` is a position in the arena's range. A part has at least one layer.
        """
        layer_bytes = self._blocks.buffer_bytes(num_blocks, 1, num_heads)
        if layer_bytes > self._scratch.numel() or not self._scratch.numel():
            size = max(layer_bytes, SCRATCH_BYTES)
            self._scratch = torch.empty(size, dtype=torch.uint8, device=self._device)
        step = self._scratch.numel() // layer_bytes
        first, count = layers
        return [
            ((first + i, min(step, count - i)), i * layer_bytes, min(step, count - i) * layer_bytes)
            for i in range(0, count, step)
        ]

    def _mark(self) -> Any:
        """An event after everything queued on the side stream so far."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def _at_end(self, event: Any, on_done: OnDone) -> None:
        if on_done is None:
            event.synchronize()
        else:
            self._waiting.put((event, on_done))

    def _wait(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            event, on_done = waiting
            try:
                event.synchronize()
                on_done()
            except Exception:  # the other callbacks must still run
                log.exception("kv.copy.died")


def lock_pages(memory: ByteArray) -> None:
    """Lock an arena's pages in memory, so that the device can copy to and from them.

    Raises OSError.
    """
    status = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.size, 0)
    if int(status):
        raise OSError(f"cudaHostRegister of {memory.size} bytes: {status}")
    log.info("kv.arena.locked", num_bytes=memory.size)
