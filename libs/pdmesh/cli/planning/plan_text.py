"""Formats the plan of `pdmesh plan`, as text for people and as data for programs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from pdmesh.cli.view.table import table
from pdmesh.core.sizing.advice import LOAD_ERROR, Advice
from pdmesh.core.sizing.deployment import Deployment, PoolSize
from pdmesh.core.sizing.search import NotPossible
from pdmesh.core.sizing.traffic import Goals, Traffic

_GIB: Final = 2**30
_HOUR_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class PlanPage:
    """The question and the answer of a plan.

    `price` is the price of one GPU for an hour, or 0 if none was given. `notes` are remarks for the
    reader about the model, the accelerator and the law.
    """

    traffic: Traffic
    goals: Goals
    advice: Advice
    price: float
    notes: tuple[str, ...]

    def sides(self) -> list[tuple[str, Deployment | NotPossible]]:
        return [("P/D", self.advice.pair), ("fusion", self.advice.fusion)]


def as_text(page: PlanPage) -> str:
    traffic, goals, advice = page.traffic, page.goals, page.advice
    head = (
        f"{traffic.rate_per_s:g} requests/s, {traffic.mean_prompt:.0f} tokens in"
        f" ({traffic.cached_share:.0%} cached), {traffic.mean_output:.0f} out;"
        f" {goals.share:.0%} within TTFT {goals.ttft_s:g} s and TPOT {1000 * goals.tpot_s:g} ms"
    )
    sides = [(name, side) for name, side in page.sides() if isinstance(side, Deployment)]
    parts = [head, "", f"{advice.answer.value}{_ranges(advice)}"]
    parts += [f"  {reason}" for reason in advice.reasons]
    if sides:
        parts += ["", table(_HEADER, [_seen_row(page, name, side) for name, side in sides])]
        pools = [row for name, side in sides for row in _pool_rows(name, side)]
        parts += ["", table(_POOL_HEADER, pools)]
    parts += ["", *(f"note: {note}" for note in _notes(page))]
    return "\n".join(parts)


_HEADER: Final = (
    "", "INSTANCES", "GPUS", "TTFT P50", "TTFT", "TPOT P50", "TPOT", "COST/H", "COST/1M TOKENS",
)  # fmt: skip
_POOL_HEADER: Final = (
    "", "ROLE", "COUNT", "TP", "SLOTS", "STEP TOKENS", "WEIGHTS/GPU", "KV/GPU", "KV TOKENS",
)  # fmt: skip


def _ranges(advice: Advice) -> str:
    told = [
        f"{name} takes {found} GPUs"
        for name, found in (("P/D", advice.pair_range), ("fusion", advice.fusion_range))
        if found is not None
    ]
    return f": {', '.join(told)}, at the load +-{LOAD_ERROR:.0%}" if told else ""


def _seen_row(page: PlanPage, name: str, side: Deployment) -> list[str]:
    seen = side.seen
    hour, million = _costs(page, side)
    unit = "" if page.price else " GPU h"
    return [
        name, str(side), str(side.num_gpus), _seconds(seen.ttft_p50_s), _seconds(seen.ttft_s),
        _seconds(seen.tpot_p50_s), _seconds(seen.tpot_s), f"{hour:.2f}{unit}",
        f"{million:.3g}{unit}",
    ]  # fmt: skip


def _costs(page: PlanPage, side: Deployment) -> tuple[float, float]:
    """The costs per hour, and per million tokens of answers. Without a price, in GPU hours."""
    hour = side.num_gpus * (page.price or 1.0)
    tokens = page.traffic.rate_per_s * page.traffic.mean_output * _HOUR_S
    return hour, hour / tokens * 1e6


def _pools_of(side: Deployment) -> list[tuple[str, PoolSize]]:
    roles = ("fusion",) if side.is_fusion else ("prefill", "decode")
    return list(zip(roles, side.pools, strict=True))


def _pool_rows(name: str, side: Deployment) -> list[list[str]]:
    return [
        [
            name, role, str(pool.count), str(pool.kind.tp), str(pool.slots), str(pool.chunk),
            f"{pool.kind.weight_bytes / _GIB:.1f} GiB", f"{pool.kind.kv_bytes / _GIB:.1f} GiB",
            str(pool.kind.kv_tokens),
        ]
        for role, pool in _pools_of(side)
    ]  # fmt: skip


def _seconds(value: float) -> str:
    if math.isinf(value):
        return "over"
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.3g} ms"


def _notes(page: PlanPage) -> list[str]:
    share = f"TTFT and TPOT without P50 are those that {page.goals.share:.0%} of requests meet"
    return [share, *page.notes]


def as_data(page: PlanPage, desired: dict[str, Any] | None) -> dict[str, Any]:
    advice = page.advice
    return {
        "answer": advice.answer.name.lower(),
        "says": advice.answer.value,
        "reasons": list(advice.reasons),
        "load_error": LOAD_ERROR,
        "pd": _side_data(page, advice.pair, advice.pair_range),
        "fusion": _side_data(page, advice.fusion, advice.fusion_range),
        "notes": _notes(page),
        "desired": desired,
    }


def _side_data(page: PlanPage, side: Deployment | NotPossible, found: Any) -> dict[str, Any]:
    if isinstance(side, NotPossible):
        return {"is_possible": False, "reason": side.reason}
    hour, million = _costs(page, side)
    seen = side.seen
    return {
        "is_possible": True,
        "num_gpus": side.num_gpus,
        "num_gpus_range": [found.low, found.high],
        "ttft_p50_s": _rounded(seen.ttft_p50_s),
        "ttft_s": _rounded(seen.ttft_s),
        "tpot_p50_s": _rounded(seen.tpot_p50_s),
        "tpot_s": _rounded(seen.tpot_s),
        "cost_per_hour": round(hour, 4),
        "cost_per_million_tokens": _rounded(million),
        "cost_unit": "price" if page.price else "gpu_hours",
        "instances": {role: _pool_data(pool) for role, pool in _pools_of(side)},
    }


def _pool_data(pool: PoolSize) -> dict[str, Any]:
    return {
        "count": pool.count,
        "tensor_parallel_size": pool.kind.tp,
        "num_slots": pool.slots,
        "max_num_batched_tokens": pool.chunk,
        "weight_bytes_per_gpu": int(pool.kind.weight_bytes),
        "kv_bytes_per_gpu": pool.kind.kv_bytes,
        "kv_tokens": pool.kind.kv_tokens,
    }


def _rounded(value: float) -> float | None:
    """The value rounded to four digits. None for infinity, which JSON does not have."""
    return None if math.isinf(value) else float(f"{value:.4g}")
