"""Checks copies of KV that run beside a computing model.

The copies must see only complete steps, and must hardly slow the model (S50).
"""

from __future__ import annotations

import threading
import time
from typing import Final

import numpy as np
import torch

from loadtests.gpu_check.finding import Finding
from pdmesh.core.kv.layout.head_blocks import head_blocks
from pdmesh.kv.device.copies import DeviceCopies, lock_pages
from pdmesh.kv.device.operators import DeviceBlocks

SHAPE: Final = (2, 512, 16, 8, 128)  # K and V, blocks, tokens, heads, numbers; 32 MiB per layer
NUM_LAYERS: Final = 16
NUM_STEPS: Final = 200
IDS: Final = list(range(3, 480, 7))
_MATRIX: Final = 4096


class Model:
    """A stand-in for a model. Each step multiplies matrices and writes to every block."""

    def __init__(self) -> None:
        self.caches = [
            torch.zeros(SHAPE, dtype=torch.int16, device="cuda") for _ in range(NUM_LAYERS)
        ]
        self._weights = torch.randn(_MATRIX, _MATRIX, dtype=torch.bfloat16, device="cuda")

    def step(self, *, writes: bool = True) -> None:
        """Queue one step on the current stream."""
        for cache in self.caches:
            self._weights @ self._weights
            if writes:
                cache.add_(1)


def check() -> list[Finding]:
    model = Model()
    where = head_blocks("kbnhc", SHAPE, model.caches[0].stride(), 2)
    copies = DeviceCopies(DeviceBlocks(model.caches, where), model.caches[0].device)
    try:
        num_bytes = NUM_LAYERS * len(IDS) * where.block_bytes
        arena = np.zeros(num_bytes, np.uint8)
        lock_pages(arena)
        return [_sees_whole_steps(model, copies, arena), _is_barely_felt(model, copies, arena)]
    finally:
        copies.close()


def _sees_whole_steps(model: Model, copies: DeviceCopies, arena: np.ndarray) -> Finding:
    """Check that each copy sees complete steps only.

    The host does not wait between steps. CUDA events alone keep the copies and the steps in order.
    """
    layers, heads = (0, NUM_LAYERS), (0, SHAPE[3])
    torn, early = 0, 0
    landed = np.empty_like(arena)
    lock_pages(landed)
    for step in range(1, NUM_STEPS + 1):
        ended = threading.Event()
        model.step()
        copies.gather(IDS, arena, layers, ended.set)
        model.step()  # the gather must not see this step
        ended.wait()
        seen = arena.view(np.int16)
        torn += not bool((seen == np.int16(2 * step - 1)).all())
        landed.view(np.int16)[:] = -step
        scattered = threading.Event()
        copies.scatter(landed, IDS, heads, scattered.set)
        # The model reads right after the scatter, without waiting on the host.
        read = [cache[:, IDS].clone() for cache in model.caches]
        scattered.wait()
        early += not all(bool((blocks == -step).all()) for blocks in read)
        for cache in model.caches:
            cache.fill_(2 * step)
    claim = (
        f"{NUM_STEPS} gathers between two steps that rewrite every block: {torn} saw another step. "
        f"{NUM_STEPS} scatters, read at once by the model: {early} came too late. "
        f"{arena.size >> 20} MiB each."
    )
    return Finding("Order beside the model", claim, torn == early == 0)


def _is_barely_felt(model: Model, copies: DeviceCopies, arena: np.ndarray) -> Finding:
    """Time steps alone and beside continuous copies, in turn.

    The bar is 1.25 times the time alone.
    """
    layers = (0, NUM_LAYERS)
    alone, beside = list[float](), list[float]()
    copied = 0
    for _ in range(5):
        alone.append(_steps_s(model))
        stop = threading.Event()

        def copy_without_pause(stop: threading.Event = stop) -> None:
            nonlocal copied
            while not stop.is_set():
                ended = threading.Event()
                copies.gather(IDS, arena, layers, ended.set)
                ended.wait()
                copied += arena.size

        copying = threading.Thread(target=copy_without_pause)
        copying.start()
        began = time.perf_counter()
        before = copied
        beside.append(_steps_s(model))
        rate = (copied - before) / (time.perf_counter() - began) / 1e9
        stop.set()
        copying.join()
    ratio = float(np.median(np.divide(beside, alone)))
    row = {
        "step alone, ms": f"{1e3 * min(alone):.2f}",
        "beside gathers, ms": f"{1e3 * min(beside):.2f}",
        "median ratio": f"{ratio:.3f}",
        "copied out meanwhile, GB/s": f"{rate:.1f}",
    }
    return Finding(
        "Cost beside the model",
        "The time of a step of matrix products, alone and beside endless gathers into the arena, "
        "in turn, in five rounds. Bar: at most 1.25 times the time alone.",
        ratio <= 1.25,
        [row],
    )


def _steps_s(model: Model) -> float:
    """Seconds of one step, by the device's clock."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    began.record()
    for _ in range(20):
        model.step(writes=False)
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1000 / 20
