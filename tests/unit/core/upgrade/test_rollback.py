"""Tests what rolls an upgrade back, and how the groups and the desired state return (S24)."""

from __future__ import annotations

import pytest

from pdmesh.core.groups.revisions import (
    canary_of,
    shares,
)
from pdmesh.core.model import Role
from tests.fakes.upgrading_world import (
    NEW,
    OLD,
    is_at,
    play,
    released,
    running,
    settled,
    told,
)


@pytest.mark.req("S24")
def test_a_revision_that_cannot_be_loaded_is_rolled_back_together_with_the_desired_state() -> None:
    world = settled(num_spare=0)
    world.apply(released("2"))
    play(world, 120, fails=lambda revision: revision == NEW)
    assert is_at(world, OLD)
    assert world.desired == released("1")
    assert world.version == 3
    assert told(world)[:3] == ["begun", "changing a", "turned_back a"]
    assert told(world)[-1] == "went_back"
    assert "LOAD_FAILED" in world.upgrading.reports["chat"].detail


@pytest.mark.req("S24")
def test_several_lost_instances_roll_an_upgrade_back_but_a_single_one_does_not() -> None:
    world = settled()
    world.apply(released("2"))
    while running(world).get("a") != {NEW}:
        play(world, 1)
    world.kill(world.ready("a", Role.PREFILL)[0])
    play(world, 3)
    assert not world.upgrades["chat"].back
    world.kill(world.ready("a", Role.DECODE)[0])
    play(world, 3)
    assert "it was lost" in world.upgrades["chat"].back


@pytest.mark.req("S24")
@pytest.mark.parametrize("is_sick", [True, False])
def test_a_canary_that_is_rolled_back_gets_no_requests_while_it_leaves(is_sick: bool) -> None:
    """The canary group is ready until it learns that it must leave. If it counted as an ordinary
    group, it would get more than its share.
    """
    world = settled()
    world.apply(released("2"), canary_share=0.1)
    canary = canary_of("chat")
    while canary not in running(world):
        play(world, 1)
    if not is_sick:
        world.apply(released("1"))
    while shares(world.upgrades.values()).get(canary) == 0.1:
        play(world, 1, sick=NEW if is_sick else "")
    while canary in running(world):
        assert shares(world.upgrades.values()) == {canary: 0.0}
        play(world, 1)
    world.apply(released("3"))
    play(world, 1)
    assert canary not in shares(world.upgrades.values())
