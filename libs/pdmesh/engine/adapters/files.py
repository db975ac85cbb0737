"""Reads the files of a LoRA adapter, and copies them in the same pass.

So the engine loads exactly the bytes that were verified. Only adapter_config.json and
adapter_model.safetensors are read, so no pickle is ever loaded. The adapter's digest covers the
names, sizes and bytes of both files. All functions here block.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from pdmesh.core.adapters.fit import SETTINGS, AdapterFacts
from pdmesh.errors import AdapterUnusable

SETTINGS_FILE: Final = SETTINGS
WEIGHTS_FILE: Final = "adapter_model.safetensors"
_MAX_SETTINGS: Final = 1 << 20
_MAX_HEADER: Final = 64 << 20
_MAX_WEIGHTS: Final = 16 << 30
_PIECE: Final = 1 << 20
_DOMAIN: Final = b"pdmesh-lora-1"
_HEADER: Final = struct.Struct("<Q")


class _Tensor(msgspec.Struct):
    shape: list[int]


def read_adapter(
    folder: Path, copy_to: Path | None = None, on_piece: Callable[[], None] = lambda: None
) -> AdapterFacts:
    """Read the adapter in `folder`, and copy its files to the new folder `copy_to`, if given.

    `on_piece` is called after each piece, to show progress. Raises AdapterUnusable with the
    problem.
    """
    try:
        if copy_to is not None:
            copy_to.mkdir(mode=0o700)
        hashed, num_bytes = hashlib.sha256(_DOMAIN), 0
        for name, most in ((SETTINGS_FILE, _MAX_SETTINGS), (WEIGHTS_FILE, _MAX_WEIGHTS)):
            size = (folder / name).stat().st_size
            if size > most:
                raise AdapterUnusable(f"{folder / name} has {size} bytes; at most {most} are read")
            hashed.update(f"\0{name}\0{size}\0".encode())
            num_bytes += size
            copy = None if copy_to is None else copy_to / name
            for piece in _pieces(folder / name, size, copy):
                hashed.update(piece)
                on_piece()
        source = folder if copy_to is None else copy_to
        settings = _settings(source / SETTINGS_FILE)
        shapes = tensor_shapes(source / WEIGHTS_FILE)
    except OSError as exc:
        raise AdapterUnusable(f"cannot read {exc.filename or folder}: {exc.strerror}") from exc
    # ValueError includes the errors of msgspec and JSON.
    except (ValueError, RecursionError, struct.error) as exc:
        raise AdapterUnusable(f"{folder} has no usable adapter: {exc}") from exc
    return AdapterFacts(hashed.hexdigest(), num_bytes, settings, shapes)


def _pieces(path: Path, size: int, copy: Path | None) -> Iterator[bytes]:
    """Yield the file's `size` bytes in pieces, and write them to `copy`, if given.

    Raises ValueError if the file's length is not `size` any more.
    """
    with path.open("rb") as source:
        target: BinaryIO | None = copy.open("xb") if copy is not None else None
        try:
            while piece := source.read(min(_PIECE, size)):
                size -= len(piece)
                if target is not None:
                    target.write(piece)
                yield piece
            if size or source.read(1):
                raise ValueError(f"{path.name} changed while it was read")
        finally:
            if target is not None:
                target.close()


def _settings(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_bytes())
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return found


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The tensors' shapes in a safetensors file, by name. Raises OSError or ValueError."""
    with path.open("rb") as file:
        (length,) = _HEADER.unpack(file.read(_HEADER.size))
        if length > _MAX_HEADER:
            raise ValueError(f"{path.name} begins with a header of {length} bytes")
        header = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
    header.pop("__metadata__", None)
    return {
        name: tuple(msgspec.json.decode(raw, type=_Tensor).shape) for name, raw in header.items()
    }


def model_shapes(model_dir: Path) -> dict[str, tuple[int, ...]] | None:
    """The shapes of a model's weights, by name.

    Returns None for a quantised model, whose shapes do not show the sizes of its layers, and for a
    folder without safetensors files. Raises OSError or ValueError.
    """
    settings = _settings(model_dir / "config.json")
    if settings.get("quantization_config"):
        return None
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        shapes |= tensor_shapes(path)
    return shapes or None
