"""Decides what an instance does from its start to its end, as assigned (P/D-Serve 3.2, 3.3).

A new instance is blank, which means that it has no role. The leading master sends it an assignment,
which has a role spec (what the instance should be) and a stage (how far it may go). Events report
the steps that are done. The instance's phase, which is how far it has come, follows from the
assignment and these events. So it does no harm if assignments are repeated or lost. A decode also
verifies its connections to its peers, the prefills of its group. An incarnation, which is one life
of an instance, takes only one role spec. For another role, the instance drains, is erased, and
starts again as another incarnation (S23). So no part of the old role can act any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import InitVar, dataclass, field, replace

from pdmesh.core.flight_recorder import FlightRecorder, recorded
from pdmesh.core.instance.lifecycle_events import (
    AdmitRequests,
    Assigned,
    BecameIdle,
    Effect,
    Erase,
    Event,
    ForgetPeer,
    Ignored,
    Loaded,
    LoadEngine,
    LoadFailed,
    PeerFailed,
    PeerVerified,
    RefuseRequests,
    Verify,
)
from pdmesh.core.model import (
    Assignment,
    Peer,
    PeerId,
    Phase,
    Role,
    RoleSpec,
    Stage,
)

RETRY_S = (1.0, 15.0)  # the first and the longest pause before a failed peer is verified again
MAX_PEERS = 1024  # of one assignment; further peers are not verified


@dataclass(slots=True)
class _PeerState:
    peer: Peer
    is_asked: bool = False
    is_verified: bool = False
    failure: str = ""
    num_failures: int = 0
    retry_at: float = 0.0

    @property
    def is_settled(self) -> bool:
        return self.is_verified or bool(self.failure)


@dataclass(slots=True)
class InstanceLife:
    """One incarnation. Only `handle` changes its state.

    `own_role_spec` is the role spec from the instance's own settings, which is already loaded. Such
    an instance serves at once, until an assignment of this role spec gives another stage. `epoch`
    is the highest epoch (number of a leadership) that the process has seen.
    """

    incarnation: int
    own_role_spec: InitVar[RoleSpec | None] = None
    epoch: int = 0
    assignment: Assignment | None = None
    role_spec: RoleSpec | None = None  # of the first assignment, or from the settings
    failure: str = ""
    is_over: bool = False
    _is_asked_to_load: bool = False
    _is_loaded: bool = False
    _was_ready: bool = False
    _is_admitting: bool = False
    _is_idle: bool = True
    _peers: dict[PeerId, _PeerState] = field(default_factory=dict)
    recorder: FlightRecorder = field(default_factory=FlightRecorder, repr=False, compare=False)

    def __post_init__(self, own_role_spec: RoleSpec | None) -> None:
        if own_role_spec is not None:
            self.role_spec = own_role_spec
            self._is_asked_to_load = self._is_loaded = self._was_ready = True
            self._is_admitting, self._is_idle = True, False

    # -- what it is now ---------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        if self.failure:
            return Phase.FAILED
        if self.role_spec is None:
            return Phase.BLANK
        if self._stage >= Stage.DRAIN:
            return Phase.DRAINED if self._is_idle else Phase.DRAINING
        if self._is_admitting:
            return Phase.READY
        if not self._is_loaded:
            return Phase.LOADING
        if self._stage is Stage.LOAD:
            return Phase.LOADED
        are_verified = all(state.is_verified for state in self._peers.values())
        return Phase.CONNECTED if are_verified else Phase.CONNECTING

    @property
    def verified_peers(self) -> tuple[PeerId, ...]:
        return tuple(sorted(i for i, state in self._peers.items() if state.is_verified))

    @property
    def failed_peers(self) -> dict[PeerId, str]:
        """The failed peers, each with the reason of its last failure."""
        return {i: state.failure for i, state in sorted(self._peers.items()) if state.failure}

    def check_invariants(self) -> None:
        assert not self._is_admitting or (self._is_loaded and not self.failure)
        assert (self.phase is Phase.READY) == (self._is_admitting and not self.is_over)
        assert self._is_loaded or not self._peers
        assert not (
            self._peers and self.role_spec is not None and self.role_spec.role is not Role.DECODE
        )
        assert all(s.peer.role is Role.PREFILL for s in self._peers.values())
        assert not any(s.is_verified and s.failure for s in self._peers.values())

    # -- what happens -----------------------------------------------------------------------------

    @recorded
    def handle(self, event: Event, now: float) -> list[Effect]:
        if self.is_over:
            return [Ignored.OVER] if isinstance(event, Assigned) else []
        match event:
            case Assigned(assignment):
                if (ignored := self._why_not(assignment)) is not None:
                    return [ignored]
                self._take(assignment)
            case Loaded():
                self._is_loaded = not self.failure
            case LoadFailed(failure):
                self.failure = "" if self._is_loaded else failure
            case PeerVerified(peer):
                self._settle(peer, "", now)
            case PeerFailed(peer, reason):
                self._settle(peer, reason, now)
            case BecameIdle():
                self._is_idle = not self._is_admitting
        return list(self._advance(now))

    def _why_not(self, assignment: Assignment) -> Ignored | None:
        if assignment.incarnation != self.incarnation:
            return Ignored.OTHER_INCARNATION
        current = self.assignment
        order = (assignment.epoch, assignment.assignment_id)
        if assignment.epoch < self.epoch:
            return Ignored.OLDER
        if current is not None and order < (current.epoch, current.assignment_id):
            return Ignored.OLDER
        if assignment.stage is not Stage.BLANK and not self._is_same(assignment.role_spec):
            return Ignored.OTHER_ROLE
        return None

    def _is_same(self, role_spec: RoleSpec) -> bool:
        """Whether the instance can follow an assigned role spec without loading another model.

        Role, group, scenario, revision and domain must be the same. The rest may change.
        """
        mine = self.role_spec
        if mine is None:
            return True
        is_own = self.assignment is None  # the role spec is from settings, which name no revision
        same = (mine.role, mine.group_id, mine.scenario) == (
            role_spec.role,
            role_spec.group_id,
            role_spec.scenario,
        )
        same = same and mine.domain == role_spec.domain
        return same and (is_own or mine.revision == role_spec.revision)

    def _take(self, assignment: Assignment) -> None:
        if self.role_spec is None:
            self.role_spec = assignment.role_spec
        elif self.assignment is None:
            self.role_spec = replace(self.role_spec, revision=assignment.role_spec.revision)
        self.assignment = assignment
        self.epoch = assignment.epoch

    def _settle(self, peer: PeerId, failure: str, now: float) -> None:
        state = self._peers.get(peer)
        if state is None or not state.is_asked:
            return  # the peer has left, or was not asked
        state.is_asked, state.is_verified, state.failure = False, not failure, failure
        if failure:
            first, most = RETRY_S
            state.retry_at = now + min(most, first * 2.0 ** min(state.num_failures, 16))
            state.num_failures += 1

    # -- what to do about it ----------------------------------------------------------------------

    @property
    def _stage(self) -> Stage:
        return self.assignment.stage if self.assignment is not None else Stage.SERVE

    def _advance(self, now: float) -> Iterator[Effect]:
        if self.role_spec is None:
            return
        if self._stage is Stage.BLANK:
            self.is_over, self._is_admitting = True, False
            self._peers.clear()
            yield Erase()
            return
        if self.failure:
            return
        if not self._is_asked_to_load and self._stage < Stage.DRAIN:
            self._is_asked_to_load = True
            yield LoadEngine(self.role_spec)
        if not self._is_loaded:
            return
        yield from self._meet_peers(now)
        yield from self._open_or_close()

    def _meet_peers(self, now: float) -> Iterator[Effect]:
        wanted = self._wanted_peers()
        for peer_id in [i for i in self._peers if i not in wanted]:
            yield ForgetPeer(self._peers.pop(peer_id).peer)
        if self._stage not in (Stage.CONNECT, Stage.SERVE):
            return
        for peer_id, peer in wanted.items():
            state = self._peers.setdefault(peer_id, _PeerState(peer))
            if state.peer != peer:
                state = self._peers[peer_id] = _PeerState(peer)
            if not (state.is_asked or state.is_verified) and now >= state.retry_at:
                state.is_asked = True
                yield Verify(peer)

    def _wanted_peers(self) -> dict[PeerId, Peer]:
        """The peers to connect to. Only a decode has any, since it pulls KV from prefills (S25)."""
        if (
            self.assignment is None
            or self.role_spec is None
            or self.role_spec.role is not Role.DECODE
        ):
            return {}
        peers = (p for p in self.assignment.peers if p.role is Role.PREFILL and p.addresses)
        return {peer.id: peer for peer, _ in zip(peers, range(MAX_PEERS), strict=False)}

    def _open_or_close(self) -> Iterator[Effect]:
        """An instance that serves continues to serve while peers come and go.

        An instance begins to serve when each peer is verified or has failed. If peers have failed,
        the master decides whether to order the stage SERVE.
        """
        may_serve = self._stage is Stage.SERVE and (
            self._was_ready or all(state.is_settled for state in self._peers.values())
        )
        if may_serve and not self._is_admitting:
            self._is_admitting = self._was_ready = True
            self._is_idle = False
            yield AdmitRequests()
        elif self._stage is Stage.DRAIN and self._is_admitting:
            self._is_admitting = False
            yield RefuseRequests()
