"""The shares of an accelerator's peaks that an engine reaches, by kind of model.

The shares are fitted to the tables of aiconfigurator 0.12 (Apache-2.0). NVIDIA measured the times
of vLLM 0.24's kernels on each accelerator. For the fit, these times are added up to the times of
the steps of twelve models on one to eight ranks. `python -m loadtests.sizing.fit` makes this table
again, and prints how far step times computed with these shares are off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the peaks, 0 to 1, and overheads in seconds, per layer or per all-reduce.

    The first five values are for prompts, the next six for decode steps. `prefill_off` and
    `step_off` are relative errors: for 90 % of the fitted steps, the computed time is at most this
    far off.
    """

    prefill_layer_s: float
    matrices: float
    attention: float
    link: float
    prefill_reduce_s: float
    step_layer_s: float
    weights: float  # `weights`, `experts_read` and `kv` are shares of the memory's bandwidth
    experts_read: float
    sequence: float
    kv: float
    step_reduce_s: float
    prefill_off: float
    step_off: float


EfficiencyKey = tuple[str, str, str]
"""An accelerator, the format of the matrices, and the kind of model, which is dense or moe.

The format is bf16, fp8, or fp8-block, which is fp8 with a scale per block.
"""

DEFAULT_GPU: Final = "h100"  # its shares are used for kinds without measurements

_FITTED: Final[dict[EfficiencyKey, Efficiency]] = {
    ("a100", "bf16", "dense"): Efficiency(
        0.00015, 0.82, 0.615, 0.426, 0,
        5.7e-05, 0.81, 1, 1, 0.746, 8e-06, 0.108, 0.109,
    ),
    ("a100", "bf16", "moe"): Efficiency(
        0.00042, 0.398, 0.581, 0.889, 0,
        6.6e-06, 0.283, 0.996, 0.218, 0.711, 2.7e-05, 0.187, 0.114,
    ),
    ("b200", "bf16", "dense"): Efficiency(
        8.7e-05, 0.649, 0.476, 0.53, 1.1e-05,
        3.9e-05, 0.944, 1, 0.954, 0.889, 9.1e-06, 0.0791, 0.122,
    ),
    ("b200", "bf16", "moe"): Efficiency(
        0.00022, 0.513, 0.548, 0.255, 0,
        3.6e-05, 1, 1, 0.148, 0.816, 1.5e-05, 0.18, 0.225,
    ),
    ("b200", "fp8", "dense"): Efficiency(
        0.00012, 0.538, 0.491, 0.437, 2.2e-06,
        5.1e-05, 0.86, 1, 0.664, 0.842, 1.1e-05, 0.113, 0.246,
    ),
    ("b200", "fp8-block", "dense"): Efficiency(
        0.00071, 0.695, 0.452, 0.733, 4e-05,
        0.00058, 0.246, 1, 1, 1, 7.4e-05, 0.0784, 0.224,
    ),
    ("b200", "fp8-block", "moe"): Efficiency(
        0.00063, 0.255, 0.551, 0.276, 0,
        0.00042, 1, 1, 0.149, 0.896, 3.7e-06, 0.133, 0.258,
    ),
    ("h100", "bf16", "dense"): Efficiency(
        0.0001, 0.705, 0.602, 0.644, 0,
        4.9e-05, 0.947, 1, 1, 0.917, 1.8e-06, 0.0818, 0.0809,
    ),
    ("h100", "bf16", "moe"): Efficiency(
        0.00025, 0.388, 0.829, 0.431, 0,
        5.1e-05, 1, 1, 0.165, 0.884, 7.9e-06, 0.174, 0.134,
    ),
    ("h100", "fp8", "dense"): Efficiency(
        0.00012, 0.582, 0.606, 0.539, 0,
        6.1e-05, 0.964, 1, 0.726, 0.798, 1.2e-06, 0.103, 0.12,
    ),
    ("h100", "fp8-block", "dense"): Efficiency(
        0.00031, 0.585, 0.549, 0.698, 3.8e-05,
        0.00019, 1, 1, 0.341, 0.74, 4.1e-05, 0.0774, 0.223,
    ),
    ("h100", "fp8-block", "moe"): Efficiency(
        0.00044, 0.267, 0.572, 0.415, 0,
        0.00016, 1, 0.813, 0.0822, 0.803, 1.2e-05, 0.0699, 0.125,
    ),
    ("h200", "bf16", "dense"): Efficiency(
        7.8e-05, 0.712, 0.58, 0.7, 5.4e-06,
        4.9e-05, 0.945, 1, 1, 0.908, 3e-06, 0.0693, 0.0834,
    ),
    ("h200", "bf16", "moe"): Efficiency(
        0.00023, 0.452, 0.805, 0.453, 0,
        5.3e-05, 1, 1, 0.196, 0.856, 8.5e-06, 0.14, 0.108,
    ),
    ("h200", "fp8", "dense"): Efficiency(
        0.00011, 0.648, 0.592, 0.586, 4.8e-06,
        5.8e-05, 0.947, 1, 0.708, 0.617, 2.6e-06, 0.0776, 0.117,
    ),
    ("h200", "fp8-block", "dense"): Efficiency(
        0.00029, 0.602, 0.534, 0.739, 3.7e-05,
        0.00021, 1, 1, 0.379, 0.576, 3.7e-05, 0.0771, 0.206,
    ),
    ("h200", "fp8-block", "moe"): Efficiency(
        0.00043, 0.325, 0.603, 0.28, 0,
        0.00017, 1, 0.94, 0.107, 0.559, 9.6e-06, 0.151, 0.139,
    ),
    ("l40s", "bf16", "dense"): Efficiency(
        0.00036, 0.593, 0.361, 1, 0,
        1.6e-05, 0.802, 1, 0.962, 0.811, 0, 0.123, 0.0536,
    ),
    ("l40s", "fp8", "dense"): Efficiency(
        0.00046, 0.479, 0.433, 1, 0,
        0.00023, 1, 1, 1, 0.773, 0, 0.0391, 0.03,
    ),
    ("l40s", "fp8-block", "dense"): Efficiency(
        0.00102, 0.398, 0.371, 1, 0,
        0.00104, 1, 1, 1, 0.78, 0, 0.0632, 0.0406,
    ),
    ("l40s", "fp8-block", "moe"): Efficiency(
        0.00154, 0.398, 0.41, 1, 0,
        0.00065, 1, 0.853, 0.23, 0.782, 0, 0.0434, 0.0618,
    ),
}  # fmt: skip
EFFICIENCIES: Final[Mapping[EfficiencyKey, Efficiency]] = MappingProxyType(_FITTED)
