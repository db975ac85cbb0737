"""Fusion instances: prompts and answers on one engine slow each other down."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pdmesh.core.instance.step_time_law import Law
from pdmesh.core.sizing.decode_pool import contexts
from pdmesh.core.sizing.fusion_pool import FusedTimes, FusionEngines, fused_times
from pdmesh.core.sizing.traffic import traffic_of

LAW = Law(
    "l", prefill_fixed_s=0.003, prefill_token_s=2e-5, step_fixed_s=0.01, step_sequence_s=1e-5,
    step_context_s=1e-8, reads_once=True,
)  # fmt: skip


def times(
    rate: float, *, prompt: str = "2000", count: int = 2, chunk: int = 2048, law: Law = LAW
) -> FusedTimes:
    traffic = traffic_of(rate, prompt, "200", 0.0)
    engines = FusionEngines(law, count, 256, chunk)
    return fused_times(engines, traffic, contexts(traffic.requests, 64), 0.002)


def test_prompts_slow_the_answers_beside_them() -> None:
    light, heavy = times(1.0), times(20.0)
    assert light.next.mean_s == pytest.approx(LAW.step_fixed_s, rel=0.05)
    assert heavy.next.mean_s > 1.3 * light.next.mean_s
    assert heavy.next.quantile_s(0.99) > 1.1 * heavy.next.quantile_s(0.5)
    assert light.mixed < heavy.mixed < 1


def test_long_prompts_make_the_tail_of_short_answers() -> None:
    """Fewer and longer prompts are the same work per second, but vary more."""
    even = times(10.0, prompt="2000").next
    uneven = times(10.0, prompt="mean=2000,p99=16000").next
    assert uneven.quantile_s(0.99) > 1.1 * even.quantile_s(0.99)


def test_a_step_that_reads_the_weights_once_costs_the_answers_less() -> None:
    twice = replace(LAW, reads_once=False)
    assert times(15.0).next.mean_s < times(15.0, law=twice).next.mean_s
    assert times(15.0).first.quantile_s(0.5) < times(15.0, law=twice).first.quantile_s(0.5)


def test_no_token_is_slower_than_if_every_step_had_prompts() -> None:
    full = times(40.0)
    assert full.next.mean_s <= LAW.prefill_s(2000) + LAW.step_s(256, 256 * 2200)


def test_a_small_chunk_protects_answers_from_long_prompts() -> None:
    """Beside a prompt of 16,000 tokens, an answer gets one token per chunk, so large chunks make
    slow tokens.
    """
    prompts = "mean=2000,p99=16000"
    small = times(18.0, prompt=prompts, chunk=256).next
    large = times(18.0, prompt=prompts, chunk=16_384).next
    assert small.quantile_s(0.999) <= 1.001 * small.slowest_s
    assert small.slowest_s < 0.1 * large.slowest_s
    assert small.quantile_s(0.99) < large.quantile_s(0.99)


def test_overload_has_no_end() -> None:
    assert math.isinf(times(100.0).first.quantile_s(0.99))
    assert times(100.0).mixed > 1


def test_more_instances_help_both_times() -> None:
    few, many = times(20.0, count=2), times(20.0, count=4)
    assert many.first.quantile_s(0.99) < few.first.quantile_s(0.99)
    assert many.next.quantile_s(0.99) < few.next.quantile_s(0.99)
