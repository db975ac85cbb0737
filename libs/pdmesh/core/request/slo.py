"""Decides how long a request may wait for its first token, by scenario and prompt length (S9).

A scenario is a kind of requests. A scenario may also have a default text, which is the answer to a
request that no instance served in time (S44). `is_ttft_met` decides whether an ended call met its
limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from pdmesh.core.request.events import RequestLimits

DEFAULT: Final = "default"


@dataclass(frozen=True, slots=True)
class ScenarioSlo:
    """The objectives of one scenario, in seconds.

    `default_text` is the answer to a request that no instance could serve, instead of an error
    (S37, S44).
    """

    ttft_s: float
    ttft_s_per_1k_tokens: float = 0.0
    default_text: str | None = None

    def ttft_for(self, num_prompt_tokens: int) -> float:
        return self.ttft_s + self.ttft_s_per_1k_tokens * num_prompt_tokens / 1000


@dataclass(slots=True)
class Slos:
    """The objectives of all scenarios.

    Scenarios outside `scenarios` use `limits.ttft_s` and `ttft_s_per_1k_tokens`.
    """

    limits: RequestLimits
    ttft_s_per_1k_tokens: float = 0.0
    scenarios: Mapping[str, ScenarioSlo] = field(default_factory=dict)

    def limits_for(self, scenario: str, num_prompt_tokens: int) -> RequestLimits:
        """The limits for a request. If nothing differs, this is `limits` itself, not a copy."""
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
        """The objectives of a scenario. A request without a scenario belongs to `default`."""
        return self.scenarios.get(scenario or DEFAULT)

    def label(self, scenario: str) -> str:
        """The scenario's name in metrics. Names that are not configured become `default`."""
        return scenario if scenario in self.scenarios else DEFAULT


def is_ttft_met(ttft_s: float | None, limit_s: float, *, has_failed: bool) -> bool | None:
    """Whether the first token came in time.

    `ttft_s` is None if there was no token. The result is None, and the call does not count, if the
    client left before the first token and before any failure.
    """
    if ttft_s is not None:
        return ttft_s <= limit_s
    return False if has_failed else None
