"""Quantises a model's weights to four bits, and writes the files of a GPTQ checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

BITS: Final = 4
GROUP_SIZE: Final = 32  # input columns that share a scale
_MIDDLE: Final = 1 << (BITS - 1)
_PER_WORD: Final = 32 // BITS
_PROJECTIONS: Final = tuple(
    f"{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down")
)


def write_gptq(source: Path, directory: Path) -> Path:
    """Write the model in `source` with all its projections quantised, symmetrically and by group.

    The largest weight of a group sets the group's scale. No data is used for calibration.
    """
    from safetensors.torch import load_file, save_file

    weights: dict[str, torch.Tensor] = {}
    for name, value in load_file(source / "model.safetensors").items():
        if name.endswith(_PROJECTIONS):
            stem = name.removesuffix("weight")
            weights |= {f"{stem}{part}": tensor for part, tensor in quantised(value).items()}
        else:
            weights[name] = value
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "gptq",
        "bits": BITS,
        "group_size": GROUP_SIZE,
        "sym": True,
        "desc_act": False,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def quantised(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of one linear layer. `weight` is (outputs, inputs), both multiples of eight."""
    import torch

    by_input = weight.float().t().contiguous()  # (inputs, outputs)
    num_inputs, num_outputs = by_input.shape
    groups = by_input.view(num_inputs // GROUP_SIZE, GROUP_SIZE, num_outputs)
    scales = groups.abs().amax(dim=1) / (_MIDDLE - 1)
    steps = torch.round(groups / scales[:, None]).clamp(-_MIDDLE, _MIDDLE - 1) + _MIDDLE
    zeros = torch.full_like(scales, _MIDDLE - 1)  # a GPTQ file stores the zero point less one
    return {
        "qweight": _packed(steps.view(num_inputs, num_outputs).t()).t().contiguous(),
        "qzeros": _packed(zeros),
        "scales": scales.to(torch.float16),
        "g_idx": torch.arange(num_inputs, dtype=torch.int32) // GROUP_SIZE,
    }


def _packed(values: torch.Tensor) -> torch.Tensor:
    """Pack eight values of a row into each word. The first value gets the lowest bits."""
    import torch

    words = values.to(torch.int64).reshape(values.shape[0], -1, _PER_WORD)
    shifts = torch.arange(0, 32, BITS)
    total = (words << shifts).sum(dim=-1)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)
