"""A prefill's KV agent as a process of its own, for tests that kill or freeze it.

    python -m tests.fakes.kv_sender_process <num_blocks> <block_bytes> <lease_s>

Prints its address, then `closed <ticket> <reason>` for each ticket; stages tickets t0, t1, ... as `stage <n>` lines come.
"""

from __future__ import annotations

import asyncio
import sys

from pdmesh.core.arena import ArenaRange
from pdmesh.core.kv_layout import KvLayout
from pdmesh.kv.agent import AgentEvent, AgentIdentity, KvAgent, TicketClosed
from pdmesh.kv.ucx import UcxTransport
from tests.fakes.kv_pair import FINGERPRINT, INCARNATION, pattern

NUM_LAYERS = 4


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def on_event(event: AgentEvent) -> None:
    if isinstance(event, TicketClosed):
        say(f"closed {event.ticket_id} {event.reason}")


async def main(num_blocks: int, block_bytes: int, lease_s: float) -> None:
    layout = KvLayout(NUM_LAYERS, num_blocks, block_bytes, FINGERPRINT)
    agent = KvAgent(
        UcxTransport(),
        AgentIdentity("prefill-0", INCARNATION, FINGERPRINT),
        staging_bytes=layout.total_bytes,
        landing_bytes=0,
        on_event=on_event,
    )
    say(await agent.start())
    r = ArenaRange(0, layout.total_bytes)
    agent.staging(r)[:] = pattern(layout.total_bytes)
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    num_staged = 0
    while line := await lines.readline():  # the end of stdin is the end of the test
        for _ in range(int(line.split()[1])):
            agent.stage(f"t{num_staged}", "r", 1, r, layout, lease_s)
            num_staged += 1
        say("staged")
    await agent.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
