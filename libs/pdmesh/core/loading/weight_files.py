"""Decides which weight files in a model's folder are read, and in which order (S84).

Files are ordered by name, and numbers in names are compared by value. So a sharded model is read
from its first file to its last. If the folder has an index, it lists the model's tensors and the
file of each tensor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from pdmesh.core.loading.weight_header import WeightHeader, WeightsUnreadable

INDEX: Final = "model.safetensors.index.json"
_DIGITS: Final = re.compile(r"(\d+)")


def in_order(names: Iterable[str]) -> list[str]:
    """The names in order, with numbers compared by value: `model-2` comes before `model-10`."""
    return sorted(
        names,
        key=lambda name: [
            (part.isdecimal(), int(part) if part.isdecimal() else 0, part)
            for part in _DIGITS.split(name)
        ],
    )


def parse_index(text: bytes, file: str = INDEX) -> Mapping[str, str]:
    """A map from tensor name to file name. Raises WeightsUnreadable."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise WeightsUnreadable(file, "is not JSON") from None
    places = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(places, dict) or not all(isinstance(each, str) for each in places.values()):
        raise WeightsUnreadable(file, "has no weight_map")
    return places


def files_to_read(found: Iterable[str], index: Mapping[str, str] | None) -> list[str]:
    """The model's files, in order. Without an index, these are all files that were found.

    Raises WeightsUnreadable if a file that the index names was not found.
    """
    there = set(found)
    if index is None:
        return in_order(there)
    wanted = in_order(set(index.values()))
    for name in wanted:
        if name not in there:
            raise WeightsUnreadable(name, f"is missing, and {INDEX} names it")
    return wanted


def check_complete(headers: Sequence[WeightHeader], index: Mapping[str, str] | None) -> None:
    """Check that each tensor of the index is in its file. Only the files of `headers` are checked.

    Raises WeightsUnreadable.
    """
    names = {header.file: {tensor.name for tensor in header.tensors} for header in headers}
    for name, file in (index or {}).items():
        if file in names and name not in names[file]:
            raise WeightsUnreadable(file, f"the tensor {name} is missing, and {INDEX} names it")
