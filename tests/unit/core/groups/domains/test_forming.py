"""Tests which blank instances become the ranks of a domain."""

from __future__ import annotations

from pdmesh.core.groups.cluster_state import InstanceStatus
from pdmesh.core.groups.domains.forming import chosen_ranks
from pdmesh.core.model import Phase


def blank(name: str, rack: str = "", node: str = "", region: str = "") -> InstanceStatus:
    return InstanceStatus(
        name, 1, Phase.BLANK, rack=rack, node_id=node, region=region, domain_address=f"{name}:2"
    )


def test_ranks_are_in_one_rack_and_on_few_machines_where_that_is_possible() -> None:
    free = [
        blank("a", "r1", "n1"), blank("b", "r2", "n2"), blank("c", "r2", "n3"),
        blank("d", "r2", "n3"), blank("e", "r1", "n4"),
    ]  # fmt: skip
    assert [s.instance_id for s in chosen_ranks(free, 3, (), ())] == ["c", "d", "b"]
    assert [s.instance_id for s in chosen_ranks(free, 2, (), ("r2",))] == ["a", "e"]


def test_ranks_are_never_in_two_regions_and_never_instances_without_an_address() -> None:
    free = [blank("a", region="eu"), blank("b", region="us"), blank("c", region="us")]
    assert [s.instance_id for s in chosen_ranks(free, 2, (), ())] == ["b", "c"]
    assert chosen_ranks(free, 3, (), ()) == []
    old = InstanceStatus("old", 1, Phase.BLANK)
    assert chosen_ranks([old, blank("a")], 2, (), ()) == []


def test_an_instance_that_failed_is_the_last_choice() -> None:
    free = [blank("a"), blank("b"), blank("c")]
    assert [s.instance_id for s in chosen_ranks(free, 2, {"a"}, ())] == ["b", "c"]
    assert [s.instance_id for s in chosen_ranks(free, 3, {"a"}, ())] == ["b", "c", "a"]
