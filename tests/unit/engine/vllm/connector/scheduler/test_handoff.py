"""The scheduler's half of the hand-over: what each step must gather, pull and release."""

from __future__ import annotations

import pytest

from pdmesh.core.kv.layout.cache_groups import CacheGroups
from pdmesh.engine.base import ArenaRange, Ticket
from pdmesh.engine.vllm.connector.scheduler.handoff import (
    Entered,
    HandoffPlanner,
    StepPlan,
    load_params,
    store_params,
)

TICKET = Ticket("t1", "r", 0, "prefill-0", 7, "fp", 9, 120, ("addr",), 5000)
BLOCKS = [[10, 11, 12, 13]]


def planner(block_size: int = 4) -> HandoffPlanner:
    return HandoffPlanner(CacheGroups(block_size))


def storing() -> HandoffPlanner:
    core = planner()
    core.add("a", store_params("t1", 0, ArenaRange(64, 4096), 5.0), 9)
    return core


def loading(num_tokens: int = 9) -> HandoffPlanner:
    core = planner()
    params = load_params(2, TICKET, ArenaRange(128, 4096), 100.0, num_tokens)
    core.add("b", params, num_tokens + 1)
    return core


@pytest.mark.req("S47")
def test_a_prompt_is_gathered_in_the_step_that_completes_it() -> None:
    core = storing()
    core.scheduled("a", 0, 5, lambda: BLOCKS)
    assert core.take_plan() == StepPlan()
    core.scheduled("a", 5, 4, lambda: BLOCKS)
    (store,) = core.take_plan().stores
    assert store.block_ids == ((10, 11, 12),)
    assert store.staging == ArenaRange(64, 4096)
    core.finished("a")
    assert core.take_plan() == StepPlan()


def test_a_preempted_prompt_is_gathered_when_it_completes_again() -> None:
    core = storing()
    core.scheduled("a", 0, 5, lambda: BLOCKS)
    core.scheduled("a", 0, 9, lambda: [[20, 21, 22]])
    (store,) = core.take_plan().stores
    assert store.block_ids == ((20, 21, 22),)


def test_a_prompt_that_ends_before_it_is_staged_drops_its_ticket() -> None:
    core = storing()
    core.finished("a")
    assert core.take_plan() == StepPlan(dropped_tickets=["t1"])


def test_all_but_the_cached_tokens_are_pulled() -> None:
    core = loading()
    assert core.num_external_tokens("b", 0) == 9
    assert core.num_external_tokens("b", 4) == 5
    core.allocated("b", BLOCKS, 5)
    (load,) = core.take_plan().loads
    assert (load.num_local_blocks, load.block_ids) == (1, ((11, 12),))
    assert load.ticket == TICKET


@pytest.mark.parametrize("num_tokens", [7, 8, 9])
def test_a_block_beyond_the_prompt_is_not_pulled(num_tokens: int) -> None:
    core = loading(num_tokens)
    core.allocated("b", BLOCKS, num_tokens)
    (load,) = core.take_plan().loads
    assert load.block_ids == (tuple(BLOCKS[0][: -(-num_tokens // 4)]),)


def test_of_a_layer_with_a_window_only_the_blocks_that_the_next_token_sees_move() -> None:
    """The window of 6 tokens begins at token 5 of 10. Block 0 is not needed, and vLLM has freed
    it.
    """
    groups = CacheGroups(4, (0, 6))
    lists = [[10, 11, 12, 13], [0, 21, 22, 23]]
    core = HandoffPlanner(groups)
    core.add("a", store_params("t1", 0, ArenaRange(64, 4096), 5.0), 10)
    core.scheduled("a", 0, 10, lambda: lists)
    (store,) = core.take_plan().stores
    assert store.block_ids == ((10, 11, 12), (21, 22))
    core.add("b", load_params(2, TICKET, ArenaRange(128, 4096), 100.0, 10), 11)
    assert core.num_external_tokens("b", 4) == 6
    core.allocated("b", lists, 6)
    (load,) = core.take_plan().loads
    assert load.block_ids == ((11, 12), (21, 22))
    core.add("c", load_params(3, TICKET, ArenaRange(128, 4096), 100.0, 10), 11)
    core.allocated("c", lists, 2)
    (load,) = core.take_plan().loads
    assert load.block_ids == ((12,), (22,)), "the window's first block is in the cache"


def test_a_wholly_cached_prompt_is_only_acknowledged() -> None:
    core = loading(8)
    assert core.num_external_tokens("b", 8) == 0
    core.allocated("b", BLOCKS, 0)
    core.scheduled("b", 8, 1, lambda: BLOCKS)
    plan = core.take_plan()
    assert not plan.loads
    assert [take.block_ids for take in plan.takes] == [()]
    assert plan.entered == [Entered(2, 0)]


def test_after_a_pull_nothing_of_the_prompt_is_computed() -> None:
    core = loading()
    core.allocated("b", BLOCKS, 9)
    core.take_plan()
    core.allocated("b", BLOCKS, 0)  # vLLM calls this again for the tokens after the prompt
    core.scheduled("b", 9, 1, lambda: BLOCKS)
    assert core.take_plan() == StepPlan(entered=[Entered(2, 0)])


def test_a_request_preempted_after_its_pull_computes_its_own_kv() -> None:
    """The ticket has been used, but all tokens are known. So vLLM recomputes the KV, as it does for
    any preempted request.
    """
    core = loading()
    core.allocated("b", BLOCKS, 9)
    core.scheduled("b", 9, 1, lambda: BLOCKS)
    assert core.num_external_tokens("b", 0) == 0


def test_tokens_that_are_computed_instead_of_pulled_are_counted() -> None:
    core = loading()
    core.allocated("b", BLOCKS, 9)
    core.scheduled("b", 4, 6, lambda: BLOCKS)
    assert core.take_plan().entered == [Entered(2, 5)]


def test_a_load_that_never_started_frees_its_landing() -> None:
    core = loading()
    core.finished("b")
    assert core.take_plan() == StepPlan(dropped_legs=[2])


def test_a_load_under_way_is_cancelled_when_its_request_ends() -> None:
    core = loading()
    core.allocated("b", BLOCKS, 9)
    core.take_plan()
    core.finished("b")
    (load,) = core.take_plan().cancelled
    assert load.leg == 2
    core.check_invariants()


def test_requests_without_a_hand_over_are_not_changed() -> None:
    core = planner()
    core.add("c", {"do_remote_decode": True}, 9)
    assert core.num_external_tokens("c", 0) == 0
    core.allocated("c", BLOCKS, 0)
    core.scheduled("c", 0, 9, lambda: BLOCKS)
    core.finished("c")
    assert core.take_plan() == StepPlan()


def test_a_request_that_can_only_be_computed_elsewhere_is_named_once() -> None:
    core = planner()
    core.lose("a")
    assert core.take_plan() == StepPlan(lost=["a"])
    assert core.take_plan() == StepPlan()
