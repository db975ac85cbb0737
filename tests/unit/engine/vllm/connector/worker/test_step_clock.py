"""A rank measures the times of its steps.

A step has a forward and then a draw, between which the rank may wait.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pdmesh.core.instance.step_times import ComputedStep
from pdmesh.engine.vllm.connector.worker.step_clock import StepClock, time_steps


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
    """In a step that only moves KV, vLLM draws nothing."""
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


def test_a_runner_that_is_timed_again_counts_each_step_once_and_by_the_new_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each engine that a process starts has its own clock."""
    now = Hands()

    class GPUModelRunner:
        def execute_model(self, scheduler_output: Any) -> str:
            return now.move(2)

        def sample_tokens(self) -> str:
            return now.move(1)

    module: Any = ModuleType("vllm.v1.worker.gpu_model_runner")
    module.GPUModelRunner = GPUModelRunner
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("vllm", "vllm.v1", "vllm.v1.worker"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    clocks = [StepClock(now) for _ in range(3)]
    time_steps(clocks[0])
    patched = GPUModelRunner.execute_model, GPUModelRunner.sample_tokens
    time_steps(clocks[1])
    time_steps(clocks[2])
    assert (GPUModelRunner.execute_model, GPUModelRunner.sample_tokens) == patched
    runner = GPUModelRunner()
    assert runner.execute_model(SimpleNamespace(total_num_scheduled_tokens=3)) == "done"
    assert runner.sample_tokens() == "done"
    assert [clock.take() for clock in clocks] == [[], [], [ComputedStep(0, 3, 3)]]
