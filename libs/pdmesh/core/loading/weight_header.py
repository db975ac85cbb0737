"""Reads the header of a safetensors file: which tensors the file has, and where.

A file begins with the header's length (8 bytes, little-endian) and the header (JSON). The tensors'
bytes follow without gaps, up to the file's end. Any other layout raises an error that names the
file. So a truncated file is found before any of its weights is used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeGuard

from pdmesh.errors import EngineFailed

LENGTH_BYTES: Final = 8
MAX_HEADER_BYTES: Final = 100_000_000  # the limit of the safetensors library
# The number of bytes of an element, by number format. Formats of less than a byte are not
# supported.
ELEMENT_BYTES: Final[Mapping[str, int]] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
_METADATA: Final = "__metadata__"


class WeightsUnreadable(EngineFailed):
    """A weight file is missing, damaged, unsupported or unreadable, or the files' index is.

    The message names the file.
    """

    default_reason = "WEIGHTS_UNREADABLE"

    def __init__(self, file: str, problem: str) -> None:
        super().__init__(f"{file}: {problem}", field=file)
        self.file, self.problem = file, problem

    def __reduce__(self) -> tuple[type[WeightsUnreadable], tuple[str, str]]:
        return type(self), (self.file, self.problem)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """`begin` and `end` are byte positions from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class WeightHeader:
    """The header of one file. `tensors` are in the order of their bytes."""

    file: str
    data_begin: int
    file_bytes: int
    tensors: tuple[StoredTensor, ...]


def header_bytes(file: str, first: bytes, file_bytes: int) -> int:
    """The length of the header, from the file's first 8 bytes. Raises WeightsUnreadable."""
    if len(first) < LENGTH_BYTES or file_bytes < LENGTH_BYTES:
        raise WeightsUnreadable(file, f"is cut off: it has {file_bytes} bytes")
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    if length > min(file_bytes - LENGTH_BYTES, MAX_HEADER_BYTES):
        raise WeightsUnreadable(
            file, f"its header has {length} bytes, and the file has {file_bytes}"
        )
    return length


def parse(file: str, text: bytes, file_bytes: int) -> WeightHeader:
    """The header in the JSON `text`. Raises WeightsUnreadable."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise WeightsUnreadable(file, "its header is not JSON") from None
    if not isinstance(found, dict):
        raise WeightsUnreadable(file, "its header is not a JSON object")
    data_begin = LENGTH_BYTES + len(text)
    tensors = sorted(
        (
            _tensor(file, name, told, data_begin)
            for name, told in found.items()
            if name != _METADATA
        ),
        key=lambda tensor: (tensor.begin, tensor.end, tensor.name),
    )
    at = data_begin
    for tensor in tensors:
        if tensor.begin != at:
            raise WeightsUnreadable(file, f"the bytes of {tensor.name} do not follow those before")
        at = tensor.end
    if at != file_bytes:
        is_less = "is cut off: it" if file_bytes < at else "is too long: it"
        raise WeightsUnreadable(file, f"{is_less} has {file_bytes} bytes of {at}")
    return WeightHeader(file, data_begin, file_bytes, tuple(tensors))


def _tensor(file: str, name: str, told: object, data_begin: int) -> StoredTensor:
    if not isinstance(told, dict):
        raise WeightsUnreadable(file, f"its header does not describe {name}")
    dtype, shape, offsets = (told.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (isinstance(dtype, str) and dtype in ELEMENT_BYTES):
        raise WeightsUnreadable(file, f"{name} has the unknown number format {dtype!r}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise WeightsUnreadable(file, f"{name} has no valid shape or place")
    begin, end = offsets
    if end - begin != math.prod(shape) * ELEMENT_BYTES[dtype]:
        raise WeightsUnreadable(file, f"{name} has {end - begin} bytes, not those of its shape")
    return StoredTensor(name, dtype, tuple(shape), data_begin + begin, data_begin + end)


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)
