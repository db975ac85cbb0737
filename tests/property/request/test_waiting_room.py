"""The waiting room, where a gateway keeps requests that all instances rejected.

The room is bounded, keeps its order, and forgets requests that left.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdmesh.core.request.waiting_room import Claim, WaitingRoom

MAX = 8
INSTANCES = ("p", "q", "r")
WEIGHTS = {"a": 1, "b": 2, "c": 1}


@dataclass(frozen=True)
class Waiter:
    number: int
    on: frozenset[str]
    until: int
    claim: Claim


class RoomMachine(RuleBasedStateMachine):
    """Checks the room against a plain list of the waiting requests."""

    def __init__(self) -> None:
        super().__init__()
        self.room: WaitingRoom[int] = WaitingRoom(MAX)
        self.waiting: dict[int, Waiter] = {}  # the keys are the test's own numbers
        self.places: dict[int, int] = {}
        self.made = 0

    @rule(
        on=st.frozensets(st.sampled_from(INSTANCES), min_size=1),
        until=st.integers(0, 50),
        tenant=st.sampled_from(sorted(WEIGHTS)),
        priority=st.integers(0, 2),
    )
    def join(self, on: frozenset[str], until: int, tenant: str, priority: int) -> None:
        self.made += 1
        claim = Claim(tenant, WEIGHTS[tenant], priority)
        newcomer = Waiter(self.made, on, until, claim)
        was_full = len(self.waiting) == MAX
        joined = self.room.join(self.made, sorted(on), until, claim)
        if joined is None:
            assert was_full
            assert not self.someone_with_less_of_a_claim(newcomer)
            return
        if was_full:
            assert joined.evicted is not None
            self.check_evicted(self.waiting.pop(joined.evicted), newcomer)
            del self.places[joined.evicted]
        else:
            assert joined.evicted is None
        self.waiting[self.made], self.places[self.made] = newcomer, joined.number

    def held(self, claim: Claim) -> int:
        return sum(
            (w.claim.priority, w.claim.tenant) == (claim.priority, claim.tenant)
            for w in self.waiting.values()
        )

    def someone_with_less_of_a_claim(self, newcomer: Waiter) -> bool:
        own, lowest = newcomer.claim, max(w.claim.priority for w in self.waiting.values())
        if lowest != own.priority:
            return lowest > own.priority
        share = (self.held(own) + 1) / own.weight
        return any(
            w.claim.tenant != own.tenant and self.held(w.claim) / w.claim.weight > share
            for w in self.waiting.values()
            if w.claim.priority == lowest
        ) and max(
            (self.held(w.claim) / w.claim.weight, w.claim.tenant)
            for w in self.waiting.values()
            if w.claim.priority == lowest
        )[1] != own.tenant  # fmt: skip

    def check_evicted(self, gone: Waiter, newcomer: Waiter) -> None:
        others = [*self.waiting.values(), gone]
        assert gone.claim.priority == max(w.claim.priority for w in others)
        assert gone.claim.priority >= newcomer.claim.priority
        own_group = [w for w in others if w.claim == gone.claim]
        assert gone.until == max(w.until for w in own_group), "its own tenant's latest deadline"

    @rule(number=st.integers(1, 60))
    def leave(self, number: int) -> None:
        place = self.places.pop(number, None)
        if place is None:
            return
        del self.waiting[number]
        assert self.room.leave(place) == number
        assert self.room.leave(place) is None

    @rule(instance=st.sampled_from(INSTANCES), num_free=st.integers(1, 4))
    def call(self, instance: str, num_free: int) -> None:
        able = [w for w in self.waiting.values() if instance in w.on]
        called = self.room.call(instance, num_free)
        assert len(called) == min(num_free, len(able))
        for number in called:
            waiter = self.waiting.pop(number)
            del self.places[number]
            rivals = [w for w in self.waiting.values() if instance in w.on]
            assert all(w.claim.priority >= waiter.claim.priority for w in rivals)
            own = [w for w in rivals if w.claim == waiter.claim]
            assert all(waiter.until <= w.until for w in own)

    @invariant()
    def no_waiter_is_lost(self) -> None:
        self.room.check_invariants()
        assert len(self.room) == len(self.waiting)
        depths = dict.fromkeys(range(3), 0)
        for waiter in self.waiting.values():
            depths[waiter.claim.priority] += 1
        assert dict(self.room.depths) == {p: n for p, n in depths.items() if n}


TestRoomMachine = pytest.mark.req("S44")(RoomMachine.TestCase)
TestRoomMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@pytest.mark.req("S44")
@given(weights=st.lists(st.integers(1, 5), min_size=2, max_size=4))
def test_tenants_are_called_in_proportion_to_their_weights(weights: list[int]) -> None:
    """A tenant with earlier deadlines does not get more than its share."""
    room: WaitingRoom[str] = WaitingRoom(4096)
    for index, weight in enumerate(weights):
        for i in range(200):
            assert room.join(str(index), ("p",), 10.0 * index + i, Claim(str(index), weight))
    num_calls = 20 * sum(weights)
    called = [room.call("p", 1)[0] for _ in range(num_calls)]
    for index, weight in enumerate(weights):
        for end in range(0, num_calls, 7):
            share = end * weight / sum(weights)
            assert abs(called[:end].count(str(index)) - share) <= len(weights)
