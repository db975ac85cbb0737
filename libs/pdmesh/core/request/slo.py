"""Decides how long a request may wait for its first token, by scenario and prompt length (S9).

It also has the text that answers a request that nothing served in time (S44), and says whether the
objective of a call that has ended was met.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from pdmesh.core.request.events import RequestLimits

DEFAULT: Final = "default"


@dataclass(frozen=True, slots=True)
class ScenarioSlo:
    """`default_text`: the answer, in place of an error, to a request that no instance could serve
    (S37, S44).
    """

    ttft_s: float
    ttft_s_per_1k_tokens: float = 0.0
    default_text: str | None = None

    def ttft_for(self, num_prompt_tokens: int) -> float:
        return self.ttft_s + self.ttft_s_per_1k_tokens * num_prompt_tokens / 1000


@dataclass(slots=True)
class Slos:
    """`limits.ttft_s` and `ttft_s_per_1k_tokens` are for scenarios that are not named."""

    limits: RequestLimits
    ttft_s_per_1k_tokens: float = 0.0
    scenarios: Mapping[str, ScenarioSlo] = field(default_factory=dict)

    def limits_for(self, scenario: str, num_prompt_tokens: int) -> RequestLimits:
        """`limits` itself, without a copy, where neither scenario nor length matters."""
        slo = self._of(scenario)
        if slo is None:
            if not self.ttft_s_per_1k_tokens:
                return self.limits
            slo = ScenarioSlo(self.limits.ttft_s, self.ttft_s_per_1k_tokens)
        return replace(self.limits, ttft_s=slo.ttft_for(num_prompt_tokens))

    def default_text(self, scenario: str) -> str | None:
        slo = self._of(scenario)
        return None if slo is None else slo.default_text

    def _of(self, scenario: str) -> ScenarioSlo | None:
        """A request that names no scenario belongs to `default`."""
        return self.scenarios.get(scenario or DEFAULT)

    def label(self, scenario: str) -> str:
        """The name for metrics. Clients may send any, but only configured ones are told apart."""
        return scenario if scenario in self.scenarios else DEFAULT


def is_ttft_met(ttft_s: float | None, limit_s: float, *, has_failed: bool) -> bool | None:
    """Whether the first token came in time; None: the call does not count.

    That is so if its client left before a first token and before the call failed. `ttft_s`: None
    if there was no token.
    """
    if ttft_s is not None:
        return ttft_s <= limit_s
    return False if has_failed else None
