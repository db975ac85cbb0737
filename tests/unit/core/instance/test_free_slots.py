"""Tests when a gateway offers a prompt to an instance, and when it calls a waiting prompt."""

from __future__ import annotations

import pytest

from pdmesh.core.instance.free_slots import TRUST_S, FreeSlots


@pytest.fixture
def slots() -> FreeSlots:
    """The instance had one free slot, and a prompt was offered for it."""
    slots = FreeSlots()
    assert slots.has_slot(0.0), "it has not told yet"
    assert slots.told(1, 0.0) == 1
    slots.offer(1)
    assert not slots.has_slot(0.0)
    return slots


def test_a_prompt_is_offered_once_the_news_of_a_full_instance_is_old(slots: FreeSlots) -> None:
    assert not slots.has_slot(TRUST_S)
    assert slots.has_slot(TRUST_S + 0.1)


def test_an_accepted_prompt_takes_the_slot_that_was_told(slots: FreeSlots) -> None:
    assert not slots.answered(1, is_accepted=True)
    assert (slots.num_free, slots.num_unoffered, slots.num_offered) == (0, 0, 0)
    assert not slots.answered(1, is_accepted=True), "it is counted once"


def test_a_load_that_came_since_the_offer_counts_the_prompt(slots: FreeSlots) -> None:
    assert slots.told(1, 0.1) == 0, "the offered prompt may take it"
    assert slots.answered(1, is_accepted=True), "the slot that was told since is left"
    assert slots.num_unoffered == 1


@pytest.mark.parametrize("end", ["rejected", "given up"])
def test_a_prompt_that_takes_no_slot_leaves_it_to_a_waiter(slots: FreeSlots, end: str) -> None:
    left = slots.given_up(1) if end == "given up" else slots.answered(1, is_accepted=False)
    assert left
    assert slots.num_unoffered == 1
    assert not slots.given_up(1)


def test_a_full_instance_has_no_slot_until_it_tells_of_one(slots: FreeSlots) -> None:
    slots.answered(1, is_accepted=False)
    slots.rejected(0.5, is_for_now=True)
    assert slots.is_full
    assert not slots.has_slot(0.5)
    assert slots.told(0, 0.6) == 0
    assert slots.is_full
    assert slots.told(2, 0.7) == 2
    assert not slots.is_full


def test_a_rejection_for_good_does_not_mean_that_the_instance_is_full(slots: FreeSlots) -> None:
    slots.rejected(0.5, is_for_now=False)
    assert not slots.is_full


def test_waiters_are_called_only_if_there_are_more_slots(slots: FreeSlots) -> None:
    slots.answered(1, is_accepted=True)
    assert slots.told(0, 0.1) == 0
    assert slots.told(2, 0.2) == 2
    assert slots.told(2, 0.3) == slots.told(1, 0.4) == 0


def test_after_a_broken_stream_nothing_is_known(slots: FreeSlots) -> None:
    slots.rejected(0.0, is_for_now=True)
    slots.broken()
    assert slots.has_slot(0.0)
    assert (slots.num_unoffered, slots.num_offered, slots.is_full) == (0, 0, False)
