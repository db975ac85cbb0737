"""Rules choose the scenario of a request that names none."""

from __future__ import annotations

import pytest

from pdmesh.core.request.scenario_rules import (
    ScenarioRule,
    depends_on_cache,
    scenario_by_rule,
)

RULES = (
    ScenarioRule("summaries", min_prompt_tokens=4000),
    ScenarioRule("lookup", max_prompt_tokens=100, operation="text_completion"),
    ScenarioRule("chat", operation="chat"),
)


@pytest.mark.req("S4")
@pytest.mark.parametrize(
    ("operation", "num_tokens", "expected"),
    [
        ("chat", 4000, "summaries"),
        ("chat", 3999, "chat"),
        ("text_completion", 9000, "summaries"),
        ("text_completion", 100, "lookup"),
        ("text_completion", 101, None),
    ],
)
def test_the_first_matching_rule_decides(
    operation: str, num_tokens: int, expected: str | None
) -> None:
    assert scenario_by_rule(RULES, operation, num_tokens, {}) == expected
    assert not depends_on_cache(RULES, operation, num_tokens)


def test_without_rules_nothing_is_decided() -> None:
    assert scenario_by_rule((), "chat", 10, {}) is None


UNCACHED = (
    ScenarioRule("interactive", max_uncached_tokens=2000, operation="chat"),
    ScenarioRule("long", min_prompt_tokens=2001),
)


@pytest.mark.req("S4", "S108")
@pytest.mark.parametrize(
    ("cached", "expected"),
    [
        ({}, "long"),
        ({"interactive": 98_000}, "interactive"),
        ({"interactive": 97_999}, "long"),
        # other instances hold the tokens, so `interactive` would compute all of them
        ({"long": 99_000}, "long"),
    ],
)
def test_a_rule_may_bound_what_the_scenarios_instances_would_have_to_compute(
    cached: dict[str, int], expected: str
) -> None:
    assert depends_on_cache(UNCACHED, "chat", 100_000)
    assert scenario_by_rule(UNCACHED, "chat", 100_000, cached) == expected


@pytest.mark.parametrize(
    ("operation", "num_tokens"), [("chat", 2000), ("text_completion", 100_000), ("chat", 0)]
)
def test_what_is_cached_is_not_asked_for_where_it_decides_nothing(
    operation: str, num_tokens: int
) -> None:
    assert not depends_on_cache(UNCACHED, operation, num_tokens)
    whole = {"interactive": num_tokens, "long": num_tokens}
    found = scenario_by_rule(UNCACHED, operation, num_tokens, {})
    assert scenario_by_rule(UNCACHED, operation, num_tokens, whole) == found
