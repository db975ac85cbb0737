"""Finds a model's `config.json` on this machine, without any download.

The user names a folder, the file itself, or the id of a model in Hugging Face's local cache.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, Final

from pdmesh.core.sizing.model_shape import ModelShape, model_shape
from pdmesh.core.sizing.problem import SizingProblem

_MAX_BYTES: Final = 1 << 24  # the largest config.json that is read
_HUB_ID: Final = re.compile(r"[\w.-]+/[\w.-]+")
_WEIGHTS: Final = ("*.safetensors", "*.gguf", "pytorch_model*.bin")


def read_model(model: str) -> tuple[ModelShape, str]:
    """The model's shape, and its folder (empty if it has no weights). Raises SizingProblem."""
    config = _config_path(model)
    folder = config.parent
    weight_bytes = _weight_bytes(folder)
    shape = model_shape(_read(config), weight_bytes=weight_bytes)
    return shape, str(folder.absolute()) if weight_bytes else ""


def _config_path(model: str) -> Path:
    path = Path(model).expanduser()
    tried = [path if path.is_file() else path / "config.json"]
    if _HUB_ID.fullmatch(model):
        tried += sorted(_snapshots(model), key=lambda p: p.stat().st_mtime, reverse=True)
    for each in tried:
        if each.is_file():
            return each
    where = f" nor in the cache {_hub_cache()}" if _HUB_ID.fullmatch(model) else ""
    raise SizingProblem("model", f"there is no config.json at {tried[0]}{where}")


def _hub_cache() -> Path:
    """The folder in which Hugging Face's library keeps downloaded models."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache)
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    return Path(home) / "hub"


def _snapshots(model: str) -> list[Path]:
    folder = _hub_cache() / f"models--{model.replace('/', '--')}" / "snapshots"
    return [path for path in folder.glob("*/config.json") if path.is_file()]


def _read(path: Path) -> dict[str, Any]:
    if path.stat().st_size > _MAX_BYTES:
        raise SizingProblem("model", f"{path} is larger than 16 MiB")
    config = _object(path)
    quantised = path.with_name("hf_quant_config.json")
    if quantised.is_file() and "quantization_config" not in config:  # made by NVIDIA's ModelOpt
        own = _object(quantised).get("quantization", {})
        if not isinstance(own, dict):
            raise SizingProblem("model", f"{quantised}: quantization is not a JSON object")
        config["quantization_config"] = {"quant_method": "modelopt", **own}
    return config


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as exc:
        raise SizingProblem("model", f"{path} is not JSON: {exc}") from exc
    if not isinstance(found, dict):
        raise SizingProblem("model", f"{path} is not a JSON object")
    return found


def _weight_bytes(folder: Path) -> int:
    """The size of the weights. Of several formats, only the first in `_WEIGHTS` counts."""
    for pattern in _WEIGHTS:
        if sizes := [path.stat().st_size for path in folder.glob(pattern)]:
            return sum(sizes)
    return 0
