"""Tests how instances join a group.

All pairs of a prefill and a decode are verified, and prefills begin to serve last.
"""

from __future__ import annotations

import pytest

from pdmesh.core.groups.desired import (
    Desired,
    Group,
)
from pdmesh.core.model import Phase, Role
from tests.fakes.group_world import World

TWO_BY_TWO = Desired(groups={"chat": Group("default", 2, 2)})


def steps_of(world: World, instance_id: str) -> list[str]:
    return [s.step for s in world.steps if s.instance_id == instance_id]


@pytest.mark.req("S14", "S15", "S16", "S18", "S19", "S23")
def test_a_group_is_set_up_from_blank_instances_and_its_prefills_come_last() -> None:
    world = World(TWO_BY_TWO)
    world.settle()
    assert world.counts() == {"chat": (2, 2, 0)}
    names = ["assigned", "loaded", "connecting", "connected", "serving", "ready"]
    for instance_id in ("i-0", "i-1", "i-2", "i-3"):
        assert steps_of(world, instance_id) == names
    roles = {s.instance_id: s.role for s in world.steps if s.step == "assigned"}
    serving = [roles[s.instance_id] for s in world.steps if s.step == "serving"]
    assert serving == ["decode", "decode", "prefill", "prefill"]
    assert [s.step for s in world.steps if not s.instance_id] == ["forming", "complete"]


@pytest.mark.req("S16")
def test_a_pair_that_cannot_be_verified_is_named_and_its_instance_replaced() -> None:
    world = World(TWO_BY_TWO, num=5)
    bad = "i-2"  # a decode all of whose connections fail
    for _ in range(120):
        world.now += 1
        world.round()
        for instance_id in list(world.processes):
            world.hear(instance_id)
            world.work(instance_id,
                fails=world.processes[instance_id].life.phase is Phase.CONNECTING
                       and instance_id == bad)  # fmt: skip
            world.tell(instance_id)
    failed = [s for s in world.steps if s.step == "failed"]
    assert [s.instance_id for s in failed] == [bad]
    assert failed[0].detail.startswith(f"no verified connection from {bad} to i-")
    assert world.counts() == {"chat": (2, 2, 0)}
    assert bad not in world.ready("chat", Role.DECODE)


@pytest.mark.req("S35")
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_one_blank_instance_repairs_a_group_that_lost_all_of_a_role(role: Role) -> None:
    world = World(TWO_BY_TWO, num=4)
    world.settle()
    for instance_id in world.ready("chat", role):
        world.kill(instance_id)
    world.start("spare")
    world.settle()
    assert world.counts() == {"chat": (1, 2, 0) if role is Role.PREFILL else (2, 1, 0)}


def test_the_first_substitute_gets_the_missing_role() -> None:
    world = World(TWO_BY_TWO, num=4)
    world.settle()
    for instance_id in [world.ready("chat", Role.PREFILL)[0], *world.ready("chat", Role.DECODE)]:
        world.kill(instance_id)
    world.start("spare")
    world.settle()
    assert world.counts() == {"chat": (1, 1, 0)}


SEEING = Desired(groups={"chat": Group("default", 2, 2, encoder=1)})


@pytest.mark.req("S130")
def test_an_encoder_joins_its_group() -> None:
    world = World(SEEING)
    world.settle()
    assert world.counts() == {"chat": (2, 2, 0)}
    assert len(world.ready("chat", Role.ENCODER)) == 1
    assert world.controller.reports["chat"].state == "serving"


@pytest.mark.req("S130")
def test_a_group_without_room_for_its_encoder_serves_and_gets_it_later() -> None:
    world = World(SEEING, num=4)
    world.settle()
    assert world.counts() == {"chat": (2, 2, 0)}
    assert world.ready("chat", Role.ENCODER) == []
    world.start("late")
    world.settle()
    assert world.ready("chat", Role.ENCODER) == ["late"]


@pytest.mark.req("S130")
def test_an_encoder_that_never_loads_stops_no_group() -> None:
    """For example, the encoder's model takes no images. The load is tried again now and then."""
    world = World(SEEING, num=5)
    num_tried = 0
    for _ in range(400):
        world.now += 1
        world.round()
        for instance_id in list(world.processes):
            world.hear(instance_id)
            role_spec = world.processes[instance_id].life.role_spec
            is_encoder = role_spec is not None and role_spec.role is Role.ENCODER
            is_slow = not is_encoder and world.now < 30  # the other instances take longer to load
            if not is_slow:
                num_tried += is_encoder and bool(world.processes[instance_id].todo)
                world.work(instance_id, fails=is_encoder)
            world.tell(instance_id)
    assert world.counts() == {"chat": (2, 2, 0)}
    assert 3 < num_tried < 60
    assert not [s for s in world.steps if s.step == "setup_failed"]


def test_a_lost_prefill_is_replaced_before_an_encoder() -> None:
    world = World(SEEING, num=5)
    world.settle()
    world.kill(world.ready("chat", Role.PREFILL)[0])
    world.kill(world.ready("chat", Role.ENCODER)[0])
    world.start("spare")
    world.settle()
    assert world.counts() == {"chat": (2, 2, 0)}
    assert world.ready("chat", Role.ENCODER) == []
