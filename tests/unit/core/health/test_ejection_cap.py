"""The caps on ejections, which take faulty instances out of service.

The health-monitor has a cap for each group and role. The leader has a cap for the fleet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pytest

from pdmesh.core.health.ejection_cap import (
    CAP,
    PANIC,
    EjectionCap,
    EjectionDecision,
    EjectionLimits,
    FleetEjectionCap,
    TakenOut,
)
from pdmesh.core.health.fault_levels import FaultJudged, Level

pytestmark = pytest.mark.req("S34", "S36")

DECODES = ("g", "decode")
CORDONED = TakenOut(is_drain=False, is_ejected=False)


def fault(level: Level, *, since: float = 0.0, held_back: str = "") -> FaultJudged:
    return FaultJudged("i", 1, level, ("ECC",), held_back, since)


def fleet(num: int, **faults: FaultJudged) -> Mapping[str, FaultJudged | None]:
    return {**{f"i{n}": None for n in range(num)}, **faults}


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (Level.PROCESS, {}),  # the instance restarts itself
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


def test_at_most_a_fifth_is_ejected_and_the_excess_is_reported_once() -> None:
    # an instance that an operator cordoned does not count towards the cap
    cap, out = FleetEjectionCap(), {"i9": CORDONED}
    faults = fleet(10, i0=fault(Level.LOST), i1=fault(Level.LOST), i2=fault(Level.LOST))
    ruled = cap.rule(faults, out)
    assert list(ruled.taken_out) == ["i0", "i1"]
    assert ruled.over_cap == ("i2",)
    again = cap.rule(faults, out | dict(ruled.taken_out))
    assert (again.taken_out, again.over_cap) == ({}, ())


def test_one_instance_may_be_ejected_from_a_fleet_of_any_size() -> None:
    assert list(FleetEjectionCap().rule(fleet(2, i1=fault(Level.LOST)), {}).taken_out) == ["i1"]


@pytest.mark.parametrize("is_ejected", [True, False])
def test_a_worse_fault_ends_any_drain(is_ejected: bool) -> None:
    out = {"i0": TakenOut(is_drain=True, is_ejected=is_ejected)}
    cap = FleetEjectionCap()
    assert not cap.rule(fleet(1, i0=fault(Level.INSTANCE)), out).taken_out
    worse = cap.rule(fleet(1, i0=fault(Level.LOST)), out).taken_out
    assert worse == {"i0": TakenOut(False, is_ejected, "fault level 5: ECC")}
    assert not cap.rule(fleet(1, i0=fault(Level.INSTANCE)), worse).taken_out


def test_an_overruled_fault_ejects_again_only_after_a_new_judgement() -> None:
    cap, old = FleetEjectionCap(), fault(Level.LOST, since=1.0)
    cap.overrule("i0", old)
    assert not cap.rule(fleet(1, i0=old), {}).taken_out
    assert cap.rule(fleet(1, i0=fault(Level.LOST, since=2.0)), {}).taken_out
    assert cap.rule(fleet(1, i0=old), {}).taken_out, (
        "the operator overruled the fault only until the next judgement"
    )


# --- the cap of one group and role ---------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    instance_id: str
    is_ejectable: bool = False
    has_proof: bool = True
    since: float = 0.0
    peers: tuple[str, str] = DECODES


def suspected(sick: Iterable[int], num: int = 6, *, has_proof: bool = True) -> list[Judged]:
    return [Judged(f"d{i}", i in sick, has_proof) for i in range(num)]


def peers_cap() -> EjectionCap:
    return EjectionCap(EjectionLimits())


def test_only_a_share_of_a_group_and_role_is_ejected_and_recovered_ones_count_for_a_minute() -> (
    None
):
    rule = peers_cap()
    assert rule.rule(suspected(sick=(0, 1, 2)), 0.0) == EjectionDecision({"d2": CAP}, ("d0", "d1"))
    assert rule.rule(suspected(sick=(2,)), 12.0) == EjectionDecision({"d2": CAP})
    assert rule.rule(suspected(sick=(2,)), 60.0) == EjectionDecision({}, ("d2",))
    assert set(rule.out(DECODES)) == {"d2"}


def test_proven_faults_are_ejected_before_suspected_ones_and_then_the_oldest_first() -> None:
    sick = [
        Judged("d0", True, has_proof=False, since=1.0),
        Judged("d1", True, since=3.0),
        Judged("d2", True, since=2.0),
    ]
    well = suspected(sick=(), num=6)[3:]
    assert peers_cap().rule([*sick, *well], 4.0) == EjectionDecision({"d0": CAP}, ("d2", "d1"))


def test_the_last_instance_of_a_role_is_ejected_only_by_a_proof() -> None:
    assert peers_cap().rule(suspected((0,), 1, has_proof=False), 0.0) == EjectionDecision(
        {"d0": CAP}
    )
    assert peers_cap().rule(suspected((0,), 1), 0.0) == EjectionDecision({}, ("d0",))


def test_if_most_look_faulty_no_more_are_ejected_and_those_already_out_stay_out() -> None:
    rule = peers_cap()
    alone = [Judged(f"d{i}", i == 0, peers=(f"g{i}", "decode")) for i in range(5)]
    assert rule.rule(alone, 0.0) == EjectionDecision({}, ("d0",))
    many = [Judged(f"d{i}", i < 3, peers=(f"g{i}", "decode")) for i in range(5)]
    assert rule.rule(many, 1.0) == EjectionDecision({"d1": PANIC, "d2": PANIC})
    assert set(rule.out(("g0", "decode"))) == {"d0"}
