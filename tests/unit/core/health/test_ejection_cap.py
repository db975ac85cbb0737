"""The leader's cap: what of the faulty instances it ejects, and how they leave."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pdmesh.core.health.ejection_cap import FleetEjectionCap, TakenOut
from pdmesh.core.health.fault_levels import Level
from pdmesh.core.placement.instance import FaultJudged

pytestmark = pytest.mark.req("S34", "S36")

CORDONED = TakenOut(is_drain=False, is_ejected=False)


def fault(level: Level, *, since: float = 0.0, held_back: str = "") -> FaultJudged:
    return FaultJudged("i", 1, level, ("ECC",), held_back, since)


def fleet(num: int, **faults: FaultJudged) -> Mapping[str, FaultJudged | None]:
    return {**{f"i{n}": None for n in range(num)}, **faults}


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (Level.PROCESS, {}),  # it restarts itself
        (Level.INSTANCE, {"i0": TakenOut(True, True, "fault level 3: ECC")}),
        (Level.LOST, {"i0": TakenOut(False, True, "fault level 5: ECC")}),
    ],
)
def test_the_level_says_how_an_instance_leaves(
    level: Level, expected: Mapping[str, TakenOut]
) -> None:
    assert FleetEjectionCap().rule(fleet(5, i0=fault(level)), {}).taken_out == expected


def test_a_fault_that_is_held_back_ejects_nothing() -> None:
    held_back = fault(Level.LOST, held_back="panic")
    assert not FleetEjectionCap().rule(fleet(5, i0=held_back), {}).taken_out


def test_a_fifth_is_ejected_at_most_and_what_is_over_is_told_once() -> None:
    cap, out = FleetEjectionCap(), {"i9": CORDONED}  # an operator's does not count
    faults = fleet(10, i0=fault(Level.LOST), i1=fault(Level.LOST), i2=fault(Level.LOST))
    ruled = cap.rule(faults, out)
    assert list(ruled.taken_out) == ["i0", "i1"]
    assert ruled.over_cap == ("i2",)
    again = cap.rule(faults, out | dict(ruled.taken_out))
    assert (again.taken_out, again.over_cap) == ({}, ())


def test_one_is_ejected_of_any_fleet() -> None:
    assert list(FleetEjectionCap().rule(fleet(2, i1=fault(Level.LOST)), {}).taken_out) == ["i1"]


@pytest.mark.parametrize("is_ejected", [True, False])
def test_a_worse_fault_ends_a_drain_whoever_began_it(is_ejected: bool) -> None:
    out = {"i0": TakenOut(is_drain=True, is_ejected=is_ejected)}
    cap = FleetEjectionCap()
    assert not cap.rule(fleet(1, i0=fault(Level.INSTANCE)), out).taken_out
    worse = cap.rule(fleet(1, i0=fault(Level.LOST)), out).taken_out
    assert worse == {"i0": TakenOut(False, is_ejected, "fault level 5: ECC")}
    assert not cap.rule(fleet(1, i0=fault(Level.INSTANCE)), worse).taken_out


def test_an_overruled_fault_ejects_again_only_once_it_was_judged_anew() -> None:
    cap, old = FleetEjectionCap(), fault(Level.LOST, since=1.0)
    cap.overrule("i0", old)
    assert not cap.rule(fleet(1, i0=old), {}).taken_out
    assert cap.rule(fleet(1, i0=fault(Level.LOST, since=2.0)), {}).taken_out
    assert cap.rule(fleet(1, i0=old), {}).taken_out, "the operator's word was for that time"
