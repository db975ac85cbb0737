"""One instance against any order of assignments, repeated, late and from former leaders, and of
what becomes of its work.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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


class InstanceLifeMachine(RuleBasedStateMachine):
    """The model: a world in which effects become work, and work may end in any order, or after it
    is wanted no more.
    """

    @initialize(own=st.sampled_from([None, *ROLE_SPECS]))
    def begin(self, own: RoleSpec | None) -> None:
        self.now = 0.0
        self.own = own
        self.life = InstanceLife(INCARNATION, own)
        self.loads: list[RoleSpec] = []
        self.is_loading = False
        self.is_admitting = own is not None
        self.is_erased = False
        self.num_running = 0
        self.asked: set[PeerId] = set()
        self.met: set[PeerId] = set()
        self.highest = (0, 0)
        self.last_stage: Stage | None = None

    def step(self, event: life.Event) -> list[life.Effect]:
        effects = self.life.handle(event, self.now)
        for effect in effects:
            self.carry_out(effect)
        return effects

    def carry_out(self, effect: life.Effect) -> None:
        assert not self.is_erased or isinstance(effect, life.Ignored), "nothing after Erase"
        match effect:
            case life.LoadEngine(role_spec):
                assert self.own is None
                self.loads.append(role_spec)
                self.is_loading = True
            case life.Verify(peer):
                assert peer.role is Role.PREFILL, "no connection between equals (S25)"
                assert self.life.role_spec is not None
                assert self.life.role_spec.role is Role.DECODE
                assert peer.id not in self.asked, "one probe at a time"
                self.asked.add(peer.id)
            case life.ForgetPeer(peer):
                self.asked.discard(peer.id)
                self.met.discard(peer.id)
            case life.AdmitRequests():
                assert not self.is_admitting
                assert not self.is_loading, "no request before the engine is there (S19)"
                self.is_admitting = True
            case life.RefuseRequests():
                assert self.is_admitting
                self.is_admitting = False
            case life.Erase():
                self.is_erased, self.is_admitting, self.num_running = True, False, 0

    # -- the master, or several --------------------------------------------------------------------

    @rule(
        incarnation=st.sampled_from([INCARNATION, INCARNATION, INCARNATION, 8]),
        epoch=st.integers(1, 3),
        number=st.integers(1, 3),
        stage=st.sampled_from(Stage),
        role_spec=st.sampled_from(ROLE_SPECS),
        peers=st.lists(st.sampled_from(PEERS), unique=True).map(tuple),
        same_role_spec=st.booleans(),
    )
    def assign(
        self,
        incarnation: int,
        epoch: int,
        number: int,
        stage: Stage,
        role_spec: RoleSpec,
        peers: tuple[Peer, ...],
        same_role_spec: bool,
    ) -> None:
        if same_role_spec and self.life.role_spec is not None:
            role_spec = self.life.role_spec
        before = (self.life.phase, self.life.role_spec, self.life.assignment)
        given = Assignment(incarnation, epoch, number, stage, role_spec, peers)
        effects = self.step(life.Assigned(given))
        if incarnation != INCARNATION or epoch < self.highest[0]:
            assert len(effects) == 1
            assert isinstance(effects[0], life.Ignored)
        if any(isinstance(e, life.Ignored) for e in effects):
            assert before == (self.life.phase, self.life.role_spec, self.life.assignment)
            return
        assert (epoch, number) >= self.highest
        self.highest, self.last_stage = (epoch, number), stage
        assert self.step(life.Assigned(given)) == ([life.Ignored.OVER] if self.is_erased else [])

    # -- its work ----------------------------------------------------------------------------------

    @precondition(lambda self: self.is_loading and not self.is_erased)
    @rule(works=st.booleans())
    def end_load(self, works: bool) -> None:
        self.is_loading = False
        self.step(life.Loaded() if works else life.LoadFailed("WRONG_HASH: model.bin"))

    @precondition(lambda self: self.asked and not self.is_erased)
    @rule(data=st.data(), works=st.booleans())
    def end_probe(self, data: st.DataObject, works: bool) -> None:
        peer = data.draw(st.sampled_from(sorted(self.asked)))
        self.asked.discard(peer)
        if works:
            self.met.add(peer)
            self.step(life.PeerVerified(peer))
        else:
            self.step(life.PeerFailed(peer, "KV_CONNECT_FAILED"))

    @rule(peer=st.sampled_from(PEERS))
    def end_probe_of_one_that_left(self, peer: Peer) -> None:
        if peer.id not in self.asked:
            before = self.life.verified_peers
            self.step(life.PeerVerified(peer.id))
            assert self.life.verified_peers == before

    @precondition(lambda self: self.is_admitting)
    @rule()
    def request(self) -> None:
        self.num_running += 1

    @precondition(lambda self: self.num_running)
    @rule()
    def finish_all(self) -> None:
        self.num_running = 0
        if not self.is_admitting:
            self.step(life.BecameIdle())

    @rule(seconds=st.floats(0.1, 20))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.step(Tick())

    # -- always ------------------------------------------------------------------------------------

    @invariant()
    def it_is_what_it_says(self) -> None:
        self.life.check_invariants()
        if self.is_erased:
            return
        phase = self.life.phase
        assert (phase is Phase.READY) == self.is_admitting, "only READY ones take requests (S19)"
        assert set(self.life.verified_peers) <= self.met
        assert not set(self.life.verified_peers) & set(self.life.failed_peers)
        if phase is Phase.DRAINED:
            assert self.num_running == 0, "nothing is cut by being erased now (S22)"
        if self.life.assignment is None and self.own is None:
            assert phase is Phase.BLANK
        assert len(self.loads) <= 1, "one role spec in its life"

    @invariant()
    def it_goes_no_further_than_it_may(self) -> None:
        phase = self.life.phase
        if self.is_erased or phase is Phase.FAILED:
            return
        if self.last_stage is Stage.LOAD and not self.own:
            assert phase in (Phase.LOADING, Phase.LOADED, Phase.READY)
        if self.last_stage is Stage.DRAIN:
            assert phase in (Phase.DRAINING, Phase.DRAINED)


@pytest.mark.req("S19", "S23", "S25")
class TestInstanceLife(InstanceLifeMachine.TestCase):  # type: ignore[valid-type,misc]  # made at run time
    pass


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
def test_a_master_that_was_followed_by_another_is_not_heeded() -> None:
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
def test_a_master_that_knows_less_of_the_role_than_was_loaded_is_heeded() -> None:
    """Assignments are lost with their bucket, and written again from what the records say."""
    one = InstanceLife(INCARNATION)
    role_spec = replace(ROLE_SPECS[0], model="m", options=(("num_slots", "4"),))
    one.handle(life.Assigned(Assignment(INCARNATION, 1, 1, Stage.SERVE, role_spec)), 0)
    one.handle(life.Loaded(), 0)
    again = Assignment(INCARNATION, 2, 1, Stage.DRAIN, ROLE_SPECS[0])
    assert one.handle(life.Assigned(again), 1) == [life.RefuseRequests()]
    assert one.role_spec == role_spec
    upgrade = replace(again, stage=Stage.SERVE, role_spec=replace(role_spec, revision="r2"))
    assert one.handle(life.Assigned(upgrade), 2) == [life.Ignored.OTHER_ROLE]


def test_one_with_a_role_of_its_own_takes_the_revision_it_is_given() -> None:
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


def test_one_that_is_not_drained_to_its_end_may_be_taken_back() -> None:
    one = InstanceLife(INCARNATION, ROLE_SPECS[0])
    assert one.handle(assigned(Stage.DRAIN), 0) == [life.RefuseRequests()]
    assert one.handle(assigned(Stage.SERVE), 1) == [life.AdmitRequests()]
    assert one.handle(life.BecameIdle(), 1) == []
    assert one.handle(assigned(Stage.DRAIN), 2) == [life.RefuseRequests()]
    assert one.phase is Phase.DRAINING


def test_what_could_not_load_says_why_until_it_is_erased() -> None:
    one = InstanceLife(INCARNATION)
    one.handle(assigned(Stage.LOAD), 0)
    one.handle(life.LoadFailed("WRONG_HASH: model.bin"), 1)
    assert (one.phase, one.failure) == (Phase.FAILED, "WRONG_HASH: model.bin")
    assert one.handle(assigned(Stage.SERVE), 2) == []
    assert one.phase is Phase.FAILED
    assert one.handle(assigned(Stage.BLANK), 3) == [life.Erase()]
