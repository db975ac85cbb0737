"""A KV agent's connections to the agents of other processes.

All pulls from one peer share one connection, which is opened at its first use. If there are too
many connections, the least recently used one that is not in use is dropped. `ConnectionPool` has
the connections that this agent opened, by address. `Peers` has all open connections, by connection
key.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Container

from pdmesh.core.kv.transfer.ticket import PullFailure
from pdmesh.errors import KvTransferFailed
from pdmesh.kv.agent import wire
from pdmesh.kv.transport.base import KvConnection, KvTransport

_CONNECT_S = 5.0


class ConnectionPool:
    """At most `max_peers` outgoing connections, by address.

    A connection whose key is `in_use` is never dropped to make room for another.
    """

    def __init__(
        self,
        transport: KvTransport,
        max_peers: int,
        in_use: Callable[[], Container[int]],
    ) -> None:
        self._transport = transport
        self._max_peers = max_peers
        self._in_use = in_use
        # By address: the number of callers of `get` that have not resumed yet.
        self._wanted: Counter[str] = Counter()
        self._open: OrderedDict[str, KvConnection] = OrderedDict()  # least recently used first
        self._opening: dict[str, asyncio.Task[KvConnection]] = {}
        self._ended_early: set[int] = set()  # keys of connections that ended before being stored
        self._leaving: dict[str, None] = {}  # addresses whose connections are dropped when idle

    def __len__(self) -> int:
        return len(self._open)

    def find(self, address: str) -> KvConnection | None:
        """The open connection to an address, if there is one."""
        connection = self._open.get(address)
        if connection is not None:
            self._open.move_to_end(address)
        return connection

    async def get(self, address: str, timeout_s: float) -> KvConnection:
        """The open connection to an address, or a new one.

        Raises KvTransferFailed if the connection cannot be opened in time or ends at once, or if
        all connections are in use. After one caller's timeout, the attempt continues for others.
        """
        if (connection := self.find(address)) is not None:
            return connection
        task = self._opening.get(address)
        if task is None:
            self._make_room()
            task = asyncio.create_task(self._connect(address), name="kv-connect")
            self._opening[address] = task
            task.add_done_callback(lambda done: self._on_done(address, done))
        self._wanted[address] += 1
        try:
            async with asyncio.timeout(timeout_s):
                connection = await asyncio.shield(task)
        except TimeoutError as exc:
            raise KvTransferFailed(
                "the KV connection was not opened in time", reason=PullFailure.TIMEOUT
            ) from exc
        finally:
            self._wanted[address] -= 1
            self._wanted += Counter()  # drop zeros
        if self._open.get(address) is not connection:
            # The end of the connection was reported before this task ran again. The end is not
            # reported twice, so a pull on this connection would never end.
            raise KvTransferFailed("the KV connection ended at once", reason=PullFailure.PEER_LOST)
        return connection

    def remove(self, connection: KvConnection) -> None:
        """Forget a closed connection, so that the next `get` opens another."""
        if self._opening:
            self._ended_early.add(connection.key)
        for address, other in list(self._open.items()):
            if other is connection:
                del self._open[address]

    @property
    def is_leaving(self) -> bool:
        """Whether any connection is to be dropped after its last pull."""
        return bool(self._leaving)

    def leave(self, address: str) -> None:
        """Drop the connection to the address as soon as no pull uses the connection."""
        self._leaving[address] = None
        self.drop_left()

    def drop_left(self) -> None:
        in_use = self._in_use() if self._leaving else ()
        for address in list(self._leaving):
            connection = self.find(address)
            if connection is not None and connection.key in in_use:
                continue
            del self._leaving[address]
            if connection is not None:
                self.remove(connection)
                connection.abort("the peer left")

    async def close(self) -> None:
        tasks = list(self._opening.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CONNECT_S)

    async def _connect(self, address: str) -> KvConnection:
        connection = await self._transport.connect(address, _CONNECT_S)
        if connection.key in self._ended_early:
            raise KvTransferFailed("the KV connection ended at once", reason=PullFailure.PEER_LOST)
        self._open[address] = connection
        return connection

    def _on_done(self, address: str, task: asyncio.Task[KvConnection]) -> None:
        del self._opening[address]
        if not self._opening:
            self._ended_early.clear()
        if not task.cancelled():
            task.exception()  # the waiting callers have received the exception

    def _make_room(self) -> None:
        if len(self._open) + len(self._opening) < self._max_peers:
            return
        in_use = self._in_use()
        idle = next(
            (a for a, c in self._open.items() if c.key not in in_use and not self._wanted[a]), None
        )
        if idle is None:
            raise KvTransferFailed("all KV connections are in use", reason=PullFailure.BUSY)
        self._open.pop(idle).abort("least recently used")


class Peers:
    """All open connections, whichever side opened them, and counts of the messages sent."""

    def __init__(
        self, pool: ConnectionPool, on_change: Callable[[int], None] = lambda _: None
    ) -> None:
        """`on_change` is called with the number of open connections when one opens or closes."""
        self._pool, self._on_change = pool, on_change
        self._by_key: dict[int, KvConnection] = {}
        self._num_sent: Counter[type] = Counter()

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def messages_sent(self) -> dict[str, int]:
        """The number of messages by kind."""
        return {kind.__name__.lower(): count for kind, count in self._num_sent.items()}

    def add(self, connection: KvConnection) -> None:
        """Add an open connection. Idempotent, since each pull adds the connection that it uses."""
        if connection.key not in self._by_key:
            self._by_key[connection.key] = connection
            self._on_change(len(self))

    def remove(self, connection: KvConnection) -> None:
        self._pool.remove(connection)
        if self._by_key.pop(connection.key, None) is not None:
            self._on_change(len(self))

    def get(self, key: int) -> KvConnection | None:
        return self._by_key.get(key)

    def tell(self, key: int, message: wire.Message) -> None:
        """Send a message. Does nothing if the peer's connection is gone."""
        connection = self._by_key.get(key)
        if connection is not None:
            self._num_sent[type(message)] += 1
            connection.send(wire.encode(message))

    def retire(self, key: int) -> None:
        """Let the next pull open another connection. The pulls on this connection continue."""
        connection = self._by_key.get(key)
        if connection is not None:
            self._pool.remove(connection)

    def abort(self, key: int, reason: str) -> None:
        connection = self._by_key.get(key)
        if connection is not None:
            # The next pull opens another connection, without waiting for the end of this one.
            self._pool.remove(connection)
            connection.abort(reason)
