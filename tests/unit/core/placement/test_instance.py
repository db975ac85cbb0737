"""An instance with a judged fault gets no requests, unless its ejection is held back."""

from __future__ import annotations

import pytest

from pdmesh.core.health.fault_levels import FaultJudged, Level
from tests.support.placements import QUERY, make, pair, planned


@pytest.mark.req("S34")
@pytest.mark.parametrize(
    ("level", "held_back", "is_left_out"),
    [(Level.TRANSIENT, "", False), (Level.PROCESS, "", True), (Level.LOST, "panic", False)],
)
def test_from_level_two_on_an_instance_is_left_out_unless_its_ejection_is_held_back(
    level: Level, held_back: str, is_left_out: bool
) -> None:
    placement = make(*pair())
    placement.fleet.handle(FaultJudged("prefill-0", 1, level, (), held_back), 0.0)
    placement.fleet.handle(FaultJudged("prefill-1", 99, Level.LOST), 0.0)
    ids = {c.instance_id for c in planned(placement, QUERY).prefills}
    assert ids == ({"prefill-1"} if is_left_out else {"prefill-0", "prefill-1"})
