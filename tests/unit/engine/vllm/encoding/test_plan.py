"""A request uses the embeddings that were fetched for it, and for no other request."""

from __future__ import annotations

from pdmesh.engine.vllm.encoding.plan import LANDED, EmbeddingPlanner, landed_params

MINE = {LANDED: landed_params(5, ["a", "b"])}


def test_a_request_loads_what_it_was_told_and_drops_it_at_its_end() -> None:
    planner = EmbeddingPlanner()
    planner.consider(MINE)
    assert planner.has("a")
    assert not planner.has("c")
    planner.allocated("a")
    planner.allocated("c")  # c is encoded in this step
    planner.finished(MINE)
    plan = planner.take(1)
    assert plan.loads == [(5, "a")]
    assert plan.dropped_legs == [5]
    assert planner.take(1).loads == []


def test_another_request_with_the_same_image_gets_nothing_of_it() -> None:
    """The other request may end later than the request for which the embeddings were fetched."""
    planner = EmbeddingPlanner()
    planner.consider(MINE)
    planner.consider({"pdmesh": "store"})
    assert not planner.has("a")
    planner.consider(None)
    assert not planner.has("a")
    planner.allocated("a")
    planner.finished(None)
    plan = planner.take(1)
    assert (plan.loads, plan.dropped_legs) == ([], [])


def test_a_step_without_tokens_drops_nothing_and_the_next_one_does() -> None:
    """vLLM's first model runner discards the plan of a step without tokens."""
    planner = EmbeddingPlanner()
    planner.finished(MINE)
    assert planner.take(0).dropped_legs == []
    assert planner.take(7).dropped_legs == [5]
    assert planner.take(7).dropped_legs == []
