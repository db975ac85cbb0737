"""The receiving half of a KV agent: pulls tickets into the landing arena, and blocks into a pool.

A ticket is the right to pull one prompt's KV from a peer, for the length of a lease. A pull moves
the KV in parts. The core (`core.kv.transfer.receiver`) decides when a pull ends and when no late
write can reach its landing range. The code here carries out these decisions. It posts receives,
compares checksums, passes verified parts to the caller and renews leases.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import structlog

from pdmesh import failpoints
from pdmesh.core.deadlines import SILENT_S
from pdmesh.core.kv.transfer import receiver_events as rx
from pdmesh.core.kv.transfer.lease_renewal import LeaseKeeper
from pdmesh.core.kv.transfer.receiver import PullBook
from pdmesh.core.kv.transfer.ticket import PullFailure, Ticket
from pdmesh.errors import KvTransferFailed
from pdmesh.kv.agent import wire
from pdmesh.kv.agent.checksums import HASH_HERE_BYTES, ChecksumKind, are_intact
from pdmesh.kv.agent.connections import Peers
from pdmesh.kv.agent.pull_order import PullOrder
from pdmesh.kv.agent.types import (
    AgentHooks,
    PullResult,
)
from pdmesh.kv.transport.base import KvBytes, KvConnection
from pdmesh.kv.transport.memory_access import fill
from pdmesh.net.tasks import watched

log = structlog.get_logger(__name__)

MAX_PULLS = 1024
MAX_EXPECTED = 4096  # remembered tickets whose senders have all bytes


@dataclass(slots=True)
class _Part:
    offset: int
    length: int
    buffers: list[KvBytes]
    checksums: list[bytes]
    kind: ChecksumKind
    inline: memoryview | None
    num_missing: int


@dataclass(slots=True, eq=False)
class _Pull:
    order: PullOrder
    message: wire.Question
    question: int
    connection: KvConnection
    done: asyncio.Future[None]
    started: float
    parts: list[_Part] = field(default_factory=list)
    num_bytes: int = 0  # verified so far
    num_ranges: int = 0
    first_range_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Opening:
    """A pull that waits for its connection. `limit` is the timeout of the wait."""

    ticket_id: str
    limit: asyncio.Timeout


class ReceiverHalf:
    def __init__(
        self,
        peers: Peers,
        hooks: AgentHooks | None,
    ) -> None:
        self._peers = peers
        self._hooks = hooks
        self._book = PullBook()
        self._pulls: dict[int, _Pull] = {}
        self._openings: set[_Opening] = set()
        # By ticket id: the `stall_s` of the last `expect`.
        self._stalls: OrderedDict[str, float] = OrderedDict()
        self._leases = LeaseKeeper()
        # By ticket id: tickets that are kept until they are pulled.
        self._kept: dict[str, tuple[Ticket, KvConnection]] = {}
        self._checks: set[asyncio.Task[None]] = set()
        self._num_asked = 0
        self.num_corrupt = 0
        self.bytes_received = 0
        self._do: dict[type, Callable[[Any], rx.ReceiverEvent | None]] = {
            rx.SendPull: self._ask,
            rx.ReceivePart: self._post_receives,
            rx.CheckPart: self._check,
            rx.DeliverPart: self._deliver,
            rx.SendAck: self._ack,
            rx.RenewLease: self._renew,
            rx.TellSilent: self._tell_silent,
            rx.CompletePull: self._complete,
            rx.FailPull: self._fail,
            rx.FreeLanding: self._free,
            rx.RetirePeer: self._retire,
            rx.AbortPeer: self._abort,
        }

    @property
    def num_pulls(self) -> int:
        return len(self._book)

    @property
    def has_work(self) -> bool:
        return bool(not self._book.is_idle or len(self._leases))

    def peers_in_use(self) -> set[int]:
        """Connections that a pull uses, or over which a lease is renewed."""
        pulling = {pull.connection.key for pull in self._pulls.values()}
        return pulling | {connection.key for _, connection in self._kept.values()}

    def check_invariants(self) -> None:
        self._book.check_invariants()
        assert len(self._pulls) == len(self._book)

    # -- for the engine ---------------------------------------------------------------------------

    def check_room(self) -> None:
        """Raises KvTransferFailed if MAX_PULLS pulls are under way."""
        if len(self._book) >= MAX_PULLS:
            raise KvTransferFailed("too many pulls at once", reason=PullFailure.BUSY)

    async def pull(
        self,
        order: PullOrder,
        connection: KvConnection,
        started: float,
        deadline: float,
        stall_s: float,
    ) -> PullResult:
        self._num_asked += 1
        pull_id = self._num_asked
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        message = order.make_message(pull_id)
        question = wire.question(message)
        pull = self._pulls[pull_id] = _Pull(order, message, question, connection, done, started)
        lease_s = 0.0
        if order.ticket is not None:
            self.stop_renewing(order.ticket.ticket_id)
            lease_s = order.ticket.lease_ms / 1000
            stall_s = self._stall_s(order, stall_s)
        key, least, most = connection.key, order.min_bytes, order.max_bytes
        self.handle(rx.PullRequested(pull_id, key, least, most, deadline, lease_s, stall_s))
        try:
            await done
        except asyncio.CancelledError:
            if done.cancelled():
                self.handle(rx.CallerLeft(pull_id))
            elif done.exception() is None:
                order.on_freed()  # the pull is complete, but the caller no longer wants it
            raise
        took = time.monotonic() - started
        checksums = [digest for part in pull.parts for digest in part.checksums]
        return PullResult(
            pull.num_bytes, took, pull.first_range_s, pull.num_ranges, len(pull.parts), checksums
        )

    async def opening(
        self,
        order: PullOrder,
        connect: Callable[[], Coroutine[None, None, KvConnection]],
        stall_s: float,
    ) -> KvConnection:
        """Open the connection for a pull.

        Raises KvTransferFailed if this fails, or takes longer than `stall_s` or the limit of
        `expect`.
        """
        ticket_id = order.ticket.ticket_id if order.ticket else ""
        stall_s = self._stall_s(order, stall_s)
        silent = asyncio.get_running_loop().call_later(SILENT_S, order.on_silent)
        try:
            async with asyncio.timeout(None if math.isinf(stall_s) else stall_s) as limit:
                opening = _Opening(ticket_id, limit)
                self._openings.add(opening)
                try:
                    return await connect()
                finally:
                    self._openings.discard(opening)
        except TimeoutError as exc:
            what = f"no KV connection to {order.source} in time"
            raise KvTransferFailed(what, reason=PullFailure.TIMEOUT) from exc
        finally:
            silent.cancel()

    def _stall_s(self, order: PullOrder, stall_s: float) -> float:
        if order.ticket is None:
            return stall_s
        return min(stall_s, self._stalls.get(order.ticket.ticket_id, math.inf))

    def expect(self, ticket_id: str, stall_s: float) -> None:
        """Set the longest silence for the ticket's pulls.

        The limit applies to present and later pulls, and to pulls that wait for a connection.
        """
        self._stalls[ticket_id] = stall_s
        if len(self._stalls) > MAX_EXPECTED:
            self._stalls.popitem(last=False)
        ends = asyncio.get_running_loop().time() + stall_s
        for opening in self._openings:
            if opening.ticket_id == ticket_id:
                limits = (opening.limit.when(), ends)
                opening.limit.reschedule(min(at for at in limits if at is not None))
        for pull_id, pull in self._pulls.items():
            if pull.order.ticket is not None and pull.order.ticket.ticket_id == ticket_id:
                self.handle(rx.SourceComplete(pull_id, stall_s))

    def keep(self, ticket: Ticket, connection: KvConnection, for_s: float) -> None:
        now = time.monotonic()
        if self._leases.keep(ticket.ticket_id, ticket.lease_ms / 1000, now + for_s, now):
            self._kept[ticket.ticket_id] = (ticket, connection)
            self._tell_renewal(ticket, connection)

    def stop_renewing(self, ticket_id: str) -> None:
        if self._kept.pop(ticket_id, None) is not None:
            self._leases.stop_renewing(ticket_id)

    def _tell_renewal(self, ticket: Ticket, connection: KvConnection) -> None:
        message = wire.Renew(ticket.ticket_id, ticket.attempt, ticket.incarnation)
        self._peers.tell(connection.key, message)

    def tick(self) -> None:
        now = time.monotonic()
        self.handle(rx.Tick())
        due, over = self._leases.due(now)
        for ticket_id in due:
            self._tell_renewal(*self._kept[ticket_id])
        for ticket_id in over:
            del self._kept[ticket_id]

    async def close(self, within_s: float) -> None:
        """Stop renewing leases, and wait until the checks of received parts have ended.

        The caller has closed all connections, so no more writes arrive.
        """
        for ticket_id in list(self._kept):
            self.stop_renewing(ticket_id)
        if self._checks:
            await asyncio.wait(self._checks, timeout=within_s)

    # -- peers ------------------------------------------------------------------------------------

    def on_meta(self, peer: int, meta: wire.Meta) -> None:
        if self._hooks is not None and self._hooks.is_dropped(meta.pull_id):
            return
        offset, length = meta.offset, meta.length
        pull = self._pulls.get(meta.pull_id)
        if pull is not None and failpoints.hit("decode.hearing", pull.order.source) == "drop":
            return  # a failpoint: act like a link that loses every answer
        part: _Part | None = None
        if pull is not None and pull.connection.key == peer:
            is_ours = meta.question == pull.question  # if False, META answers another pull
            buffers = pull.order.place(meta.ranges) if is_ours else None
            if buffers is None:
                length = -1  # the core rejects it
            else:
                checksums = [r.checksum for r in meta.ranges]
                part = _Part(
                    offset, length, buffers, checksums, meta.checksums, meta.inline, len(buffers)
                )
                pull.parts.append(part)
        is_inline = meta.inline is not None
        self.handle(rx.MetaArrived(peer, meta.pull_id, meta.num_bytes, offset, length, is_inline))
        if part is not None:
            part.inline = None  # the transport reuses these bytes

    # -- effects ----------------------------------------------------------------------------------

    def handle(self, event: rx.ReceiverEvent) -> None:
        """Pass the event to the core and carry out its effects.

        An effect may have a result at once, such as a part's check. The result is the next event.
        """
        events = [event]
        for event in events:  # the loop appends to `events`
            for effect in self._book.handle(event, time.monotonic()):
                checked = self._do[type(effect)](effect)
                if checked is not None:
                    events.append(checked)

    def _ask(self, effect: rx.SendPull) -> None:
        pull = self._pulls[effect.pull_id]
        if failpoints.hit("decode.asking", pull.order.source) == "drop":
            return  # a failpoint: act like a link that loses everything
        self._peers.tell(pull.connection.key, pull.message)

    def _ack(self, effect: rx.SendAck) -> None:
        key = self._pulls[effect.pull_id].connection.key
        self._peers.tell(key, wire.Ack(effect.pull_id, effect.is_taken))

    def _renew(self, effect: rx.RenewLease) -> None:
        pull = self._pulls[effect.pull_id]
        if pull.order.ticket is not None:
            self._tell_renewal(pull.order.ticket, pull.connection)

    def _tell_silent(self, effect: rx.TellSilent) -> None:
        self._pulls[effect.pull_id].order.on_silent()

    def _complete(self, effect: rx.CompletePull) -> None:
        pull = self._pulls.pop(effect.pull_id)
        if pull.done.done():  # the caller has cancelled or `on_range` failed, unknown to the core
            pull.order.on_freed()
        else:
            pull.done.set_result(None)

    def _free(self, effect: rx.FreeLanding) -> None:
        self._pulls.pop(effect.owner).order.on_freed()

    def _retire(self, effect: rx.RetirePeer) -> None:
        self._peers.retire(effect.peer)

    def _abort(self, effect: rx.AbortPeer) -> rx.PeerLost | None:
        if self._peers.get(effect.peer) is None:
            return rx.PeerLost(effect.peer)  # the loss was reported before the pull began
        self._peers.abort(effect.peer, "a pull missed its deadline or got an invalid answer")
        return None

    def _post_receives(self, effect: rx.ReceivePart) -> None:
        pull_id, index = effect.pull_id, effect.index
        pull = self._pulls[pull_id]
        part = pull.parts[index]

        def on_received() -> None:
            part.num_missing -= 1
            if part.num_missing == 0:
                self.handle(rx.PartArrived(pull_id, index))

        for buffer in part.buffers:
            pull.connection.recv_payload(pull_id, buffer, on_received)

    def _check(self, effect: rx.CheckPart) -> rx.PartChecked | rx.CheckFailed | None:
        """Compare the part's bytes with its checksums. None means that the result comes later."""
        failpoints.hit("decode.receiving")
        pull_id, index = effect.pull_id, effect.index
        part = self._pulls[pull_id].parts[index]
        if part.inline is not None:
            start = 0
            for buffer in part.buffers:
                fill(buffer, part.inline[start : start + buffer.size])
                start += buffer.size
        if self._hooks is not None:
            for buffer in part.buffers:
                self._hooks.on_received(buffer)
        if part.length <= HASH_HERE_BYTES:
            try:
                is_intact = are_intact(part.buffers, part.checksums, part.kind)
            except Exception as error:  # the pull must not wait forever
                log.error("kv.check.died", exc_info=error)
                return rx.CheckFailed(pull_id, index)
            return rx.PartChecked(pull_id, index, is_intact)
        task = watched(
            self._check_aside(pull_id, index, part),
            f"kv-check-{pull_id}",
            lambda error: self._check_died(pull_id, index, error),
        )
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)
        return None

    async def _check_aside(self, pull_id: int, index: int, part: _Part) -> None:
        is_intact = await asyncio.to_thread(are_intact, part.buffers, part.checksums, part.kind)
        self.handle(rx.PartChecked(pull_id, index, is_intact))

    def _check_died(self, pull_id: int, index: int, error: BaseException) -> None:
        log.error("kv.check.died", exc_info=error)
        self.handle(rx.CheckFailed(pull_id, index))

    def _deliver(self, effect: rx.DeliverPart) -> None:
        pull = self._pulls[effect.pull_id]
        part = pull.parts[effect.index]
        if not effect.index:
            pull.first_range_s = time.monotonic() - pull.started
        pull.num_bytes += part.length
        pull.num_ranges += len(part.buffers)
        self.bytes_received += part.length
        if self._hooks is not None:
            for buffer in part.buffers:
                self._hooks.on_verified(buffer)
        if pull.order.on_range is not None and not pull.done.done() and part.length:
            whole = pull.order.targets[0]
            try:
                pull.order.on_range(part.offset, whole[part.offset : part.offset + part.length])
            except Exception as error:  # noqa: BLE001  the caller's code; other pulls wait behind this one
                pull.done.set_exception(error)  # the landing range is freed after the last part

    def _fail(self, effect: rx.FailPull) -> None:
        pull, reason = self._pulls[effect.pull_id], effect.reason
        if reason == PullFailure.CORRUPT:
            self.num_corrupt += 1
        if not pull.done.done():
            what = "pull" if pull.order.ticket else "fetch of blocks"
            pull.done.set_exception(KvTransferFailed(f"{what} failed: {reason}", reason=reason))
