"""Writes LoRA adapters of random weights as PEFT does, but without PEFT or torch."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pdmesh.engine.adapters.files import SETTINGS_FILE, WEIGHTS_FILE, model_shapes, read_adapter

ANY_MODEL = {"model.layers.0.self_attn.q_proj.weight": (64, 64)}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    seed: int,
    *,
    model: Path | None = None,
    rank: int = 4,
    scale: float = 0.05,
    targets: Sequence[str] = TARGETS,
    **settings: object,
) -> str:
    """Write an adapter for the model in `model` to a new folder, and return its digest."""
    shapes: Mapping[str, tuple[int, ...]] = ANY_MODEL
    if model is not None:
        found = model_shapes(model)
        assert found is not None
        shapes = found
    rng = np.random.default_rng(seed)
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if module.rsplit(".", 1)[-1] not in targets or len(shape) != 2:
            continue
        for side, size in (("A", (rank, shape[1])), ("B", (shape[0], rank))):
            values = rng.standard_normal(size, np.float32) * np.float32(scale)
            tensors[f"base_model.model.{module}.lora_{side}.weight"] = values
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    config |= {"target_modules": list(targets), "task_type": "CAUSAL_LM", **settings}
    (folder / SETTINGS_FILE).write_text(json.dumps(config))
    (folder / WEIGHTS_FILE).write_bytes(safetensors(tensors))
    return read_adapter(folder).digest


def safetensors(tensors: Mapping[str, npt.NDArray[np.float32]]) -> bytes:
    header, data, at = dict[str, object](), b"", 0
    for name, values in tensors.items():
        end = at + values.nbytes
        header[name] = {"dtype": "F32", "shape": values.shape, "data_offsets": (at, end)}
        data, at = data + values.tobytes(), end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + data
