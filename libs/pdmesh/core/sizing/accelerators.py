"""The accelerators that a deployment plan may use, with peaks and sizes from data sheets.

Peaks are dense, without sparsity. `memory_bytes` is the size that the driver reports. Link
bandwidths are per device, in one direction. `network_bandwidth` assumes one network card per
device, as in the vendors' reference hosts. The shares of the peaks that an engine reaches are in
`efficiency.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from pdmesh.core.sizing.problem import SizingProblem
from pdmesh.core.suggestion import suggestion

_TERA: Final = 1e12
_GIGA: Final = 1e9
CUSTOM: Final = "custom:"


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Operations per second, bytes, and bytes per second of one device.

    `source` says where the numbers are from. `fitted_as` names the accelerator whose measured
    shares of the peaks are used.
    """

    name: str
    bf16_flops: float
    fp8_flops: float  # 0: the device has no such unit
    fp4_flops: float
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float  # to the other devices of its host
    network_bandwidth: float
    source: str
    fitted_as: str

    def flops(self, compute: str) -> float:
        """The peak of a unit (bf16, fp8 or fp4), or 0 if the device has no such unit."""
        return {"bf16": self.bf16_flops, "fp8": self.fp8_flops, "fp4": self.fp4_flops}[compute]


def _made(
    name: str,
    tera: tuple[float, float, float],
    memory: tuple[float, float],
    links: tuple[float, float],
    source: str,
    fitted_as: str = "",
) -> Accelerator:
    """`tera` has the TFLOP/s of bf16, fp8 and fp4. `memory` has MiB and GB/s. `links` has the GB/s
    within the host and over the network.
    """
    return Accelerator(
        name,
        bf16_flops=tera[0] * _TERA,
        fp8_flops=tera[1] * _TERA,
        fp4_flops=tera[2] * _TERA,
        memory_bytes=memory[0] * 2**20,
        memory_bandwidth=memory[1] * _GIGA,
        link_bandwidth=links[0] * _GIGA,
        network_bandwidth=links[1] * _GIGA,
        source=source,
        fitted_as=fitted_as or name,
    )


_ALL: Final = (
    _made(
        "a100", (312, 0, 0), (81_920, 2039), (300, 25),
        "NVIDIA A100 80GB SXM data sheet (2021); network: one 200 Gbit/s card",
    ),
    _made(
        "h100", (989, 1979, 0), (81_559, 3350), (450, 50),
        "NVIDIA H100 SXM data sheet (2023); network: one 400 Gbit/s card",
    ),
    _made(
        "h200", (989, 1979, 0), (143_771, 4800), (450, 50),
        "NVIDIA H200 SXM data sheet (2024); network: one 400 Gbit/s card",
    ),
    _made(
        "b200", (2250, 4500, 9000), (183_359, 7700), (900, 100),
        "NVIDIA HGX B200 data sheet (2025); network: one 800 Gbit/s card",
    ),
    _made(
        "l40s", (362, 733, 0), (46_068, 864), (32, 50),
        "NVIDIA L40S data sheet (2023); PCIe 4.0 x16; network: one 400 Gbit/s card",
    ),
    _made(
        "l4", (121, 242, 0), (23_034, 300), (32, 25),
        "NVIDIA L4 data sheet (2023); PCIe 4.0 x16; network: one 200 Gbit/s card", "l40s",
    ),
    _made(
        "mi300x", (1307, 2615, 0), (196_592, 5300), (448, 50),
        "AMD Instinct MI300X data sheet (2023); network: one 400 Gbit/s card", "h100",
    ),
)  # fmt: skip
ACCELERATORS: Final[Mapping[str, Accelerator]] = MappingProxyType({a.name: a for a in _ALL})

# For each field of `custom:`, the attribute that it sets, and the field's unit.
_FIELDS: Final[Mapping[str, tuple[str, float]]] = MappingProxyType(
    {
        "bf16_tflops": ("bf16_flops", _TERA),
        "fp8_tflops": ("fp8_flops", _TERA),
        "fp4_tflops": ("fp4_flops", _TERA),
        "memory_gib": ("memory_bytes", 2**30),
        "memory_gbs": ("memory_bandwidth", _GIGA),
        "link_gbs": ("link_bandwidth", _GIGA),
        "network_gbs": ("network_bandwidth", _GIGA),
    }
)
_MUST: Final = ("bf16_tflops", "memory_gib", "memory_gbs")


def accelerator(text: str) -> Accelerator:
    """The accelerator of a name, or of `custom:bf16_tflops=400,memory_gib=64,memory_gbs=2000`.

    `custom:h100,memory_gib=94` changes fields of a known accelerator. Raises SizingProblem.
    """
    if not text.startswith(CUSTOM):
        return _known(text)
    base, values = "", dict[str, float]()
    for part in text.removeprefix(CUSTOM).split(","):
        name, has_value, value = part.partition("=")
        if not has_value and not values:
            base = name
            continue
        if name not in _FIELDS:
            raise SizingProblem("gpu", f"custom has no {name!r}{suggestion(name, _FIELDS)}")
        values[name] = _positive(name, value)
    if missing := [name for name in _MUST if name not in values and not base]:
        raise SizingProblem("gpu", f"custom needs {', '.join(missing)}")
    start = _known(base) if base else _made("", (0, 0, 0), (0, 0), (32, 12.5), "", "h100")
    changed = {_FIELDS[name][0]: value * _FIELDS[name][1] for name, value in values.items()}
    return replace(start, **changed, name=text, source="given by the user")  # type: ignore[arg-type]


def _known(name: str) -> Accelerator:
    if (found := ACCELERATORS.get(name.lower())) is None:
        hint = suggestion(name, ACCELERATORS)
        known = ", ".join(sorted(ACCELERATORS))
        raise SizingProblem("gpu", f"there is no {name!r}{hint}; known: {known}, or {CUSTOM}...")
    return found


def _positive(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise SizingProblem("gpu", f"{name}: must be a positive number, not {text!r}")
    return value
