"""One action for each level of fault (S34)."""

from __future__ import annotations

import pytest

from pdmesh.core.health.fault_levels import (
    EJECTS_FROM,
    RESPONSES,
    FaultAction,
    Level,
    level_of,
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
