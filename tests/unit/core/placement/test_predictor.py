"""The predictor of prefill times learns a law, follows its changes, and stays bounded."""

from __future__ import annotations

import random
import statistics

import pytest

from loadtests.placement.unknown_laws import tiled
from pdmesh.core.instance.step_time_law import Law
from pdmesh.core.placement.predictor import MAX_KINDS, LatencyPredictor, PrefillFit, PromptTokens
from pdmesh.engine.step_time_laws import DEMO, MOCKER, SMOLLM2_CPU


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
    assert statistics.mean(errors[200:]) < 0.13  # the noise alone has a mean of 0.10


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
    """Prompts of one length give no data about four of the five coefficients. With plain
    forgetting, their uncertainty would grow without bound.
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


@pytest.mark.req("S93", "S107")
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_predictor_is_within_15_percent_on_a_law_of_tiles_whose_form_it_does_not_have(
    noise: float,
) -> None:
    errors = learn(PrefillFit(), tiled(noise), 400)
    assert statistics.mean(errors[50:]) < 0.15


@pytest.mark.req("S93")
def test_prompts_that_shared_steps_teach_as_much_as_prompts_alone() -> None:
    """The data are spans: one to twelve prompts, which are timed together because they shared
    steps.
    """
    fit, rng = PrefillFit(), random.Random(4)
    for _ in range(300):
        prompts = [
            PromptTokens(n, n // 4 * rng.randrange(4))
            for n in (rng.randrange(64, 4096) for _ in range(rng.randrange(1, 13)))
        ]
        num_steps = -(-len(prompts) // 3)
        seconds = num_steps * 0.02 + sum(2e-5 * (p.num_tokens - p.num_reused) for p in prompts)
        fit.observe_span(prompts, seconds, num_steps)
        fit.check_invariants()
    assert fit.predict_s(1000, 0) == pytest.approx(0.04, rel=0.05)
    assert fit.predict_s(1000, 0, is_queued=True) < 0.035, "it may share a step"


@pytest.mark.req("S93")
def test_a_pause_of_the_machine_teaches_nothing() -> None:
    fit = PrefillFit()
    learn(fit, SMOLLM2_CPU, 300)
    usual = fit.predict_s(2000, 0)
    fit.observe(2000, 0, 60.0)
    assert fit.predict_s(2000, 0) == pytest.approx(usual, rel=0.2)


@pytest.mark.req("S93")
def test_sequences_that_decode_beside_a_prompt_are_part_of_its_time() -> None:
    fit, rng = PrefillFit(), random.Random(5)
    for _ in range(400):
        num_tokens, num_beside = rng.randrange(64, 1024), rng.choice((0, 0, 1, 8, 32))
        seconds = SMOLLM2_CPU.prefill_s(num_tokens) + SMOLLM2_CPU.step_s(num_beside, 0)
        fit.observe_span((PromptTokens(num_tokens, 0),), seconds, 1, num_beside)
    for num_beside in (0, 8, 32):
        expected = SMOLLM2_CPU.prefill_s(200) + SMOLLM2_CPU.step_s(num_beside, 0)
        assert fit.predict_s(200, 0, num_beside=num_beside) == pytest.approx(expected, rel=0.1)


def test_a_token_that_is_computed_always_costs_something() -> None:
    """Even for an engine that takes no time, the instance that holds the prompt is preferred."""
    fit = PrefillFit()
    for number in range(200):
        num_reused = 64 * (number % 8)
        fit.observe(640, num_reused, 0.001 + 1e-6 * num_reused)  # noise makes reuse look expensive
    assert fit.predict_s(640, 576) < fit.predict_s(640, 0)


def test_a_prediction_that_is_exact_teaches_nothing_and_breaks_nothing() -> None:
    """Measurements of a simulated law have no noise, so the prediction becomes exact."""
    fit = PrefillFit()
    for _ in range(4000):
        for i in range(1, 6):
            fit.observe(1000 * i, 0, 0.02 * i)
    assert fit.error < 1e-3
    fit.check_invariants()
