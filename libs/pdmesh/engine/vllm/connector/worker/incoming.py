"""Pulls KV to one rank of a decode, and scatters it into the blocks of the request that awaits KV.

A pull together with its blocks is a load. `core.kv.transfer.incoming_blocks` makes the decisions
about loads, and this module carries them out. vLLM keeps the blocks until the load is reported as
over, even if the request was aborted. Ranges are scattered as they arrive, on the KV agent's thread
and without the lock. All other effects hold the lock, so that they keep the order of the decisions.

A leg is a request's stay on this instance. The host is the part of the instance outside the engine.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Final

import numpy as np

from pdmesh import failpoints
from pdmesh.core.kv.layout.cache_groups import BlockIds
from pdmesh.core.kv.transfer.incoming_blocks import IncomingBlocks
from pdmesh.core.kv.transfer.incoming_events import (
    AgentLandingFreed,
    BoundSilence,
    CancelPull,
    CompleteLoad,
    FirstTokenKnown,
    IncomingEffect,
    IncomingEvent,
    KeepLease,
    LoadCancelled,
    LoadFailure,
    LoadStarted,
    PullEnded,
    PullFellSilent,
    RangeScattered,
    RangeVerified,
    ReleaseBlocks,
    ReportLoad,
    StartPull,
    StopRenewing,
)
from pdmesh.core.kv.transfer.receiver_events import FreeLanding
from pdmesh.core.kv.transfer.ticket import PullFailure
from pdmesh.core.model import Tick
from pdmesh.engine.vllm.connector.scheduler.handoff import Entered, KvLoad
from pdmesh.engine.vllm.connector.worker.group_caches import GroupCaches
from pdmesh.engine.vllm.connector.worker.piece_pulls import (
    PiecePull,
    Share,
    TogetherPull,
    pull_pieces,
)
from pdmesh.engine.vllm.messages import (
    Arrived,
    PullFailed,
    Pulling,
    RankLandingFreed,
    RankMessage,
    Received,
)
from pdmesh.errors import KvTransferFailed
from pdmesh.kv.agent.thread import AgentThread
from pdmesh.kv.transport.base import KvBytes

# While all requests wait for their KV, vLLM runs an empty step every millisecond. These steps hold
# the GIL, which the agent's thread needs. So each empty step waits up to this long for news of a
# load. A new request has to wait for at most this time.
_EMPTY_STEP_S: Final = 0.003


@dataclass(slots=True)
class _Loading:
    load: KvLoad
    pieces: tuple[PiecePull, ...]
    pull: TogetherPull | None = None  # None until the pull begins


class IncomingKv:
    """The loads of one rank. `send` sends a message to the host.

    vLLM's thread, which runs the steps, calls the methods from `pull` to `take_first_tokens`.
    """

    def __init__(
        self,
        share: Share,
        caches: GroupCaches,
        agent: AgentThread,
        max_pulls: int,
        send: Callable[[RankMessage], None],
    ) -> None:
        self._share, self._rank = share, share.place.rank
        self._caches, self._agent, self._send = caches, agent, send
        self._lock = threading.RLock()  # reentrant, since an effect may cause the next event
        self._has_news = threading.Condition(self._lock)
        self._blocks = IncomingBlocks(max_pulls)
        self._loading: dict[int, _Loading] = {}  # by leg, until the load is over
        self._over: dict[int, tuple[KvLoad, bool]] = {}  # by leg: load, whether all KV arrived
        self._first_tokens: dict[int, int] = {}  # by leg: token 1 that vLLM's scheduler lacks
        self._arrived: dict[int, tuple[int, float, float]] = {}  # by leg: bytes, duration, wait

    # -- a step -----------------------------------------------------------------------------------

    def pull(self, load: KvLoad) -> None:
        """Begin a load. Its pull may have to wait for a turn.

        If the sender has another number of ranks, the pull may consist of several pieces, and takes
        no turn: while a pull waits for a turn, the lease is renewed only at the sender's rank of
        the same number.
        """
        pieces = self._share.pieces(load.ticket, load.landing, self._num_bytes(load))
        takes_turn = load.block_ids and not load.is_early and self._share.is_like(load.ticket)
        started = LoadStarted(
            load.leg,
            tuple(piece.landing.offset for piece in pieces),
            (load.ticket.instance_id, load.ticket.incarnation) if takes_turn else None,
            load.ticket.kv_bytes,
            load.timeout_s,
            load.is_early,
            bool(load.block_ids),
        )
        with self._lock:
            self._loading[load.leg] = _Loading(load, pieces)
            self._tell(started)
            if not load.block_ids:  # the pull only acknowledges, and nothing waits for it
                del self._loading[load.leg]

    def cancel(self, load: KvLoad) -> None:
        """Give up the load. `take_results` reports when vLLM may free the blocks."""
        with self._lock:
            self._arrived.pop(load.leg, None)
            if load.leg in self._over:
                self._over[load.leg] = (load, False)
            self._tell(LoadCancelled(load.leg))

    def forget(self, leg: int) -> None:
        """The request ended before its load began."""
        self._tell(LoadCancelled(leg))

    def take_results(self, is_empty_step: bool = False) -> tuple[set[str], set[str]]:
        """Returns the requests whose loads completed, and those whose loads failed, by vLLM's ids.

        Each load is reported once. After a step that computed nothing, the call waits a moment for
        news of a load under way.
        """
        with self._lock:
            self._tell(Tick())
            if is_empty_step and self._loading and not (self._over or self._first_tokens):
                self._has_news.wait(_EMPTY_STEP_S)
            over, self._over = list(self._over.values()), {}
        for load, is_complete in over:
            if is_complete:
                self._spoil(load.block_ids, failpoints.hit("decode.pulled"))
        received = {load.key for load, is_complete in over if is_complete}
        return received, {load.key for load, is_complete in over if not is_complete}

    def _spoil(self, block_ids: BlockIds, action: str | None) -> None:
        """Do what a test's failpoint orders: zero all KV that arrived, or only the states."""
        if action == "zero-states":
            block_ids = self._caches.groups.states(block_ids)
        if action in ("zero-kv", "zero-states"):
            num_bytes = self._caches.num_bytes(block_ids)
            self._caches.scatter(np.zeros(num_bytes, np.uint8), block_ids)

    def entered(self, entered: Entered) -> None:
        """The request computes its first tokens in the step about to run."""
        with self._lock:
            came = self._arrived.pop(entered.leg, (0, 0.0, 0.0))
        num_bytes, duration_s, waited_s = came
        num_computed = entered.num_computed_tokens
        self._send(Received(self._rank, entered.leg, num_bytes, duration_s, num_computed, waited_s))

    def take_first_tokens(self) -> dict[int, int]:
        """First tokens that the scheduler does not know yet, by leg."""
        with self._lock:
            news, self._first_tokens = self._first_tokens, {}
        return news

    # -- other threads ----------------------------------------------------------------------------

    def join(self, leg: int, token_id: int) -> None:
        with self._lock:
            self._first_tokens[leg] = token_id
            self._has_news.notify()
            self._tell(FirstTokenKnown(leg))

    def landing_freed(self, offset: int) -> None:
        self._tell(AgentLandingFreed(offset))

    # -- effects ----------------------------------------------------------------------------------

    def _tell(self, event: IncomingEvent) -> None:
        with self._lock:
            for effect in self._blocks.handle(event, time.monotonic()):
                self._do(effect)

    def _do(self, effect: IncomingEffect) -> None:
        match effect:
            case StartPull(leg, awaits_prefill):
                self._start(self._loading[leg], awaits_prefill)
            case CancelPull(leg):
                pull = self._loading[leg].pull
                assert pull is not None, "it was started"
                pull.cancel()
            case KeepLease(leg):
                load = self._loading[leg].load
                self._agent.keep(load.ticket, load.timeout_s)
            case StopRenewing(leg):
                self._agent.stop_renewing(self._loading[leg].load.ticket.ticket_id)
            case BoundSilence(leg):
                load = self._loading[leg].load
                self._agent.expect(load.ticket.ticket_id, load.stall_s)
            case ReportLoad():
                self._report(effect)
            case CompleteLoad(leg) | ReleaseBlocks(leg):
                load = self._loading.pop(leg).load
                self._over[leg] = (load, isinstance(effect, CompleteLoad))
                self._has_news.notify()
            case FreeLanding(leg):
                self._send(RankLandingFreed(self._rank, leg))

    def _start(self, loading: _Loading, awaits_prefill: bool) -> None:
        load, leg = loading.load, loading.load.leg

        def land(piece: PiecePull, offset: int, data: KvBytes) -> None:
            self._land(load, piece, offset, data)

        if load.block_ids:
            self._send(Pulling(self._rank, leg))
        pull = loading.pull = pull_pieces(
            self._agent,
            load.ticket,
            loading.pieces,
            leg=leg,
            deadline_s=load.timeout_s,
            stall_s=math.inf if awaits_prefill else load.stall_s,
            first_block=load.num_local_blocks,
            num_blocks=self._caches.groups.num_blocks(load.num_tokens),
            on_range=land if load.block_ids else None,
            on_silent=lambda: self._tell(PullFellSilent(leg)),
        )
        pull.start(lambda: self._tell(_ended(leg, pull)))

    def _land(self, load: KvLoad, piece: PiecePull, offset: int, data: KvBytes) -> None:
        with self._lock:
            orders = self._blocks.handle(RangeVerified(load.leg), time.monotonic())
        for _ in orders:
            try:
                self._caches.scatter_part(data, offset, load.block_ids, piece.here)
            finally:
                self._tell(RangeScattered(load.leg))
        failpoints.hit("decode.range")

    def _report(self, report: ReportLoad) -> None:
        """Report to the host at once, because the current step may take longer than a pull."""
        leg, failure = report.leg, report.failure
        if failure is None:
            num_bytes = self._num_bytes(self._loading[leg].load)
            self._arrived[leg] = (num_bytes, report.duration_s, report.waited_s)
            self._send(Arrived(self._rank, leg))
            return
        why = f"{failure.reason}: {failure.message}"
        general = KvTransferFailed.default_reason
        self._send(PullFailed(self._rank, leg, general, why, failure.reason))

    def _num_bytes(self, load: KvLoad) -> int:
        return self._caches.num_bytes(load.block_ids) if load.block_ids else 0


def _ended(leg: int, pull: TogetherPull) -> PullEnded:
    landings = tuple(piece.landing.offset for piece in pull.arrived)
    match pull.error():
        case None:
            failure = None
        case KvTransferFailed() as error:
            failure = LoadFailure(error.reason, error.message)
        case CancelledError():
            failure = LoadFailure(PullFailure.CLOSING, "the pull was cancelled")
        case error:
            failure = LoadFailure(PullFailure.PROTOCOL, f"{type(error).__name__}: {error}")
    return PullEnded(leg, failure, landings)
