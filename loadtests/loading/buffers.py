"""Compares one buffer for all files with a buffer for each file, at page-cache speed (S86)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pdmesh.engine.vllm.loading import shared_buffer
from pdmesh.engine.vllm.loading.node_ranks import LoneRank
from pdmesh.engine.vllm.loading.window_reader import open_file


@dataclass(frozen=True, slots=True)
class BufferRound:
    """The seconds that reading all files took, with one buffer and with a buffer for each file."""

    one_s: float
    each_s: float


def measure(files: Sequence[Path], rounds: int) -> list[BufferRound]:
    """Measure both ways in turn, after a round that warms up the page cache."""
    found = list[BufferRound]()
    for turn in range(rounds + 1):
        times = [0.0, 0.0]
        for reuses in (True, False) if turn % 2 else (False, True):
            times[not reuses] = _read(files, reuses=reuses)
        if turn:
            found.append(BufferRound(*times))
    return found


def _read(files: Sequence[Path], *, reuses: bool) -> float:
    largest = max(path.stat().st_size for path in files)
    began = time.perf_counter()
    buffer = shared_buffer.allocate(largest, LoneRank()) if reuses else None
    for path in files:
        with open_file(path) as file:
            own = buffer or shared_buffer.allocate(file.num_bytes, LoneRank())
            at = 0
            while at < file.num_bytes:
                at += file.read_into(memoryview(own)[at : file.num_bytes], at)
    return time.perf_counter() - began
