"""Records when a rank computes its steps, and reports the times to vLLM's scheduler (S139).

On a GPU, the calls that are timed here only launch a step, so the recorded times are launch times.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, Final

from pdmesh.core.instance.step_times import ComputedStep

_MOST_KEPT: Final = 64  # steps kept until the next `take`


class StepClock:
    """Called on vLLM's thread. A step is a forward pass, followed by the draw of tokens."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._busy_s = 0.0
        self._is_open = False
        self._computed: list[ComputedStep] = []

    def forward(self, compute: Callable[[], Any]) -> Any:
        self._began = begin = self._clock()
        self._is_open = True
        try:
            return compute()
        finally:
            self._busy_s = self._clock() - begin

    def draw(self, compute: Callable[[], Any]) -> Any:
        begin = self._clock()
        try:
            return compute()
        finally:
            if self._is_open:
                end = self._clock()
                self._computed.append(ComputedStep(self._began, end, self._busy_s + end - begin))
                del self._computed[:-_MOST_KEPT]
                self._is_open = False

    def take(self) -> list[ComputedStep]:
        """The steps that have ended since the last call, in order."""
        computed, self._computed = self._computed, []
        return computed


def time_steps(clock: StepClock) -> None:
    """Patch the model runner of this process so that `clock` times its steps. Idempotent."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    GPUModelRunner.step_clock = clock
    if hasattr(GPUModelRunner.execute_model, "is_timed"):
        return
    # Any, because vLLM's functions are replaced
    forward: Any = GPUModelRunner.execute_model
    draw: Any = GPUModelRunner.sample_tokens

    @functools.wraps(forward)
    def execute_model(runner: Any, scheduler_output: Any, *args: Any, **named: Any) -> Any:
        if not scheduler_output.total_num_scheduled_tokens:
            return forward(runner, scheduler_output, *args, **named)
        return runner.step_clock.forward(lambda: forward(runner, scheduler_output, *args, **named))

    @functools.wraps(draw)
    def sample_tokens(runner: Any, *args: Any, **named: Any) -> Any:
        return runner.step_clock.draw(lambda: draw(runner, *args, **named))

    execute_model.is_timed = True  # type: ignore[attr-defined]
    GPUModelRunner.execute_model = execute_model
    GPUModelRunner.sample_tokens = sample_tokens
