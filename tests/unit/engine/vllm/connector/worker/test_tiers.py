"""The KV tiers of the vLLM engine, tested without vLLM.

The scheduler's half plans loads and saves, and each rank's half carries them out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest

from pdmesh.core.kv.layout.cache_groups import CacheGroups
from pdmesh.core.kv.prefix.block_hash import block_hashes
from pdmesh.core.kv.prefix.pins import PinnedPrefix
from pdmesh.core.kv.tier import Tier
from pdmesh.core.kv.tiers.owner import owner_of
from pdmesh.core.kv.tiers.step_copies import (
    PoolLoad,
    PoolSave,
    StepCopies,
)
from pdmesh.engine.base import BlocksChanged, Output, TiersReported
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
from pdmesh.kv.transport.base import ByteArray

ROOT = bytes(range(16))
SALT = ROOT.hex()
OWNER = owner_of(SALT)
BLOCKS = [[10, 11, 12, 13, 14]]
TOKENS = list(range(100, 120))
NAMES = tuple(block_hashes(ROOT, TOKENS, 4))


class ArrayCaches:
    """A paged cache of two layers in host memory."""

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
    """A rank's worker, and the messages that it sends to its host."""

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
    """Otherwise the worker would still look healthy. Its host would wait for each fetch, and would
    get no more reports about disks and blocks.
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
    rank.worker.save(StepCopies(saves=[PoolSave(NAMES[:3], OWNER, ((4, 9, 2),))]))
    assert rank.fetch(1, NAMES) == 3
    rank.worker.load(StepCopies(loads=[PoolLoad(1, 1, ((20, 21),))]))
    for row in rank.caches.rows:
        assert np.array_equal(row[[20, 21]], row[[9, 2]])
    assert rank.worker.take_failed_blocks() == set()


@pytest.mark.req("S77")
def test_computing_is_timed_from_the_beginning_of_the_step_whenever_vllm_asks_for_loads(
    rank: Rank,
) -> None:
    """In a step that loads nothing, vLLM asks for loads only after the forward.

    A time from then on would be far too short: 0.4 ms per block when this bug was found. With such
    a time, no load seems to pay, and all blocks in the tiers are computed again.
    """
    costs = rank.worker.stack.costs
    costs.weight = 1.0
    rank.worker.begin()
    rank.now += 3.0  # the time of the forward
    plan = StepCopies(loads=[PoolLoad(9)], saves=[PoolSave(NAMES[:3], OWNER, ((4, 9, 2),))])
    plan.num_tokens = 12
    rank.worker.load(plan)
    rank.worker.save(plan)
    assert costs.recompute_block_s == 1.0


@pytest.mark.req("S77")
def test_the_time_of_computing_does_not_include_loading(rank: Rank) -> None:
    costs = rank.worker.stack.costs
    costs.weight = 1.0
    rank.worker.save(StepCopies(saves=[PoolSave(NAMES[:2], OWNER, ((4, 9),))]))
    assert rank.fetch(1, NAMES) == 2
    plan = StepCopies(
        [PoolLoad(1, 0, ((20, 21),))], [PoolSave(NAMES[:3], OWNER, ((2,),))], num_tokens=4
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
    rank.worker.save(StepCopies(saves=[PoolSave(NAMES[:2], OWNER, ((4, 9),))]))
    rank.until(lambda: any(isinstance(m, TierNews) and m.num_pinned == 2 for m in rank.said))
    others = [n.to_bytes(16, "big") for n in range(40)]
    for name in others:  # there are more blocks than slots in the pool
        rank.worker.save(StepCopies(saves=[PoolSave((name,), OWNER, ((7,),))]))
    assert rank.fetch(1, NAMES) == 2
    rank.worker.handle(ForgetLease(1))
    longest = Pin([(OWNER, 2e9, [*(n.to_bytes(16, "big") for n in range(32))])] * 64)
    assert len(encode_frame(longest)) <= MAX_FRAME


def test_a_lease_that_is_not_needed_is_closed(rank: Rank) -> None:
    rank.worker.save(StepCopies(saves=[PoolSave(NAMES[:3], OWNER, ((4, 9, 2),))]))
    assert rank.fetch(1, NAMES) == 3
    rank.worker.load(StepCopies(loads=[PoolLoad(1)]))
    assert rank.fetch(2, NAMES) == 3
    rank.worker.handle(ForgetLease(2))
    rank.until(lambda: rank.worker.stack.pool.num_pinned == 0)


def test_a_load_without_its_lease_is_reported_to_vllm_and_writes_nothing(rank: Rank) -> None:
    before = [row.copy() for row in rank.caches.rows]
    rank.worker.load(StepCopies(loads=[PoolLoad(5, 0, ((20, 21),))]))
    assert rank.worker.take_failed_blocks() == {20, 21}
    assert rank.worker.take_failed_blocks() == set()
    assert all(np.array_equal(a, b) for a, b in zip(before, rank.caches.rows, strict=True))


@pytest.mark.req("S78", "S98")
def test_reports_of_a_rank_become_outputs_of_the_engine(rank: Rank) -> None:
    rank.worker.save(StepCopies(saves=[PoolSave(NAMES[:2], OWNER, ((4, 9),))]))
    outputs: list[Output] = []

    def stored() -> tuple[set[bytes], int]:
        """The stored names and their number over all reports.

        A busy pool may report each block by itself.
        """
        outputs[:] = [o for m in rank.said if isinstance(m, TierNews) for o in outputs_of(m)]
        counts = [o.report.counts for o in outputs if isinstance(o, TiersReported)]
        names = {n for o in outputs if isinstance(o, BlocksChanged) for n in o.stored}
        return names, sum(count.get(("host", "stored"), 0) for count in counts)

    rank.until(lambda: stored() == (set(NAMES[:2]), 2))
    assert {o.tier for o in outputs if isinstance(o, BlocksChanged)} == {Tier.HOST}
