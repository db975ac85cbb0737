"""Rolling upgrades (S24).

Groups change one after another. Each change waits until the group before has proved the revision.
"""

from __future__ import annotations

import pytest

from tests.fakes.group_world import World
from tests.fakes.upgrading_world import (
    NEW,
    OLD,
    is_at,
    play,
    released,
    settled,
    told,
)


@pytest.mark.req("S24")
@pytest.mark.parametrize("num_spare", [0, 4])
def test_each_group_is_upgraded_after_the_group_before_it_has_proved_itself(
    num_spare: int,
) -> None:
    world = settled(num_spare=num_spare)
    world.apply(released("2"))
    play(world, 120)
    assert is_at(world, NEW)
    each = [f"{step} {group}" for group in "abc" for step in ("changing", "proved")]
    assert told(world) == ["begun", *each, "done"]


@pytest.mark.req("S24")
def test_a_service_without_serving_groups_changes_at_once() -> None:
    """No request needs the revision that never served, so the repaired one can start at once."""
    world = World(released("1"), num=16)
    play(world, 30, fails=lambda revision: revision == OLD)
    world.apply(released("2"))
    play(world, 90, fails=lambda revision: revision == OLD)
    assert is_at(world, NEW)
