"""The pool of outgoing KV connections is bounded, and drops the least recently used one first."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from pdmesh.core.kv.transfer.ticket import PullFailure
from pdmesh.errors import KvTransferFailed
from pdmesh.kv.agent.connections import ConnectionPool


@dataclass(eq=False)
class Line:
    address: str
    key: int
    open_lines: list[Line]

    def abort(self, reason: str) -> None:
        self.open_lines.remove(self)


@dataclass
class Exchange:
    """A transport whose peers all answer. It records which connections are open."""

    open_lines: list[Line] = field(default_factory=list)
    num_opened: int = 0
    most: int = 0

    async def connect(self, address: str, timeout_s: float) -> Line:
        self.num_opened += 1
        line = Line(address, self.num_opened, self.open_lines)
        self.open_lines.append(line)
        self.most = max(self.most, len(self.open_lines))
        return line

    @property
    def addresses(self) -> list[str]:
        return [line.address for line in self.open_lines]


def pool_of(exchange: Any, max_peers: int, in_use: set[int]) -> ConnectionPool:
    return ConnectionPool(exchange, max_peers, lambda: in_use)


@pytest.mark.req("S55")
async def test_the_number_of_open_connections_is_bounded_however_many_peers_there_are() -> None:
    exchange = Exchange()
    pool = pool_of(exchange, 3, set())
    for number in range(20):
        await pool.get(f"peer-{number}", 5.0)
    assert (exchange.most, len(pool)) == (3, 3)
    assert exchange.addresses == ["peer-17", "peer-18", "peer-19"]


@pytest.mark.req("S55")
async def test_a_peer_has_one_connection_and_the_one_used_longest_ago_is_dropped() -> None:
    exchange = Exchange()
    pool = pool_of(exchange, 2, set())
    for address in ("a", "b", "a", "a", "c"):
        await pool.get(address, 5.0)
    assert exchange.addresses == ["a", "c"]
    assert exchange.num_opened == 3


@pytest.mark.req("S55")
async def test_a_connection_that_is_in_use_is_kept_and_the_next_is_refused() -> None:
    exchange = Exchange()
    in_use: set[int] = set()
    pool = pool_of(exchange, 2, in_use)
    in_use.add((await pool.get("a", 5.0)).key)
    await pool.get("b", 5.0)
    in_use.add((await pool.get("c", 5.0)).key)
    assert exchange.addresses == ["a", "c"]
    with pytest.raises(KvTransferFailed) as caught:
        await pool.get("d", 5.0)
    assert caught.value.reason == PullFailure.BUSY
    assert exchange.addresses == ["a", "c"]
