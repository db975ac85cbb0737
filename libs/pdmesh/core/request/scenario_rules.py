"""Decides the scenario of a request that names none (P/D-Serve 2.2.1, 3.2; S4).

The rules look at the operation, the prompt's length, and how much of it the scenario's instances
would have to compute. A label always stands: the client that sent it knows better. Without a label
the first rule that fits decides. If none fits, the scenario is `default`.

There is no lower bound on what must be computed: it would send a chat away from the scenario that
holds it, once little of it is new. A later rule without an upper bound has the same effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScenarioRule:
    """Fits prompts of `min_prompt_tokens` to `max_prompt_tokens` (0: no upper bound).

    `max_uncached_tokens`: the most tokens of the prompt that the scenario's best instance may lack
    (0: no bound). `operation` is chat or text_completion; empty: both.
    """

    scenario: str
    min_prompt_tokens: int = 0
    max_prompt_tokens: int = 0
    max_uncached_tokens: int = 0
    operation: str = ""

    def fits(self, operation: str, num_prompt_tokens: int, num_cached_tokens: int) -> bool:
        """`num_cached_tokens`: the longest prefix that an instance of the scenario holds."""
        if self.operation and operation != self.operation:
            return False
        if self.max_prompt_tokens and num_prompt_tokens > self.max_prompt_tokens:
            return False
        num_uncached = num_prompt_tokens - num_cached_tokens
        if self.max_uncached_tokens and num_uncached > self.max_uncached_tokens:
            return False
        return num_prompt_tokens >= self.min_prompt_tokens


def scenario_by_rule(
    rules: Sequence[ScenarioRule],
    operation: str,
    num_prompt_tokens: int,
    num_cached_tokens: Mapping[str, int],
) -> str | None:
    """None if no rule fits. `num_cached_tokens`: by scenario; 0 for one that is absent."""
    for rule in rules:
        if rule.fits(operation, num_prompt_tokens, num_cached_tokens.get(rule.scenario, 0)):
            return rule.scenario
    return None


def depends_on_cache(rules: Sequence[ScenarioRule], operation: str, num_prompt_tokens: int) -> bool:
    """Whether what is cached may change the answer of `scenario_by_rule`."""
    for rule in rules:
        if rule.fits(operation, num_prompt_tokens, 0):
            return False
        if rule.fits(operation, num_prompt_tokens, num_prompt_tokens):
            return True
    return False
