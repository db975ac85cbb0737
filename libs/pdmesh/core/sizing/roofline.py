"""Computes the times of an engine's steps, as a law, from its accelerators' roofline.

A law is a formula for the times of steps. The operations and the bytes of a step would take a
certain time at the device's peaks. This time is divided by the share of each peak that the engine
reaches (`efficiency.py`). An overhead per layer is added. With several tensor-parallel ranks, each
layer adds two all-reduces.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.core.instance.step_time_law import Law
from pdmesh.core.sizing.accelerators import Accelerator
from pdmesh.core.sizing.efficiency import DEFAULT_GPU, EFFICIENCIES, Efficiency, EfficiencyKey
from pdmesh.core.sizing.model_shape import ModelShape
from pdmesh.core.sizing.problem import SizingProblem


@dataclass(frozen=True, slots=True)
class PrefillTerms:
    """The parts of a prompt's compute time at the peaks, in seconds, and counts per step."""

    layers: float
    token_s: float
    pair_s: float
    link_token_s: float
    reductions: float


@dataclass(frozen=True, slots=True)
class StepTerms:
    """The parts of a decode step's time at the peaks, in seconds, and counts per step."""

    layers: float
    weights_s: float
    experts_s: float
    sequence_s: float
    context_token_s: float
    reductions: float


def prefill_terms(shape: ModelShape, device: Accelerator, tp: int) -> PrefillTerms:
    rate = _flops(shape, device) * tp
    moved = 2 * shape.num_layers * shape.hidden * 2.0 * 2 * (tp - 1) / tp  # ring all-reduces, bf16
    return PrefillTerms(
        layers=shape.num_layers,
        token_s=2 * shape.active_params / rate,
        pair_s=2 * shape.attention_width * shape.num_layers / (device.bf16_flops * tp),
        link_token_s=moved / device.link_bandwidth if tp > 1 else 0.0,
        reductions=_reductions(shape, tp),
    )


def step_terms(shape: ModelShape, device: Accelerator, tp: int) -> StepTerms:
    multiplied = shape.active_params + shape.head_params
    return StepTerms(
        layers=shape.num_layers,
        weights_s=shape.dense_bytes / tp / device.memory_bandwidth,
        experts_s=shape.expert_bytes / tp / device.memory_bandwidth,
        sequence_s=2 * multiplied / (_flops(shape, device) * tp),
        context_token_s=shape.rank_kv_bytes(tp) / device.memory_bandwidth,
        reductions=_reductions(shape, tp),
    )


def _reductions(shape: ModelShape, tp: int) -> float:
    return 2.0 * shape.num_layers if tp > 1 else 0.0


def _flops(shape: ModelShape, device: Accelerator) -> float:
    if not (rate := device.flops(shape.compute)):
        raise SizingProblem(
            "gpu", f"{device.name} has no {shape.compute} unit, which the model's weights need"
        )
    return rate


def efficiency_key(shape: ModelShape, device: Accelerator) -> EfficiencyKey:
    compute = "bf16" if shape.compute == "bf16" else "fp8"
    if compute == "fp8" and shape.is_block_scaled:
        compute = "fp8-block"
    return device.fitted_as, compute, "moe" if shape.num_experts else "dense"


def efficiency_of(shape: ModelShape, device: Accelerator) -> tuple[Efficiency, EfficiencyKey]:
    """The shares to use, and the kind of engine that they were fitted to.

    If the kind itself was not measured, this is the nearest kind.
    """
    gpu, compute, kind = efficiency_key(shape, device)
    for key in ((gpu, compute, kind), (DEFAULT_GPU, compute, kind), (DEFAULT_GPU, "bf16", kind)):
        if (share := EFFICIENCIES.get(key)) is not None:
            return share, key
    raise AssertionError(f"{DEFAULT_GPU} has shares for {kind}")


def law_of(shape: ModelShape, device: Accelerator, tp: int, share: Efficiency | None = None) -> Law:
    """The law of an engine with `tp` ranks. If `share` is given, it replaces the fitted shares."""
    share = share or efficiency_of(shape, device)[0]
    prompt, step = prefill_terms(shape, device, tp), step_terms(shape, device, tp)
    return Law(
        name=f"{device.name} x {tp}",
        prefill_fixed_s=prompt.layers * share.prefill_layer_s
        + prompt.reductions * share.prefill_reduce_s,
        prefill_token_s=prompt.token_s / share.matrices + prompt.link_token_s / share.link,
        prefill_pair_s=prompt.pair_s / share.attention,
        step_fixed_s=step.layers * share.step_layer_s
        + step.weights_s / share.weights
        + step.reductions * share.step_reduce_s,
        step_sequence_s=step.sequence_s / share.sequence,
        step_context_s=step.context_token_s / share.kv,
        step_experts_s=step.experts_s / share.experts_read,
        expert_share=shape.expert_share,
        reads_once=True,
    )


def law_notes(shape: ModelShape, device: Accelerator, tp: int) -> tuple[str, ...]:
    """Notes for the user: how far the law may be off, and whether it was fitted to another kind."""
    share, key = efficiency_of(shape, device)
    told = [
        (
            f"laws are fitted to measured kernels of {' '.join(key)} models: 90 % of their"
            f" prefills are within {share.prefill_off:.0%}, of their decode steps within"
            f" {share.step_off:.0%}"
        )
    ]
    if device.name != key[0]:
        told.append(
            f"{device.name} was not measured: it is given the shares of its peaks that {key[0]}"
            " reaches"
        )
    if efficiency_key(shape, device)[1:] != key[1:]:
        told.append("no model in these number formats was measured there")
    if tp > 1 and device.link_bandwidth < _SLOW_LINK:
        told.append(f"all-reduces over {device.name}'s link were not measured: prefer --tp 1")
    return tuple(told)


_SLOW_LINK = 100e9  # a slower link is PCIe
