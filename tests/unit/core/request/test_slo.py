"""The deadline of a request's first token, and whether its objective was missed."""

from __future__ import annotations

import pytest

from pdmesh.core.request.events import RequestLimits
from pdmesh.core.request.slo import ScenarioSlo, Slos, is_ttft_met


@pytest.mark.req("S9")
def test_the_deadline_is_by_scenario_and_by_length() -> None:
    limits = RequestLimits(ttft_s=10.0)
    slos = Slos(limits, 0.0, {"search": ScenarioSlo(0.5, 0.25, "busy")})
    assert slos.limits_for("", 8000) is limits, "without an SLO the general limits apply"
    assert slos.limits_for("search", 2000).ttft_s == 1.0
    assert Slos(limits, 0.1).limits_for("any", 5000).ttft_s == 10.5
    assert (slos.default_text("search"), slos.default_text("any")) == ("busy", None)
    assert (slos.label("search"), slos.label("x" * 200)) == ("search", "default")


@pytest.mark.req("S9")
def test_an_objective_is_missed_by_a_late_token_or_a_failure() -> None:
    assert is_ttft_met(1.0, 1.0, has_failed=False) is True
    assert is_ttft_met(1.1, 1.0, has_failed=False) is False
    assert is_ttft_met(0.5, 1.0, has_failed=True) is True, "it failed after its first token"
    assert is_ttft_met(None, 1.0, has_failed=True) is False
    assert is_ttft_met(None, 1.0, has_failed=False) is None
