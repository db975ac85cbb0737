"""Writes a model's folder, and imitates storage with a limited rate.

All ranks of a node share the rate, as with a FUSE mount.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.sharedctypes import SynchronizedArray
from pathlib import Path
from typing import Any

from pdmesh.core.loading.weight_files import INDEX
from pdmesh.engine.vllm.loading.window_reader import WeightFile, open_file

HIDDEN, INNER, VOCABULARY = 1024, 2816, 16_384
NUM_FILES = 4
LAYER = {
    **{f"self_attn.{part}_proj.weight": (HIDDEN, HIDDEN) for part in "qkvo"},
    "mlp.gate_proj.weight": (INNER, HIDDEN),
    "mlp.up_proj.weight": (INNER, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, INNER),
    "input_layernorm.weight": (HIDDEN,),
}
Shapes = Mapping[str, tuple[int, ...]]


def write_model(folder: Path, num_layers: int) -> Mapping[str, str]:
    """Write random bf16 weights to four files, named as on Hugging Face.

    Returns the file of each tensor.
    """
    layers = {
        f"model.layers.{n}.{name}": shape
        for n in range(num_layers)
        for name, shape in LAYER.items()
    }
    everything: Shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), **layers}
    names = sorted(everything)
    share = -(-len(names) // NUM_FILES)
    index = dict[str, str]()
    for number in range(NUM_FILES):
        file = f"model-{number + 1:05}-of-{NUM_FILES:05}.safetensors"
        mine = {name: everything[name] for name in names[number * share : (number + 1) * share]}
        _write(folder / file, mine)
        index |= dict.fromkeys(mine, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return index


def _write(path: Path, shapes: Shapes) -> None:
    head, at = dict[str, object](), 0
    for name, shape in shapes.items():
        end = at + 2 * math.prod(shape)
        head[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            file.write(os.urandom(2 * math.prod(shape)))


@dataclass(frozen=True, slots=True)
class SharedRate:
    """A limit on the bytes per second that all processes with the same `times` read.

    With 0, there is no limit. `times` has two values: when the bytes so far would have come at this
    rate, and when the last call returned. If a sleep took too long, later calls wait less. Time
    without a call is not made up for.
    """

    bytes_per_s: float
    times: SynchronizedArray[float]

    def take(self, num_bytes: int) -> None:
        """Wait until `num_bytes` more would have come."""
        if not self.bytes_per_s:
            return
        with self.times.get_lock():
            free_at, returned_at = self.times[0], self.times[1]
            now = time.monotonic()
            begin = max(free_at, min(now, free_at + max(0.0, now - returned_at)))
            self.times[0] = end = begin + num_bytes / self.bytes_per_s
        time.sleep(max(0.0, end - time.monotonic()))
        with self.times.get_lock():
            self.times[1] = time.monotonic()


def shared_times() -> Any:
    """The `times` of a `SharedRate`, which can be passed to spawned processes."""
    return multiprocessing.get_context("spawn").Array("d", [time.monotonic()] * 2)


@dataclass(slots=True)
class SlowDisk:
    """A disk whose reads take as long as the rate says. This process has read `num_bytes`."""

    rate: SharedRate
    num_bytes: int = 0

    @contextlib.contextmanager
    def open(self, path: Path) -> Iterator[WeightFile]:
        with open_file(path) as file:
            yield SlowFile(file, self)


@dataclass(frozen=True, slots=True)
class SlowFile:
    file: WeightFile
    disk: SlowDisk

    @property
    def num_bytes(self) -> int:
        return self.file.num_bytes

    def read_into(self, memory: memoryview, offset: int) -> int:
        num_bytes = self.file.read_into(memory, offset)
        self.disk.num_bytes += num_bytes
        self.disk.rate.take(num_bytes)
        return num_bytes
