"""The life of one instance under any order of assignments and of the results of its work.

Assignments may be repeated, late, or from former leaders.
"""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdmesh.core.instance import lifecycle_events as life
from pdmesh.core.instance.lifecycle import InstanceLife
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
    """A world that starts the work that the instance asks for.

    Work may end in any order, even when the instance no longer needs it.
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
                assert peer.role is Role.PREFILL, (
                    "no connection between instances of one role (S25)"
                )
                assert self.life.role_spec is not None
                assert self.life.role_spec.role is Role.DECODE
                assert peer.id not in self.asked, "one probe at a time"
                self.asked.add(peer.id)
            case life.ForgetPeer(peer):
                self.asked.discard(peer.id)
                self.met.discard(peer.id)
            case life.AdmitRequests():
                assert not self.is_admitting
                assert not self.is_loading, "no request before the engine has started (S19)"
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
            assert self.num_running == 0, "the erase cuts no request (S22)"
        if self.life.assignment is None and self.own is None:
            assert phase is Phase.BLANK
        assert len(self.loads) <= 1, "one role spec in an incarnation"

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
