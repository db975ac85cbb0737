"""A rarely used adapter gets a slot although other adapters are in use all the time."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from pdmesh.core.adapters.slot_turns import CLAIM_S, TURN_S, AdapterTurns


def take(turns: AdapterTurns, adapter: str, now: float) -> bool:
    if turns.why_not(adapter, now):
        return False
    turns.taken(adapter, now)
    turns.check_invariants()
    return True


def test_any_number_of_legs_share_a_slot_while_no_other_adapter_waits() -> None:
    turns = AdapterTurns(2)
    assert all(take(turns, adapter, now) for now, adapter in enumerate("abab" * 100))
    assert turns.why_not("", 0.0) == ""
    assert turns.legs == Counter(a=200, b=200)


def test_a_waiting_adapter_gets_the_slot_that_was_held_longest() -> None:
    turns = AdapterTurns(2)
    assert take(turns, "a", 0.0)
    assert take(turns, "b", 1.0)
    assert turns.why_not("rare", 5.0) == "all adapter slots are in use"
    assert turns.why_not("a", 5.1) == "another adapter gets its slot next"
    assert take(turns, "b", 5.1), "only one slot is kept for one waiting adapter"
    turns.left("a")
    assert turns.why_not("a", 5.2), "a waits behind rare now"
    assert take(turns, "rare", 5.3)


def test_an_adapter_keeps_its_slot_for_at_least_one_turn() -> None:
    turns = AdapterTurns(1)
    assert take(turns, "a", 0.0)
    assert turns.why_not("b", 0.1)
    assert take(turns, "a", TURN_S - 0.1)
    assert turns.why_not("b", TURN_S)
    assert turns.why_not("a", TURN_S)


def test_waiting_requests_are_served_in_order() -> None:
    turns = AdapterTurns(1)
    take(turns, "a", 0.0)
    for adapter in "bcd":
        assert turns.why_not(adapter, 1.0)
    turns.left("a")
    for adapter in "dc":
        assert turns.why_not(adapter, 2.0)
    assert take(turns, "b", 2.0)
    turns.left("b")
    assert turns.why_not("d", 3.0)
    assert take(turns, "c", 3.0)


def test_a_claim_on_a_slot_ends_when_it_is_not_repeated() -> None:
    turns = AdapterTurns(1)
    take(turns, "a", 0.0)
    assert turns.why_not("gone", 2.0)
    assert turns.why_not("a", 1.9 + CLAIM_S)
    assert take(turns, "a", 2.0 + CLAIM_S)


def test_a_waiting_gateway_that_asks_again_keeps_its_turn() -> None:
    turns = AdapterTurns(1)
    take(turns, "a", 0.0)
    for now in range(1, 50):
        assert turns.why_not("rare", float(now))
        assert turns.why_not("a", now + 0.5)
    turns.left("a")
    assert take(turns, "rare", 50.0)


def test_the_number_of_waiting_requests_is_bounded() -> None:
    turns = AdapterTurns(1)
    take(turns, "a", 0.0)
    for number in range(1000):
        assert turns.why_not(f"b{number}", 1.0)
        turns.check_invariants()


@pytest.mark.parametrize("seed", range(20))
def test_each_of_many_adapters_gets_legs_however_busy_the_others_are(seed: int) -> None:
    """Gateways offer their requests again every 50 ms. Adapters a, b and c always have many
    requests. Adapters x and y have one at a time.
    """
    rng, turns = random.Random(seed), AdapterTurns(2)
    running: list[tuple[float, str]] = []
    served, now = Counter[str](), 0.0
    while now < 120.0:
        now += 0.05
        for _, adapter in [leg for leg in running if leg[0] <= now]:
            turns.left(adapter)
        running = [leg for leg in running if leg[0] > now]
        for adapter in [*"aaabbbccc", "x", "y"]:
            is_new = adapter in "abc" or adapter not in turns.legs
            if is_new and take(turns, adapter, now):
                running.append((now + rng.uniform(0.2, 2.0), adapter))
                served[adapter] += 1
    assert set(served) == set("abcxy")
    assert min(served["x"], served["y"]) > 5, served
