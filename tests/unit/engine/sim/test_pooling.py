"""The simulated engine's vectors depend on the tokens.

Texts with common tokens have vectors near each other.
"""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from pdmesh.engine.sim.pooling import vector


def near(one: list[int], other: list[int]) -> float:
    return float(vector(array("I", one), 64, 1) @ vector(array("I", other), 64, 1))


def test_a_vector_is_normalised_and_repeats() -> None:
    made = vector(array("I", range(2000)), 64, 1)
    assert np.linalg.norm(made) == pytest.approx(1.0)
    assert (made == vector(array("I", range(2000)), 64, 1)).all()


def test_a_vector_depends_on_the_tokens_their_order_and_the_seed_of_the_model() -> None:
    tokens = array("I", [1, 2, 3, 4])
    others = [(array("I", [1, 2, 3, 5]), 1), (array("I", [2, 1, 3, 4]), 1), (tokens, 2)]
    for changed, seed in others:
        assert not np.allclose(vector(tokens, 64, 1), vector(changed, 64, seed))


def test_texts_with_common_tokens_have_nearer_vectors() -> None:
    assert near([1, 2, 3, 4], [1, 2, 3, 9]) > near([1, 2, 3, 4], [5, 6, 7, 8]) + 0.3
