"""An engine loads adapters into its slots, and unloads one only when no leg uses it.

A leg is a request's stay on one instance.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pdmesh.core.adapters.adapter import Adapter
from pdmesh.core.adapters.adapter_slots import (
    FAILED_S,
    AdapterSlots,
    CannotUse,
    Discard,
    Effect,
    FetchFiles,
    Load,
    Move,
    Ready,
    Unload,
)

A, B, C = (Adapter(name, name * 64, f"/{name}") for name in "abc")


def loaded(slots: AdapterSlots, *adapters: Adapter) -> None:
    for leg, adapter in enumerate(adapters, 1000):
        assert slots.wanted(leg, adapter, 0.0) == [FetchFiles(adapter)]
        assert slots.was_fetched(adapter) == [Load(adapter)]
        assert slots.was_loaded(adapter) == [Ready(leg)]
        slots.left(leg)


def test_the_first_leg_has_its_adapter_loaded_and_later_ones_find_it() -> None:
    slots = AdapterSlots(2)
    assert slots.wanted(1, A, 0.0) == [FetchFiles(A)]
    assert slots.wanted(2, A, 0.0) == []
    assert slots.was_fetched(A) == [Load(A)]
    assert slots.was_loaded(A) == [Ready(1), Ready(2)]
    assert slots.wanted(3, A, 0.0) == [Ready(3)]
    assert slots.loaded == (A.digest,)


def test_the_least_recently_used_adapter_makes_room() -> None:
    slots = AdapterSlots(2)
    loaded(slots, A, B)
    assert slots.wanted(1, A, 0.0) == [Ready(1)]
    slots.left(1)
    assert slots.wanted(2, C, 0.0) == [FetchFiles(C)]
    assert slots.was_fetched(C) == [Unload(B.digest)]
    assert slots.was_unloaded(B.digest) == [Load(C)]
    assert slots.was_loaded(C) == [Ready(2)]
    assert slots.loaded == (A.digest, C.digest)


def test_an_adapter_with_bad_files_takes_no_slot_from_another() -> None:
    slots = AdapterSlots(1)
    loaded(slots, A)
    assert slots.wanted(1, B, 0.0) == [FetchFiles(B)]
    assert slots.failed(B, "rank", 0.0) == [CannotUse(1, "rank")]
    assert slots.loaded == (A.digest,)


def test_an_adapter_in_use_is_never_unloaded() -> None:
    slots = AdapterSlots(1)
    loaded(slots, A)
    assert slots.wanted(1, A, 0.0) == [Ready(1)]
    assert slots.wanted(2, B, 0.0) == [FetchFiles(B)]
    assert slots.was_fetched(B) == []
    assert slots.wanted(3, A, 0.0) == [Ready(3)]
    assert slots.left(1) == []
    assert slots.left(3) == [Unload(A.digest)]
    assert slots.was_unloaded(A.digest) == [Load(B)]


def test_files_fetched_for_a_leg_that_left_are_discarded() -> None:
    slots = AdapterSlots(1)
    loaded(slots, A)
    assert slots.wanted(1, A, 0.0) == [Ready(1)]
    assert slots.wanted(2, B, 0.0) == [FetchFiles(B)]
    assert slots.wanted(3, C, 0.0) == []
    assert slots.was_fetched(B) == []
    assert slots.left(2) == [Discard(B.digest)]
    assert slots.was_discarded(B.digest) == [FetchFiles(C)]
    slots.check_invariants()


def test_a_removed_adapter_is_unloaded_when_its_last_leg_has_left() -> None:
    slots = AdapterSlots(2)
    loaded(slots, A, B)
    assert slots.wanted(1, A, 0.0) == [Ready(1)]
    assert slots.keep([B.digest]) == []
    assert slots.left(1) == [Unload(A.digest)]
    assert slots.was_unloaded(A.digest) == []
    assert slots.loaded == (B.digest,)


def test_nothing_is_unloaded_before_the_registered_adapters_are_known() -> None:
    slots = AdapterSlots(2)
    loaded(slots, A)
    assert slots.loaded == (A.digest,)
    assert slots.keep([]) == [Unload(A.digest)]


def test_a_leg_with_a_removed_adapter_is_still_served() -> None:
    """The leg's gateway may not know of the removal yet, or the request may have been running."""
    slots = AdapterSlots(1)
    slots.keep([])
    assert slots.wanted(1, A, 0.0) == [FetchFiles(A)]
    assert slots.was_fetched(A) == [Load(A)]
    assert slots.was_loaded(A) == [Ready(1)]
    assert slots.left(1) == [Unload(A.digest)]


@pytest.mark.parametrize("is_fetched", [False, True])
def test_a_failure_is_reported_to_all_of_its_waiters_and_to_no_others(is_fetched: bool) -> None:
    slots = AdapterSlots(2)
    slots.wanted(1, A, 0.0)
    slots.wanted(2, B, 0.0)
    slots.wanted(3, A, 0.0)
    if is_fetched:
        assert slots.was_fetched(A) == [Load(A)]
    assert slots.failed(A, "rank", 5.0) == [
        CannotUse(1, "rank"), CannotUse(3, "rank"), FetchFiles(B),
    ]  # fmt: skip
    assert slots.was_fetched(B) == [Load(B)]
    assert slots.was_loaded(B) == [Ready(2)]


def test_a_failure_is_not_retried_for_a_while() -> None:
    slots = AdapterSlots(1)
    slots.wanted(1, A, 0.0)
    slots.failed(A, "rank", 5.0)
    for leg in range(2, 500):
        assert slots.wanted(leg, A, 4.9 + FAILED_S) == [CannotUse(leg, "rank")]
    elsewhere = replace(A, path="/elsewhere")
    assert slots.wanted(500, elsewhere, 6.0) == [FetchFiles(elsewhere)], (
        "the failure counts for one folder"
    )
    slots.failed(elsewhere, "gone", 6.0)
    assert slots.wanted(501, A, 5.0 + FAILED_S) == [FetchFiles(A)]
    slots.failed(A, "rank", 50.0)
    slots.was_found_good(A.digest)
    assert slots.wanted(502, A, 51.0) == [FetchFiles(A)]
    slots.check_invariants()


def test_the_number_of_remembered_failures_is_bounded() -> None:
    slots = AdapterSlots(1)
    for number in range(1000):
        adapter = Adapter("x", f"{number:064x}", "/x")
        slots.wanted(number, adapter, 0.0)
        slots.failed(adapter, "rank", 0.0)
        slots.check_invariants()
    assert slots.wanted(1000, Adapter("x", f"{999:064x}", "/x"), 1.0) == [CannotUse(1000, "rank")]


def test_a_leg_that_left_while_its_adapter_loads_leaves_it_idle() -> None:
    slots = AdapterSlots(1)
    slots.wanted(1, A, 0.0)
    assert slots.was_fetched(A) == [Load(A)]
    assert slots.left(1) == []
    assert slots.was_loaded(A) == []
    assert slots.wanted(2, B, 0.0) == [FetchFiles(B)]
    assert slots.was_fetched(B) == [Unload(A.digest)]
    assert slots.left(7) == []


class Engine:
    """An engine that carries out the orders of the slots later, and sometimes fails."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.slots = AdapterSlots(self.rng.choice((1, 2)))
        self.pending: list[Move] = []
        self.now = 0.0
        self.open: set[int] = set()
        self.answered: set[int] = set()

    def note(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, FetchFiles | Load | Unload | Discard):
                self.pending.append(effect)
                continue
            self.answered.add(effect.leg)
            if isinstance(effect, CannotUse):
                self.open.discard(effect.leg)
        assert len(self.pending) <= 1
        self.slots.check_invariants()

    def answer(self) -> None:
        self.now += 10.0
        match self.pending.pop():
            case FetchFiles(adapter) | Load(adapter) if self.rng.random() < 0.2:
                self.note(self.slots.failed(adapter, "why", self.now))
            case FetchFiles(adapter):
                self.note(self.slots.was_fetched(adapter))
            case Load(adapter):
                self.note(self.slots.was_loaded(adapter))
            case Unload(digest):
                self.note(self.slots.was_unloaded(digest))
            case Discard(digest):
                self.note(self.slots.was_discarded(digest))

    def leave(self, leg: int) -> None:
        self.open.discard(leg)
        self.answered.add(leg)
        self.note(self.slots.left(leg))

    def step(self, leg: int) -> None:
        self.open.add(leg)
        self.note(self.slots.wanted(leg, self.rng.choice((A, B, C)), self.now))
        while self.pending and self.rng.random() < 0.6:
            self.answer()
        if self.open and self.rng.random() < 0.7:
            self.leave(self.rng.choice(sorted(self.open)))
        if self.rng.random() < 0.1:
            all_of_them = [A.digest, B.digest, C.digest]
            self.note(self.slots.keep(self.rng.sample(all_of_them, self.rng.randint(0, 3))))


@pytest.mark.parametrize("seed", range(100))
def test_any_order_of_events_keeps_the_slots_and_answers_every_leg(seed: int) -> None:
    engine = Engine(seed)
    for leg in range(60):
        engine.step(leg)
    for _ in range(200):
        if engine.pending:
            engine.answer()
        elif engine.open:
            engine.leave(min(engine.open & engine.answered))
    assert engine.slots.num_waiting == 0
    assert engine.answered == set(range(60))
