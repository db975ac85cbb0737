"""Tests which peers an instance asks for the blocks of a prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.kv.tiers.peer_choice import MAX_PEERS, PoolMatch, PoolOwner, peers_to_ask
from pdmesh.core.kv.transfer.source_exclusions import KvSource

A = PoolOwner(KvSource("a", 1), "here", ("addr",))


def asked(*owners: PoolOwner, num_blocks: int = 3, corrupt: frozenset[KvSource]) -> list[str]:
    known = {owner.source.instance_id: owner for owner in owners}
    matches = [PoolMatch(KvSource(i, 1), num_blocks) for i in known]
    found = peers_to_ask(matches, known, "me", "here", corrupt)
    return [owner.source.instance_id for owner, _ in found]


@pytest.mark.parametrize(
    "owner",
    [
        replace(A, source=KvSource("a", 2)),  # the index knows another incarnation
        replace(A, kv_region="there"),
        replace(A, addresses=()),
        replace(A, source=KvSource("me", 1)),
    ],
)
def test_a_peer_that_cannot_be_asked_is_left_out(owner: PoolOwner) -> None:
    assert asked(A, corrupt=frozenset()) == ["a"]
    assert asked(owner, corrupt=frozenset()) == []


def test_a_peer_that_sent_corrupt_kv_or_is_not_registered_is_left_out() -> None:
    assert asked(A, corrupt=frozenset({A.source})) == []
    assert peers_to_ask([PoolMatch(A.source, 1)], {}, "me", "here", ()) == []


def test_the_longest_runs_are_asked_for_first_and_only_a_few() -> None:
    owners = {f"p{n}": replace(A, source=KvSource(f"p{n}", 1)) for n in range(MAX_PEERS + 2)}
    matches = [PoolMatch(owner.source, n) for n, owner in enumerate(owners.values())]
    found = peers_to_ask(matches, owners, "me", "here", ())
    assert [num for _, num in found] == [5, 4, 3, 2]
