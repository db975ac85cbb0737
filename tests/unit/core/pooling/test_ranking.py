from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pdmesh.core.model import PeerId
from pdmesh.core.pooling import ranking
from pdmesh.core.pooling.ranking import MOST_RANKED, PoolingInstance, PoolingQuery

A, B, C = (PeerId(name, 1) for name in "abc")
USED: dict[PeerId, int] = {}


def instance(peer: PeerId, num_used: int = 0, region: str = "") -> PoolingInstance:
    USED[peer] = num_used
    return PoolingInstance(peer, "m", "", region, 4)


def ranked(instances: Sequence[PoolingInstance], query: PoolingQuery) -> list[PeerId]:
    return ranking.ranked(instances, query, USED.__getitem__)


def test_the_least_busy_instance_comes_first() -> None:
    found = ranked([instance(A, 2), instance(B, 1), instance(C, 3)], PoolingQuery("m"))
    assert found == [B, A, C]


def test_only_instances_of_the_model_and_scenario_are_ranked() -> None:
    others = [
        replace(instance(A), model="other"),
        replace(instance(B), scenario="search"),
        instance(C),
    ]
    assert ranked(others, PoolingQuery("m")) == [C]
    assert ranked(others, PoolingQuery("m", "search")) == [B, C]


def test_an_excluded_incarnation_is_left_out_and_its_successor_is_not() -> None:
    again = PeerId("a", 2)
    found = ranked([instance(again), instance(B)], PoolingQuery("m", excluded=[A, B]))
    assert found == [again]


def test_avoided_full_and_far_instances_come_last() -> None:
    d = PeerId("d", 1)
    instances = [
        instance(A, 0, "here"),
        instance(B, 4, "here"),
        instance(C, 0, "there"),
        instance(d, 1, "here"),
    ]
    found = ranked(instances, PoolingQuery("m", region="here", avoided=["a"]))
    assert found == [d, C, B, A]


def test_equally_busy_instances_are_ordered_by_their_tie_breakers() -> None:
    instances = [replace(instance(A), tie=b"2"), replace(instance(B), tie=b"1")]
    assert ranked(instances, PoolingQuery("m")) == [B, A]


def test_only_instances_of_the_revision_of_the_call_are_ranked() -> None:
    instances = [replace(instance(A), fingerprint="new"), instance(B), instance(C)]
    assert ranked(instances, PoolingQuery("m", fingerprint="new")) == [A]
    assert ranked(instances, PoolingQuery("m", fingerprint="")) == [B, C]
    assert ranked(instances, PoolingQuery("m")) == [A, B, C]


def test_a_canary_gets_its_calls_and_no_others() -> None:
    instances = [replace(instance(A), group_id="canary"), instance(B), instance(C)]
    assert ranked(instances, PoolingQuery("m", canary=("canary", True))) == [A]
    assert ranked(instances, PoolingQuery("m", canary=("canary", False))) == [B, C]


def test_a_side_without_a_good_instance_leaves_its_calls_to_the_other() -> None:
    instances = [replace(instance(A), group_id="canary"), instance(B)]
    found = ranked(instances, PoolingQuery("m", canary=("canary", True), avoided=["a"]))
    assert found == [B, A]
    assert ranked(instances, PoolingQuery("m", canary=("canary", False), excluded=[B])) == [A]


def test_of_a_large_fleet_only_the_best_are_ranked() -> None:
    many = [instance(PeerId(f"i{number}", 1), number % 3) for number in range(3 * MOST_RANKED)]
    found = ranked(many, PoolingQuery("m"))
    assert len(found) == MOST_RANKED
    assert {USED[peer] for peer in found} == {0}
