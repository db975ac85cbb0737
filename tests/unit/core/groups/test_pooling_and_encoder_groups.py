"""Groups of pooling instances and groups with encoders.

The tests cover which groups are valid and how many instances a scenario keeps.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.groups.cluster_state import wanted_of
from pdmesh.core.groups.desired import Desired, Group, Scenario, ScheduleLine, problems
from pdmesh.core.model import Role
from pdmesh.desired_file import read
from pdmesh.errors import InvalidRequest


def desired(**groups: Group) -> Desired:
    scenarios = {group.scenario: Scenario() for group in groups.values()}
    return Desired(scenarios=scenarios, groups=groups)


SEARCH = Group("search", pooling=2)


def test_two_pooling_instances_in_a_scenario_are_valid() -> None:
    assert list(problems(desired(a=SEARCH))) == []


@pytest.mark.parametrize(
    ("wrong", "path"),
    [
        (desired(a=Group("search", pooling=1)), "groups.a"),
        (desired(a=Group("search", pooling=2, fusion=1)), "groups.a.pooling"),
        (desired(a=SEARCH, b=Group("search", prefill=2, decode=2)), "groups.a.pooling"),
        (
            replace(desired(a=SEARCH), schedules=(ScheduleLine("0 1 * * *", "search", "lend"),)),
            "schedules[0].scenario",
        ),
    ],
    ids=["one-instance", "mixed-group", "mixed-scenario", "schedule"],
)
def test_an_impossible_group_is_reported_with_its_path(wrong: Desired, path: str) -> None:
    assert path in [problem.path for problem in problems(wrong)]


def test_a_pooling_scenario_keeps_two_instances_and_needs_no_prefill() -> None:
    wanted = wanted_of(desired(a=SEARCH, b=SEARCH), "kv")
    assert wanted.floor("search", Role.POOLING) == 2
    assert wanted.floor("search", Role.PREFILL) == 0
    assert wanted.groups["a"].counts[Role.POOLING] == 2


def test_a_file_may_ask_for_pooling_instances() -> None:
    text = "scenarios:\n  search: {}\ngroups:\n  a: {scenario: search, pooling: 3}\n"
    assert read(text).groups["a"] == Group("search", pooling=3)
    with pytest.raises(InvalidRequest, match="has only pooling instances"):
        read(text.replace("pooling: 3", "pooling: 3, fusion: 1"))


@pytest.mark.req("S130")
@pytest.mark.parametrize(
    "group",
    [Group("default", prefill=2, decode=2, encoder=1), Group("default", fusion=2, encoder=1)],
    ids=["pair", "fusion"],
)
def test_one_encoder_is_enough_because_prefills_encode_too(group: Group) -> None:
    assert list(problems(desired(a=group))) == []


@pytest.mark.parametrize(
    ("group", "path"),
    [
        (Group("default", encoder=2), "groups.a"),
        (Group("default", encoder=1, pooling=2), "groups.a.pooling"),
    ],
    ids=["alone", "pooling"],
)
def test_a_group_that_computes_no_prompts_has_no_use_for_encoders(group: Group, path: str) -> None:
    assert path in [problem.path for problem in problems(desired(a=group))]


def test_a_scenario_needs_no_encoder_to_serve() -> None:
    group = Group("default", prefill=2, decode=2, encoder=1)
    wanted = wanted_of(desired(a=group), "kv")
    assert wanted.floor("default", Role.ENCODER) == 0
    assert wanted.floor("default", Role.PREFILL) == 2
    assert wanted.groups["a"].counts[Role.ENCODER] == 1
    assert wanted.groups["a"].size == 5


def test_a_file_may_ask_for_encoders() -> None:
    text = (
        "scenarios: {default: {allow_single: true}}\n"
        "groups:\n  a: {prefill: 1, decode: 1, encoder: 1}\n"
    )
    assert read(text).groups["a"].encoder == 1
