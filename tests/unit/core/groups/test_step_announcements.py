"""Steps of instances and groups are announced once and in order. A new leader repeats none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.groups.cluster_state import InstanceStatus, Observed, WantedGroups
from pdmesh.core.groups.round import Round
from pdmesh.core.groups.step_announcements import AnnounceStep, StepAnnouncer
from pdmesh.core.model import Assignment, Phase, Role, RoleSpec, Stage

GIVEN = Assignment(7, 1, 11, Stage.LOAD, RoleSpec(Role.DECODE, "chat", "default", "r1"))


def observed(phase: Phase, given: Assignment = GIVEN) -> Observed:
    return Observed(1, 1, WantedGroups(), {"i-0": InstanceStatus("i-0", 7, phase)}, {"i-0": given})


@pytest.mark.req("S23")
def test_a_phase_is_announced_when_it_is_reached_and_not_by_a_new_leader() -> None:
    announcer, successor = StepAnnouncer(), StepAnnouncer()
    assert announcer.begin(observed(Phase.LOADING)) == []
    (step,) = announcer.begin(observed(Phase.LOADED))
    assert step == AnnounceStep("chat", "loaded", "i-0", 7, 11, "decode")
    assert announcer.begin(observed(Phase.LOADED)) == []
    assert successor.begin(observed(Phase.LOADED)) == []


@pytest.mark.req("S23")
def test_a_round_announces_group_steps_then_stages_then_released_instances() -> None:
    announcer = StepAnnouncer(group_id="chat")
    round_ = Round(observed(Phase.LOADED))
    round_.plan["i-0"] = replace(GIVEN, stage=Stage.CONNECT)
    announcer.announce_group("forming")
    assert [s.step for s in announcer.end(round_)] == ["forming", "connecting"]
    gone = Round(observed(Phase.DRAINED, replace(GIVEN, stage=Stage.BLANK)))
    del gone.plan["i-0"]
    assert [s.step for s in announcer.end(gone)] == ["released"]


def test_a_loss_is_announced_once_per_incarnation_and_a_group_step_only_when_it_changes() -> None:
    announcer, round_ = StepAnnouncer(group_id="chat"), Round(observed(Phase.READY))
    assert announcer.lost("i-0", GIVEN)
    assert not announcer.lost("i-0", GIVEN)
    for detail in ("1 more", "1 more", "2 more"):
        announcer.announce_group("gathering", detail)
    assert [(s.step, s.detail) for s in announcer.end(round_)] == [
        ("lost", ""),
        ("gathering", "1 more"),
        ("gathering", "2 more"),
    ]
