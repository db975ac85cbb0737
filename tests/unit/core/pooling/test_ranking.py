from __future__ import annotations

from dataclasses import replace

from pdmesh.core.model import PeerId
from pdmesh.core.pooling.ranking import PoolingInstance, PoolingQuery, ranked

A, B, C = (PeerId(name, 1) for name in "abc")


def instance(peer: PeerId, num_used: int = 0, region: str = "") -> PoolingInstance:
    return PoolingInstance(peer, "m", "", region, 4, num_used)


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
