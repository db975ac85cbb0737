"""The cost of a token is estimated from the times of steps, if these allow it."""

from __future__ import annotations

import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pdmesh.core.speculation.token_cost import TokenCost

ASSUMED = 0.01


def measured(share: float, counts: list[int], noise: float = 0.0, seed: int = 1) -> TokenCost:
    """The estimate after 2,000 steps with a fixed cost of 20 ms. The steps' numbers of tokens are
    `counts`, in turn.
    """
    rng, cost = random.Random(seed), TokenCost(ASSUMED)
    for step in range(2000):
        num = counts[step % len(counts)]
        cost.computed(num, 0.02 * (1 + share * num) * (1 + noise * rng.random()))
    return cost


@pytest.mark.req("S118")
@settings(max_examples=40)
@given(
    share=st.floats(1e-3, 0.5),
    counts=st.lists(st.integers(1, 300), min_size=2, max_size=8, unique=True),
)
def test_exact_times_tell_the_cost_to_within_a_quarter(share: float, counts: list[int]) -> None:
    assume(max(counts) >= 2 * min(counts))
    assert 0.8 < measured(share, counts).share / share < 1.26


@pytest.mark.req("S118")
@pytest.mark.parametrize("seed", range(5))
def test_noise_moves_it_little(seed: int) -> None:
    assert 0.5 < measured(0.1, [8, 8, 8, 16, 40], noise=0.3, seed=seed).share / 0.1 < 2


@pytest.mark.req("S118")
def test_steps_of_one_size_tell_nothing() -> None:
    assert measured(0.1, [8]).share == ASSUMED


@pytest.mark.req("S118")
def test_a_few_steps_tell_nothing() -> None:
    cost = TokenCost(ASSUMED)
    for num in range(1, 40):
        cost.computed(num, 1.0 * num)
    assert cost.share == ASSUMED


@pytest.mark.req("S118")
def test_a_pause_of_the_process_does_not_count_as_computing() -> None:
    cost = measured(0.1, [8, 16])
    before = cost.share
    cost.computed(16, 60.0)
    assert 0.7 < cost.share / before < 1.5


@pytest.mark.req("S118")
@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 100, allow_nan=False)), max_size=200))
def test_whatever_the_times_are_the_share_is_a_share(steps: list[tuple[int, float]]) -> None:
    cost = TokenCost(ASSUMED)
    for num_tokens, seconds in steps:
        cost.computed(num_tokens, seconds)
        assert 5e-5 < cost.share <= 1.0
