"""Tests which instances leave a group, and when.

A successor serves before an instance leaves. If no instance is spare, only as many leave early as
must make room for successors.
"""

from __future__ import annotations

import pytest

from pdmesh.core.groups.desired import (
    Desired,
    Group,
    Scenario,
    Service,
)
from pdmesh.core.model import Phase, Role
from tests.fakes.group_world import World

TWO_BY_TWO = Desired(groups={"chat": Group("default", 2, 2)})

SINGLE = {"default": Scenario(allow_single=True)}

THREE_BY_ONE = Desired(scenarios=SINGLE, groups={"chat": Group("default", 3, 1)})


def steps_of(world: World, instance_id: str) -> list[str]:
    return [s.step for s in world.steps if s.instance_id == instance_id]


@pytest.mark.req("S25", "S26", "S28")
def test_a_ratio_changes_by_adding_first_and_draining_afterwards() -> None:
    world = World(TWO_BY_TWO)
    world.settle()
    world.steps.clear()
    world.apply(THREE_BY_ONE)
    world.settle()
    assert world.counts() == {"chat": (3, 1, 0)}
    told = [(s.step, s.role) for s in world.steps if s.instance_id]
    assert told.index(("ready", "prefill")) < told.index(("draining", "decode"))
    leaving = next(s.instance_id for s in world.steps if s.step == "draining")
    assert steps_of(world, leaving) == ["draining", "drained", "disconnected", "released"]


@pytest.mark.req("S28")
@pytest.mark.parametrize("num_spare", [0, 1, 2, 4])
def test_a_ratio_changes_one_instance_at_a_time_whatever_an_operator_asks_for_at_once(
    num_spare: int,
) -> None:
    """The ratio changes from 4:2 to 2:4. With a spare instance, six instances always serve. Without
    one, at least five do.

    Draining takes a moment, and loading takes minutes. If each instance left as soon as the one
    before was blank, half of the group would be loading at the same time.
    """
    begin, end = (Desired(groups={"chat": Group("default", *n)}) for n in ((4, 2), (2, 4)))
    world = World(begin, num=6 + num_spare)
    world.settle()
    world.apply(end)
    before, seen = 6, [(4, 2)]
    for _ in range(100):
        world.work_round()
        num_prefill, num_decode = (len(world.ready("chat", r)) for r in (Role.PREFILL, Role.DECODE))
        assert num_prefill + num_decode >= 6 - (num_spare == 0)
        assert num_prefill + num_decode >= before - 1, "two left at once"
        assert len(world.given) <= 6 + min(num_spare, 2)
        before = num_prefill + num_decode
        if (num_prefill, num_decode) != seen[-1]:
            seen.append((num_prefill, num_decode))
    assert seen[-1] == (2, 4)
    assert len(world.given) == 6, "the spare instances are given back"
    prefills, decodes = zip(*seen, strict=True)
    assert list(prefills) == sorted(prefills, reverse=True), "neither count goes back and forth"
    assert list(decodes) == sorted(decodes)


@pytest.mark.req("S26", "S35")
def test_a_drained_instance_leaves_after_its_substitute_has_come() -> None:
    world = World(TWO_BY_TWO, num=5)
    world.settle()
    world.steps.clear()
    going = world.ready("chat", Role.DECODE)[0]
    world.to_drain.add(going)
    world.settle()
    assert world.counts() == {"chat": (2, 2, 0)}
    told = [s.step for s in world.steps]
    assert told.index("ready") < told.index("draining")
    assert world.processes[going].life.phase is Phase.BLANK


@pytest.mark.req("S31")
def test_the_last_instances_of_a_scenario_are_not_drained_without_a_substitute() -> None:
    world = World(TWO_BY_TWO, num=4)
    world.settle()
    world.to_drain.add(world.ready("chat", Role.DECODE)[0])
    world.settle()
    assert world.counts() == {"chat": (2, 2, 0)}
    assert "scenario default would be left with 1 decode" in world.controller.reports["chat"].detail


@pytest.mark.req("S22")
def test_a_group_that_is_no_longer_wanted_is_drained_and_given_back() -> None:
    world = World(TWO_BY_TWO)
    world.settle()
    world.apply(Desired())
    world.settle()
    assert world.counts() == {}
    assert world.given == {}
    assert {p.life.phase for p in world.processes.values()} == {Phase.BLANK}


def released(release: str, *counts: tuple[int, int]) -> Desired:
    """A desired state of one scenario and one revision. Its groups are named a, b and so on."""
    groups = {name: Group("default", *each) for name, each in zip("abc", counts, strict=False)}
    return Desired(services={"default": Service(release=release)}, groups=groups)


@pytest.mark.req("S24")
def test_the_whole_group_serves_the_new_revision_before_old_instances_leave() -> None:
    world = World(released("1", (4, 4)), num=16)
    world.settle()
    world.steps.clear()
    world.apply(released("2", (4, 4)))
    world.settle()
    assert world.counts() == {"a": (4, 4, 0)}
    assert len({a.role_spec.revision for a in world.given.values()}) == 1
    told = [s.step for s in world.steps]
    assert told.count("draining") == 8
    assert told[: told.index("draining")].count("ready") == 8
