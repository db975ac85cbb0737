"""The answers, failures and tokens of each scenario over the last hour, in steps."""

from __future__ import annotations

import pytest

from pdmesh.core.history.ended_request import EndedRequest
from pdmesh.core.history.scenario_history import (
    MAX_SCENARIOS,
    NUM_STEPS,
    STEP_S,
    AnswerHistory,
    HistoryStep,
)


def ended(scenario: str = "chat", outcome: str = "completed", **more: object) -> EndedRequest:
    return EndedRequest("r", scenario, outcome, **more)  # type: ignore[arg-type]  # any field


def test_a_step_counts_answers_failures_and_tokens_and_the_running_step_is_left_out() -> None:
    history = AnswerHistory()
    for request in (
        ended(num_completion_tokens=7),
        ended(outcome="failed"),
        ended(outcome="failed", is_by_client=True),
        ended(outcome="cancelled", num_completion_tokens=2),
    ):
        history.handle(request, 10 * STEP_S + 1)
    assert history.steps(11 * STEP_S - 0.1) == {"chat": [HistoryStep()] * NUM_STEPS}
    last = history.steps(11 * STEP_S)["chat"][-1]
    assert (last.num_answered, last.num_failed, last.num_cancelled) == (1, 1, 1)
    assert last.num_tokens == 9


def test_quantiles_of_ttft_are_at_most_a_twentieth_off() -> None:
    step = HistoryStep()
    for ttft_ms in range(1, 1001):
        step.add(ended(ttft_ms=float(ttft_ms)))
    assert step.ttft_ms(0.5) == pytest.approx(500, rel=0.05)
    assert step.ttft_ms(0.99) == pytest.approx(990, rel=0.05)
    assert HistoryStep().ttft_ms(0.5) == 0.0


def test_what_is_older_than_an_hour_is_forgotten_and_gaps_are_empty_steps() -> None:
    history = AnswerHistory()
    history.handle(ended(), 0.0)
    history.handle(ended(), 5 * STEP_S)
    steps = history.steps(6 * STEP_S)["chat"]
    assert [step.num_answered for step in steps[-6:]] == [1, 0, 0, 0, 0, 1]
    assert history.steps((NUM_STEPS + 6) * STEP_S) == {}


def test_a_name_that_a_client_invents_is_no_scenario_but_a_served_one_that_only_fails_is() -> None:
    history = AnswerHistory()
    history.handle(ended("invented", "failed"), 0.0, is_served=False)
    history.handle(ended("served", "failed"), 0.0, is_served=True)
    assert list(history.steps(STEP_S)) == ["served"]


def test_scenarios_and_steps_are_bounded() -> None:
    history = AnswerHistory()
    for number in range(MAX_SCENARIOS + 5):
        history.handle(ended(f"s{number:03}"), 0.0)
    found = history.steps(STEP_S)
    assert len(found) == MAX_SCENARIOS
    assert "s000" not in found
    for number in range(3 * NUM_STEPS):
        history.handle(ended("s010"), number * STEP_S)
    assert len(history.steps(3 * NUM_STEPS * STEP_S)["s010"]) == NUM_STEPS
