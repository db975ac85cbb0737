"""The waiting room calls requests by priority, tenant and deadline.

A tenant's flood keeps only its own requests out. `tests/property/request/test_waiting_room.py`
tries any order of joins, calls and leaves.
"""

from __future__ import annotations

import pytest

from pdmesh.core.request.waiting_room import Claim, Joined, WaitingRoom


def joined(room: WaitingRoom[str], name: str, until: float, claim: Claim, *on: str) -> int:
    found = room.join(name, on or ("p",), until, claim)
    assert isinstance(found, Joined)
    return found.number


def test_a_tenant_that_was_away_gets_its_next_turn_but_not_those_it_missed() -> None:
    room: WaitingRoom[str] = WaitingRoom(100)
    for i in range(30):
        joined(room, "busy", i, Claim("busy"))
    assert room.call("p", 20) == ["busy"] * 20
    for i in range(5):
        joined(room, "late", 99.0 + i, Claim("late"))
    assert room.call("p", 6).count("late") == 3


@pytest.mark.req("S44")
def test_a_tenant_that_floods_the_room_keeps_only_its_own_requests_out() -> None:
    room: WaitingRoom[str] = WaitingRoom(10)
    for i in range(10):
        joined(room, "flood", float(i), Claim("flood"))
    assert room.join("flood", ("p",), 0.0, Claim("flood")) is None
    evicted = []
    for i in range(5):
        found = room.join(f"quiet{i}", ("p",), 50.0, Claim("quiet"))
        assert found is not None
        evicted.append(found.evicted)
    assert evicted == ["flood"] * 5
    assert room.join("quiet", ("p",), 50.0, Claim("quiet")) is None, (
        "each tenant has half of the room now"
    )
    assert room.num_evicted == 5
    order = room.call("p", 10)
    assert order[0:2].count("flood") == 1, "and they take turns"


def test_a_higher_priority_is_called_first_and_takes_the_place_of_a_lower_one() -> None:
    room: WaitingRoom[str] = WaitingRoom(2)
    joined(room, "batch-1", 1.0, Claim("a", priority=2))
    joined(room, "batch-2", 2.0, Claim("a", priority=2))
    found = room.join("chat", ("p",), 9.0, Claim("b", priority=0))
    assert found is not None
    assert found.evicted == "batch-2"
    assert room.join("batch-3", ("p",), 0.5, Claim("c", priority=3)) is None
    assert room.call("p", 5) == ["chat", "batch-1"]
    assert len(room) == 0


def test_a_full_room_refuses_and_without_tenants_the_deadline_decides() -> None:
    assert WaitingRoom[str](0).join("a", ("p",), 1.0) is None
    room: WaitingRoom[str] = WaitingRoom(8)
    for name, until in (("late", 3.0), ("soon", 1.0), ("then", 2.0)):
        joined(room, name, until, Claim())
    assert room.call("q", 4) == []
    assert room.call("p", 2) == ["soon", "then"]
    assert room.call("p", 2) == ["late"]
