"""One rank's KV on its way in: pulls, and scatters what lands into the blocks that vLLM holds for
the waiting request.

vLLM keeps those blocks until it has been told that the load is over, also if the request was
aborted; so ranges are scattered as they land, on the agent's thread, and never into blocks of
another request. Pulls take turns (S53); one whose prompt is computed still does not, and is over
only when token 1 is known as well. A sender of another number of ranks is pulled from in pieces,
which take no turns: only the lease at a rank's like is kept while it waits.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pdmesh import failpoints
from pdmesh.core.kv.transfer.pull_queue import PullQueue
from pdmesh.core.kv.transfer.ticket import PullFailure
from pdmesh.engine.vllm.connector.scheduler.handoff import Entered, KvLoad
from pdmesh.engine.vllm.connector.worker.caches import PagedCaches
from pdmesh.engine.vllm.connector.worker.piece_pulls import (
    Landings,
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
from pdmesh.kv.transport.base import ByteArray

OnPieceRange = Callable[[PiecePull, int, ByteArray], None]


@dataclass(slots=True)
class _Pulling:
    load: KvLoad
    started: float
    pull: TogetherPull | None = None  # from its turn on
    is_overdue: bool = False  # its turn did not come in time
    waits_since: float = math.inf  # for bytes alone: its turn has come, and prefill is done
    came_at: float = 0.0
    is_cancelled: bool = False
    is_over: bool = False  # its blocks may belong to another request
    scattering: threading.Lock = field(default_factory=threading.Lock)  # and over `is_over`


@dataclass(frozen=True, slots=True)
class _Arrived:
    kv_bytes: int
    duration_s: float
    waited_s: float


class IncomingKv:
    """`send` tells the host.

    `pull`, `cancel`, `take_results` and `entered` are called by the step's thread.
    """

    def __init__(
        self,
        share: Share,
        caches: PagedCaches,
        agent: AgentThread,
        max_pulls: int,
        send: Callable[[RankMessage], None],
    ) -> None:
        self._share, self._rank = share, share.rank
        self._caches, self._agent, self._send = caches, agent, send
        self._lock = threading.RLock()  # of the turns: they pass on the agent's thread as well
        self._queue: PullQueue[str] = PullQueue(max_pulls)
        self._pulling: dict[str, _Pulling] = {}
        self._ended: deque[_Pulling] = deque()
        self._unjoined: dict[str, KvLoad] = {}  # their KV is here, token 1 is not
        self._first_tokens: dict[int, int] = {}
        self._news: dict[int, int] = {}  # first tokens that the scheduler has not been told
        self._landings = Landings(lambda leg: send(RankLandingFreed(share.rank, leg)))
        self._arrived: dict[int, _Arrived] = {}

    # -- a step -----------------------------------------------------------------------------------

    def pull(self, load: KvLoad) -> None:
        self._landings.take(load.leg, [load.landing.offset])
        if not load.block_ids:
            self._acknowledge(load)
            return
        self._pulling[load.key] = pulling = _Pulling(load, time.monotonic())
        if load.is_early or not self._share.is_like(load.ticket):
            self._begin(pulling)
            return
        source = (load.ticket.instance_id, load.ticket.incarnation)
        with self._lock:
            until = pulling.started + load.timeout_s
            self._begin_all(self._queue.add(load.key, load.ticket.kv_bytes, source, until))
            if self._queue.is_waiting(load.key):
                self._agent.keep(load.ticket, load.timeout_s)

    def cancel(self, load: KvLoad) -> None:
        """The load is no longer wanted; `take_results` says when its blocks may go."""
        self._arrived.pop(load.leg, None)
        self._first_tokens.pop(load.leg, None)
        pulling = self._pulling.get(load.key)
        if pulling is None:
            return
        pulling.is_cancelled = True
        with self._lock:
            if pulling.pull is not None:
                pulling.pull.cancel()
                return
            self._begin_all(self._queue.end(load.key))
            self._end_in_queue(pulling)

    def forget(self, leg: int) -> None:
        """Its request ended before its load began."""
        self._first_tokens.pop(leg, None)

    def take_results(self) -> tuple[set[str], set[str]]:
        """The keys of loads that are complete, and of those that failed, since the last call."""
        received: set[str] = set()
        failed: set[str] = set()
        self._drop_overdue()
        while self._ended:
            pulling = self._ended.popleft()
            if self._is_complete(pulling):
                self._unjoined[pulling.load.key] = pulling.load
            else:
                del self._pulling[pulling.load.key]
                failed.add(pulling.load.key)
        for key, load in list(self._unjoined.items()):
            is_cancelled = self._pulling[key].is_cancelled
            if is_cancelled or not load.is_early or load.leg in self._first_tokens:
                del self._unjoined[key], self._pulling[key]
                (failed if is_cancelled else received).add(key)
        return received, failed

    def entered(self, entered: Entered) -> None:
        """The leg computes in the step about to run."""
        self._first_tokens.pop(entered.leg, None)
        arrived = self._arrived.pop(entered.leg, _Arrived(0, 0.0, 0.0))
        self._send(
            Received(
                self._rank,
                entered.leg,
                arrived.kv_bytes,
                arrived.duration_s,
                entered.num_computed_tokens,
                arrived.waited_s,
            )
        )

    def take_first_tokens(self) -> dict[int, int]:
        """By leg; what the scheduler has not been told yet."""
        with self._lock:
            news, self._news = self._news, {}
        return news

    # -- other threads ----------------------------------------------------------------------------

    def join(self, leg: int, token_id: int) -> None:
        with self._lock:
            self._first_tokens[leg] = self._news[leg] = token_id
        for pulling in list(self._pulling.values()):
            if pulling.load.leg == leg:  # its prefill is done
                pulling.waits_since = min(pulling.waits_since, time.monotonic())
                self._agent.expect(pulling.load.ticket.ticket_id, pulling.load.stall_s)

    def landing_freed(self, offset: int) -> None:
        self._landings.clear(offset)

    # -- inside -----------------------------------------------------------------------------------

    def _acknowledge(self, load: KvLoad) -> None:
        """All blocks are cached here: nothing lands or waits, and there may be no further step."""
        pull = self._pull(load)
        pull.start(lambda: self._clear(pull))

    def _drop_overdue(self) -> None:
        if not self._lock.acquire(blocking=False):
            return  # the next step will do; this one must not wait for a range that is scattered
        try:
            dropped, begun = self._queue.drop_overdue(time.monotonic())
            for key in dropped:
                self._pulling[key].is_overdue = True
                self._end_in_queue(self._pulling[key])
            self._begin_all(begun)
        finally:
            self._lock.release()

    def _end_in_queue(self, pulling: _Pulling) -> None:
        """It is over before its turn."""
        load = pulling.load
        self._agent.let_go(load.ticket.ticket_id)
        self._landings.clear(load.landing.offset)
        self._ended.append(pulling)

    def _begin_all(self, keys: list[str]) -> None:
        for key in keys:
            self._begin(self._pulling[key])

    def _begin(self, pulling: _Pulling) -> None:
        load = pulling.load

        def land(piece: PiecePull, offset: int, data: ByteArray) -> None:
            with pulling.scattering:
                if pulling.is_over:
                    return  # cancelled, and the agent has not heard of it yet
                self._caches.scatter_part(data, offset, load.block_ids, piece.here)
            failpoints.hit("decode.range")

        if not self._is_unmade(load):
            pulling.waits_since = time.monotonic()
        self._send(Pulling(self._rank, load.leg))
        pulling.pull = self._pull(load, land, lambda: self._fell_silent(load.key))
        pulling.pull.start(lambda: self._end(pulling))

    def _fell_silent(self, key: str) -> None:
        with self._lock:
            self._begin_all(self._queue.fell_silent(key))

    def _pull(
        self,
        load: KvLoad,
        on_range: OnPieceRange | None = None,
        on_silent: Callable[[], None] = lambda: None,
    ) -> TogetherPull:
        wanted = self._share.pieces(load.ticket, load.landing, self._num_bytes(load))
        self._landings.take(load.leg, [piece.landing.offset for piece in wanted])
        return pull_pieces(
            self._agent,
            load.ticket,
            wanted,
            leg=load.leg,
            deadline_s=load.timeout_s,
            stall_s=math.inf if self._is_unmade(load) else load.stall_s,
            first_block=load.num_local_blocks,
            num_blocks=load.num_local_blocks + len(load.block_ids),
            on_range=on_range,
            on_silent=on_silent,
        )

    def _is_unmade(self, load: KvLoad) -> bool:
        """Its prefill computes still."""
        return load.is_early and load.leg not in self._first_tokens

    def _num_bytes(self, load: KvLoad) -> int:
        return len(load.block_ids) * self._caches.num_layers * self._caches.block_bytes

    def _end(self, pulling: _Pulling) -> None:
        with pulling.scattering:  # a cancelled pull ends here before it ends on the agent's thread
            pulling.is_over = True
        pulling.came_at = time.monotonic()
        self._tell_end(pulling)
        with self._lock:
            self._begin_all(self._queue.end(pulling.load.key))
        self._ended.append(pulling)

    def _tell_end(self, pulling: _Pulling) -> None:
        """At once: the step that is under way may take longer than a pull."""
        assert pulling.pull is not None
        leg, error = pulling.load.leg, pulling.pull.error()
        if error is None:
            self._send(Arrived(self._rank, leg))
        elif isinstance(error, KvTransferFailed):  # else the leg was aborted
            why = f"{error.reason}: {error.message}"
            self._send(PullFailed(self._rank, leg, error.default_reason, why, error.reason))

    def _is_complete(self, pulling: _Pulling) -> bool:
        load = pulling.load
        if pulling.pull is None:  # before its turn
            if pulling.is_overdue:
                reason = PullFailure.OVERDUE
                why = f"{reason}: its turn did not come in time"
                general = KvTransferFailed.default_reason
                self._send(PullFailed(self._rank, load.leg, general, why, reason))
            return False
        error = pulling.pull.error()
        if error is None and failpoints.hit("decode.pulled") == "zero-kv":
            landed = self._agent.landing(load.landing)[: self._num_bytes(load)]
            landed[:] = 0
            self._caches.scatter(landed, load.block_ids)
        self._clear(pulling.pull)
        if error is not None:
            return False
        if not pulling.is_cancelled:
            duration_s = time.monotonic() - pulling.started
            waited_s = max(0.0, pulling.came_at - pulling.waits_since)
            self._arrived[load.leg] = _Arrived(self._num_bytes(load), duration_s, waited_s)
        return not pulling.is_cancelled

    def _clear(self, pull: TogetherPull) -> None:
        """Its ranges were scattered before it was over; of pieces that failed the agent says when theirs are free."""
        for piece in pull.arrived:
            self._landings.clear(piece.landing.offset)
