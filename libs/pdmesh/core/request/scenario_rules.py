"""Decides the scenario of a request that names none (P/D-Serve 2.2.1, 3.2; S4).

A scenario is a kind of requests with its own instances. If the client names a scenario, no rule
applies. Otherwise the first matching rule decides. If no rule matches, the scenario is `default`. A
rule may depend on the operation, on the prompt's length, and on how many of the prompt's tokens the
scenario's best instance would have to compute.

Rules have no lower bound on the tokens to compute. With such a bound, a growing chat would leave
the scenario that caches it, as soon as few tokens of a turn are new. An operator can get the effect
of a lower bound by a later rule without an upper bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScenarioRule:
    """A rule that fits prompts of `min_prompt_tokens` to `max_prompt_tokens`.

    `max_uncached_tokens` is the most tokens of the prompt that may be missing in the cache of the
    scenario's best instance. A maximum of 0 means no limit. `operation` is chat or text_completion,
    or empty for both.
    """

    scenario: str
    min_prompt_tokens: int = 0
    max_prompt_tokens: int = 0
    max_uncached_tokens: int = 0
    operation: str = ""

    def fits(self, operation: str, num_prompt_tokens: int, num_cached_tokens: int) -> bool:
        """Whether the rule fits a request.

        `num_cached_tokens` is the longest prefix of the prompt that an instance of the scenario
        has cached.
        """
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
    """The scenario of the first rule that fits, or None.

    `num_cached_tokens` has the length of the longest cached prefix by scenario. A missing scenario
    means 0.
    """
    for rule in rules:
        if rule.fits(operation, num_prompt_tokens, num_cached_tokens.get(rule.scenario, 0)):
            return rule.scenario
    return None


def depends_on_cache(rules: Sequence[ScenarioRule], operation: str, num_prompt_tokens: int) -> bool:
    """Whether the result of `scenario_by_rule` may depend on the cached prefixes."""
    for rule in rules:
        if rule.fits(operation, num_prompt_tokens, 0):
            return False
        if rule.fits(operation, num_prompt_tokens, num_prompt_tokens):
            return True
    return False
