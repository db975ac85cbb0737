"""Tests whether a group may be taken out for an upgrade (S24)."""

from __future__ import annotations

import pytest

from tests.fakes.upgrading_world import (
    OLD,
    play,
    released,
    running,
    settled,
)


@pytest.mark.req("S24")
@pytest.mark.parametrize(
    ("num_groups", "busy", "why"),
    [
        (1, 0.1, "only 0 instances may leave; 4 more blank"),
        (3, 0.7, "4 prefill would be 105% busy"),
        (3, None, "load of a's prefills is unknown"),
    ],
)
def test_a_group_is_not_taken_out_if_the_others_cannot_carry_its_load(
    num_groups: int, busy: float | None, why: str
) -> None:
    world = settled(num_groups, num_spare=0)
    world.busy = busy
    world.apply(released("2", num_groups))
    play(world, 30)
    assert set.union(*running(world).values()) == {OLD}
    assert why in world.upgrading.reports["chat"].detail
