"""A prefill's KV agent as a separate process, which tests kill or freeze.

    python -m tests.fakes.kv.sender_process \
        <num_blocks> <block_bytes> <lease_s> [<host> [<chunk_bytes>]]

The process prints its address, and `closed <ticket> <reason>` when a ticket is closed. For each
line `stage <n>` on stdin, it stages the next n of the tickets t0, t1, ... and prints `staged`. A
ticket gives a decode the right to pull one prompt's KV.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import structlog

from pdmesh.core.instance.arena import ArenaRange
from pdmesh.core.kv.layout.buffer_layout import KvLayout
from pdmesh.core.kv.transfer.pull_parts import CHUNK_BYTES
from pdmesh.kv.agent.agent import KvAgent
from pdmesh.kv.agent.arena_memory import host_memory
from pdmesh.kv.agent.types import AgentEvent, AgentIdentity, AgentTicketClosed
from pdmesh.kv.transport.ucx import UcxTransport
from tests.fakes.kv.pair import FINGERPRINT, INCARNATION, pattern

NUM_LAYERS = 4


def log_to_stderr() -> None:
    """Log to stderr, because the test reads stdout."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def lines_of_stdin() -> AsyncIterator[list[str]]:
    """The words of each line of stdin. The test ends the process by closing stdin."""
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        yield line.decode().split()


def on_event(event: AgentEvent) -> None:
    if isinstance(event, AgentTicketClosed):
        say(f"closed {event.ticket_id} {event.reason}")


async def main(
    num_blocks: int, block_bytes: int, lease_s: float, host: str, chunk_bytes: int
) -> None:
    layout = KvLayout(NUM_LAYERS, num_blocks, block_bytes, FINGERPRINT)
    agent = KvAgent(
        UcxTransport(host),
        AgentIdentity("prefill-0", INCARNATION, FINGERPRINT),
        host_memory(layout.total_bytes, 0),
        on_event=on_event,
    )
    say(await agent.start())
    r = ArenaRange(0, layout.total_bytes)
    agent.staging(r)[:] = pattern(layout.total_bytes)
    num_staged = 0
    async for words in lines_of_stdin():
        for _ in range(int(words[1])):
            agent.stage(f"t{num_staged}", 1, r, layout, lease_s, chunk_bytes=chunk_bytes)
            num_staged += 1
        say("staged")
    await agent.close()


if __name__ == "__main__":
    log_to_stderr()
    more = sys.argv[4:]
    host = more[0] if more else "127.0.0.1"
    chunk_bytes = int(more[1]) if len(more) > 1 else CHUNK_BYTES
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), host, chunk_bytes))
