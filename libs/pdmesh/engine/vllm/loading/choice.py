"""Chooses the loader of an engine's weights, and checks the weight files before vLLM starts.

vLLM hides the cause of a failed start in its worker's log, so this module reports a file that is
cut off or missing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from pdmesh.core.loading.weight_files import INDEX, check_complete, files_to_read, parse_index
from pdmesh.core.loading.weights_loader import (
    LoaderChoice,
    WeightsLoader,
    choose,
    filesystem_of,
)
from pdmesh.engine.vllm.loading.window_reader import read_header

LOAD_FORMAT: Final = "pdmesh_file_order"
_EXTENSION: Final = "pdmesh.engine.vllm.loading.loader.WorkerExtension"
_MOUNTS: Final = Path("/proc/mounts")


def loader_choice(asked: WeightsLoader, model_dir: Path) -> LoaderChoice:
    """Choose by the setting, and by the storage that holds the weights."""
    try:
        mounts = _MOUNTS.read_text(errors="replace")
    except OSError:  # not Linux
        mounts = ""
    return choose(asked, filesystem_of(str(model_dir.resolve()), mounts))


def loader_arguments(choice: LoaderChoice) -> dict[str, Any]:
    """vLLM's arguments for the loader. The extension makes vLLM's workers import our loader."""
    if not choice.is_file_order:
        return {}
    return {"load_format": LOAD_FORMAT, "worker_extension_cls": _EXTENSION}


def check_weights(choice: LoaderChoice, model_dir: Path) -> None:
    """Read the headers of the files that our loader will read. Blocks. Raises WeightsUnreadable.

    A folder in Mistral's own format is not checked, because vLLM decides which of its files it
    reads.
    """
    found = [path.name for path in model_dir.glob("*.safetensors")]
    if not choice.is_file_order or not found or any(n.startswith("consolidated") for n in found):
        return
    index_file = model_dir / INDEX
    index = parse_index(index_file.read_bytes()) if index_file.is_file() else None
    check_complete([read_header(model_dir / name) for name in files_to_read(found, index)], index)
