"""How long a request may wait for its first token, by scenario and prompt length (S9), and what it is told if that is too long (S44)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from pdmesh.core.request.events import RequestLimits

DEFAULT: Final = "default"


@dataclass(frozen=True, slots=True)
class ScenarioSlo:
    """`default_text`: the answer instead of an error when nothing could serve the request (S37, S44)."""

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
        """The limits themselves where neither scenario nor length matters: that is free."""
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
        """Who names none is of the scenario `default`."""
        return self.scenarios.get(scenario or DEFAULT)

    def label(self, scenario: str) -> str:
        """For metrics: clients may send any name, and only those that are configured get their own."""
        return scenario if scenario in self.scenarios else DEFAULT
