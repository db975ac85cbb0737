"""The time to the first token depends on load, chunks and shared steps."""

from __future__ import annotations

import math

import pytest

from pdmesh.core.instance.step_time_law import Law
from pdmesh.core.sizing.prefill_pool import batch_size, first_tokens, prompt_s
from pdmesh.core.sizing.traffic import RequestLengths, traffic_of

LAW = Law("l", prefill_fixed_s=0.01, prefill_token_s=1e-4, prefill_pair_s=1e-9)
TRAFFIC = traffic_of(1.0, "1000-3000", "10", 0.0)


def quantile(rate_per_s: float, count: int) -> float:
    return first_tokens(LAW, TRAFFIC.at(rate_per_s), count, 8192, 0.002, 8).quantile_s(0.99)


def test_a_lone_prompt_takes_its_own_time_and_the_hops() -> None:
    alone = first_tokens(LAW, traffic_of(0.001, "2000", "10", 0.0), 1, 8192, 0.002, 8)
    assert alone.quantile_s(0.5) == pytest.approx(0.002 + LAW.prefill_s(2000), rel=1e-3)


def test_every_chunk_pays_the_fixed_part() -> None:
    whole, parts = (prompt_s(LAW, RequestLengths(4000, 0, 1), chunk) for chunk in (4000, 1000))
    assert parts - whole == pytest.approx(3 * LAW.prefill_fixed_s)
    cached = prompt_s(LAW, RequestLengths(4000, 3000, 1), 4000)
    assert cached == pytest.approx(LAW.prefill_s(1000, 3000))


def test_more_load_waits_longer_and_more_prefills_less() -> None:
    assert quantile(1, 1) < quantile(3, 1) < quantile(4, 1)
    assert quantile(8, 4) < quantile(8, 3) < quantile(8, 2)
    assert math.isinf(quantile(40, 2))


def test_prompts_that_share_a_step_share_its_fixed_cost() -> None:
    short = traffic_of(70.0, "100", "10", 0.0)
    single = first_tokens(LAW, short, 1, 100, 0.0, 8)
    shared = first_tokens(LAW, short, 1, 8192, 0.0, 8)
    assert single.busy > 1 > shared.busy


def test_batches_grow_with_load_up_to_what_fits() -> None:
    assert batch_size(1, 0.0, 8) == 1.0
    assert batch_size(1, 0.5, 8) == pytest.approx(1 / (1 - 0.25))
    assert batch_size(1, 0.99, 8) == 8
    assert batch_size(4, 0.5, 8) < batch_size(1, 0.5, 8)
