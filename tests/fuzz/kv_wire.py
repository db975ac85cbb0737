"""Fuzzes the parser of KV messages, and a KV agent that receives them.

`feed_parser` and `feed_agent` raise only if a promise is broken. Hypothesis calls both in `make
test`. These commands fuzz with coverage as the guide:

    make fuzz-kv_wire    # atheris, from tests/fuzz/corpus/kv_wire; FUZZ_S=600 for ten minutes
    python -m tests.fuzz.kv_wire      # write the corpus again: one message of each kind
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from pdmesh.core.instance.arena import ArenaRange
from pdmesh.core.kv.layout.buffer_layout import KvLayout
from pdmesh.core.kv.transfer.ticket import Refusal
from pdmesh.kv.agent import wire
from pdmesh.kv.agent.agent import KvAgent
from pdmesh.kv.agent.arena_memory import host_memory
from pdmesh.kv.agent.checksums import ChecksumKind, fingerprint_hash
from pdmesh.kv.agent.types import AgentIdentity, PinnedBlocks
from pdmesh.kv.transport.base import ConnectionHandler, KvBytes, KvConnection
from tests.fakes.kv.pair import ticket_for

CORPUS = Path(__file__).parent / "corpus" / "kv_wire"
LAYOUT = KvLayout(2, 2, 16, "f")
HASH = fingerprint_hash("f")
MAX_LEN = 512
LENGTH = 2  # bytes of the length before each message of an input


def resealed(data: bytes) -> bytes:
    """The message with a correct checksum, so that the parser also sees the faulty content."""
    if len(data) < wire.BODY_AT:
        return data
    seal = wire.seal_of(memoryview(data))
    return data[: wire.BODY_AT - 8] + seal.to_bytes(8, "little") + data[wire.BODY_AT :]


def feed_parser(data: bytes) -> None:
    """Parse bytes to a message or WireError. A message must survive encoding and parsing again."""
    _feed_parser(data)
    _feed_parser(resealed(data))


def _feed_parser(data: bytes) -> None:
    try:
        message = wire.parse(memoryview(data))
    except wire.WireError:
        return
    assert b"".join(wire.encode(message)) == data


class _Connection:
    """A peer that accepts all messages and never completes the transfer of a payload."""

    key = 1

    def __init__(self) -> None:
        self.is_aborted = False

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        wire.parse(memoryview(b"".join(parts)))

    def send_payload(self, key: int, buffer: KvBytes, on_sent: Callable[[], None]) -> None:
        assert buffer.size

    def recv_payload(self, key: int, buffer: KvBytes, on_received: Callable[[], None]) -> None:
        assert buffer.size

    def abort(self, reason: str) -> None:
        self.is_aborted = True


class _Transport:
    def __init__(self) -> None:
        self.connection = _Connection()
        self.handler: ConnectionHandler

    async def start(self, handler: ConnectionHandler) -> str:
        self.handler = handler
        handler.on_connected(self.connection)
        return "peer"

    async def connect(self, address: str, timeout_s: float) -> KvConnection:
        return self.connection

    async def close(self) -> None: ...


class _Pool:
    def __init__(self) -> None:
        self.num_open = 0

    def open(self, names: Sequence[bytes]) -> PinnedBlocks | None:
        self.num_open += 1
        return PinnedBlocks([np.zeros(8, np.uint8)])

    def close(self, pinned: PinnedBlocks) -> None:
        self.num_open -= 1


async def _feed(messages: list[bytes]) -> None:
    transport, pool = _Transport(), _Pool()
    connection = transport.connection
    agent = KvAgent(
        transport,
        AgentIdentity("i", 7, "f"),
        host_memory(4096, 4096, pool),
        on_event=lambda _: None,
    )
    await agent.start()
    agent.stage("t", 1, ArenaRange(0, LAYOUT.total_bytes), LAYOUT, 10.0)
    agent.open("u", 1, ArenaRange(0, LAYOUT.total_bytes), LAYOUT, 10.0)
    ticket = ticket_for("peer", LAYOUT, "x")
    pull = asyncio.create_task(agent.pull(ticket, ArenaRange(0, 4096), deadline_s=10))
    while not agent.num_pulls:
        await asyncio.sleep(0)
    for message in messages:
        if not connection.is_aborted:
            transport.handler.on_message(connection, memoryview(resealed(message)))
            agent.check_invariants()
    transport.handler.on_closed(connection, "the peer is gone")
    agent.check_invariants()
    await asyncio.wait([pull])
    pull.exception()
    assert agent.num_pulls == 0
    assert pool.num_open == 0, "a pool's blocks outlived their reader"
    await agent.close()
    assert agent.num_tickets == 0


def feed_agent(data: bytes) -> None:
    """Feed messages to an agent. Each message has its length before it.

    The agent must not raise, break an invariant, or leak anything.
    """
    messages: list[bytes] = []
    while len(data) >= LENGTH:
        size = int.from_bytes(data[:LENGTH], "little")
        messages.append(data[LENGTH : LENGTH + size])
        data = data[LENGTH + size :]
    asyncio.run(_feed(messages))


def feed(data: bytes) -> None:
    """Feed the parser and the agent. The parser gets only the first message."""
    feed_parser(data[LENGTH:])
    feed_agent(data)


def honest() -> bytes:
    """As many honest messages as fit into the longest input."""
    return (sequence(examples()) * MAX_LEN)[:MAX_LEN]


def sequence(messages: Sequence[bytes]) -> bytes:
    return b"".join(len(m).to_bytes(LENGTH, "little") + m for m in messages)


def examples() -> list[bytes]:
    """One message of each kind, which the agent above can answer."""
    ranges = (wire.Range(0, 40, bytes(16)), wire.Range(40, 24, bytes(16)))
    messages: list[wire.Message] = [
        wire.Pull(1, "t", 1, 7, HASH),
        wire.Pull(2, "u", 1, 7, HASH, first_block=1, num_takers=2),
        wire.Pull(3, "t", 1, 7, HASH, first_head=0, num_heads=1),
        wire.Meta(1, 64, ranges, memoryview(bytes(64))),
        wire.Meta(1, 64, ranges[:1]),
        wire.Meta(1, 64, ranges, checksums=ChecksumKind.WORDS),
        wire.Meta(1, 0, (), memoryview(b"")),
        wire.Ack(1, True),
        wire.Ack(2, False),
        wire.PullRefusal(1, Refusal.STOPPED),
        wire.Renew("t", 1, 7),
        wire.Fetch(4, 7, HASH, (bytes(16), bytes(range(16)))),
        wire.Probe(5, 7, HASH, bytes(16)),
    ]
    return [b"".join(wire.encode(message)) for message in messages]


def seeds() -> dict[str, bytes]:
    """The corpus by file name. It has each example, and all examples together."""
    found = {f"message-{n:02}": sequence([each]) for n, each in enumerate(examples())}
    return found | {"all": sequence(examples())}


def write_corpus() -> None:
    CORPUS.mkdir(parents=True, exist_ok=True)
    for name, data in seeds().items():
        (CORPUS / name).write_bytes(data)


if __name__ == "__main__":
    write_corpus()
