"""Checks that the GPU's checksum equals the host's, and is as fast as the GPU reads memory
(S50).
"""

from __future__ import annotations

import time

import numpy as np
import torch

from loadtests.gpu_check.finding import Finding, Row
from pdmesh.core.instance.arena import ArenaRange
from pdmesh.kv.device.arena import DeviceArena
from pdmesh.kv.device.digest import digest

SIZES = (1, 7, 8, 4096, 1 << 20, (1 << 22) + 3, 64 << 20, 512 << 20)
_COMPARED = 64 << 20  # larger data is not compared, since the host would take too long
ROUNDS = 7


def check(device: str = "cuda", sizes: tuple[int, ...] = SIZES) -> Finding:
    """Compare checksums and measure speed.

    Without a GPU, `device` may be "cpu". Then the speed means nothing, and only the comparison
    counts.
    """
    rng = np.random.default_rng(5)
    wrong, rows = list[int](), list[Row]()
    for size in sizes:
        data = rng.integers(0, 256, size, np.uint8)
        place = DeviceArena(size, device).view(ArenaRange(0, size))
        place.fill(data.data)
        if size <= _COMPARED and place.checksum() != digest(data):
            wrong.append(size)
        if size >= 1 << 20:
            took = min(_seconds(place.checksum) for _ in range(ROUNDS))
            copy = place.tensor.clone()
            copied = min(_seconds(lambda to=copy, of=place: _copy(to, of.tensor)) for _ in range(7))
            rows.append(
                {
                    "MiB": size >> 20,
                    "checksum, ms": f"{1e3 * took:.3f}",
                    "GB/s": f"{size / took / 1e9:.0f}",
                    "copy on the device, ms": f"{1e3 * copied:.3f}",
                }
            )
    claim = f"{len(sizes)} sizes; {len(wrong)} have another checksum than on the host {wrong or ''}"
    return Finding("Checksums on the device", f"{claim.rstrip()}.", not wrong, rows)


def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    to.copy_(source)
    if to.is_cuda:
        torch.cuda.synchronize()


def _seconds(work: object) -> float:
    assert callable(work)
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
