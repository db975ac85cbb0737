from __future__ import annotations

import pytest

from pdmesh.core.pooling.facts import PoolingFacts, PoolingTask

EMBED = frozenset({PoolingTask.EMBED})


def test_a_model_of_one_size_refuses_every_number_of_dimensions() -> None:
    """Even the model's own size is refused, as in vLLM, because the client may mean another
    model.
    """
    facts = PoolingFacts(EMBED, num_dimensions=8)
    assert facts.why_not_dimensions(4)
    assert facts.why_not_dimensions(8)


@pytest.mark.parametrize(("asked", "is_refused"), [(0, True), (1, False), (8, False), (9, True)])
def test_a_matryoshka_model_takes_any_smaller_size(asked: int, is_refused: bool) -> None:
    facts = PoolingFacts(EMBED, num_dimensions=8, is_matryoshka=True)
    assert bool(facts.why_not_dimensions(asked)) == is_refused


def test_a_matryoshka_model_may_list_its_sizes() -> None:
    facts = PoolingFacts(EMBED, 8, is_matryoshka=True, matryoshka_dimensions=(2, 4))
    assert not facts.why_not_dimensions(4)
    assert "2, 4" in facts.why_not_dimensions(3)


def test_the_size_of_a_vector_follows_from_the_task_and_the_request() -> None:
    facts = PoolingFacts(EMBED, num_dimensions=8, num_classes=3)
    assert facts.num_values(PoolingTask.EMBED) == 8
    assert facts.num_values(PoolingTask.EMBED, 4) == 4
    assert facts.num_values(PoolingTask.CLASSIFY) == 3
