"""Decides how long a step may take in an engine that cannot compute a long input in parts.

Such an engine answers no ping until its step ends. A step with n times the usual tokens may take n
times the usual time. For that long, the step counts as work. After that, the engine counts as
silent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

_SIGN_S: Final = 1.0


@dataclass(slots=True)
class StepTimeLimit:
    """`step_tokens` is the most tokens of a step. A step of `usual_tokens` may take `usual_s`."""

    step_tokens: int
    usual_tokens: int
    usual_s: float
    _num_steps: int = 0
    _began_at: float = 0.0
    _num_before: int = 0  # the extra signs within earlier steps
    _num_now: int = 0  # the extra signs within the present step

    def num_signs(self, num_steps: int, num_open_tokens: int, now: float) -> int:
        """The number of signs of work so far: one for each of `num_steps`, and more within long
        steps.
        """
        if num_steps != self._num_steps or not num_open_tokens:
            self._num_steps, self._began_at = num_steps, now
            self._num_before, self._num_now = self._num_before + self._num_now, 0
        num_tokens = min(num_open_tokens, self.step_tokens)
        extra_s = (math.ceil(num_tokens / self.usual_tokens) - 1) * self.usual_s
        lasted_s = min(now - self._began_at, max(0.0, extra_s))
        self._num_now = max(self._num_now, int(lasted_s / _SIGN_S))
        return num_steps + self._num_before + self._num_now
