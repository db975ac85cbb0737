"""Decides when and how each pull of a receiver ends.

A pull transfers one prompt's KV into a range of memory, its landing. The sender announces the bytes
part by part. Each part arrives, is verified, and is delivered in order. While a pull waits or
receives, its lease at the sender is renewed. If a pull fails or its caller gives it up, the
receiver asks the sender to stop. The pull is then drained, which means that the receiver waits
until no late write can reach the landing (`landing.py`).

A pull also fails if no bytes came for `stall_s`. This detects a cut link long before the deadline,
but lets a slow link use all of the time. If bytes are still missing STOP_S after the deadline or
after this failure, the connection is aborted, because the sender may be frozen and not only slow.
For a pull that failed or was given up, the deadline is at most PULL_DRAIN_S away.

An abort must not end other pulls. While other pulls still expect bytes on the connection, the
connection is retired instead: it takes no new pull, and is aborted after its last pull. But if no
bytes of any pull came for PULL_DRAIN_S, the connection is aborted at once, with all its pulls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from pdmesh.core.deadlines import PULL_DRAIN_S, RENEWALS_PER_LEASE, SILENT_S, STOP_S
from pdmesh.core.flight_recorder import FlightRecorder, recorded
from pdmesh.core.kv.transfer.landing import Landing
from pdmesh.core.kv.transfer.receiver_events import (
    AbortPeer,
    CallerLeft,
    CheckFailed,
    CheckPart,
    CompletePull,
    DeliverPart,
    FailPull,
    FreeLanding,
    MetaArrived,
    PartArrived,
    PartChecked,
    PeerLost,
    PullRefused,
    PullRequested,
    ReceivePart,
    ReceiverEffect,
    ReceiverEvent,
    RenewLease,
    RetirePeer,
    SendAck,
    SendPull,
    SourceComplete,
    TellSilent,
    Tick,
)
from pdmesh.core.kv.transfer.ticket import PullFailure


@dataclass(slots=True)
class _Pull:
    peer: int
    landing: Landing
    deadline: float
    renew_every_s: float
    renew_at: float
    stall_s: float
    heard_at: float  # time of the last message or byte of this pull
    num_delivered: int = 0  # parts
    verified: set[int] = field(default_factory=set)  # parts that are not delivered yet
    is_silent: bool = False
    has_caller: bool = True
    is_stopped: bool = False  # the pull failed or was given up, and must drain


class PullBook:
    """One agent's pulls. Only `handle` changes the book."""

    def __init__(self) -> None:
        self.recorder = FlightRecorder()
        self._pulls: dict[int, _Pull] = {}
        self._heard_at: dict[int, float] = {}  # by peer: last message or byte of its pulls
        self._retired: dict[int, None] = {}  # peers

    def __len__(self) -> int:
        return len(self._pulls)

    @property
    def is_idle(self) -> bool:
        """Whether no pull depends on time, so that no Tick is needed."""
        return not (self._pulls or self._retired)

    @recorded
    def handle(self, event: ReceiverEvent, now: float) -> list[ReceiverEffect]:
        match event:
            case PullRequested():
                return self._on_requested(event, now)
            case MetaArrived():
                return self._on_meta(event, now)
            case PartArrived():
                return self._on_part(event, now)
            case PartChecked():
                return self._on_checked(event)
            case CheckFailed():
                return self._on_check_failed(event)
            case PullRefused():
                return self._on_refused(event, now)
            case SourceComplete() | CallerLeft():
                return self._on_caller(event, now)
            case PeerLost(peer):
                return self._on_peer_lost(peer)
            case Tick():
                return self._on_tick(now)

    def check_invariants(self) -> None:
        for pull in self._pulls.values():
            landing = pull.landing
            assert not landing.is_peer_lost or not landing.posted, "it outlived its connection"
            assert not (pull.is_stopped and landing.is_free), "it should have ended"
            assert pull.is_stopped or pull.has_caller
            assert pull.num_delivered + len(pull.verified) <= landing.num_parts

    def _on_requested(self, event: PullRequested, now: float) -> list[ReceiverEffect]:
        if event.pull_id in self._pulls:
            raise ValueError(f"pull {event.pull_id} exists")
        every = event.lease_s / RENEWALS_PER_LEASE or math.inf
        self._pulls[event.pull_id] = _Pull(
            event.peer,
            Landing(event.min_bytes, event.max_bytes),
            event.deadline,
            every,
            now + every,
            event.stall_s,
            now,
        )
        return [SendPull(event.pull_id)]

    # -- parts ------------------------------------------------------------------------------------

    def _on_meta(self, event: MetaArrived, now: float) -> list[ReceiverEffect]:
        pull = self._pulls.get(event.pull_id)
        if pull is None or pull.peer != event.peer or pull.landing.is_peer_lost:
            # Inline bytes can be ignored. Other bytes would wait forever for a receive.
            return [] if event.is_inline else [AbortPeer(event.peer)]
        index = pull.landing.announce(event)
        if index is None:
            return [*self._fail(event.pull_id, PullFailure.PROTOCOL), AbortPeer(event.peer)]
        self._hear(pull, now)
        if not event.is_inline:
            return [ReceivePart(event.pull_id, index)]
        if pull.is_stopped:
            return self._settle(event.pull_id)
        pull.landing.checking.add(index)
        return [CheckPart(event.pull_id, index)]

    def _hear(self, pull: _Pull, now: float) -> None:
        pull.heard_at = self._heard_at[pull.peer] = now

    def _on_part(self, event: PartArrived, now: float) -> list[ReceiverEffect]:
        pull = self._pulls.get(event.pull_id)
        if pull is None or event.index not in pull.landing.posted:
            return []
        pull.landing.posted.remove(event.index)
        self._hear(pull, now)
        if pull.is_stopped:
            return self._settle(event.pull_id)
        pull.landing.checking.add(event.index)
        return [CheckPart(event.pull_id, event.index)]

    def _on_checked(self, event: PartChecked) -> list[ReceiverEffect]:
        pull = self._pulls.get(event.pull_id)
        if pull is None or event.index not in pull.landing.checking:
            return []
        pull.landing.checking.remove(event.index)
        if not event.is_intact:
            return [*self._fail(event.pull_id, PullFailure.CORRUPT), *self._settle(event.pull_id)]
        pull.verified.add(event.index)
        effects: list[ReceiverEffect] = []
        while not pull.is_stopped and pull.num_delivered in pull.verified:
            pull.verified.remove(pull.num_delivered)
            effects.append(DeliverPart(event.pull_id, pull.num_delivered))
            pull.num_delivered += 1
        return effects + self._settle(event.pull_id)

    def _on_check_failed(self, event: CheckFailed) -> list[ReceiverEffect]:
        pull = self._pulls.get(event.pull_id)
        if pull is None or event.index not in pull.landing.checking:
            return []
        pull.landing.checking.remove(event.index)
        return [*self._fail(event.pull_id, PullFailure.UNCHECKED), *self._settle(event.pull_id)]

    def _settle(self, pull_id: int) -> list[ReceiverEffect]:
        """End the pull if no more bytes can come."""
        pull = self._pulls.get(pull_id)
        if pull is None or not pull.landing.is_free:
            return []
        del self._pulls[pull_id]
        if pull.is_stopped:
            return [FreeLanding(pull_id)]
        ack: list[ReceiverEffect] = [] if pull.landing.is_peer_lost else [SendAck(pull_id, True)]
        return [*ack, CompletePull(pull_id)]

    # -- the end ----------------------------------------------------------------------------------

    def _on_refused(self, event: PullRefused, now: float) -> list[ReceiverEffect]:
        pull = self._pulls.get(event.pull_id)
        if (
            pull is None
            or pull.peer != event.peer
            or pull.landing.is_peer_lost
            or pull.landing.is_announced
        ):
            return []
        pull.landing.is_refused = True
        self._heard_at[pull.peer] = now
        return [*self._fail(event.pull_id, event.reason), *self._settle(event.pull_id)]

    def _on_caller(self, event: SourceComplete | CallerLeft, now: float) -> list[ReceiverEffect]:
        pull = self._pulls.get(event.pull_id)
        if pull is None:
            return []
        if isinstance(event, SourceComplete):
            pull.stall_s, pull.heard_at = event.stall_s, now
            return []
        pull.has_caller = False
        return [*self._stop(event.pull_id), *self._settle(event.pull_id)]

    def _on_peer_lost(self, peer: int) -> list[ReceiverEffect]:
        effects: list[ReceiverEffect] = []
        self._heard_at.pop(peer, None)
        self._retired.pop(peer, None)
        for pull_id in [i for i, pull in self._pulls.items() if pull.peer == peer]:
            pull = self._pulls[pull_id]
            if pull.landing.lose_peer():  # otherwise all bytes have arrived
                effects += self._fail(pull_id, PullFailure.PEER_LOST)
            effects += self._settle(pull_id)
        return effects

    def _on_tick(self, now: float) -> list[ReceiverEffect]:
        effects: list[ReceiverEffect] = []
        overdue: dict[int, None] = {}  # peers
        for pull_id, pull in self._pulls.items():
            if not pull.landing.is_owed:
                continue
            if pull.is_stopped:
                pull.deadline = min(pull.deadline, now + PULL_DRAIN_S)
            if now >= pull.renew_at and not pull.is_stopped:
                pull.renew_at = now + pull.renew_every_s
                effects.append(RenewLease(pull_id))
            given_up_at = min(pull.deadline, pull.heard_at + pull.stall_s)
            if now >= given_up_at:
                effects += self._fail(pull_id, PullFailure.TIMEOUT)
            elif self._is_newly_silent(pull, now):
                pull.is_silent = True
                effects.append(TellSilent(pull_id))
            if now >= given_up_at + STOP_S:
                overdue[pull.peer] = None
        return effects + self._end_peers(overdue, now) if overdue or self._retired else effects

    def _end_peers(self, overdue: Iterable[int], now: float) -> list[ReceiverEffect]:
        """Abort or retire the `overdue` peers. Each has a pull that should have drained by now."""
        effects: list[ReceiverEffect] = []
        wanted = {
            pull.peer
            for pull in self._pulls.values()
            if pull.landing.is_owed and not pull.is_stopped
        }
        for peer in overdue:
            if peer not in wanted or now >= self._heard_at.get(peer, -math.inf) + PULL_DRAIN_S:
                effects.append(AbortPeer(peer))
            else:
                self._retired[peer] = None
                effects.append(RetirePeer(peer))
        in_use = {pull.peer for pull in self._pulls.values()}
        return effects + [AbortPeer(peer) for peer in self._retired if peer not in in_use]

    @staticmethod
    def _is_newly_silent(pull: _Pull, now: float) -> bool:
        """Whether to report that the pull is silent. Each pull is reported once.

        A pull that waits for prefill is expected to be silent.
        """
        is_known = pull.is_silent or pull.is_stopped or math.isinf(pull.stall_s)
        return not is_known and now >= pull.heard_at + SILENT_S

    def _fail(self, pull_id: int, reason: str) -> list[ReceiverEffect]:
        """Tell the caller of the failure unless it was told before, and ask the sender to stop."""
        pull = self._pulls[pull_id]
        told: list[ReceiverEffect] = [FailPull(pull_id, reason)] if pull.has_caller else []
        pull.has_caller = False
        return [*self._stop(pull_id), *told]

    def _stop(self, pull_id: int) -> list[ReceiverEffect]:
        pull = self._pulls[pull_id]
        is_first, pull.is_stopped = not pull.is_stopped, True
        is_heard = not (pull.landing.is_refused or pull.landing.is_peer_lost)
        return [SendAck(pull_id, False)] if is_first and is_heard else []
