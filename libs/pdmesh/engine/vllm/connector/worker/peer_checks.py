"""Checks whether KV arrives from a peer, which is an instance to pull KV from (S16).

Each rank pulls a probe from those ranks of the peer that it will pull KV from. If both instances
have the same number of ranks, rank i probes only rank i. Otherwise a rank probes the ranks whose
heads it needs. The host, which is the part of the instance outside the engine, starts the check and
collects the answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from pdmesh.core.kv.transfer.ticket import PullFailure
from pdmesh.engine.base import KvPeer
from pdmesh.engine.vllm.connector.worker.piece_pulls import Share
from pdmesh.engine.vllm.messages import Disconnect, Probed, ProbePeer, RankMessage
from pdmesh.errors import KvFormatMismatch, KvTransferFailed
from pdmesh.kv.agent.thread import AgentThread

_GRACE_S: Final = 1.0  # time for the ranks' answers to arrive


@dataclass(slots=True)
class _Asked:
    num_left: int
    answer: asyncio.Future[None]


class PeerChecks:
    """The host's half. `broadcast` sends to all ranks."""

    def __init__(self, broadcast: Callable[[RankMessage], None], num_ranks: int) -> None:
        self._broadcast, self._num_ranks = broadcast, num_ranks
        self._asked: dict[int, _Asked] = {}
        self._num_asked = 0

    async def verify(self, peer: KvPeer, timeout_s: float) -> None:
        """Let all ranks probe. Raises KvTransferFailed if a rank fails, or does not answer in time.

        The message is that of the rank that failed first.
        """
        self._num_asked += 1
        check_id = self._num_asked
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked[check_id] = _Asked(self._num_ranks, answer)
        self._broadcast(
            ProbePeer(check_id, peer.instance_id, peer.incarnation, peer.addresses, timeout_s)
        )
        try:
            async with asyncio.timeout(timeout_s + _GRACE_S):
                await answer
        except TimeoutError as exc:
            raise KvTransferFailed(
                f"a rank did not answer about {peer.instance_id}", reason=PullFailure.TIMEOUT
            ) from exc
        finally:
            del self._asked[check_id]

    def forget(self, peer: KvPeer) -> None:
        self._broadcast(Disconnect(peer.addresses))

    def on_probed(self, message: Probed) -> None:
        asked = self._asked.get(message.check_id)
        if asked is None or asked.answer.done():
            return
        if message.reason:
            text = f"rank {message.rank}: {message.message}"
            asked.answer.set_exception(KvTransferFailed(text, reason=message.reason))
            return
        asked.num_left -= 1
        if not asked.num_left:
            asked.answer.set_result(None)


class PeerProber:
    """The worker's half, on the thread that receives the host's messages.

    `send` sends a message to the host.
    """

    def __init__(
        self, share: Share, agent: AgentThread, send: Callable[[RankMessage], None]
    ) -> None:
        self._share, self._agent, self._send = share, agent, send

    def handle(self, message: ProbePeer | Disconnect) -> None:
        match message:
            case ProbePeer():
                self._probe(message)
            case Disconnect():
                for address in message.addresses:
                    self._agent.disconnect(address)

    def _probe(self, order: ProbePeer) -> None:
        try:
            sources = self._share.sources(len(order.addresses))
            done = self._agent.probe(
                [order.addresses[rank] for rank in sources],
                order.incarnation,
                deadline_s=order.timeout_s,
                source=order.instance_id,
            )
        except ValueError as error:
            self._tell(order, KvTransferFailed(str(error), reason=KvFormatMismatch.default_reason))
        except KvTransferFailed as error:
            self._tell(order, error)
        else:
            done.add_done_callback(lambda ended: self._on_done(order, ended))

    def _on_done(self, order: ProbePeer, ended: Future[None]) -> None:
        if ended.cancelled():
            self._tell(order, KvTransferFailed("closing", reason=PullFailure.CLOSING))
        else:
            self._tell(order, ended.exception())

    def _tell(self, order: ProbePeer, error: BaseException | None) -> None:
        reason = message = ""
        if error is not None:
            message = str(error) or type(error).__name__
            reason = KvTransferFailed.default_reason
        if isinstance(error, KvTransferFailed):
            reason = error.reason
        self._send(Probed(self._share.place.rank, order.check_id, reason, message))
