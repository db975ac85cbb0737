"""The plan to load blocks from several sources is as good as the best plan of a brute-force
search.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.kv.tier import Tier
from pdmesh.core.kv.tiers.load_plan import (
    Cost,
    CostBook,
    LoadPlan,
    Run,
    Source,
    plan_load,
    prefix_length,
)

TIERS = {tier: rank for rank, tier in enumerate(Tier)}
costs = st.builds(
    Cost,
    st.integers(0, 50).map(lambda n: n / 1000),
    st.integers(0, 30).map(lambda n: n / 1000),
)
sources = st.lists(
    st.builds(
        Source,
        st.sampled_from([Tier.HOST, Tier.PEER, Tier.FILE]),
        st.integers(0, (1 << 10) - 1),
        costs,
    ),
    max_size=4,
).map(lambda found: [Source(s.tier, s.held, s.cost, f"source-{i}") for i, s in enumerate(found)])


def duration(chosen: list[Source]) -> float:
    """The time to load the chosen blocks.

    Sources load in parallel. Each source loads its blocks one after another.
    """
    return max((s.cost.of(chosen.count(s)) for s in set(chosen)), default=0.0)


@pytest.mark.req("S76", "S106")
@given(sources, st.integers(0, 6), st.integers(0, 10), st.integers(0, 40))
def test_a_plan_is_the_best_of_all_lengths(
    found: list[Source], first: int, num_blocks: int, recompute_ms: int
) -> None:
    recompute_s = recompute_ms / 1000
    plan = plan_load(found, first, num_blocks, recompute_s)
    by_name = {s.name: s for s in found}
    position = first
    chosen: list[Source] = []
    for run in plan.runs:
        assert run.first == position, "in order, without a hole"
        assert run.count > 0
        for block in range(run.first, run.first + run.count):
            source = by_name[run.name]
            assert source.held >> block & 1, "served by a source that holds it"
            assert source.tier is run.tier
            chosen.append(source)
        position += run.count
    assert position <= max(first, num_blocks)
    # No length saves more time if each block comes from its fastest source.
    every: list[Source] = []
    most = 0.0
    for block in range(first, num_blocks):
        holders = [s for s in found if s.held >> block & 1]
        if not holders:
            break
        every.append(min(holders, key=lambda s: (s.cost.block_s, s.cost.latency_s, TIERS[s.tier])))
        most = max(most, len(every) * recompute_s - duration(every))
    assert plan.saved_s == pytest.approx(most)
    assert len(chosen) * recompute_s - duration(chosen) == pytest.approx(most)


@given(st.lists(st.booleans(), max_size=40), st.integers(0, 40))
def test_a_mask_knows_its_unbroken_run(held: list[bool], first: int) -> None:
    expected = 0
    while first + expected < len(held) and held[first + expected]:
        expected += 1
    mask = sum(is_held << position for position, is_held in enumerate(held))
    assert prefix_length(mask, first) == expected


@pytest.mark.req("S76")
def test_each_block_comes_from_the_fastest_tier_that_has_it() -> None:
    host = Source(Tier.HOST, 0b000011, Cost(0.0, 0.001))
    peer = Source(Tier.PEER, 0b001100, Cost(0.002, 0.002), "decode-1")
    file = Source(Tier.FILE, 0b111111, Cost(0.001, 0.004))
    plan = plan_load([file, peer, host], 1, 6, recompute_block_s=0.05)
    assert plan.runs == (
        Run(Tier.HOST, "", 1, 1),
        Run(Tier.PEER, "decode-1", 2, 2),
        Run(Tier.FILE, "", 4, 2),
    )
    assert plan.saved_s == pytest.approx(5 * 0.05 - 0.009)


def test_a_slow_tier_is_not_used_when_computing_is_quicker() -> None:
    slow = Source(Tier.FILE, 0b1111, Cost(0.5, 0.1))
    assert plan_load([slow], 0, 4, recompute_block_s=0.02) == LoadPlan()
    assert plan_load([slow], 0, 4, recompute_block_s=0.5).num_blocks == 4
    assert plan_load([slow], 0, 4, recompute_block_s=0.5, min_saved_s=2.0) == LoadPlan()


def test_costs_follow_what_was_seen() -> None:
    book = CostBook()
    for _ in range(200):
        book.loaded(Tier.FILE, 10, 0.001 + 10 * 0.05)
        book.computed(4, 2.0)
    assert book.costs[Tier.FILE].block_s == pytest.approx(0.05, rel=0.01)
    assert book.recompute_block_s == pytest.approx(0.5, rel=0.01)
