"""Tests which layers of KV are sent after each layer of a step is computed."""

from __future__ import annotations

import random

import pytest

from pdmesh.core.kv.transfer.layer_order import LayerOrder


def sent(order: LayerOrder, hooks: list[int]) -> tuple[list[list[int]], list[int]]:
    """Run a step. Returns the layers sent after each hook, and those sent at the step's end."""
    return [list(order.told(layer)) for layer in hooks], list(order.end_step())


@pytest.mark.req("S48")
def test_each_layer_is_sent_once_it_and_those_before_it_are_computed() -> None:
    order = LayerOrder(4)
    assert sent(order, [0, 1, 2, 3]) == ([[0], [1], [2], [3]], [])
    assert sent(order, [0, 2, 1, 3]) == ([[0], [], [1, 2], [3]], []), "layer 1 is late"
    assert sent(order, [0, 1]) == ([[0], [1]], [2, 3]), "the others are in a graph"
    assert sent(order, []) == ([], [0, 1, 2, 3])


def test_a_layer_whose_hook_comes_again_is_sent_again() -> None:
    assert sent(LayerOrder(2), [0, 0, 1]) == ([[0], [0], [1]], [])


def test_layers_with_states_are_sent_with_the_next_one_once_a_step_has_shown_the_order() -> None:
    order = LayerOrder(5, frozenset({0, 2, 4}))
    assert sent(order, [1, 3]) == ([[], []], [0, 1, 2, 3, 4]), "the order is not known yet"
    assert sent(order, [1, 3]) == ([[0, 1], [2, 3]], [4])
    assert sent(order, [1]) == ([[0, 1]], [2, 3, 4])


def test_a_model_that_computes_its_layers_in_another_order_sends_no_states_early() -> None:
    order = LayerOrder(5, frozenset({4}))
    for _ in range(3):
        assert sent(order, [0, 2, 1, 3]) == ([[], [], [], []], [0, 1, 2, 3, 4])
    late = LayerOrder(3, frozenset({0}))
    assert sent(late, [1, 2])[1] == [0, 1, 2]
    assert sent(late, [2, 1])[0] == [[], []], "it breaks the order that it has shown"
    assert sent(late, [1, 2]) == ([[], []], [0, 1, 2])


@pytest.mark.parametrize("seed", range(50))
def test_no_layer_is_sent_before_its_hook_and_all_are_sent(seed: int) -> None:
    rng = random.Random(seed)
    num = rng.randrange(1, 9)
    without = frozenset(n for n in range(num) if rng.random() < 0.3)
    order, hooked = LayerOrder(num, without), [n for n in range(num) if n not in without]
    for _ in range(5):
        hooks = rng.sample(hooked, len(hooked)) if rng.random() < 0.5 else hooked
        done: list[int] = []
        for number, layer in enumerate(hooks):
            now = list(order.told(layer))
            assert {n for n in now if n not in without} <= set(hooks[: number + 1])
            done += now
        assert [*done, *order.end_step()] == list(range(num))
