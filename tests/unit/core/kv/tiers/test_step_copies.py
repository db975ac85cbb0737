"""Tests which blocks an engine's step loads from the host pool, and which it saves there."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pdmesh.core.kv.layout.cache_groups import NULL_BLOCK
from pdmesh.core.kv.prefix.block_hash import block_hashes
from pdmesh.core.kv.tiers.owner import owner_of
from pdmesh.core.kv.tiers.step_copies import (
    PoolLoad,
    PoolSave,
    StepCopies,
    StepCopyPlanner,
)

ROOT = bytes(range(16))
SALT = ROOT.hex()
OWNER = owner_of(SALT)
BLOCKS = [[10, 11, 12, 13, 14]]
TOKENS = list(range(100, 120))
NAMES = tuple(block_hashes(ROOT, TOKENS, 4))


def planner(offer: Sequence[int] | None = None, num_tokens: int = 18) -> StepCopyPlanner:
    core = StepCopyPlanner(4)
    core.add("a", SALT, TOKENS[:num_tokens], offer)
    return core


def test_a_lease_continues_what_the_engine_holds() -> None:
    core = planner(offer=(7, 1, 3))
    assert core.num_external_tokens("a", 4) == 12
    assert core.num_external_tokens("a", 8) == 8, "the engine held more than was known"
    assert core.num_external_tokens("a", 8) == 8, "vLLM asks again after it had no room"
    core.allocated("a", BLOCKS, 8)
    assert core.num_external_tokens("a", 0) == 0, "a preempted request computes its KV"
    core.scheduled("a", 16, 2, lambda: BLOCKS)
    plan = core.take_plan()
    assert plan.loads == [PoolLoad(7, 2, ((12, 13),))]
    core.finished("a")
    assert core.take_plan() == StepCopies()
    assert core.is_idle


@pytest.mark.parametrize("num_local", [0, 16])
def test_a_lease_that_does_not_continue_the_held_blocks_is_given_back(num_local: int) -> None:
    core = planner(offer=(7, 1, 3))
    assert core.num_external_tokens("a", num_local) == 0
    core.allocated("a", BLOCKS, 0)
    assert core.take_plan().loads == [PoolLoad(7, 4, ())]


def test_the_lease_of_a_request_that_ends_before_its_turn_is_given_back() -> None:
    core = planner(offer=(7, 1, 3))
    core.finished("a")
    assert core.take_plan().loads == [PoolLoad(7)]
    assert core.is_idle


def test_blocks_are_saved_as_they_become_full_under_their_mesh_names() -> None:
    core = planner()
    core.scheduled("a", 0, 7, lambda: BLOCKS)
    core.scheduled("a", 7, 3, lambda: BLOCKS)
    core.scheduled("a", 10, 1, lambda: BLOCKS)
    plan = core.take_plan()
    assert plan.saves == [
        PoolSave(NAMES[:1], OWNER, ((10,),)),
        PoolSave(NAMES[:2], OWNER, ((11,),)),
    ]
    assert plan.num_tokens == 11


def test_blocks_that_have_left_a_window_are_neither_saved_nor_loaded() -> None:
    """vLLM replaces such blocks in a request's list by its null block."""
    core = planner()
    core.scheduled("a", 12, 4, lambda: [[NULL_BLOCK, NULL_BLOCK, 12, 13]])
    assert core.take_plan().saves == [PoolSave(NAMES[:4], OWNER, ((12, 13),))]
    core = planner(offer=(7, 1, 3))
    assert core.num_external_tokens("a", 4) == 12
    core.allocated("a", [[10, NULL_BLOCK, NULL_BLOCK, 13, 14]], 12)
    assert core.take_plan().loads == [PoolLoad(7, 3, ((13,),))]


def test_a_block_is_saved_if_all_groups_hold_it_and_loaded_into_those_that_need_it() -> None:
    full, window = [10, 11, 12, 13, 14], [NULL_BLOCK, NULL_BLOCK, 22, 23, 24]
    core = planner()
    core.scheduled("a", 12, 4, lambda: [full, window])
    assert core.take_plan().saves == [PoolSave(NAMES[:4], OWNER, ((12, 13), (22, 23)))]
    core = planner(offer=(7, 0, 4))
    assert core.num_external_tokens("a", 4) == 12
    core.allocated("a", [full, window], 12)
    expected = PoolLoad(7, 1, ((11, 12, 13), (NULL_BLOCK, 22, 23)))
    assert core.take_plan().loads == [expected]


def test_a_draft_that_may_be_rejected_has_no_name() -> None:
    tokens = TOKENS[:6]
    core = StepCopyPlanner(4)
    core.add("a", SALT, tokens, None)
    core.scheduled("a", 5, 4, lambda: BLOCKS)
    assert [len(save.names) for save in core.take_plan().saves] == [1]
    tokens += TOKENS[6:9]
    core.scheduled("a", 7, 2, lambda: BLOCKS)
    assert core.take_plan().saves == [PoolSave(NAMES[:2], OWNER, ((11,),))]


def test_after_a_pulled_prompt_only_the_answer_is_saved() -> None:
    tokens = TOKENS[:10]
    core = StepCopyPlanner(4)
    core.add("a", SALT, tokens, None, is_pulled=True)
    core.scheduled("a", 9, 1, lambda: BLOCKS)
    assert core.take_plan().saves == []
    tokens += TOKENS[10:12]
    core.scheduled("a", 11, 1, lambda: BLOCKS)
    assert core.take_plan().saves == [PoolSave(NAMES[:3], OWNER, ((12,),))]


def test_the_block_that_token_1_completes_is_saved_at_the_decode() -> None:
    """The prefill drew token 1 but did not compute its KV."""
    core = StepCopyPlanner(4)
    core.add("a", SALT, TOKENS[:8], None, is_pulled=True)
    core.scheduled("a", 7, 1, lambda: BLOCKS)
    assert core.take_plan().saves == [PoolSave(NAMES[:2], OWNER, ((11,),))]


@pytest.mark.fault("F40")
@pytest.mark.parametrize("salt", [None, "", "not hex, but of thirty-two chars", "ab"])
def test_a_request_without_a_root_has_no_names(salt: str | None) -> None:
    core = StepCopyPlanner(4)
    core.add("a", salt, TOKENS, None)
    core.scheduled("a", 0, 20, lambda: BLOCKS)
    assert core.take_plan().saves == []


@pytest.mark.req("S128")
def test_blocks_with_images_are_saved_under_the_names_that_gateways_give_them() -> None:
    places = [(3, b"a" * 32), (5, b"b" * 32), (13, b"c" * 32)]
    core = StepCopyPlanner(4)
    core.add("a", SALT, TOKENS, None, images=places)
    for computed, count in ((0, 5), (5, 6), (11, 9)):
        core.scheduled("a", computed, count, lambda: BLOCKS)
    expected = tuple(block_hashes(ROOT, TOKENS, 4, images=places))
    assert core.take_plan().saves[-1].names == expected
    assert not set(expected) & set(NAMES)
