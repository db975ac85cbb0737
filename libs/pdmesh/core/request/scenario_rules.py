"""Decides the scenario of a request that names none (P/D-Serve 2.2.1, 3.2; S4).

The rules look at the operation and the prompt's length. A label always stands: the client that sent
it knows better. Without a label the first rule that fits decides. If none fits, the scenario is
`default`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScenarioRule:
    """Fits prompts of `min_prompt_tokens` to `max_prompt_tokens` (0: no upper bound).

    `operation` is chat or text_completion; empty: both.
    """

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
