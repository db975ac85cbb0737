"""How far one incarnation of an instance is between blank and serving, by what the master assigns it (P/D-Serve 3.2, 3.3).

The assignment's stage says how far the instance may go; what is done is said by events; the phase follows from both. So an
assignment that is repeated, or comes after some that were never seen, leads to the same state. An incarnation takes one duty
in its life: another role means to drain, to be erased, and to begin anew under another incarnation (S23), so
that nothing of the old role can act again.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

from pdmesh.core.fleet import Role

RETRY_S = (1.0, 15.0)  # a failed peer is verified again after so long; doubled up to the second
MAX_PEERS = 1024  # of one assignment; more are not verified


class Stage(enum.IntEnum):
    """How far the master lets an instance go. The numbers are those of `pdmesh.v1.Stage`."""

    LOAD = 1
    CONNECT = 2
    SERVE = 3
    DRAIN = 4
    BLANK = 5


class Phase(enum.IntEnum):
    """How far it is. The numbers are those of `pdmesh.v1.InstancePhase`."""

    BLANK = 1
    LOADING = 2
    LOADED = 3
    CONNECTING = 4
    CONNECTED = 5
    READY = 6
    DRAINING = 7
    DRAINED = 8
    FAILED = 9


@dataclass(frozen=True, slots=True, order=True)
class PeerId:
    instance_id: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Peer:
    """An instance of the same group. `addresses` are of its KV transport, one per device, in device order (S14)."""

    id: PeerId
    role: Role
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Duty:
    """What an instance is to be. It never changes within an incarnation."""

    role: Role
    group_id: str
    scenario: str
    revision: str = ""  # of model, KV layout and transport
    model: str = ""  # the name clients use
    model_dir: str = ""  # empty: as the instance's settings say
    manifest: str = ""  # path of the artefact's manifest; empty: the model is loaded unchecked
    options: tuple[tuple[str, str], ...] = ()  # settings of the instance, by name


@dataclass(frozen=True, slots=True)
class Assignment:
    """The master's word. Mirrors `pdmesh.v1.Assignment`."""

    incarnation: int
    epoch: int
    assignment_id: int
    stage: Stage
    duty: Duty
    peers: tuple[Peer, ...] = ()


@dataclass(frozen=True, slots=True)
class Assigned:
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Loaded:
    """The engine is there, with the duty's model."""


@dataclass(frozen=True, slots=True)
class LoadFailed:
    failure: str  # a stable reason, a colon, and what went wrong


@dataclass(frozen=True, slots=True)
class PeerVerified:
    peer: PeerId


@dataclass(frozen=True, slots=True)
class PeerFailed:
    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class BecameIdle:
    """No request runs and no staged KV waits; none can come while requests are refused."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. Sent about twice a second."""


Event = Assigned | Loaded | LoadFailed | PeerVerified | PeerFailed | BecameIdle | Tick


@dataclass(frozen=True, slots=True)
class Load:
    """Fetch, check and load what the duty needs; requests are refused until `Admit`."""

    duty: Duty


@dataclass(frozen=True, slots=True)
class Verify:
    """Pull a probe from the peer; answered by PeerVerified or PeerFailed."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class ForgetPeer:
    """The peer left: close the connections to it (S26)."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class Admit:
    """Take requests from now on."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Take nothing new, finish what runs, keep staged KV until its leases end; answered by BecameIdle."""


@dataclass(frozen=True, slots=True)
class Erase:
    """Stop everything and forget it; the process goes on as a blank one, under a new incarnation. Last of all."""


class Ignored(enum.Enum):
    """Why an assignment is not followed."""

    OTHER_INCARNATION = "meant for another incarnation"
    OLDER = "older than one that was seen"
    OTHER_DUTY = "another duty, without having been erased"
    OVER = "this incarnation is over"


Effect = Load | Verify | ForgetPeer | Admit | Refuse | Erase | Ignored


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
    """One incarnation. The only way to change state is `handle`.

    `own_duty`: its settings gave the instance a role, and it is loaded: it serves at once, until assignments of that duty
    say otherwise. `epoch` is the highest the process has seen.
    """

    incarnation: int
    own_duty: Duty | None = None
    epoch: int = 0
    assignment: Assignment | None = None
    failure: str = ""
    is_over: bool = False
    _is_asked_to_load: bool = False
    _is_loaded: bool = False
    _was_ready: bool = False
    _is_admitting: bool = False
    _is_idle: bool = True
    _peers: dict[PeerId, _PeerState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.own_duty is not None:
            self._is_asked_to_load = self._is_loaded = self._was_ready = True
            self._is_admitting, self._is_idle = True, False

    # -- what it is now ---------------------------------------------------------------------------

    @property
    def duty(self) -> Duty | None:
        return self.assignment.duty if self.assignment is not None else self.own_duty

    @property
    def phase(self) -> Phase:
        if self.failure:
            return Phase.FAILED
        if self.duty is None:
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
        """With the reason of the last failure."""
        return {i: state.failure for i, state in sorted(self._peers.items()) if state.failure}

    def check_invariants(self) -> None:
        assert not self._is_admitting or (self._is_loaded and not self.failure)
        assert (self.phase is Phase.READY) == (self._is_admitting and not self.is_over)
        assert self._is_loaded or not self._peers
        assert not (self._peers and self.duty is not None and self.duty.role is not Role.DECODE)
        assert all(s.peer.role is Role.PREFILL for s in self._peers.values())
        assert not any(s.is_verified and s.failure for s in self._peers.values())

    # -- what happens -----------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        if self.is_over:
            return [Ignored.OVER] if isinstance(event, Assigned) else []
        match event:
            case Assigned(assignment):
                if (ignored := self._why_not(assignment)) is not None:
                    return [ignored]
                self.assignment = assignment
                self.epoch = assignment.epoch
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
        if assignment.stage is not Stage.BLANK and not self._is_same(assignment.duty):
            return Ignored.OTHER_DUTY
        return None

    def _is_same(self, duty: Duty) -> bool:
        if self.assignment is not None:
            return duty == self.assignment.duty
        own = (
            self.own_duty
        )  # what it has loaded is by its settings: the master may call it as it likes
        wanted = (duty.role, duty.group_id, duty.scenario)
        return own is None or wanted == (own.role, own.group_id, own.scenario)

    def _settle(self, peer: PeerId, failure: str, now: float) -> None:
        state = self._peers.get(peer)
        if state is None or not state.is_asked:
            return  # it left meanwhile
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
        if self.duty is None:
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
            yield Load(self.duty)
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
        """KV is pulled: a decode connects to each prefill, and nobody else to anybody (S25)."""
        if self.assignment is None or self.assignment.duty.role is not Role.DECODE:
            return {}
        peers = (p for p in self.assignment.peers if p.role is Role.PREFILL and p.addresses)
        return {peer.id: peer for peer, _ in zip(peers, range(MAX_PEERS), strict=False)}

    def _open_or_close(self) -> Iterator[Effect]:
        """Once it serves it goes on while peers come and go; whether to begin with failed ones is the master's to say."""
        may_serve = self._stage is Stage.SERVE and (
            self._was_ready or all(state.is_settled for state in self._peers.values())
        )
        if may_serve and not self._is_admitting:
            self._is_admitting = self._was_ready = True
            self._is_idle = False
            yield Admit()
        elif self._stage is Stage.DRAIN and self._is_admitting:
            self._is_admitting = False
            yield Refuse()
