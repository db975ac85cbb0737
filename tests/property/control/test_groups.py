"""The group controller with larger groups: restarts, new leaders, and upgrades without spares."""

from __future__ import annotations

import pytest

from pdmesh.core.groups.desired import (
    Desired,
    Group,
    Service,
)
from pdmesh.core.model import Phase, Role, Stage
from tests.fakes.group_world import LIMITS, World

TWO_BY_TWO = Desired(groups={"chat": Group("default", 2, 2)})


@pytest.mark.fault("F41")
def test_processes_that_are_restarted_one_by_one_are_not_failures() -> None:
    """Each drain takes longer than `serve_s`, the limit for an instance to begin to serve."""
    world = World(TWO_BY_TWO, num=5)
    world.settle()
    world.steps.clear()
    for role in (Role.PREFILL, Role.DECODE, Role.PREFILL, Role.DECODE):
        going = world.ready("chat", role)[0]
        world.stop(going)
        for _ in range(int(LIMITS.serve_s) + 5):
            world.work_round()
        assert world.counts()["chat"] == (2, 2, 0), "its place is filled while it drains"
        world.kill(going)
        world.start(going)
        world.settle()
    told = {s.step for s in world.steps}
    assert told.isdisjoint({"failed", "lost", "setup_failed"})
    assert world.counts() == {"chat": (2, 2, 0)}


@pytest.mark.fault("F11", "F13")
@pytest.mark.parametrize("num_rounds", range(12))
def test_a_new_leader_continues_where_the_old_one_stopped(num_rounds: int) -> None:
    """The old leader stops after `num_rounds` rounds. No instance is assigned twice, and
    no assignment remains that the group does not need.
    """
    world = World(TWO_BY_TWO)
    for _ in range(num_rounds):
        world.now += 1
        world.round(num_written=2)
        for instance_id in list(world.processes):
            world.hear(instance_id)
            world.work(instance_id)
            world.tell(instance_id)
    world.elect()
    world.settle()
    assert world.counts() == {"chat": (2, 2, 0)}
    assert len(world.given) == 4
    assert {a.epoch for a in world.given.values()} == {2}


def released(release: str, *counts: tuple[int, int]) -> Desired:
    """A desired state of one scenario and one revision. Its groups are named a, b and so on."""
    groups = {name: Group("default", *each) for name, each in zip("abc", counts, strict=False)}
    return Desired(services={"default": Service(release=release)}, groups=groups)


def ready_of(world: World, revision: str) -> list[str]:
    lives = {i: p.life for i, p in world.processes.items()}
    return [
        i
        for i, life in lives.items()
        if life.phase is Phase.READY and life.role_spec and life.role_spec.revision == revision
    ]


@pytest.mark.req("S24")
def test_without_spare_instances_one_group_at_a_time_makes_room() -> None:
    """There are three groups and no blank instance. The old instances of one group leave, and the
    other groups carry its traffic until new instances have replaced them.
    """
    world = World(released("1", (2, 2), (2, 2), (2, 2)), num=12)
    world.settle()
    (old,) = {a.role_spec.revision for a in world.given.values()}
    world.apply(released("2", (2, 2), (2, 2), (2, 2)))
    fewest = 12
    for _ in range(200):
        world.now += 1
        world.round()
        going = {a.role_spec.group_id for a in world.given.values() if a.stage is Stage.DRAIN}
        assert len(going) <= 1
        for instance_id in list(world.processes):
            for act in (world.hear, world.work, world.tell):
                act(instance_id)
        ready = sum(p.life.phase is Phase.READY for p in world.processes.values())
        fewest = min(fewest, ready)
    assert fewest == 8
    assert world.counts() == dict.fromkeys("abc", (2, 2, 0))
    assert not ready_of(world, old)


@pytest.mark.req("S24", "S31")
@pytest.mark.parametrize(("num_spare", "is_changed"), [(0, False), (3, False), (4, True)])
def test_an_old_revision_leaves_only_if_that_makes_enough_room(
    num_spare: int, is_changed: bool
) -> None:
    """The group needs eight new instances, and at most four of its old ones may leave. With three
    blank instances there would still be too few, so no old one leaves.
    """
    world = World(released("1", (4, 4)), num=8 + num_spare)
    world.settle()
    (old,) = {a.role_spec.revision for a in world.given.values()}
    world.apply(released("2", (4, 4)))
    world.settle()
    assert world.counts() == {"a": (4, 4, 0)}
    assert bool(ready_of(world, old)) is not is_changed
    if not is_changed:
        assert "4 instances may leave" in world.upgrading.reports["default"].detail
