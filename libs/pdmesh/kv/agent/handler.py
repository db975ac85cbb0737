"""Passes each message from a peer to the sending or the receiving half of a KV agent.

A peer loses its connection if it sends bytes that are not a message, or if handling a message
fails. The messages of other peers are still handled.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from pdmesh.core.kv.transfer import receiver_events as rx
from pdmesh.core.kv.transfer import sender_events as tx
from pdmesh.kv.agent import wire
from pdmesh.kv.agent.connections import Peers
from pdmesh.kv.agent.receiver import ReceiverHalf
from pdmesh.kv.agent.sender import SenderHalf
from pdmesh.kv.transport.base import KvConnection

log = structlog.get_logger(__name__)


class AgentHandler:
    """The `ConnectionHandler` of an agent.

    It calls `catch_up` before each message, and `lent` after each fetch and each probe.
    """

    def __init__(
        self,
        peers: Peers,
        sender: SenderHalf,
        receiver: ReceiverHalf,
        catch_up: Callable[[], None],
        lent: Callable[[], None],
    ) -> None:
        self._peers, self._sender, self._receiver = peers, sender, receiver
        self._catch_up, self._lent = catch_up, lent

    def on_connected(self, connection: KvConnection) -> None:
        self._peers.add(connection)

    def on_closed(self, connection: KvConnection, reason: str) -> None:
        self._peers.remove(connection)
        self._sender.handle(tx.PeerLost(connection.key))
        self._receiver.handle(rx.PeerLost(connection.key))

    def on_message(self, connection: KvConnection, message: memoryview) -> None:
        self._catch_up()  # this message may ask for a ticket that another thread has just staged
        try:
            self._dispatch(connection.key, wire.parse(message))
        except wire.WireError as exc:
            log.warning("kv.message.refused", error=exc.message)
            connection.abort("not a message")
        except Exception as error:  # the messages of other peers must still be handled
            log.error("kv.message.died", exc_info=error)
            connection.abort("a bug in handling its message")

    def _dispatch(self, peer: int, parsed: wire.Message) -> None:
        match parsed:
            case wire.Pull():
                self._sender.on_pull(peer, parsed)
            case wire.Meta():
                self._receiver.on_meta(peer, parsed)
            case wire.Ack(pull_id, is_taken):
                self._sender.handle(tx.PullAcked(peer, pull_id, is_taken))
            case wire.PullRefusal(pull_id, refusal):
                self._receiver.handle(rx.PullRefused(peer, pull_id, f"KV_REFUSED_{refusal.name}"))
            case wire.Renew(ticket_id, attempt, incarnation):
                self._sender.handle(tx.LeaseRenewed(peer, ticket_id, attempt, incarnation))
            case wire.Fetch():
                self._sender.on_fetch(peer, parsed)
                self._lent()
            case wire.Probe():
                self._sender.on_probe(peer, parsed)
                self._lent()
