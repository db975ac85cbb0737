"""The waiting room is bounded, fair by deadline, and forgets whoever left."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.waiting_room import WaitingRoom

entries = st.lists(
    st.tuples(st.sets(st.sampled_from("pqr"), min_size=1), st.integers(0, 100)), max_size=12
)


@given(entries=entries, leavers=st.sets(st.integers(0, 11)))
def test_those_who_wait_for_an_instance_are_called_by_deadline(
    entries: list[tuple[set[str], int]], leavers: set[int]
) -> None:
    room: WaitingRoom[int] = WaitingRoom(max_waiting=8)
    numbers = [room.join(i, sorted(on), until) for i, (on, until) in enumerate(entries)]
    assert [n is not None for n in numbers] == [i < 8 for i in range(len(entries))]
    room.check_invariants()
    for i in leavers & set(range(min(8, len(entries)))):
        number = numbers[i]
        assert number is not None
        room.leave(number)
    waiting = [i for i in range(min(8, len(entries))) if i not in leavers]
    expected = sorted(
        (i for i in waiting if "p" in entries[i][0]), key=lambda i: (entries[i][1], i)
    )
    assert room.call("p", 2) == expected[:2]
    assert room.call("p", 100) == expected[2:]
    assert len(room) == len(waiting) - len(expected)


def test_a_full_room_refuses_and_a_leaver_makes_room() -> None:
    room: WaitingRoom[str] = WaitingRoom(max_waiting=1)
    first = room.join("a", ["p0"], 1.0)
    assert first is not None
    assert room.join("b", ["p0"], 0.5) is None
    room.leave(first)
    room.leave(first)
    assert room.join("b", ["p0"], 0.5) is not None
    assert room.call("p0", 1) == ["b"]
    assert len(room) == 0
