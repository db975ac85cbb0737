"""The receiver's pulls: each succeeds once or fails once, and its landing bytes are let go only when safe.

REQUESTED -> RECEIVING -> VERIFYING -> done. Once a receive may have been posted, nothing but the arrival of
its bytes or the end of its connection proves that no late write lands. So a pull whose caller gave up is drained,
and one past its deadline has its connection aborted: frozen peers look like slow ones, and both end there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from pdmesh.core.ticket import PullFailure


@dataclass(frozen=True, slots=True)
class PullRequested:
    """A caller wants its bytes, between `min_bytes` and `max_bytes`, by `deadline`. `peer` is the connection."""

    pull_id: int
    peer: int
    min_bytes: int
    max_bytes: int
    deadline: float


@dataclass(frozen=True, slots=True)
class MetaArrived:
    """The sender serves the pull. `is_inline`: the bytes came with the message, else they follow."""

    peer: int
    pull_id: int
    num_bytes: int
    is_inline: bool


@dataclass(frozen=True, slots=True)
class PayloadArrived:
    pull_id: int


@dataclass(frozen=True, slots=True)
class Checked:
    """The checksums were compared."""

    pull_id: int
    is_intact: bool


@dataclass(frozen=True, slots=True)
class PullRefused:
    peer: int
    pull_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class CallerLeft:
    """Nobody wants the result any more."""

    pull_id: int


@dataclass(frozen=True, slots=True)
class PeerLost:
    """A connection is gone; no write comes from it any more."""

    peer: int


@dataclass(frozen=True, slots=True)
class Tick:
    pass


ReceiverEvent = (
    PullRequested
    | MetaArrived
    | PayloadArrived
    | Checked
    | PullRefused
    | CallerLeft
    | PeerLost
    | Tick
)


@dataclass(frozen=True, slots=True)
class SendPull:
    pull_id: int


@dataclass(frozen=True, slots=True)
class ReceivePayload:
    """Post the receives into the landing range; answered by PayloadArrived, or PeerLost."""

    pull_id: int


@dataclass(frozen=True, slots=True)
class Check:
    """Compare checksums, having copied the bytes first if they came inline; answered by Checked."""

    pull_id: int


@dataclass(frozen=True, slots=True)
class SendAck:
    pull_id: int
    is_taken: bool


@dataclass(frozen=True, slots=True)
class Complete:
    """The verified bytes are the caller's, and the landing range with them."""

    pull_id: int


@dataclass(frozen=True, slots=True)
class Fail:
    """Tell the caller, if it is still there. FreeLanding follows, now or later."""

    pull_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class FreeLanding:
    """No late write can land. The last word about a pull that did not complete."""

    pull_id: int


@dataclass(frozen=True, slots=True)
class AbortPeer:
    """Drop the connection; answered by PeerLost. May be repeated."""

    peer: int


ReceiverEffect = (
    SendPull | ReceivePayload | Check | SendAck | Complete | Fail | FreeLanding | AbortPeer
)


class _Stage(Enum):
    REQUESTED = auto()
    RECEIVING = auto()
    VERIFYING = auto()


@dataclass(slots=True)
class _Pull:
    peer: int
    min_bytes: int
    max_bytes: int
    deadline: float
    stage: _Stage = _Stage.REQUESTED
    has_caller: bool = True
    is_peer_lost: bool = False


class PullBook:
    """One agent's pulls. `handle` is the only way to change it."""

    def __init__(self) -> None:
        self._pulls: dict[int, _Pull] = {}

    def __len__(self) -> int:
        return len(self._pulls)

    def num_pulls_from(self, peer: int) -> int:
        return sum(pull.peer == peer for pull in self._pulls.values())

    def handle(self, event: ReceiverEvent, now: float) -> list[ReceiverEffect]:
        match event:
            case PullRequested():
                return self._on_requested(event)
            case MetaArrived():
                return self._on_meta(event)
            case PayloadArrived(pull_id):
                return self._on_payload(pull_id)
            case Checked():
                return self._on_checked(event)
            case PullRefused():
                return self._on_refused(event)
            case CallerLeft(pull_id):
                if pull_id in self._pulls:
                    self._pulls[pull_id].has_caller = False
                return []
            case PeerLost(peer):
                return self._on_peer_lost(peer)
            case Tick():
                return self._on_tick(now)

    def check_invariants(self) -> None:
        for pull in self._pulls.values():
            assert pull.stage is _Stage.VERIFYING or not pull.is_peer_lost, (
                "outlived its connection"
            )

    def _on_requested(self, event: PullRequested) -> list[ReceiverEffect]:
        if event.pull_id in self._pulls:
            raise ValueError(f"pull {event.pull_id} exists")
        self._pulls[event.pull_id] = _Pull(
            event.peer, event.min_bytes, event.max_bytes, event.deadline
        )
        return [SendPull(event.pull_id)]

    def _on_meta(self, event: MetaArrived) -> list[ReceiverEffect]:
        pull = self._pulls.get(event.pull_id)
        is_expected = (
            pull is not None and pull.peer == event.peer and pull.stage is _Stage.REQUESTED
        )
        if pull is None or not is_expected:
            # Inline bytes can be ignored. Bytes that follow would wait for a receive for ever.
            return [] if event.is_inline else [AbortPeer(event.peer)]
        if not pull.min_bytes <= event.num_bytes <= pull.max_bytes:
            return [*self._fail(event.pull_id, PullFailure.PROTOCOL), AbortPeer(event.peer)]
        if event.is_inline:
            pull.stage = _Stage.VERIFYING
            return [Check(event.pull_id)]
        pull.stage = _Stage.RECEIVING
        return [ReceivePayload(event.pull_id)]

    def _on_payload(self, pull_id: int) -> list[ReceiverEffect]:
        pull = self._pulls.get(pull_id)
        if pull is None or pull.stage is not _Stage.RECEIVING:
            return []
        pull.stage = _Stage.VERIFYING
        return [Check(pull_id)]

    def _on_checked(self, event: Checked) -> list[ReceiverEffect]:
        pull = self._pulls.get(event.pull_id)
        if pull is None or pull.stage is not _Stage.VERIFYING:
            return []
        is_taken = event.is_intact and pull.has_caller
        ack = [] if pull.is_peer_lost else [SendAck(event.pull_id, is_taken)]
        if is_taken:
            del self._pulls[event.pull_id]
            return [*ack, Complete(event.pull_id)]
        fail = self._fail(event.pull_id, PullFailure.CORRUPT)
        del self._pulls[event.pull_id]
        return [*ack, *fail, FreeLanding(event.pull_id)]

    def _on_refused(self, event: PullRefused) -> list[ReceiverEffect]:
        pull = self._pulls.get(event.pull_id)
        if pull is None or pull.peer != event.peer or pull.stage is not _Stage.REQUESTED:
            return []
        fail = self._fail(event.pull_id, event.reason)
        del self._pulls[event.pull_id]
        return [*fail, FreeLanding(event.pull_id)]

    def _on_peer_lost(self, peer: int) -> list[ReceiverEffect]:
        effects: list[ReceiverEffect] = []
        for pull_id in [i for i, pull in self._pulls.items() if pull.peer == peer]:
            pull = self._pulls[pull_id]
            pull.is_peer_lost = True
            if pull.stage is not _Stage.VERIFYING:  # else the bytes are all here
                effects += [*self._fail(pull_id, PullFailure.PEER_LOST), FreeLanding(pull_id)]
                del self._pulls[pull_id]
        return effects

    def _on_tick(self, now: float) -> list[ReceiverEffect]:
        effects: list[ReceiverEffect] = []
        for pull_id, pull in self._pulls.items():
            if now >= pull.deadline and pull.stage is not _Stage.VERIFYING:
                effects += [*self._fail(pull_id, PullFailure.TIMEOUT), AbortPeer(pull.peer)]
        return effects

    def _fail(self, pull_id: int, reason: str) -> list[ReceiverEffect]:
        """Tell the caller once."""
        pull = self._pulls[pull_id]
        if not pull.has_caller:
            return []
        pull.has_caller = False
        return [Fail(pull_id, reason)]
