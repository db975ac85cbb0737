"""Tests which instances move while a region is lost, or while a group moves to another region
(S58).
"""

from __future__ import annotations

import random

import pytest

from pdmesh.core.model import Role
from pdmesh.desired_file import read
from tests.fakes.group_world import World

HOME_AND_FAILOVER = """
regions: [eu, us]
groups:
  chat: {prefill: 2, decode: 2, region: eu, failover: [us]}
"""

SINGLE = "scenarios: {default: {allow_single: true}}\n"

ANYWHERE = "regions: [eu, us]\ngroups:\n  chat: {prefill: 2, decode: 2}\n"

pytestmark = pytest.mark.req("S58")


def world_of(text: str, **num: int) -> World:
    """A world with `num` instances in each region. Their ids are eu-0, us-0 and so on."""
    world = World(read(text), num=0)
    for region, count in num.items():
        for i in range(count):
            start(world, f"{region}-{i}")
    return world


def start(world: World, name: str) -> None:
    world.start(name)
    world.processes[name].region = name.partition("-")[0]
    world.tell(name)


def regions(world: World) -> set[str]:
    roles = (Role.PREFILL, Role.DECODE)
    return {name.partition("-")[0] for role in roles for name in world.ready("chat", role)}


def test_the_loss_of_a_region_counts_as_no_failed_set_up() -> None:
    """The leases of the region's instances end one after another. So the group first takes spare
    instances of the same region, which are lost next.
    """
    world = world_of(ANYWHERE, eu=12, us=4)
    world.settle()
    assert regions(world) == {"eu"}
    order = random.Random(3).sample(range(12), 12)
    for i in order:
        world.kill(f"eu-{i}")
        world.round()
        world.round()
    assert not any(step.step == "setup_failed" for step in world.steps)
    began = world.now
    while regions(world) != {"us"}:
        world.work_round()
        assert world.now - began < 10, world.describe()


def test_surplus_instances_leave_even_if_blank_ones_wait_in_another_region() -> None:
    text = SINGLE + "regions: [eu, us]\ngroups:\n  chat: {COUNTS, region: eu}\n"
    world = world_of(text.replace("COUNTS", "prefill: 3, decode: 1"), eu=4, us=4)
    world.settle()
    text = text.replace("region: eu", "region: us")
    world.apply(read(text.replace("COUNTS", "prefill: 3, decode: 1")))
    while len(world.ready("chat", Role.PREFILL)) < 6:
        world.work_round()
    world.apply(read(text.replace("COUNTS", "prefill: 1, decode: 3")))
    world.settle()
    assert (world.counts(), regions(world)) == ({"chat": (1, 3, 0)}, {"us"}), world.describe()


def test_an_upgrade_without_spare_instances_at_home_makes_room_only_there() -> None:
    text = HOME_AND_FAILOVER + "  other: {scenario: default, prefill: 2, decode: 2, region: eu}\n"
    world = world_of(SINGLE + text, eu=8, us=4)
    world.settle()
    world.steps.clear()
    world.apply(read(SINGLE + "services: {default: {release: '2'}}\n" + text))
    world.settle()
    assert world.counts() == {"chat": (2, 2, 0), "other": (2, 2, 0)}
    assert {given.role_spec.revision for given in world.given.values()} == {
        group.revision for group in world.observe().wanted.groups.values()
    }
    assert {s.instance_id[:2] for s in world.steps if s.step == "assigned"} == {"eu"}
