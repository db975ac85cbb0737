"""One kind of instance that a plan may use: its step times, and how much KV its memory holds.

Kinds of one model and one accelerator differ in their number of tensor-parallel ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pdmesh.core.instance.step_time_law import Law
from pdmesh.core.sizing.accelerators import Accelerator
from pdmesh.core.sizing.model_shape import ModelShape
from pdmesh.core.sizing.problem import SizingProblem
from pdmesh.core.sizing.roofline import law_of

TP_SIZES: Final = (1, 2, 4, 8)
MEMORY_SHARE: Final = 0.9  # vLLM's default of gpu_memory_utilization
WORKSPACE_BYTES: Final = 3 * 2**30  # per rank: activations, CUDA graphs, NCCL
_GIB: Final = 2**30


@dataclass(frozen=True, slots=True)
class InstanceKind:
    """An instance of `tp` devices. Its KV cache holds `kv_tokens` tokens. `law` gives its step
    times.
    """

    law: Law
    tp: int
    kv_tokens: int
    kv_token_bytes: float = 0.0  # the bytes that one token's KV has in a transfer to a decode
    network_bandwidth: float = math.inf  # bytes/s of the whole instance, in one direction
    weight_bytes: float = 0.0  # per device
    kv_bytes: int = 0  # per device


def kind_of(
    shape: ModelShape, device: Accelerator, tp: int, law: Law | None = None
) -> InstanceKind | None:
    """The kind with `tp` ranks. None means that the model does not fit.

    If `law` is given, it replaces the law from the accelerator's roofline.
    """
    room = _room(shape, device, tp)
    if room <= 0:
        return None
    return InstanceKind(
        law or law_of(shape, device, tp),
        tp,
        int(room / shape.rank_kv_bytes(tp)),
        shape.kv_token_bytes,
        device.network_bandwidth * tp,
        weight_bytes=shape.weight_bytes / tp,
        kv_bytes=int(room),
    )


def _room(shape: ModelShape, device: Accelerator, tp: int) -> float:
    """The bytes for KV on each rank."""
    usable = MEMORY_SHARE * device.memory_bytes - WORKSPACE_BYTES
    return usable - shape.weight_bytes / tp


def kinds_of(
    shape: ModelShape, device: Accelerator, sizes: Sequence[int], law: Law | None = None
) -> list[InstanceKind]:
    """All kinds of these sizes with room for the model. Raises SizingProblem if there are none."""
    kinds = [k for tp in sizes if (k := kind_of(shape, device, tp, law)) is not None]
    if not kinds:
        raise SizingProblem("gpu", _does_not_fit(shape, device, max(sizes)))
    return kinds


def _does_not_fit(shape: ModelShape, device: Accelerator, tp: int) -> str:
    short = -_room(shape, device, tp) / _GIB
    need = shape.weight_bytes / _GIB
    text = (
        f"the model's weights of {need:.0f} GiB do not fit {tp} x {device.name}:"
        f" {short:.1f} GiB per device are missing"
    )
    fits = [size for size in (*TP_SIZES, 16, 32) if _room(shape, device, size) > 0]
    if not fits:
        return f"{text}; no number of devices up to 32 has the room"
    if fits[0] > TP_SIZES[-1]:
        return f"{text}; {fits[0]} devices would have the room, which is more than one host has"
    return f"{text}; --tp {fits[0]} fits"
