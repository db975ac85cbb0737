"""A TCP link from one process to its server.

A test can cut the link or slow it down without an effect on other processes.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self
from urllib.parse import urlsplit

_CHUNK = 65_536


class Link:
    """Use `async with Link(server.url) as link:` and give the process `link.url`.

    A cut link behaves like a network partition. It passes no bytes and reports no error.
    Connections stay open. New connections are accepted but get no answer. When the link is healed,
    all delayed bytes arrive. Each chunk is delayed by `delay_s`, in both directions.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._scheme = "redis" if parts.scheme == "unix" else parts.scheme
        self._socket = parts.path if parts.scheme == "unix" else ""
        credentials, at, _ = parts.netloc.rpartition("@")
        self._credentials = credentials + at
        self._target = (parts.hostname or "", parts.port or 0)
        self._passes = asyncio.Event()
        self._passes.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.delay_s = 0.0
        self.url = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._on_connection, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"{self._scheme}://{self._credentials}127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def is_cut(self) -> bool:
        return not self._passes.is_set()

    def cut(self) -> None:
        self._passes.clear()

    def heal(self) -> None:
        self._passes.set()

    async def _on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(OSError):
            try:
                await self._passes.wait()
                there, back = await (
                    asyncio.open_unix_connection(self._socket)
                    if self._socket
                    else asyncio.open_connection(*self._target)
                )
                await self._join(reader, back, there, writer)
            finally:
                writer.transport.abort()

    async def _join(
        self,
        client: asyncio.StreamReader,
        to_server: asyncio.StreamWriter,
        server: asyncio.StreamReader,
        to_client: asyncio.StreamWriter,
    ) -> None:
        pumps = [
            asyncio.create_task(self._pump(client, to_server)),
            asyncio.create_task(self._pump(server, to_client)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            to_server.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self._passes.wait()
                writer.write(data)
                await writer.drain()
