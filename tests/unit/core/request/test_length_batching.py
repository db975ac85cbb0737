"""Prompts of similar length share a batch.

No prompt waits without end for others of its length.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.request.length_batching import (
    LengthWindow,
    Place,
    padding_waste,
    window_size,
)
from pdmesh.core.request.waiting_room import Claim, WaitingRoom


def places(*lengths: int) -> list[Place]:
    return [Place(number, length) for number, length in enumerate(lengths)]


@pytest.mark.req("S91")
@pytest.mark.parametrize(("depth", "size"), [(0, 4), (3, 4), (4, 4), (5, 5), (40, 40)])
def test_the_window_is_the_dp_size_or_the_queue(depth: int, size: int) -> None:
    assert window_size(4, depth) == size


@pytest.mark.req("S91")
@pytest.mark.parametrize("lengths", [(900,), (900, 10, 500), (900, 10, 500, 20)])
def test_a_queue_no_longer_than_a_batch_is_taken_in_its_order(lengths: tuple[int, ...]) -> None:
    assert LengthWindow(4).take(places(*lengths)) == list(range(len(lengths)))


@pytest.mark.req("S90", "S91")
def test_a_longer_queue_yields_the_batch_with_the_least_padding() -> None:
    window = LengthWindow(2)
    assert sorted(window.take(places(1000, 100, 400, 110))) == [1, 3]
    assert sorted(window.take([Place(0, 1000), Place(2, 400), Place(4, 990)])) == [0, 4]
    assert window.take([Place(2, 400)]) == [2]


@pytest.mark.req("S90")
def test_more_than_half_of_the_waste_of_a_mixed_queue_is_saved() -> None:
    """Half of the queue is chats, and half is documents. Taken in order, most batches would hold
    both.
    """
    rng = random.Random(1)
    lengths = [rng.choice((rng.randint(50, 150), rng.randint(800, 1200))) for _ in range(400)]

    def waste(window: LengthWindow) -> float:
        queue: list[Place] = []
        left, wasted = list(enumerate(lengths)), 0.0
        while queue or left:
            while left and len(queue) < 32:
                queue.append(Place(*left.pop(0)))
            gone = window.take(queue)
            wasted += padding_waste([lengths[number] for number in gone]) / 100
            queue = [place for place in queue if place.number not in gone]
        return wasted

    assert waste(LengthWindow(4)) <= 0.5 * waste(LengthWindow(4, max_passed=0))


@pytest.mark.req("S90")
@given(
    lengths=st.lists(st.integers(1, 1000), min_size=1, max_size=60),
    dp_size=st.integers(2, 8),
    max_passed=st.integers(0, 5),
    newcomers=st.integers(0, 8),
)
def test_no_request_begins_much_later_than_in_order(
    lengths: list[int], dp_size: int, max_passed: int, newcomers: int
) -> None:
    """Later requests cannot delay an earlier one for long. A request with k others ahead of it is
    in batch k / dp_size + max_passed + 1 at the latest.
    """
    window = LengthWindow(dp_size, max_passed)
    queue, num_known = places(*lengths), len(lengths)
    rounds = 0
    while any(place.number < num_known for place in queue):
        rounds += 1
        gone = window.take(queue)
        assert 1 <= len(gone) <= dp_size
        assert len(set(gone)) == len(gone)
        for number in gone:
            if number < num_known:
                assert rounds <= number // dp_size + max_passed + 1
        queue = [place for place in queue if place.number not in gone]
        behind = num_known + 100 * rounds
        queue += [Place(behind + i, 500) for i in range(newcomers)]


@pytest.mark.req("S90", "S91")
def test_the_waiting_room_calls_a_batch_when_a_prefill_has_room_for_one() -> None:
    room: WaitingRoom[str] = WaitingRoom(16, window=LengthWindow(2))
    for until, (name, length) in enumerate([("a", 900), ("b", 100), ("c", 920), ("d", 90)]):
        assert room.join(name, ["p"], float(until), Claim("tenant"), length)
    assert room.join("e", ["p"], 9.0, Claim("other"), 50)
    assert room.call("p", 1) == []
    assert sorted(room.call("p", 2)) == ["a", "c"]
    assert room.call("p", 2) == ["e"], "tenants still take turns"
    room.check_invariants()
    assert sorted(room.call("p", 4)) == ["b", "d"]
    assert len(room) == 0


@pytest.mark.req("S46", "S90")
def test_requests_too_few_for_a_batch_wait_for_room_but_not_for_more_requests() -> None:
    room: WaitingRoom[str] = WaitingRoom(16, window=LengthWindow(4))
    for until, name in enumerate("abc"):
        room.join(name, ["p"], float(until), num_tokens=100)
    assert room.call("p", 2) == []
    assert room.call("p", 3) == ["a", "b", "c"]
    number = room.join("d", ["p"], 0.0, num_tokens=100)
    room.join("e", ["p"], 1.0, num_tokens=100)
    assert number is not None
    room.leave(number.number)
    assert room.call("p", 1) == ["e"], "d has left and no longer fills a batch"
    room.check_invariants()


@pytest.mark.req("S90")
def test_a_batch_of_one_tenant_does_not_reset_the_counts_of_another() -> None:
    """Two tenants flood the waiting room with short prompts, so batches come from both in turn."""
    room: WaitingRoom[str] = WaitingRoom(64, window=LengthWindow(2, max_passed=3))
    room.join("long", ["p"], 0.0, Claim("one"), 9000)
    called: list[str] = []
    for until in range(1, 12):
        for tenant in ("one", "other"):
            for _ in range(3):
                room.join("short", ["p"], float(until), Claim(tenant), 100)
        called += room.call("p", 4)
    assert "long" in called
    room.check_invariants()


def test_a_request_that_left_is_forgotten() -> None:
    window = LengthWindow(2)
    room: WaitingRoom[str] = WaitingRoom(64, window=window)
    joined = room.join("long", ["p"], 0.0, num_tokens=9000)
    for until in range(1, 4):
        room.join("short", ["p"], float(until), num_tokens=100)
    room.call("p", 2)
    assert joined is not None
    room.leave(joined.number)
    room.check_invariants()


def test_requests_that_wait_for_a_decode_are_called_one_by_one() -> None:
    room: WaitingRoom[str] = WaitingRoom(16, window=LengthWindow(4))
    room.join("a", ["d"], 1.0)
    assert room.call("d", 1) == ["a"]
