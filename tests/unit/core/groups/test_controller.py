"""The controller forms, changes, drains and repairs groups. Each test is one story.

The property test covers all orders of events.
"""

from __future__ import annotations

import pytest

from pdmesh.core.groups.desired import (
    Desired,
    Group,
    Scenario,
    Service,
)
from pdmesh.core.model import Phase, Role, RoleSpec, Stage
from pdmesh.desired_file import read
from tests.fakes.group_world import LIMITS, World

TWO_BY_TWO = Desired(groups={"chat": Group("default", 2, 2)})


@pytest.mark.req("S15")
def test_without_enough_instances_none_is_taken_and_the_missing_number_is_reported() -> None:
    world = World(TWO_BY_TWO, num=3)
    world.settle()
    assert world.given == {}
    assert world.controller.reports["chat"].detail == "1 more blank instance needed"
    world.start("late")
    world.settle()
    assert world.counts() == {"chat": (2, 2, 0)}


@pytest.mark.req("S15")
def test_a_group_that_loses_an_instance_while_it_forms_releases_the_others() -> None:
    world = World(TWO_BY_TWO, num=4)
    world.round()
    world.kill("i-3")
    world.settle()
    assert world.given == {}
    assert {p.life.phase for p in world.processes.values()} == {Phase.BLANK}
    assert "setup_failed" in [s.step for s in world.steps]


@pytest.mark.req("S35", "S36")
def test_a_lost_instance_is_replaced_by_exactly_one_and_no_other_is_touched() -> None:
    world = World(TWO_BY_TWO)
    world.settle()
    before = {i: p.life.incarnation for i, p in world.processes.items()}
    assignments = {i: a.assignment_id for i, a in world.given.items()}
    world.steps.clear()
    lost = world.ready("chat", Role.DECODE)[0]
    world.kill(lost)
    world.settle()
    assert world.counts() == {"chat": (2, 2, 0)}
    assigned = [s for s in world.steps if s.step == "assigned"]
    assert [s.replaces for s in assigned] == [lost]
    for instance_id, assignment_id in assignments.items():
        if instance_id != lost:
            assert world.given[instance_id].assignment_id == assignment_id
            assert world.processes[instance_id].life.incarnation == before[instance_id]
    assert lost not in world.given


@pytest.mark.req("S15", "S35")
def test_an_assignment_that_kills_each_instance_is_a_set_up_that_fails() -> None:
    """An engine that crashes on its model ends the process. Without a limit, one blank instance
    after another would crash.
    """
    world = World(TWO_BY_TWO, num=6)
    num_deaths = 0
    for _ in range(40):  # this is shorter than the group's pause after a failed set-up
        world.now += 0.5
        world.round()
        for instance_id, given in sorted(world.given.items()):
            if given.stage is Stage.LOAD and given.role_spec.role is Role.DECODE:
                world.kill(instance_id)
                world.start(instance_id)
                num_deaths += 1
    assert num_deaths <= 2 * LIMITS.max_tries
    report = world.controller.reports["chat"]
    assert (report.state, "was lost while it was set up" in report.detail) == ("failed", True)
    assert world.counts() == {}
    assert "setup_failed" in [s.step for s in world.steps if s.group_id == "chat"]
    world.now += LIMITS.cool_s
    world.settle()
    assert world.counts() == {"chat": (2, 2, 0)}


@pytest.mark.fault("F21")
def test_lost_assignments_are_restored_from_the_records() -> None:
    world = World(TWO_BY_TWO)
    world.settle()
    before, world.given = world.given, {}
    world.settle()
    assert world.given == before


def test_an_instance_taken_out_at_once_is_replaced_and_unused_until_it_is_put_back() -> None:
    world = World(TWO_BY_TWO, num=5)
    world.settle()
    bad = world.ready("chat", Role.PREFILL)[0]
    world.out_at_once.add(bad)
    world.settle()
    assert world.counts() == {"chat": (2, 2, 0)}
    assert world.processes[bad].life.phase is Phase.BLANK
    world.kill(bad)
    world.start(bad)  # a restart does not put the instance back into service
    other = world.ready("chat", Role.PREFILL)[0]
    world.kill(other)
    world.settle()
    assert world.counts() == {"chat": (1, 2, 0)}
    world.out_at_once.clear()
    world.settle()
    assert world.counts() == {"chat": (2, 2, 0)}


def of_scenario(name: str, prefill: int = 2, decode: int = 2) -> Desired:
    scenarios = {name: Scenario(service="model")}
    groups = {"a": Group(name, prefill, decode)}
    return Desired({"model": Service(release="1")}, scenarios, groups)


def scenarios_of(world: World) -> set[str]:
    return {p.life.role_spec.scenario for p in world.processes.values() if p.life.role_spec}


@pytest.mark.req("S4")
@pytest.mark.parametrize("num", [4, 8])
def test_a_group_that_is_to_serve_another_scenario_serves_it_with_other_instances(num: int) -> None:
    """An incarnation never changes its scenario. A bug once counted the old instances as members of
    the changed group.
    """
    world = World(of_scenario("chat"), num=num)
    world.settle()
    assert scenarios_of(world) == {"chat"}
    world.steps.clear()
    world.apply(of_scenario("summaries"))
    world.settle()
    assert world.counts() == {"a": (2, 2, 0)}
    assert scenarios_of(world) == {"summaries"}
    told = [s.step for s in world.steps]
    if num == 8:  # with blank instances, the new members serve before the old ones leave
        assert told[: told.index("draining")].count("ready") == 4


@pytest.mark.fault("F21")
def test_a_member_of_another_scenario_is_known_as_one_when_assignments_are_lost() -> None:
    world = World(of_scenario("chat"), num=8)
    world.settle()
    world.given.clear()
    world.apply(of_scenario("summaries"))
    world.settle()
    assert scenarios_of(world) == {"summaries"}
    assert {a.role_spec.scenario for a in world.given.values()} == {"summaries"}


@pytest.mark.req("S10")
def test_instances_with_a_fixed_role_are_adopted_by_groups_that_need_them() -> None:
    world = World(TWO_BY_TWO, num=0)
    for i, role in enumerate((Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)):
        world.start(f"own-{i}", RoleSpec(role, "chat", "default"))
    world.start("other", RoleSpec(Role.DECODE, "elsewhere", "default"))
    world.settle()
    assert world.counts()["chat"] == (2, 2, 0)
    assert {a.stage for a in world.given.values()} == {Stage.SERVE}
    assert "other" not in world.given


def test_without_any_desired_state_nothing_is_touched() -> None:
    world = World(Desired())
    world.version = 0
    world.start("own", RoleSpec(Role.FUSION, "chat", "default"))
    world.settle()
    assert world.given == {}


def test_fusion_groups_and_regions() -> None:
    text = """
groups:
  a: {fusion: 2, region: eu}
  b: {prefill: 2, decode: 2, region: us}
regions: [eu, us]
"""
    world = World(read(text), num=8)
    for i, process in enumerate(world.processes.values()):
        process.region = "eu" if i % 2 else "us"
        world.tell(process.instance_id)
    world.settle()
    assert world.counts() == {"a": (0, 0, 2), "b": (2, 2, 0)}
    assert world.ready("a", Role.FUSION) == ["i-1", "i-3"]


@pytest.mark.req("S54")
def test_a_group_takes_only_instances_of_its_racks_and_moves_when_these_change() -> None:
    world = World(Desired(groups={"chat": Group("chat", 2, 2, racks=("r1",))}), num=8)
    for number in range(8):
        world.processes[f"i-{number}"].rack = "r1" if number < 3 else "r2"
        world.tell(f"i-{number}")
    for _ in range(5):
        world.work_round()
    assert world.counts() == {}
    assert world.controller.reports["chat"].detail == "1 more blank instance needed in rack r1"
    world.apply(Desired(groups={"chat": Group("chat", 2, 2, racks=("r1", "r2"))}))
    world.settle()
    assert world.counts() == {"chat": (2, 2, 0)}
    world.apply(Desired(groups={"chat": Group("chat", 2, 2, racks=("r2",))}))
    world.settle()
    serving = [i for role in (Role.PREFILL, Role.DECODE) for i in world.ready("chat", role)]
    assert {world.processes[i].rack for i in serving} == {"r2"}
    assert len(serving) == 4
