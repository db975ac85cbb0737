"""A domain's ranks are folded into one member of the group, and unfolded again."""

from __future__ import annotations

import pytest

from pdmesh.core.groups.cluster_state import InstanceStatus, Observed, WantedGroups
from pdmesh.core.groups.domains.folding import folded, unfolded
from pdmesh.core.model import Assignment, DomainRank, Peer, PeerId, Phase, Role, RoleSpec, Stage


def rank(n: int, phase: Phase = Phase.READY, **facts: object) -> InstanceStatus:
    return InstanceStatus(
        f"i-{n}", 100 + n, phase, Role.DECODE, "chat", assignment_id=7,
        kv_addresses=(f"i-{n}:1",), domain=DomainRank("chat-d7", n, 2), **facts,  # type: ignore[arg-type]
    )  # fmt: skip


def told(n: int, stage: Stage = Stage.SERVE) -> Assignment:
    domain = DomainRank("chat-d7", n, 2)
    return Assignment(100 + n, 1, 7, stage, RoleSpec(Role.DECODE, "chat", "", domain=domain))


def registry(*pairs: tuple[InstanceStatus, Assignment | None]) -> Observed:
    given = {seen.instance_id: each for seen, each in pairs if each is not None}
    return Observed(1, 1, WantedGroups(), {seen.instance_id: seen for seen, _ in pairs}, given)


@pytest.mark.parametrize(
    ("phases", "whole"),
    [
        ((Phase.READY, Phase.LOADING), Phase.LOADING),
        ((Phase.READY, Phase.READY), Phase.READY),
        ((Phase.READY, Phase.DRAINED), Phase.DRAINING),
        ((Phase.DRAINED, Phase.DRAINED), Phase.DRAINED),
        ((Phase.DRAINED, Phase.FAILED), Phase.FAILED),
    ],
)
def test_a_domain_is_as_far_as_its_last_rank(phases: tuple[Phase, Phase], whole: Phase) -> None:
    observed = folded(registry(*((rank(n, p), told(n)) for n, p in enumerate(phases))))
    assert observed.seen["chat-d7"].phase is whole
    assert "i-0" not in {*observed.seen, *observed.given}


@pytest.mark.parametrize(
    ("stages", "whole"),
    [
        ((Stage.SERVE, Stage.CONNECT), Stage.CONNECT),
        ((Stage.DRAIN, Stage.SERVE), Stage.DRAIN),
        ((Stage.SERVE, Stage.BLANK), Stage.BLANK),
    ],
)
def test_a_rank_that_was_told_to_leave_takes_the_others_along(
    stages: tuple[Stage, Stage], whole: Stage
) -> None:
    observed = folded(registry(*((rank(n), told(n, s)) for n, s in enumerate(stages))))
    assert observed.given["chat-d7"].stage is whole


def test_a_member_is_connected_to_a_domain_when_it_is_connected_to_each_rank() -> None:
    one, both = PeerId("i-0", 100), PeerId("i-1", 101)
    some = InstanceStatus("d-0", 1, Phase.CONNECTING, verified=frozenset({one}))
    all_ = InstanceStatus("d-1", 1, Phase.CONNECTING, verified=frozenset({one, both}))
    pairs = [(some, None), (all_, None), (rank(0), told(0)), (rank(1), told(1))]
    observed = folded(registry(*pairs))
    assert observed.seen["d-0"].verified == frozenset()
    assert observed.seen["d-1"].verified == {PeerId("chat-d7", 100)}


def test_unfolded_ranks_have_their_own_place_and_each_others_addresses_as_peers() -> None:
    observed = folded(registry((rank(0), told(0)), (rank(1), told(1))))
    other = Assignment(
        1, 1, 8, Stage.SERVE, RoleSpec(Role.PREFILL, "chat", ""),
        (Peer(PeerId("chat-d7", 100), Role.DECODE, ("i-0:1",)),),
    )  # fmt: skip
    plan = unfolded({**observed.given, "p-0": other}, observed.domains)
    assert {i: plan[i] for i in ("i-0", "i-1")} == {"i-0": told(0), "i-1": told(1)}
    assert [peer.addresses for peer in plan["p-0"].peers] == [("i-0:1",), ("i-1:1",)]


def test_a_rank_that_follows_another_formation_does_not_complete_this_one() -> None:
    stranger = DomainRank("chat-d3", 1, 2)
    seen = InstanceStatus("i-1", 101, Phase.LOADING, assignment_id=3, domain=stranger)
    observed = folded(registry((rank(0), told(0)), (seen, told(1))))
    assert "chat-d7" not in observed.seen
    assert observed.given.keys() == {"i-0", "i-1"}
