"""The prefill predictor learns a law, follows its changes, and stays bounded."""

from __future__ import annotations

import random
import statistics

import pytest

from pdmesh.core.instance.law import Law
from pdmesh.core.placement.predictor import MAX_KINDS, LatencyPredictor, PrefillFit
from pdmesh.engine.laws import DEMO, MOCKER, SMOLLM2_CPU


def learn(fit: PrefillFit, law: Law, count: int, seed: int = 1, noise: float = 0.0) -> list[float]:
    rng, errors = random.Random(seed), []
    for _ in range(count):
        num_tokens = rng.randrange(64, 8192)
        num_reused = rng.choice((0, 0, num_tokens // 4, num_tokens * 3 // 4))
        seconds = law.prefill_s(num_tokens - num_reused, num_reused)
        errors.append(
            fit.observe(num_tokens, num_reused, seconds * rng.uniform(1 - noise, 1 + noise))
        )
        fit.check_invariants()
    return errors


@pytest.mark.req("S93", "S107")
@pytest.mark.parametrize("law", [DEMO, SMOLLM2_CPU, MOCKER])
def test_the_predictor_learns_each_law_within_a_few_percent_from_a_hundred_prompts(
    law: Law,
) -> None:
    errors = learn(PrefillFit(), law, 600)
    assert statistics.mean(errors[100:]) < 0.05


@pytest.mark.req("S93")
def test_measurements_with_20_percent_noise_hardly_add_more_than_the_noise_to_the_error() -> None:
    errors = learn(PrefillFit(), SMOLLM2_CPU, 1000, noise=0.2)
    assert statistics.mean(errors[200:]) < 0.13  # the noise's own mean is 0.10


@pytest.mark.req("S107")
def test_the_predictor_follows_an_instance_that_became_half_as_fast() -> None:
    fit = PrefillFit()
    learn(fit, SMOLLM2_CPU, 1000)
    slow = Law("slow", 2 * 0.015, 2 * 0.00037, 2 * 2e-8)
    errors = learn(fit, slow, 1500, seed=2)
    assert statistics.mean(errors[:20]) > 0.3
    assert statistics.mean(errors[1000:]) < 0.06
    assert fit.error < 0.1


def test_equal_prompts_for_ever_do_not_make_the_uncertainty_explode() -> None:
    """With one length, four of five directions are never excited, and plain forgetting would make
    their uncertainty explode.
    """
    fit = PrefillFit()
    for _ in range(20_000):
        fit.observe(640, 0, 0.1)
    fit.check_invariants()
    assert fit.predict_s(640, 0) == pytest.approx(0.1, rel=0.01)


def test_the_time_of_a_prompt_is_predicted_after_the_first_measurement() -> None:
    predictor = LatencyPredictor()
    assert predictor.whole_s("kind", 1000) == 0.0
    for num_tokens in (400, 800, 1600, 3200) * 5:
        predictor.fit("kind").observe(num_tokens, num_tokens // 2, 0.001 * num_tokens / 2)
    assert predictor.whole_s("kind", 1000) == pytest.approx(1.0, rel=0.5), "with nothing reused"


def test_the_number_of_kinds_is_bounded_and_each_learns_by_itself() -> None:
    predictor = LatencyPredictor()
    for i in range(MAX_KINDS + 10):
        predictor.fit(f"kind-{i}").observe(1000, 0, 0.1)
    assert len(list(predictor.fits())) == MAX_KINDS
    assert predictor.fit("kind-300") is not predictor.fit("kind-200")
