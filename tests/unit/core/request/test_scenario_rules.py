"""The scenario of a request that names none."""

from __future__ import annotations

import pytest

from pdmesh.core.request.scenario_rules import ScenarioRule, scenario_by_rule

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
    assert scenario_by_rule(RULES, operation, num_tokens) == expected


def test_without_rules_nothing_is_decided() -> None:
    assert scenario_by_rule((), "chat", 10) is None
