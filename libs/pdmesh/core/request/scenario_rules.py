"""Which scenario a request belongs to that names none: by rules on what it is and how long its prompt is (P/D-Serve 2.2.1, 3.2; S4).

A label always stands: whoever sent it knows better. Without one the first rule that fits decides, and where none does the request
is of the scenario `default`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScenarioRule:
    """Fits prompts of `min_prompt_tokens` to `max_prompt_tokens` (0: any more) of an `operation` (chat, text_completion; empty: both)."""

    scenario: str
    min_prompt_tokens: int = 0
    max_prompt_tokens: int = 0
    operation: str = ""

    def fits(self, operation: str, num_prompt_tokens: int) -> bool:
        if self.operation and operation != self.operation:
            return False
        is_short_enough = not self.max_prompt_tokens or num_prompt_tokens <= self.max_prompt_tokens
        return is_short_enough and num_prompt_tokens >= self.min_prompt_tokens


def scenario_by_rule(
    rules: Sequence[ScenarioRule], operation: str, num_prompt_tokens: int
) -> str | None:
    """None if no rule fits."""
    return next((r.scenario for r in rules if r.fits(operation, num_prompt_tokens)), None)
