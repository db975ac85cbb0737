"""A decode's KV agent as a separate process, which tests kill, freeze or connect over a bad link.

    python -m tests.fakes.kv.receiver_process <num_blocks> <block_bytes> <lease_s> [<host>]

The process prints `ready`. For each line `pull <address> <ticket> <deadline_s> [<stall_s>]` on
stdin, it prints lines `part <bytes verified so far>`, and at the end `pulled <ticket> <ok, wrong
bytes or reason> <seconds>`. It prints `freed` when a landing range, to which a pull writes, is
given back.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time

from pdmesh.core.instance.arena import ArenaRange
from pdmesh.core.kv.layout.buffer_layout import KvLayout
from pdmesh.errors import KvTransferFailed
from pdmesh.kv.agent.agent import KvAgent
from pdmesh.kv.agent.arena_memory import host_memory
from pdmesh.kv.agent.types import AgentEvent, AgentIdentity, AgentLandingFreed
from pdmesh.kv.transport.base import ByteArray
from pdmesh.kv.transport.ucx import UcxTransport
from tests.fakes.kv.pair import (
    FINGERPRINT,
    INCARNATION,
    pattern,
    ticket_for,
)
from tests.fakes.kv.sender_process import (
    NUM_LAYERS,
    lines_of_stdin,
    log_to_stderr,
    say,
)


def on_event(event: AgentEvent) -> None:
    if isinstance(event, AgentLandingFreed):
        say("freed")


def on_range(offset: int, data: ByteArray) -> None:
    say(f"part {offset + data.size}")


async def pull(
    agent: KvAgent,
    layout: KvLayout,
    lease_s: float,
    address: str,
    name: str,
    deadline_s: float,
    stall_s: float = math.inf,
) -> None:
    r = ArenaRange(0, layout.total_bytes)
    ticket = ticket_for(address, layout, name, lease_ms=round(1000 * lease_s))
    started = time.monotonic()
    try:
        await agent.pull(ticket, r, deadline_s=deadline_s, on_range=on_range, stall_s=stall_s)
    except KvTransferFailed as exc:
        outcome = exc.reason
    else:
        is_right = (agent.landing(r) == pattern(layout.total_bytes)).all()
        outcome = "ok" if is_right else "WRONG_BYTES"
    say(f"pulled {name} {outcome} {time.monotonic() - started:.3f}")


async def main(num_blocks: int, block_bytes: int, lease_s: float, host: str) -> None:
    layout = KvLayout(NUM_LAYERS, num_blocks, block_bytes, FINGERPRINT)
    agent = KvAgent(
        UcxTransport(host),
        AgentIdentity("decode-0", INCARNATION + 1, FINGERPRINT),
        host_memory(0, layout.total_bytes),
        on_event=on_event,
    )
    await agent.start()
    say("ready")
    async for words in lines_of_stdin():
        _, address, name, *seconds = words
        await pull(agent, layout, lease_s, address, name, *map(float, seconds))
    agent.check_invariants()
    await agent.close()


if __name__ == "__main__":
    log_to_stderr()
    host = sys.argv[4] if len(sys.argv) > 4 else "127.0.0.1"
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), host))
