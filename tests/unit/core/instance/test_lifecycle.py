"""The life of one instance under assignments, step by step.

The property test tries any order of assignments.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdmesh.core.instance import lifecycle_events as life
from pdmesh.core.instance.lifecycle import RETRY_S, InstanceLife
from pdmesh.core.model import (
    Assignment,
    Peer,
    PeerId,
    Phase,
    Role,
    RoleSpec,
    Stage,
    Tick,
)

INCARNATION = 7
ROLE_SPECS = [RoleSpec(role, "g", "s", "r1") for role in (Role.PREFILL, Role.DECODE, Role.FUSION)]
PEERS = [
    Peer(PeerId(f"{role.value}-{n}", 1 + n), role, (f"10.0.0.{n}:1",))
    for role in (Role.PREFILL, Role.DECODE)
    for n in range(3)
]


def assigned(stage: Stage, role: Role = Role.PREFILL, *peers: Peer, **changes: Any) -> life.Event:
    role_spec = next(d for d in ROLE_SPECS if d.role is role)
    return life.Assigned(replace(Assignment(INCARNATION, 1, 1, stage, role_spec, peers), **changes))


@pytest.mark.req("S16", "S23")
def test_a_blank_instance_becomes_a_decode_step_by_step_and_blank_again() -> None:
    peer = PEERS[0]
    blank = InstanceLife(INCARNATION)
    assert blank.phase is Phase.BLANK
    assert blank.handle(assigned(Stage.LOAD, Role.DECODE), 0) == [life.LoadEngine(ROLE_SPECS[1])]
    assert blank.phase is Phase.LOADING
    assert blank.handle(life.Loaded(), 1) == []
    assert blank.phase is Phase.LOADED
    assert blank.handle(assigned(Stage.CONNECT, Role.DECODE, peer), 2) == [life.Verify(peer)]
    assert blank.phase is Phase.CONNECTING
    assert blank.handle(life.PeerVerified(peer.id), 3) == []
    assert blank.phase is Phase.CONNECTED
    assert blank.handle(assigned(Stage.SERVE, Role.DECODE, peer), 4) == [life.AdmitRequests()]
    assert blank.phase is Phase.READY
    assert blank.handle(assigned(Stage.DRAIN, Role.DECODE, peer), 5) == [life.RefuseRequests()]
    assert blank.phase is Phase.DRAINING
    assert blank.handle(life.BecameIdle(), 6) == []
    assert blank.phase is Phase.DRAINED
    assert blank.handle(assigned(Stage.BLANK, Role.DECODE), 7) == [life.Erase()]
    assert blank.handle(assigned(Stage.SERVE, Role.DECODE), 8) == [life.Ignored.OVER]


@pytest.mark.req("S16")
def test_a_pair_that_fails_is_named_and_tried_again_ever_more_rarely() -> None:
    peer = PEERS[0]
    one = InstanceLife(INCARNATION)
    one.handle(assigned(Stage.CONNECT, Role.DECODE, peer), 0)
    assert one.handle(life.Loaded(), 0) == [life.Verify(peer)]
    assert one.handle(life.PeerFailed(peer.id, "KV_CONNECT_FAILED"), 0) == []
    assert (one.phase, one.failed_peers) == (Phase.CONNECTING, {peer.id: "KV_CONNECT_FAILED"})
    first, most = RETRY_S
    assert one.handle(Tick(), first / 2) == []
    assert one.handle(Tick(), first) == [life.Verify(peer)]
    one.handle(life.PeerFailed(peer.id, "KV_CONNECT_FAILED"), first)
    assert one.handle(Tick(), 2 * first) == []
    assert one.handle(Tick(), 3 * first) == [life.Verify(peer)]
    one.handle(life.PeerVerified(peer.id), 4 * first)
    assert (one.phase, one.failed_peers) == (Phase.CONNECTED, {})
    assert most > first


@pytest.mark.req("S25", "S26")
def test_peers_come_and_go_while_it_serves() -> None:
    old, new = PEERS[0], PEERS[1]
    one = InstanceLife(INCARNATION)
    one.handle(assigned(Stage.SERVE, Role.DECODE, old), 0)
    one.handle(life.Loaded(), 0)
    assert one.handle(life.PeerVerified(old.id), 0) == [life.AdmitRequests()]
    effects = one.handle(assigned(Stage.SERVE, Role.DECODE, new), 1)
    assert effects == [life.ForgetPeer(old), life.Verify(new)]
    assert one.phase is Phase.READY
    assert one.verified_peers == ()


@pytest.mark.fault("F12", "F13")
def test_orders_from_a_replaced_master_are_ignored() -> None:
    one = InstanceLife(INCARNATION)
    one.handle(assigned(Stage.SERVE, epoch=5), 0)
    one.handle(life.Loaded(), 0)
    for late in (
        assigned(Stage.BLANK, epoch=4),
        assigned(Stage.BLANK, epoch=4, assignment_id=9),
        assigned(Stage.BLANK, epoch=5, assignment_id=0),
    ):
        assert one.handle(late, 1) == [life.Ignored.OLDER]
    assert one.handle(assigned(Stage.BLANK, epoch=9, incarnation=8), 1) == [
        life.Ignored.OTHER_INCARNATION
    ]
    assert one.phase is Phase.READY


@pytest.mark.fault("F21")
def test_an_order_with_less_detail_than_the_loaded_role_is_followed() -> None:
    """The assignments were lost with their bucket. The leader wrote them again from the records,
    which have less detail.
    """
    one = InstanceLife(INCARNATION)
    role_spec = replace(ROLE_SPECS[0], model="m", options=(("num_slots", "4"),))
    one.handle(life.Assigned(Assignment(INCARNATION, 1, 1, Stage.SERVE, role_spec)), 0)
    one.handle(life.Loaded(), 0)
    again = Assignment(INCARNATION, 2, 1, Stage.DRAIN, ROLE_SPECS[0])
    assert one.handle(life.Assigned(again), 1) == [life.RefuseRequests()]
    assert one.role_spec == role_spec
    upgrade = replace(again, stage=Stage.SERVE, role_spec=replace(role_spec, revision="r2"))
    assert one.handle(life.Assigned(upgrade), 2) == [life.Ignored.OTHER_ROLE]


def test_an_instance_with_a_configured_role_takes_the_revision_it_is_given() -> None:
    one = InstanceLife(INCARNATION, RoleSpec(Role.DECODE, "g", "s", model="mine"))
    assert one.handle(assigned(Stage.SERVE, Role.DECODE, PEERS[0]), 0) == [life.Verify(PEERS[0])]
    assert one.phase is Phase.READY
    assert one.role_spec is not None
    assert (one.role_spec.revision, one.role_spec.model) == ("r1", "mine")


@pytest.mark.req("S23")
def test_another_role_needs_another_incarnation() -> None:
    one = InstanceLife(INCARNATION)
    one.handle(assigned(Stage.SERVE, Role.PREFILL), 0)
    one.handle(life.Loaded(), 0)
    other = assigned(Stage.SERVE, Role.DECODE, assignment_id=2)
    assert one.handle(other, 1) == [life.Ignored.OTHER_ROLE]
    assert one.phase is Phase.READY


def test_an_instance_may_be_taken_back_before_its_drain_has_ended() -> None:
    one = InstanceLife(INCARNATION, ROLE_SPECS[0])
    assert one.handle(assigned(Stage.DRAIN), 0) == [life.RefuseRequests()]
    assert one.handle(assigned(Stage.SERVE), 1) == [life.AdmitRequests()]
    assert one.handle(life.BecameIdle(), 1) == []
    assert one.handle(assigned(Stage.DRAIN), 2) == [life.RefuseRequests()]
    assert one.phase is Phase.DRAINING


def test_a_failed_load_shows_its_reason_until_the_erase() -> None:
    one = InstanceLife(INCARNATION)
    one.handle(assigned(Stage.LOAD), 0)
    one.handle(life.LoadFailed("WRONG_HASH: model.bin"), 1)
    assert (one.phase, one.failure) == (Phase.FAILED, "WRONG_HASH: model.bin")
    assert one.handle(assigned(Stage.SERVE), 2) == []
    assert one.phase is Phase.FAILED
    assert one.handle(assigned(Stage.BLANK), 3) == [life.Erase()]
