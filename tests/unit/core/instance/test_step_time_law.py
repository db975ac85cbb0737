"""The law that predicts a step's time from its prompt tokens and its decodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.instance.step_time_law import Law

PLAIN = Law(
    "plain", prefill_fixed_s=0.004, prefill_token_s=1e-4, step_fixed_s=0.006, step_sequence_s=1e-4,
    step_context_s=1e-7,
)  # fmt: skip
ONCE = Law(
    "once", prefill_fixed_s=0.004, prefill_token_s=1e-4, step_fixed_s=0.006, step_sequence_s=1e-4,
    step_context_s=1e-7, reads_once=True,
)  # fmt: skip
EXPERTS = Law("experts", step_fixed_s=0.001, step_experts_s=0.016, expert_share=1 / 16)


def test_a_step_of_both_is_the_sum_unless_the_weights_are_read_once() -> None:
    alone = PLAIN.prefill_s(2000)
    assert PLAIN.mixed_s(alone, 10, 5000) == pytest.approx(alone + PLAIN.step_s(10, 5000))
    assert ONCE.mixed_s(alone, 10, 5000) == pytest.approx(alone + 10 * 1e-4 + 5000 * 1e-7)


def test_a_short_chunk_hides_no_more_than_its_own_time() -> None:
    short = ONCE.prefill_s(1)
    assert short < ONCE.step_fixed_s
    assert ONCE.mixed_s(short, 10, 0) == pytest.approx(ONCE.step_s(10, 0))


@pytest.mark.parametrize("law", [PLAIN, ONCE, EXPERTS])
def test_without_decodes_a_mixed_step_is_the_prompts_alone(law: Law) -> None:
    assert law.mixed_s(0.5, 0, 0) == 0.5
    assert law.step_s(0, 0) == 0.0


def test_a_batch_reads_the_experts_that_it_uses() -> None:
    assert EXPERTS.step_s(1, 0) == pytest.approx(0.001 + 0.016 / 16)
    assert EXPERTS.step_s(2, 0) == pytest.approx(0.001 + 0.016 * (1 - (15 / 16) ** 2))
    assert EXPERTS.step_s(500, 0) == pytest.approx(0.017)


@given(st.integers(1, 8192), st.integers(0, 256), st.integers(0, 10**6))
def test_a_mixed_step_lies_between_its_parts_and_their_sum(
    tokens: int, batch: int, context: int
) -> None:
    alone, step = ONCE.prefill_s(tokens), ONCE.step_s(batch, context)
    assert max(alone, step) - 1e-12 <= ONCE.mixed_s(alone, batch, context) <= alone + step + 1e-12
