"""Writes safetensors files in the documented format, and records what is read from a disk."""

from __future__ import annotations

import contextlib
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pdmesh.core.loading.weight_files import INDEX
from pdmesh.core.loading.weight_header import ELEMENT_BYTES
from pdmesh.engine.vllm.loading.window_reader import WeightFile, open_file

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]  # number format and shape by tensor name


def header_of(shapes: Shapes, pad: int = 8) -> bytes:
    """A header with its length, for tensors that are stored in this order."""
    told, at = dict[str, object](), 0
    for name, (dtype, shape) in shapes.items():
        end = at + ELEMENT_BYTES[dtype] * math.prod(shape)
        told[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **told}).encode()
    text += b" " * (-len(text) % pad)
    return len(text).to_bytes(8, "little") + text


def num_data_bytes(shapes: Shapes) -> int:
    return sum(ELEMENT_BYTES[dtype] * math.prod(shape) for dtype, shape in shapes.values())


def write_weights(path: Path, shapes: Shapes, seed: int = 0) -> Path:
    """Write random bits. Booleans are 0 or 1, because a copy of a boolean tensor turns every other
    byte into 1.
    """
    rng, data = random.Random(seed), bytearray()
    for dtype, shape in shapes.values():
        drawn = rng.randbytes(ELEMENT_BYTES[dtype] * math.prod(shape))
        data += bytes(byte & 1 for byte in drawn) if dtype == "BOOL" else drawn
    path.write_bytes(header_of(shapes) + data)
    return path


def write_sharded(folder: Path, files: Sequence[Shapes]) -> list[str]:
    """Write a folder as Hugging Face's tools do, with `model-00001-of-00002...` and an index."""
    names = [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
    for seed, (name, shapes) in enumerate(zip(names, files, strict=True)):
        write_weights(folder / name, shapes, seed)
    places = {t: name for name, shapes in zip(names, files, strict=True) for t in shapes}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return names


@dataclass(slots=True)
class NotedDisk:
    """A disk that records its reads. Reads that end beyond `fails_at` raise OSError.

    `reads` has the file, the offset and the number of bytes of each read. `fails_at` is a file and
    an offset in it.
    """

    reads: list[tuple[str, int, int]] = field(default_factory=list)
    fails_at: tuple[str, int] | None = None

    @contextlib.contextmanager
    def open(self, path: Path) -> Iterator[WeightFile]:
        with open_file(path) as file:
            yield _NotedFile(file, path.name, self)


@dataclass(frozen=True, slots=True)
class _NotedFile:
    file: WeightFile
    name: str
    disk: NotedDisk

    @property
    def num_bytes(self) -> int:
        return self.file.num_bytes

    def read_into(self, memory: memoryview, offset: int) -> int:
        if self.disk.fails_at is not None:
            file, limit = self.disk.fails_at
            if self.name == file and offset + len(memory) > limit:
                raise OSError(5, "Input/output error")
        num_bytes = self.file.read_into(memory, offset)
        self.disk.reads.append((self.name, offset, num_bytes))
        return num_bytes
