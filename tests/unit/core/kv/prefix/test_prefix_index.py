"""The prefix index knows which KV blocks each instance holds.

The tests cover matching, gaps, bounds and cost.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import pytest

from loadtests.placement.index import Index, PerWorker, SetPerBlock
from pdmesh.core.kv.prefix.prefix_index import (
    MAX_WAITING,
    DeltaOutcome,
    IndexDelta,
    PeerRuns,
    PrefixIndex,
    TierDelta,
)
from pdmesh.core.kv.tier import Tier


def block(i: int) -> bytes:
    return i.to_bytes(16, "big")


def chain(n: int, start: int = 0) -> list[bytes]:
    return [block(i) for i in range(start, start + n)]


@pytest.mark.req("S102")
def test_a_block_behind_a_missing_one_does_not_count() -> None:
    """The paper's algorithm would count four blocks for p1. But blocks 2 and 3 are useless without
    block 1.
    """
    index = PrefixIndex()
    index.apply(IndexDelta("p0", 1, 1, stored=chain(4)))
    index.apply(IndexDelta("p1", 1, 1, stored=[block(0), block(2), block(3)]))
    index.apply(IndexDelta("p2", 1, 1, stored=[block(3)]))
    assert index.match(chain(6)) == {"p0": 4, "p1": 1}
    assert index.match([]) == {}
    assert index.match([block(99)]) == {}


def test_a_reordered_delta_waits_for_the_one_before_it() -> None:
    index = PrefixIndex()
    assert index.apply(IndexDelta("p0", 1, 1, stored=[block(0)])) is DeltaOutcome.APPLIED
    assert index.apply(IndexDelta("p0", 1, 3, removed=[block(1)])) is DeltaOutcome.GAP
    assert not index.is_whole("p0")
    assert index.apply(IndexDelta("p0", 1, 2, stored=[block(1)])) is DeltaOutcome.APPLIED
    assert index.is_whole("p0")
    assert index.match(chain(2)) == {"p0": 1}
    assert index.apply(IndexDelta("p0", 1, 3, stored=[block(5)])) is DeltaOutcome.STALE
    index.check_invariants()


def test_a_large_snapshot_is_loaded_in_bounded_steps_and_deltas_wait_for_its_end() -> None:
    index, taken = PrefixIndex(), list[int]()

    def told() -> Iterator[bytes]:
        for number in range(5_000, 20_000):
            taken.append(number)
            yield block(number)

    index.apply(IndexDelta("p0", 1, 1, stored=chain(10_000)))
    load = index.begin_snapshot("p0", 1, 4, told())
    assert load is not None
    num_steps = before = 0
    while (outcome := load.step(1_000)) is None:
        assert len(taken) - before <= 1_000
        before, num_steps = len(taken), num_steps + 1
        assert index.is_loading("p0")
        assert index.version("p0") == (1, 1)
        if num_steps == 3:
            index.check_invariants()
            assert index.apply(IndexDelta("p0", 1, 3, stored=[block(1)])) is DeltaOutcome.STALE
            assert index.apply(IndexDelta("p0", 1, 5, stored=[block(7)])) is DeltaOutcome.WAITS
    assert num_steps == 20  # the snapshot's 15,000 blocks, and 5,000 old ones that it lacks
    assert outcome is DeltaOutcome.APPLIED
    assert index.version("p0") == (1, 5)
    assert index.blocks("p0") == {*chain(15_000, start=5_000), block(7)}
    index.check_invariants()


def test_a_snapshot_takes_the_place_of_one_on_its_way() -> None:
    index = PrefixIndex()
    index.apply(IndexDelta("p0", 1, 1, stored=chain(6)))
    first = index.begin_snapshot("p0", 1, 2, chain(4, start=3))
    assert first is not None
    assert first.step(2) is None
    assert index.load_snapshot("p0", 1, 3, chain(2, start=2)) is DeltaOutcome.APPLIED
    assert first.step(2) is DeltaOutcome.STALE
    assert index.blocks("p0") == set(chain(2, start=2))
    index.check_invariants()


def test_an_instance_that_is_gone_is_swept_in_bounded_steps_and_never_matched() -> None:
    index = PrefixIndex()
    index.apply(IndexDelta("p0", 1, 1, stored=chain(10)))
    index.apply(IndexDelta("p1", 1, 1, stored=chain(5)))
    assert index.retire_instance("p0") == 10
    assert index.match(chain(10)) == {"p1": 5}
    left = [index.num_blocks]
    while index.sweep(4):
        index.check_invariants()
        left.append(index.num_blocks)
        index.apply(IndexDelta("p2", 1, len(left), stored=()))
    assert left[0] == 15
    assert index.num_blocks == 5
    index.apply(IndexDelta("p0", 2, 1, stored=chain(10)))
    assert index.match(chain(10)) == {"p1": 5, "p0": 10}
    index.check_invariants()


def test_blocks_of_an_instance_that_is_gone_make_room_before_those_of_others() -> None:
    index = PrefixIndex(max_blocks=40)
    index.load_snapshot("alive", 1, 1, chain(20))
    index.load_snapshot("gone", 1, 1, chain(20, start=100))
    index.retire_instance("gone")
    index.load_snapshot("new", 1, 1, chain(20, start=200))
    assert index.num_blocks_of("alive") == index.num_blocks_of("new") == 20
    assert not index.take_forgotten()
    index.check_invariants()


def test_a_delta_that_waits_for_the_rest_of_a_snapshot_is_not_missing() -> None:
    index = PrefixIndex()
    index.load_snapshot("a", 1, 1, chain(5))
    assert index.begin_snapshot("a", 1, 2, chain(9)) is not None
    assert index.apply(IndexDelta("a", 1, 3, stored=chain(1, start=50))) is DeltaOutcome.WAITS
    assert index.is_whole("a")


def test_an_instance_first_heard_of_in_mid_stream_has_a_gap_until_its_snapshot() -> None:
    index = PrefixIndex()
    assert index.apply(IndexDelta("p0", 1, 8, stored=[block(9)])) is DeltaOutcome.GAP
    assert index.match([block(9)]) == {}
    assert index.load_snapshot("p0", 1, 7, chain(2)) is DeltaOutcome.APPLIED
    assert index.blocks("p0") == {block(0), block(1), block(9)}
    assert index.version("p0") == (1, 8)


def test_deltas_that_wait_are_bounded() -> None:
    index = PrefixIndex()
    for sequence in range(2, MAX_WAITING + 100):
        assert index.apply(IndexDelta("p0", 1, sequence)) is DeltaOutcome.GAP
    index.check_invariants()


def test_clear_comes_before_what_the_same_delta_stores() -> None:
    index = PrefixIndex()
    index.apply(IndexDelta("p0", 1, 1, stored=chain(3)))
    index.apply(IndexDelta("p0", 1, 2, stored=[block(0)], is_cleared=True))
    assert index.blocks("p0") == {block(0)}


@pytest.mark.req("S98")
def test_removing_an_instance_leaves_the_others_and_frees_its_bit() -> None:
    index = PrefixIndex()
    for name in ("p0", "p1"):
        index.apply(IndexDelta(name, 1, 1, stored=chain(3)))
    assert index.remove_instance("p0") == 3
    assert index.match(chain(3)) == {"p1": 3}
    assert index.apply(IndexDelta("p0", 1, 2, stored=chain(3))) is DeltaOutcome.STALE
    index.forget_history("p0")
    assert index.load_snapshot("p0", 1, 2, chain(1)) is DeltaOutcome.APPLIED
    index.check_invariants()


def test_memory_is_bounded_and_what_no_prompt_asked_for_is_forgotten_first() -> None:
    index = PrefixIndex(max_blocks=10)
    index.apply(IndexDelta("p0", 1, 1, stored=chain(8)))
    index.apply(IndexDelta("p1", 1, 1, stored=chain(2)))
    assert index.match(chain(3)) == {"p0": 3, "p1": 2}
    index.apply(IndexDelta("p0", 1, 2, stored=chain(3, start=50)))
    assert index.num_blocks == 10
    assert index.num_evicted == 3
    assert index.match(chain(3)) == {"p0": 3, "p1": 2}
    assert index.match(chain(3, start=50)) == {"p0": 3}
    (forgotten,) = index.take_forgotten()
    assert (forgotten.instance_id, forgotten.sequence) == ("p0", 2)
    assert set(forgotten.removed) == set(chain(3, start=3))
    assert index.take_forgotten() == []
    index.check_invariants()


@pytest.mark.req("S78")
def test_names_that_are_pinned_are_forgotten_last() -> None:
    index = PrefixIndex(max_blocks=10)
    index.pin(frozenset(chain(3)))
    index.apply(IndexDelta("p0", 1, 1, stored=chain(10)))
    for sequence in range(2, 30):
        index.apply(IndexDelta("p0", 1, sequence, stored=chain(5, start=10 * sequence)))
        index.check_invariants()
    assert index.match(chain(3)) == {"p0": 3}
    index.pin(index.blocks("p0"))  # a pin of all blocks
    index.apply(IndexDelta("p0", 1, 30, stored=chain(5, start=500)))
    assert index.num_blocks == 10, "one of them had to go"
    index.check_invariants()


@pytest.mark.req("S78")
def test_a_pinned_name_outlasts_a_name_that_was_asked_for_but_not_pinned() -> None:
    index = PrefixIndex(max_blocks=10)
    index.pin(frozenset(chain(3)))
    index.apply(IndexDelta("p0", 1, 1, stored=chain(10)))
    index.match(chain(7, start=3))  # now only the pinned names are unused
    index.apply(IndexDelta("p0", 1, 2, stored=chain(1, start=50)))
    assert index.match(chain(3)) == {"p0": 3}
    index.check_invariants()


def test_a_bound_of_one_block_holds() -> None:
    index = PrefixIndex(max_blocks=1)
    for sequence in range(1, 50):
        index.apply(
            IndexDelta(
                "p0", 1, sequence, stored=chain(3), host=TierDelta(stored=chain(sequence % 4))
            )
        )
        index.match(chain(3))
        index.check_invariants()


@pytest.mark.req("S76", "S98")
def test_a_prefix_may_lie_in_two_tiers_of_one_instance_but_not_in_two_instances() -> None:
    index = PrefixIndex()
    host = TierDelta(stored=chain(2, start=2))
    index.apply(IndexDelta("p0", 1, 1, stored=chain(2), host=host))
    index.apply(IndexDelta("p1", 1, 1, host=TierDelta(stored=chain(3))))
    assert index.match(chain(9)) == {"p0": 4, "p1": 3}
    assert index.match(chain(9), Tier.ENGINE) == {"p0": 2}
    assert index.match(chain(9), Tier.HOST) == {"p1": 3}
    assert index.match(chain(4, start=2), Tier.HOST) == {"p0": 2, "p1": 1}
    index.apply(IndexDelta("p0", 1, 2, host=TierDelta(is_cleared=True)))
    assert index.match(chain(9)) == {"p0": 2, "p1": 3}
    index.check_invariants()


@pytest.mark.req("S99")
def test_a_walk_over_blocks_takes_as_long_with_a_thousand_instances_as_with_ten() -> None:
    """Every instance holds the whole prompt. That is the worst case for a walk instance by
    instance.
    """
    assert _slowdown(PrefixIndex) < 2


@pytest.mark.req("S99")
@pytest.mark.parametrize("other", [PerWorker, SetPerBlock])
def test_the_measurement_detects_an_index_that_is_slow(other: Callable[[], Index]) -> None:
    assert _slowdown(other) > 20


@pytest.mark.req("S99")
def test_twice_the_blocks_take_twice_the_time() -> None:
    index = PrefixIndex()
    index.apply(IndexDelta("p0", 1, 1, stored=chain(8192)))
    times = _walk_s({n: (index, chain(n)) for n in (2048, 8192)})
    assert 2 < times[8192] / times[2048] < 8


@pytest.mark.req("S99")
def test_a_walk_ends_where_no_instance_holds_more() -> None:
    index = PrefixIndex()
    index.apply(IndexDelta("p0", 1, 1, stored=chain(5)))
    index.apply(IndexDelta("p1", 1, 1, stored=chain(300, start=6)))
    index.apply(IndexDelta("p2", 1, 1, stored=[*chain(2), *chain(300, start=3)]))
    asked = iter(chain(400))
    assert index.match(asked) == {"p0": 5, "p2": 2}  # type: ignore[arg-type]  # it only iterates
    assert next(asked) == block(6)
    index.remove_instance("p0")
    asked = iter(chain(400))
    assert index.match(asked) == {"p2": 2}  # type: ignore[arg-type]
    assert next(asked) == block(3), "blocks that others hold further on are not asked for"


def _slowdown(make: Callable[[], Index]) -> float:
    """The time of a match of 256 blocks with 1,000 instances, divided by the time with 10."""
    prompt = chain(256)
    indexes = {10: make(), 1000: make()}
    for num_instances, index in indexes.items():
        for i in range(num_instances):
            index.apply(IndexDelta(f"i{i}", 1, 1, stored=prompt))
        assert index.match(prompt) == {f"i{i}": 256 for i in range(num_instances)}
    times = _walk_s({n: (index, prompt) for n, index in indexes.items()})
    return times[1000] / times[10]


def _walk_s(walks: dict[int, tuple[Index, list[bytes]]]) -> dict[int, float]:
    """The shortest time of a match in each index, measured in turn.

    The time to match one block is subtracted, because it is the cost of making the answer.
    """
    whole, one = dict.fromkeys(walks, math.inf), dict.fromkeys(walks, math.inf)
    for _ in range(7):
        for number, (index, prompt) in walks.items():
            for best, names in ((one, prompt[:1]), (whole, prompt)):
                began = time.thread_time()
                index.match(names)
                best[number] = min(best[number], time.thread_time() - began)
    return {number: whole[number] - one[number] for number in walks}


@pytest.mark.req("S77", "S107")
def test_blocks_of_host_pools_extend_the_prefix_that_an_instance_holds() -> None:
    """Instance a holds blocks 0 to 3 in its engine. In host pools, b holds 2 to 5 and c holds 8."""
    prompt = [bytes([i]) * 16 for i in range(10)]
    index = PrefixIndex()
    index.apply(IndexDelta("a", 1, 1, stored=prompt[:4]))
    assert index.peer_runs(prompt) == PeerRuns()
    index.apply(IndexDelta("b", 1, 1, host=TierDelta(stored=prompt[2:6])))
    index.apply(IndexDelta("c", 1, 1, host=TierDelta(stored=prompt[8:9])))
    peers = index.peer_runs(prompt)
    assert peers == PeerRuns(((2, 6), (8, 9)))
    assert [peers.reach(held) for held in (0, 1, 2, 4, 6, 8)] == [0, 1, 6, 6, 6, 9]
    index.remove_instance("b")
    assert index.peer_runs(prompt) == PeerRuns(((8, 9),))
    index.check_invariants()
