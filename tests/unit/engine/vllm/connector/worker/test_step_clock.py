"""A rank's times of its steps: a forward and then a draw, which may be asked for later."""

from __future__ import annotations

import pytest

from pdmesh.core.instance.step_times import ComputedStep
from pdmesh.engine.vllm.connector.worker.step_clock import StepClock


class Hands:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def move(self, seconds: float) -> str:
        self.now += seconds
        return "done"


@pytest.mark.req("S139")
def test_waiting_between_forward_and_draw_is_not_computing() -> None:
    now = Hands()
    clock = StepClock(now)
    assert clock.forward(lambda: now.move(5)) == "done"
    now.move(3)
    assert clock.draw(lambda: now.move(1)) == "done"
    assert clock.take() == [ComputedStep(0, 9, 6)]
    assert clock.take() == []


def test_a_draw_without_a_forward_is_no_step() -> None:
    """vLLM draws nothing in a step that only moves KV."""
    now = Hands()
    clock = StepClock(now)
    clock.draw(lambda: now.move(1))
    assert clock.take() == []


def test_steps_that_are_not_taken_are_bounded() -> None:
    now = Hands()
    clock = StepClock(now)
    for _ in range(200):
        clock.forward(lambda: now.move(1))
        clock.draw(lambda: now.move(1))
    assert len(taken := clock.take()) == 64
    assert taken[-1].end == 400
