"""A NATS server that a contract test can stop and start again.

A contract test checks that an interface's fake and its real implementation behave alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pdmesh.net.nats.bus import NatsBus
from tests.support.sites import servers


class NatsServerWorld:
    """The base of a contract test's world with real NATS.

    It is a context manager, which closes its connections and its server at the end.
    """

    def __init__(self, directory: Path) -> None:
        self._server = servers.nats(directory)
        self._buses: list[NatsBus] = []

    async def __aenter__(self) -> Self:
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            for bus in self._buses:
                await bus.close()
        finally:
            self._server.close()

    async def connect(self) -> NatsBus:
        self._buses.append(await NatsBus.connect(self._server.url, "test"))
        return self._buses[-1]

    async def take_away(self) -> None:
        self._server.kill()

    async def bring_back(self) -> None:
        await self._server.start()
