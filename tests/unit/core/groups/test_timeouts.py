"""Tests when an instance has taken too long for a stage, and which instance is to blame."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.groups.desired import (
    Desired,
    Group,
)
from pdmesh.core.model import Phase, Role, Stage
from tests.fakes.group_world import LIMITS, World

TWO_BY_TWO = Desired(groups={"chat": Group("default", 2, 2)})


def steps_of(world: World, instance_id: str) -> list[str]:
    return [s.step for s in world.steps if s.instance_id == instance_id]


def test_an_instance_that_is_no_longer_ready_gets_as_long_as_a_new_one() -> None:
    world = World(TWO_BY_TWO)
    world.settle()
    odd = world.ready("chat", Role.DECODE)[0]
    for num_seconds, is_kept in ((0, True), (LIMITS.serve_s, True), (1, False)):
        world.now += num_seconds
        world.records[odd] = replace(world.records[odd], phase=Phase.CONNECTING)
        world.round()
        assert (world.given[odd].stage is Stage.SERVE) == is_kept


@pytest.mark.req("S23")
def test_an_instance_that_does_not_become_blank_is_reported_once() -> None:
    world = World(TWO_BY_TWO, num=5)
    world.settle()
    odd = world.ready("chat", Role.DECODE)[0]
    world.out_at_once.add(odd)
    for _ in range(int(LIMITS.erase_s) + 5):
        world.now += 1
        world.round()
    assert steps_of(world, odd).count("stuck") == 1
    world.settle()
    assert world.processes[odd].life.phase is Phase.BLANK
