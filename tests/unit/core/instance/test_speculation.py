"""Tokens are proposed where checking them is nearly free, and not where it costs as much as drawing
them.
"""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.instance.speculation import LEAST_GAIN, Speculation
from pdmesh.engine.laws import MOCKER, SMOLLM2_CPU, Law

CPU_COST = SMOLLM2_CPU.prefill_token_s / SMOLLM2_CPU.step_s(1, 0)


def test_a_step_yields_what_is_accepted_and_one_more() -> None:
    assert Speculation(4, 0.5, 0.01).tokens_per_step(0) == 1
    assert Speculation(4, 0.5, 0.01).tokens_per_step(2) == 1.75


@pytest.mark.req("S118")
@given(
    max_tokens=st.integers(0, 8),
    acceptance=st.floats(0.0, 0.95),
    token_cost=st.floats(1e-4, 0.2),
    max_batch=st.integers(1, 300),
)
def test_the_schedule_covers_every_batch_and_proposes_less_the_larger_it_is(
    max_tokens: int, acceptance: float, token_cost: float, max_batch: int
) -> None:
    speculation = Speculation(max_tokens, acceptance, token_cost)
    ranges = speculation.schedule(max_batch)
    assert (ranges[0][0], ranges[-1][1]) == (1, max_batch)
    for (_, last, more), (first, _, fewer) in pairwise(ranges):
        assert first == last + 1
        assert fewer < more
    for first, _, count in ranges:
        assert 0 <= count <= max_tokens
        assert not count or speculation.speedup(count, first) >= LEAST_GAIN


def decode_s(law: Law, batch: int, num_proposed: int, acceptance: float) -> float:
    """Virtual seconds per token of a full batch.

    A proposed token is computed as one of a prompt is, beside the one that is drawn.
    """
    rng, drawn, seconds = random.Random(batch), 0, 0.0
    for _ in range(400):
        seconds += law.step_s(batch, batch * 100) + batch * num_proposed * law.prefill_token_s
        for _ in range(batch):
            drawn += 1
            for _ in range(num_proposed):
                if rng.random() >= acceptance:
                    break
                drawn += 1
    return seconds / drawn * batch


@pytest.mark.req("S118")
@pytest.mark.parametrize("law", [SMOLLM2_CPU, MOCKER], ids=lambda law: law.name)
def test_no_batch_is_slowed_by_three_percent_where_a_fixed_number_slows_the_large_ones(
    law: Law,
) -> None:
    cost = law.prefill_token_s / law.step_s(1, 0)
    speculation = Speculation(4, 0.6, cost)
    assert speculation.num_proposed(1) == 4
    for batch in (1, 4, 16, 64, 256, 1024):
        off = decode_s(law, batch, 0, 0.6)
        adapted = decode_s(law, batch, speculation.num_proposed(batch), 0.6)
        assert adapted <= 1.03 * off
    assert decode_s(law, 1, speculation.num_proposed(1), 0.6) < 0.6 * decode_s(law, 1, 0, 0.6)
    assert decode_s(law, 1024, 4, 0.6) > 1.03 * decode_s(law, 1024, 0, 0.6)
    assert speculation.num_proposed(1024) == 0


@pytest.mark.req("S118")
def test_a_small_model_on_a_cpu_proposes_none_in_large_batches() -> None:
    assert Speculation(4, 0.6, CPU_COST).num_proposed(256) == 0
    assert Speculation(4, 0.05, CPU_COST).num_proposed(1) == 0
