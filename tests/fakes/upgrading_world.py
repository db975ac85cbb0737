"""Rolling upgrades in a world of groups (`group_world`), whose groups begin with release 1."""

from __future__ import annotations

from collections.abc import Callable

from pdmesh.core.groups.desired import (
    Desired,
    Group,
    Scenario,
    Service,
    revision_of,
)
from pdmesh.core.groups.round import Round
from pdmesh.core.model import Phase, Role, Stage
from pdmesh.core.upgrade.events import (
    KeepRecord,
    Promoted,
)
from tests.fakes.group_world import KV, World

ROLES = (Role.PREFILL, Role.DECODE)


def released(release: str, num_groups: int = 3) -> Desired:
    groups = {name: Group("chat", 2, 2) for name in "abcd"[:num_groups]}
    scenarios = {"chat": Scenario("model")}
    return Desired({"model": Service(release=release)}, scenarios, groups)


def revision(release: str) -> str:
    return revision_of(Service(release=release), KV)


OLD, NEW = revision("1"), revision("2")


def settled(num_groups: int = 3, num_spare: int = 4) -> World:
    """A world with groups of 2P:2D, which serve release 1."""
    world = World(released("1", num_groups), num=4 * num_groups + num_spare)
    world.settle()
    world.told.clear()
    return world


def running(world: World) -> dict[str, set[str]]:
    """The revisions of the instances that accept requests, by group."""
    found: dict[str, set[str]] = {}
    for process in world.processes.values():
        role_spec = process.life.role_spec
        if role_spec is not None and process.record().phase is Phase.READY:
            found.setdefault(role_spec.group_id, set()).add(role_spec.revision)
    return found


def told(world: World) -> list[str]:
    return [f"{t.step} {t.group_id}".strip() for t in world.told]


def check_one_at_a_time(world: World) -> None:
    """Check that at most one group has more than one revision.

    Of each revision, a group must not have more prefills or decodes than the group should have.
    """
    round_ = Round(world.observe())
    mixed = []
    for group_id, group in round_.observed.wanted.groups.items():
        staying = [m for m in round_.members(group_id) if m.stage <= Stage.SERVE]
        if len({m.revision for m in staying}) > 1:
            mixed.append(group_id)
        for each in {m.revision for m in staying}:
            for role in ROLES:
                num = sum(m.role is role and m.revision == each for m in staying)
                assert num <= group.counts[role]
    assert len(mixed) <= 1, mixed


def play(
    world: World, seconds: int, *, sick: str = "", fails: Callable[[str], bool] = lambda _: False
) -> None:
    """Let all instances work for some seconds.

    Instances of the revision `sick` fail requests. Instances cannot load if `fails(revision)` is
    true for their revision.
    """
    for _ in range(seconds):
        world.now += 1
        world.round()
        world.answer(sick)
        check_one_at_a_time(world)
        for instance_id in list(world.processes):
            world.hear(instance_id)
            process = world.processes[instance_id]
            role_spec = process.life.role_spec
            is_loading = process.life.phase is Phase.LOADING and role_spec is not None
            world.work(
                instance_id,
                fails=is_loading and role_spec is not None and fails(role_spec.revision),
            )
            world.tell(instance_id)


def promote(world: World) -> None:
    for effect in world.upgrading.handle(Promoted(world.upgrades["chat"]), world.now):
        if isinstance(effect, KeepRecord):
            world.upgrades["chat"] = effect.upgrade


def is_at(world: World, revision: str) -> bool:
    groups = world.desired.groups
    return (
        world.counts() == dict.fromkeys(groups, (2, 2, 0))
        and running(world) == {g: {revision} for g in groups}
        and world.upgrades["chat"].is_idle
    )
