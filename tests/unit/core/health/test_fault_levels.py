"""Each fault level has one action (S34)."""

from __future__ import annotations

import pytest

from pdmesh.core.health.fault_levels import (
    EJECTS_FROM,
    RESPONSES,
    FaultAction,
    Level,
    level_of,
    must_restart,
)


@pytest.mark.req("S34")
@pytest.mark.parametrize(
    ("level", "action", "takes_requests", "finishes_running"),
    [
        (Level.WELL, FaultAction.IGNORE, True, True),
        (Level.TRANSIENT, FaultAction.RETRY, True, True),
        (Level.PROCESS, FaultAction.RESTART_PROCESS, False, False),
        (Level.INSTANCE, FaultAction.REPLACE_INSTANCE, False, True),
        (Level.NODE, FaultAction.DRAIN_NODE, False, True),
        (Level.LOST, FaultAction.EJECT_NODE, False, False),
    ],
)
def test_each_level_has_one_action(
    level: Level, action: FaultAction, takes_requests: bool, finishes_running: bool
) -> None:
    response = RESPONSES[level]
    assert response.action is action
    assert response.finishes_running is finishes_running
    assert (level < EJECTS_FROM) is takes_requests


def test_a_level_out_of_range_is_the_nearest_level() -> None:
    assert level_of(9) is Level.LOST
    assert level_of(-1) is Level.WELL
    assert len({r.action for r in RESPONSES.values()}) == len(Level)


@pytest.mark.req("S34")
def test_an_instance_ends_itself_only_for_a_fault_of_its_process_that_is_not_held_back() -> None:
    assert [level for level in Level if must_restart(level, "")] == [Level.PROCESS]
    assert not must_restart(Level.PROCESS, "too many instances are ejected")
