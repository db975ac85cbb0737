"""Upgrades of several scenarios, and of a scenario whose groups are all lent (S24)."""

from __future__ import annotations

import pytest

from pdmesh.core.groups.desired import (
    Desired,
    Group,
    Scenario,
    Service,
)
from pdmesh.core.groups.revisions import (
    Upgrade,
)
from pdmesh.core.upgrade.controller import UpgradeController
from pdmesh.core.upgrade.events import (
    GroupsObserved,
    KeepRecord,
)
from tests.fakes.group_world import KV, World
from tests.fakes.upgrading_world import (
    NEW,
    play,
    running,
    told,
)


@pytest.mark.req("S24")
def test_a_version_that_is_applied_while_all_groups_are_lent_waits_for_one_to_prove_it() -> None:
    old, new = Service(release="1"), Service(release="2")
    known = {"chat": Upgrade("chat", old, 1, old, 1, is_proved=True)}
    controller = UpgradeController(KV)
    (kept,) = [
        e.upgrade
        for e in controller.handle(GroupsObserved(2, {"chat": new}, known, {}), 0.0)
        if isinstance(e, KeepRecord)
    ]
    assert (kept.settled, kept.target, kept.is_idle) == (old, new, False)
    controller.handle(GroupsObserved(2, {"chat": new}, {"chat": kept}, {}), 1.0)
    assert controller.reports["chat"].detail == "all of its groups are lent or not set up yet"


@pytest.mark.req("S24")
def test_two_scenarios_take_turns() -> None:
    desired = {
        release: Desired(
            {"model": Service(release=release)},
            {"x": Scenario("model"), "y": Scenario("model")},
            {"a": Group("x", 2, 2), "b": Group("y", 2, 2)},
        )
        for release in ("1", "2")
    }
    world = World(desired["1"], num=12)
    world.settle()
    world.told.clear()
    world.apply(desired["2"])
    play(world, 90)
    assert set.union(*running(world).values()) == {NEW}
    steps = [s for s in told(world) if s.startswith(("changing", "proved"))]
    assert steps == ["changing a", "proved a", "changing b", "proved b"]
