"""The prompts of a simulated engine share the tokens of a step by urgency (S83)."""

from __future__ import annotations

from array import array

import pytest

from pdmesh.core.instance.urgency import CLASS_S, Urgency
from pdmesh.engine.base import PrefillJob, Sampling
from pdmesh.engine.sim.prefill_queue import PrefillQueue, PromptUnderWay

CHUNK_TOKENS = 10


def prompt(leg: int, num_tokens: int, priority: int = 1, at: float = 0.0) -> PromptUnderWay:
    job = PrefillJob(leg, f"r{leg}", 0, array("I", [1] * num_tokens), Sampling(1))
    return PromptUnderWay(job, [], 0, Urgency(priority, at))


def step(queue: PrefillQueue) -> tuple[dict[int, int], list[int]]:
    """Run a step. Returns the number of tokens of each prompt, and the prompts that are now
    complete.
    """
    queue.next_chunk()
    tokens = {each.job.leg: each.num_in_chunk for each in queue.in_chunk()}
    return tokens, [each.job.leg for each in queue.finish_chunk()]


@pytest.mark.req("S83")
def test_a_prompt_under_way_stands_back_for_a_more_urgent_one_and_goes_on_after_it() -> None:
    queue = PrefillQueue(CHUNK_TOKENS)
    queue.add(prompt(1, 25, priority=1))
    assert step(queue) == ({1: 10}, [])
    queue.add(prompt(2, 5, priority=1))
    queue.add(prompt(3, 12, priority=0, at=1.0))
    assert step(queue) == ({3: 10}, [])
    assert step(queue) == ({3: 2, 1: 8}, [3])
    assert step(queue) == ({1: 7, 2: 3}, [1])
    assert step(queue) == ({2: 2}, [2])
    assert len(queue) == 0


@pytest.mark.req("S83")
def test_urgent_prompts_without_end_delay_another_by_the_worth_of_its_class() -> None:
    queue = PrefillQueue(CHUNK_TOKENS)
    queue.add(prompt(0, CHUNK_TOKENS, priority=1))
    for leg in range(1, 100):
        at = 0.1 * leg
        queue.add(prompt(leg, CHUNK_TOKENS, priority=0, at=at))
        _, done = step(queue)
        if done == [0]:
            assert at >= CLASS_S
            return
    pytest.fail("it starves")
