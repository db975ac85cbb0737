"""Steps of instances and groups are announced once, in order; a new leader repeats none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.groups.facts import Observed, Seen, WantedGroups
from pdmesh.core.groups.round import Round
from pdmesh.core.groups.steps import AnnounceStep, StepTeller
from pdmesh.core.model import Assignment, Phase, Role, RoleSpec, Stage

GIVEN = Assignment(7, 1, 11, Stage.LOAD, RoleSpec(Role.DECODE, "chat", "default", "r1"))


def observed(phase: Phase, given: Assignment = GIVEN) -> Observed:
    return Observed(1, 1, WantedGroups(), {"i-0": Seen("i-0", 7, phase)}, {"i-0": given})


@pytest.mark.req("S23")
def test_a_phase_is_announced_when_it_is_reached_and_not_by_a_new_leader() -> None:
    teller, successor = StepTeller(), StepTeller()
    assert teller.begin(observed(Phase.LOADING)) == []
    (step,) = teller.begin(observed(Phase.LOADED))
    assert step == AnnounceStep("chat", "loaded", "i-0", 7, 11, "decode")
    assert teller.begin(observed(Phase.LOADED)) == []
    assert successor.begin(observed(Phase.LOADED)) == []


@pytest.mark.req("S23")
def test_a_round_announces_what_was_told_then_stages_then_those_it_released() -> None:
    teller = StepTeller(group_id="chat")
    round_ = Round(observed(Phase.LOADED))
    round_.plan["i-0"] = replace(GIVEN, stage=Stage.CONNECT)
    teller.tell_group("forming")
    assert [s.step for s in teller.end(round_)] == ["forming", "connecting"]
    gone = Round(observed(Phase.DRAINED, replace(GIVEN, stage=Stage.BLANK)))
    del gone.plan["i-0"]
    assert [s.step for s in teller.end(gone)] == ["released"]


def test_a_loss_is_told_once_for_an_incarnation_and_a_groups_step_until_another_one() -> None:
    teller, round_ = StepTeller(group_id="chat"), Round(observed(Phase.READY))
    assert teller.lost("i-0", GIVEN)
    assert not teller.lost("i-0", GIVEN)
    for detail in ("1 more", "1 more", "2 more"):
        teller.tell_group("gathering", detail)
    assert [(s.step, s.detail) for s in teller.end(round_)] == [
        ("lost", ""),
        ("gathering", "1 more"),
        ("gathering", "2 more"),
    ]
