"""Two KV agents with the same kind of transport, and their state for tests.

A KV agent is the part of one rank that stages and pulls KV.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np

from pdmesh.core.instance.arena import ArenaRange
from pdmesh.core.kv.layout.buffer_layout import KvLayout
from pdmesh.core.kv.transfer.ticket import Ticket
from pdmesh.kv.agent.agent import KvAgent
from pdmesh.kv.agent.arena_memory import host_memory
from pdmesh.kv.agent.types import (
    AgentEvent,
    AgentHooks,
    AgentIdentity,
    BlockSource,
)
from pdmesh.kv.transport.base import ByteArray, KvTransport

FINGERPRINT = "model-a"
INCARNATION = 7
ARENA_BYTES = 64 << 20


def pattern(size: int, seed: int = 1) -> ByteArray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def ticket_for(address: str, layout: KvLayout, ticket_id: str = "t", **changes: object) -> Ticket:
    values: dict[str, object] = {
        "ticket_id": ticket_id,
        "request_id": "r",
        "attempt": 1,
        "instance_id": "prefill-0",
        "incarnation": INCARNATION,
        "model_fingerprint": FINGERPRINT,
        "num_tokens": 1,
        "kv_bytes": layout.total_bytes,
        "addresses": (address,),
        "lease_ms": 30000,
    }
    return Ticket(**(values | changes))  # type: ignore[arg-type]


@dataclass
class KvPair:
    sender: KvAgent
    receiver: KvAgent
    sender_transport: KvTransport
    receiver_transport: KvTransport
    address: str
    sender_events: list[AgentEvent] = field(default_factory=list)
    receiver_events: list[AgentEvent] = field(default_factory=list)

    def stage(
        self, layout: KvLayout, ticket_id: str = "t", *, lease_s: float = 30.0, offset: int = 4096
    ) -> ByteArray:
        """Stage random bytes under the ticket, and return a copy of them."""
        r = ArenaRange(offset, layout.total_bytes)
        data = pattern(layout.total_bytes)
        self.sender.staging(r)[:] = data
        self.sender.stage(ticket_id, 1, r, layout, lease_s)
        return data

    def landed(self, size: int, offset: int = 0) -> ByteArray:
        landed: ByteArray = self.receiver.landing(ArenaRange(offset, size))
        return landed


@asynccontextmanager
async def kv_pair(
    make_transport: Callable[[], KvTransport],
    *,
    hooks: AgentHooks | None = None,
    sender_hooks: AgentHooks | None = None,
    receiver_fingerprint: str = FINGERPRINT,
    receiver_group: str = "g",
    blocks: BlockSource | None = None,
) -> AsyncIterator[KvPair]:
    """A pair of agents. At the end of the block, neither agent may hold anything."""
    sender_events: list[AgentEvent] = []
    receiver_events: list[AgentEvent] = []
    transports = make_transport(), make_transport()
    sender = KvAgent(
        transports[0],
        AgentIdentity("prefill-0", INCARNATION, FINGERPRINT, group_id="g"),
        host_memory(ARENA_BYTES, 0, blocks),
        on_event=sender_events.append,
        hooks=sender_hooks,
    )
    receiver = KvAgent(
        transports[1],
        AgentIdentity("decode-0", INCARNATION + 1, receiver_fingerprint, group_id=receiver_group),
        host_memory(0, ARENA_BYTES),
        on_event=receiver_events.append,
        hooks=hooks,
    )
    address = await sender.start()
    await receiver.start()
    try:
        yield KvPair(sender, receiver, *transports, address, sender_events, receiver_events)
    finally:
        sender.check_invariants()
        receiver.check_invariants()
        await receiver.close()
        await sender.close()
        for agent in (sender, receiver):
            agent.check_invariants()
            assert agent.num_tickets == 0
            assert agent.num_pulls == 0
