"""Adapters come to an engine's slots and leave them, and never under a leg that uses them."""

from __future__ import annotations

import random

import pytest

from pdmesh.core.adapters.adapter import Adapter
from pdmesh.core.adapters.shelf import AdapterShelf, CannotUse, Effect, Load, Ready, Unload

A, B, C = (Adapter(name, name * 64, f"/{name}") for name in "abc")


def loaded(shelf: AdapterShelf, *adapters: Adapter) -> None:
    for leg, adapter in enumerate(adapters, 1000):
        assert shelf.wanted(leg, adapter) == [Load(adapter)]
        assert shelf.was_loaded(adapter.digest) == [Ready(leg)]
        shelf.left(leg)


def test_the_first_leg_has_its_adapter_loaded_and_later_ones_find_it() -> None:
    shelf = AdapterShelf(2)
    assert shelf.wanted(1, A) == [Load(A)]
    assert shelf.wanted(2, A) == []
    assert shelf.was_loaded(A.digest) == [Ready(1), Ready(2)]
    assert shelf.wanted(3, A) == [Ready(3)]
    assert shelf.loaded == (A.digest,)


def test_the_one_used_least_recently_makes_room() -> None:
    shelf = AdapterShelf(2)
    loaded(shelf, A, B)
    assert shelf.wanted(1, A) == [Ready(1)]
    shelf.left(1)
    assert shelf.wanted(2, C) == [Unload(B.digest)]
    assert shelf.was_unloaded(B.digest) == [Load(C)]
    assert shelf.was_loaded(C.digest) == [Ready(2)]
    assert shelf.loaded == (A.digest, C.digest)


def test_one_in_use_is_never_unloaded() -> None:
    shelf = AdapterShelf(1)
    loaded(shelf, A)
    assert shelf.wanted(1, A) == [Ready(1)]
    assert shelf.wanted(2, B) == []
    assert shelf.wanted(3, A) == [Ready(3)]
    assert shelf.left(1) == []
    assert shelf.left(3) == [Unload(A.digest)]
    assert shelf.was_unloaded(A.digest) == [Load(B)]


def test_a_removed_one_is_unloaded_when_its_last_leg_has_left() -> None:
    shelf = AdapterShelf(2)
    loaded(shelf, A, B)
    assert shelf.wanted(1, A) == [Ready(1)]
    assert shelf.keep([B.digest]) == []
    assert shelf.left(1) == [Unload(A.digest)]
    assert shelf.was_unloaded(A.digest) == []
    assert shelf.loaded == (B.digest,)


def test_what_is_registered_is_not_known_at_first_and_nothing_is_unloaded() -> None:
    shelf = AdapterShelf(2)
    loaded(shelf, A)
    assert shelf.loaded == (A.digest,)
    assert shelf.keep([]) == [Unload(A.digest)]


def test_a_leg_of_a_removed_one_is_served_still() -> None:
    """Its gateway had not heard of the removal, or it was running."""
    shelf = AdapterShelf(1)
    shelf.keep([])
    assert shelf.wanted(1, A) == [Load(A)]
    assert shelf.was_loaded(A.digest) == [Ready(1)]
    assert shelf.left(1) == [Unload(A.digest)]


def test_a_failure_is_told_to_all_that_wait_for_it_and_to_nobody_else() -> None:
    shelf = AdapterShelf(2)
    shelf.wanted(1, A)
    shelf.wanted(2, B)
    shelf.wanted(3, A)
    assert shelf.failed(A.digest, "rank") == [
        CannotUse(1, "rank"), CannotUse(3, "rank"), Load(B),
    ]  # fmt: skip
    assert shelf.wanted(4, A) == []
    assert shelf.was_loaded(B.digest) == [Ready(2), Load(A)]


def test_a_leg_that_left_while_its_adapter_loads_leaves_it_idle() -> None:
    shelf = AdapterShelf(1)
    shelf.wanted(1, A)
    assert shelf.left(1) == []
    assert shelf.was_loaded(A.digest) == []
    assert shelf.wanted(2, B) == [Unload(A.digest)]
    assert shelf.left(7) == []


class Engine:
    """Answers what the shelf asks for, later, and fails now and then."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.shelf = AdapterShelf(self.rng.choice((1, 2)))
        self.pending: list[Load | Unload] = []
        self.open: set[int] = set()
        self.answered: set[int] = set()

    def note(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Load | Unload):
                self.pending.append(effect)
                continue
            self.answered.add(effect.leg)
            if isinstance(effect, CannotUse):
                self.open.discard(effect.leg)
        assert len(self.pending) <= 1
        self.shelf.check_invariants()

    def answer(self) -> None:
        match self.pending.pop():
            case Load(adapter) if self.rng.random() < 0.2:
                self.note(self.shelf.failed(adapter.digest, "why"))
            case Load(adapter):
                self.note(self.shelf.was_loaded(adapter.digest))
            case Unload(digest):
                self.note(self.shelf.was_unloaded(digest))

    def leave(self, leg: int) -> None:
        self.open.discard(leg)
        self.answered.add(leg)
        self.note(self.shelf.left(leg))

    def step(self, leg: int) -> None:
        self.open.add(leg)
        self.note(self.shelf.wanted(leg, self.rng.choice((A, B, C))))
        while self.pending and self.rng.random() < 0.6:
            self.answer()
        if self.open and self.rng.random() < 0.7:
            self.leave(self.rng.choice(sorted(self.open)))
        if self.rng.random() < 0.1:
            all_of_them = [A.digest, B.digest, C.digest]
            self.note(self.shelf.keep(self.rng.sample(all_of_them, self.rng.randint(0, 3))))


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
    assert engine.shelf.num_waiting == 0
    assert engine.answered == set(range(60))
