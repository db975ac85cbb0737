"""The vLLM engine's tiers without vLLM: the scheduler's half plans, and the ranks' half carries the
plan out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest

from pdmesh.core.kv.layout.cache_groups import NULL_BLOCK, CacheGroups
from pdmesh.core.kv.prefix.block_hash import block_hashes
from pdmesh.core.kv.prefix.pins import PinnedPrefix
from pdmesh.core.kv.tiers.load_plan import Tier
from pdmesh.engine.base import BlocksChanged, Output, TiersReported
from pdmesh.engine.vllm.connector.scheduler.tier_plan import (
    TierLoad,
    TierPlan,
    TierPlanner,
    TierSave,
)
from pdmesh.engine.vllm.connector.worker.group_caches import GroupCaches
from pdmesh.engine.vllm.connector.worker.tier_worker import RankBlocks, TierWorker
from pdmesh.engine.vllm.host.tier_client import TierClient, outputs_of
from pdmesh.engine.vllm.messages import (
    MAX_FRAME,
    Fetched,
    FetchToPool,
    ForgetLease,
    Pin,
    RankMessage,
    TierNews,
    encode_frame,
)
from pdmesh.kv.device.scatter import gather, recv_scatter
from pdmesh.kv.tiers.config import TierConfig
from pdmesh.kv.tiers.owner import owner_of
from pdmesh.kv.transport.base import ByteArray

ROOT = bytes(range(16))
SALT = ROOT.hex()
OWNER = owner_of(SALT)
BLOCKS = [[10, 11, 12, 13, 14]]
TOKENS = list(range(100, 120))
NAMES = tuple(block_hashes(ROOT, TOKENS, 4))


def planner(offer: Sequence[int] | None = None, num_tokens: int = 18) -> TierPlanner:
    core = TierPlanner(4)
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
    assert plan.loads == [TierLoad(7, 2, ((12, 13),))]
    core.finished("a")
    assert core.take_plan() == TierPlan()
    assert core.is_idle


@pytest.mark.parametrize("num_local", [0, 16])
def test_a_lease_that_does_not_continue_the_held_blocks_is_given_back(num_local: int) -> None:
    core = planner(offer=(7, 1, 3))
    assert core.num_external_tokens("a", num_local) == 0
    core.allocated("a", BLOCKS, 0)
    assert core.take_plan().loads == [TierLoad(7, 4, ())]


def test_the_lease_of_a_request_that_ends_before_its_turn_is_given_back() -> None:
    core = planner(offer=(7, 1, 3))
    core.finished("a")
    assert core.take_plan().loads == [TierLoad(7)]
    assert core.is_idle


def test_blocks_are_saved_as_they_become_full_under_their_mesh_names() -> None:
    core = planner()
    core.scheduled("a", 0, 7, lambda: BLOCKS)
    core.scheduled("a", 7, 3, lambda: BLOCKS)
    core.scheduled("a", 10, 1, lambda: BLOCKS)
    plan = core.take_plan()
    assert plan.saves == [
        TierSave(NAMES[:1], OWNER, ((10,),)),
        TierSave(NAMES[:2], OWNER, ((11,),)),
    ]
    assert plan.num_tokens == 11


def test_blocks_that_have_left_a_window_are_neither_saved_nor_loaded() -> None:
    """vLLM has them in a request's list with the id of its null block."""
    core = planner()
    core.scheduled("a", 12, 4, lambda: [[NULL_BLOCK, NULL_BLOCK, 12, 13]])
    assert core.take_plan().saves == [TierSave(NAMES[:4], OWNER, ((12, 13),))]
    core = planner(offer=(7, 1, 3))
    assert core.num_external_tokens("a", 4) == 12
    core.allocated("a", [[10, NULL_BLOCK, NULL_BLOCK, 13, 14]], 12)
    assert core.take_plan().loads == [TierLoad(7, 3, ((13,),))]


def test_a_block_is_saved_if_all_groups_hold_it_and_loaded_into_those_that_need_it() -> None:
    full, window = [10, 11, 12, 13, 14], [NULL_BLOCK, NULL_BLOCK, 22, 23, 24]
    core = planner()
    core.scheduled("a", 12, 4, lambda: [full, window])
    assert core.take_plan().saves == [TierSave(NAMES[:4], OWNER, ((12, 13), (22, 23)))]
    core = planner(offer=(7, 0, 4))
    assert core.num_external_tokens("a", 4) == 12
    core.allocated("a", [full, window], 12)
    expected = TierLoad(7, 1, ((11, 12, 13), (NULL_BLOCK, 22, 23)))
    assert core.take_plan().loads == [expected]


def test_a_draft_that_may_be_rejected_has_no_name() -> None:
    tokens = TOKENS[:6]
    core = TierPlanner(4)
    core.add("a", SALT, tokens, None)
    core.scheduled("a", 5, 4, lambda: BLOCKS)
    assert [len(save.names) for save in core.take_plan().saves] == [1]
    tokens += TOKENS[6:9]
    core.scheduled("a", 7, 2, lambda: BLOCKS)
    assert core.take_plan().saves == [TierSave(NAMES[:2], OWNER, ((11,),))]


def test_after_a_pulled_prompt_only_the_answer_is_saved() -> None:
    tokens = TOKENS[:10]
    core = TierPlanner(4)
    core.add("a", SALT, tokens, None, is_pulled=True)
    core.scheduled("a", 9, 1, lambda: BLOCKS)
    assert core.take_plan().saves == []
    tokens += TOKENS[10:12]
    core.scheduled("a", 11, 1, lambda: BLOCKS)
    assert core.take_plan().saves == [TierSave(NAMES[:3], OWNER, ((12,),))]


def test_the_block_that_token_1_completes_is_saved_at_the_decode() -> None:
    """The prefill drew token 1, but has no KV of it."""
    core = TierPlanner(4)
    core.add("a", SALT, TOKENS[:8], None, is_pulled=True)
    core.scheduled("a", 7, 1, lambda: BLOCKS)
    assert core.take_plan().saves == [TierSave(NAMES[:2], OWNER, ((11,),))]


@pytest.mark.fault("F40")
@pytest.mark.parametrize("salt", [None, "", "not hex, but of thirty-two chars", "ab"])
def test_a_request_without_a_root_has_no_names(salt: str | None) -> None:
    core = TierPlanner(4)
    core.add("a", salt, TOKENS, None)
    core.scheduled("a", 0, 20, lambda: BLOCKS)
    assert core.take_plan().saves == []


class ArrayCaches:
    """A paged cache of two layers in plain memory."""

    def __init__(self, num_blocks: int = 32, block_bytes: int = 2048) -> None:
        rng = np.random.default_rng(1)
        self.rows = [rng.integers(0, 256, (num_blocks, block_bytes), np.uint8) for _ in range(2)]
        self.num_layers, self.num_heads, self.block_bytes = 2, 1, block_bytes

    def wait_for_model(self) -> None:
        pass

    def gather(self, block_ids: Sequence[int], out: ByteArray, on_done: None = None) -> None:
        assert on_done is None, "the call waits"
        gather(self.rows, block_ids, out)

    def scatter(self, source: ByteArray, block_ids: Sequence[int]) -> None:
        recv_scatter(source, self.rows, block_ids)


class Rank:
    """A worker, and the messages that it sends to the host."""

    def __init__(self) -> None:
        self.caches = ArrayCaches()
        self.said: list[RankMessage] = []
        config = TierConfig(host_pool_bytes=16 * 4096).to_plain()
        self.died: list[BaseException] = []
        self.now = 100.0
        self.worker = TierWorker(
            config,
            GroupCaches(cast(Any, self.caches), CacheGroups(4), (0, 0), "fp"),
            RankBlocks("fp", 4, 0, 1),
            self.said.append,
            self.died.append,
            self.clock,
        )

    def clock(self) -> float:
        return self.now

    def until(self, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + 30
        while not is_so():
            assert time.monotonic() < end, self.said
            time.sleep(0.005)

    def fetch(self, leg: int, names: Sequence[bytes], first: int = 0) -> int:
        self.worker.handle(FetchToPool(leg, list(names), OWNER, first, 5.0))
        answers: list[int] = []

        def is_answered() -> bool:
            answers[:] = [
                m.end - m.first for m in self.said if isinstance(m, Fetched) and m.leg == leg
            ]
            return bool(answers)

        self.until(is_answered)
        return answers[0]


@pytest.fixture
def expected_deaths() -> list[str]:
    return []


@pytest.fixture
def rank(expected_deaths: list[str]) -> Iterator[Rank]:
    made = Rank()
    yield made
    made.worker.close()
    made.worker.stack.pool.check_invariants()
    assert [str(error) for error in made.died] == expected_deaths
    assert made.worker.stack.pool.num_pinned == 0


@pytest.mark.parametrize("what", ["report", "fetch"])
def test_a_part_of_the_tiers_that_dies_ends_the_worker(
    rank: Rank, what: str, expected_deaths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its host would wait for each fetch and learn nothing more about disks and blocks,
    but take the worker for healthy.
    """

    def broken(*_: object) -> None:
        raise ValueError(f"a bug in {what}")

    expected_deaths.append(f"a bug in {what}")
    monkeypatch.setattr(rank.worker.stack, what, broken)
    if what == "fetch":
        rank.worker.handle(FetchToPool(1, list(NAMES), OWNER, 0, 5.0))
    rank.until(lambda: bool(rank.died))


@pytest.mark.req("S76", "S77")
def test_blocks_saved_by_one_step_are_loaded_into_other_blocks_by_a_later_step(rank: Rank) -> None:
    rank.worker.save(TierPlan(saves=[TierSave(NAMES[:3], OWNER, ((4, 9, 2),))]))
    assert rank.fetch(1, NAMES) == 3
    rank.worker.load(TierPlan(loads=[TierLoad(1, 1, ((20, 21),))]))
    for row in rank.caches.rows:
        assert np.array_equal(row[[20, 21]], row[[9, 2]])
    assert rank.worker.take_failed_blocks() == set()


@pytest.mark.req("S77")
def test_computing_is_timed_from_the_beginning_of_the_step_whenever_vllm_asks_for_loads(
    rank: Rank,
) -> None:
    """In steps that load nothing, vLLM calls for loads after the forward.

    Timed from that call, computing seemed to take 0.4 ms per block. So no load seemed to pay, and
    all that the tiers held was computed again.
    """
    costs = rank.worker.stack.costs
    costs.weight = 1.0
    rank.worker.begin()
    rank.now += 3.0  # the forward
    plan = TierPlan(loads=[TierLoad(9)], saves=[TierSave(NAMES[:3], OWNER, ((4, 9, 2),))])
    plan.num_tokens = 12
    rank.worker.load(plan)
    rank.worker.save(plan)
    assert costs.recompute_block_s == 1.0


@pytest.mark.req("S77")
def test_the_time_of_computing_does_not_include_loading(rank: Rank) -> None:
    costs = rank.worker.stack.costs
    costs.weight = 1.0
    rank.worker.save(TierPlan(saves=[TierSave(NAMES[:2], OWNER, ((4, 9),))]))
    assert rank.fetch(1, NAMES) == 2
    plan = TierPlan(
        [TierLoad(1, 0, ((20, 21),))], [TierSave(NAMES[:3], OWNER, ((2,),))], num_tokens=4
    )
    rank.worker.begin()
    rank.now += 5.0
    rank.worker.load(plan)
    rank.now += 2.0
    rank.worker.save(plan)
    assert costs.recompute_block_s == 2.0


@pytest.mark.req("S78")
def test_every_rank_keeps_the_blocks_of_a_pinned_prefix(rank: Rank) -> None:
    client = TierClient(lambda message: rank.worker.handle(message), 1, 5.0)
    client.pin([PinnedPrefix(NAMES[:2], OWNER, 2e9)])
    rank.worker.save(TierPlan(saves=[TierSave(NAMES[:2], OWNER, ((4, 9),))]))
    rank.until(lambda: any(isinstance(m, TierNews) and m.num_pinned == 2 for m in rank.said))
    others = [n.to_bytes(16, "big") for n in range(40)]
    for name in others:  # more blocks than the pool has slots
        rank.worker.save(TierPlan(saves=[TierSave((name,), OWNER, ((7,),))]))
    assert rank.fetch(1, NAMES) == 2
    rank.worker.handle(ForgetLease(1))
    longest = Pin([(OWNER, 2e9, [*(n.to_bytes(16, "big") for n in range(32))])] * 64)
    assert len(encode_frame(longest)) <= MAX_FRAME


def test_a_lease_that_is_not_needed_is_closed(rank: Rank) -> None:
    rank.worker.save(TierPlan(saves=[TierSave(NAMES[:3], OWNER, ((4, 9, 2),))]))
    assert rank.fetch(1, NAMES) == 3
    rank.worker.load(TierPlan(loads=[TierLoad(1)]))
    assert rank.fetch(2, NAMES) == 3
    rank.worker.handle(ForgetLease(2))
    rank.until(lambda: rank.worker.stack.pool.num_pinned == 0)


def test_a_load_without_its_lease_is_reported_to_vllm_and_writes_nothing(rank: Rank) -> None:
    before = [row.copy() for row in rank.caches.rows]
    rank.worker.load(TierPlan(loads=[TierLoad(5, 0, ((20, 21),))]))
    assert rank.worker.take_failed_blocks() == {20, 21}
    assert rank.worker.take_failed_blocks() == set()
    assert all(np.array_equal(a, b) for a, b in zip(before, rank.caches.rows, strict=True))


@pytest.mark.req("S78", "S98")
def test_reports_of_a_rank_become_outputs_of_the_engine(rank: Rank) -> None:
    rank.worker.save(TierPlan(saves=[TierSave(NAMES[:2], OWNER, ((4, 9),))]))
    outputs: list[Output] = []

    def stored() -> tuple[set[bytes], int]:
        """The stored names and their number, over all reports: a busy pool may report each block
        by itself.
        """
        outputs[:] = [o for m in rank.said if isinstance(m, TierNews) for o in outputs_of(m)]
        counts = [o.report.counts for o in outputs if isinstance(o, TiersReported)]
        names = {n for o in outputs if isinstance(o, BlocksChanged) for n in o.stored}
        return names, sum(count.get(("host", "stored"), 0) for count in counts)

    rank.until(lambda: stored() == (set(NAMES[:2]), 2))
    assert {o.tier for o in outputs if isinstance(o, BlocksChanged)} == {Tier.HOST}


@pytest.mark.req("S128")
def test_blocks_with_images_are_saved_under_the_names_that_gateways_give_them() -> None:
    places = [(3, b"a" * 32), (5, b"b" * 32), (13, b"c" * 32)]
    core = TierPlanner(4)
    core.add("a", SALT, TOKENS, None, images=places)
    for computed, count in ((0, 5), (5, 6), (11, 9)):
        core.scheduled("a", computed, count, lambda: BLOCKS)
    expected = tuple(block_hashes(ROOT, TOKENS, 4, images=places))
    assert core.take_plan().saves[-1].names == expected
    assert not set(expected) & set(NAMES)
