"""The watch of a bucket goes on, whatever those it tells do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pdmesh.net.nats_kv import KvWatch


class QuietServer:
    """As much of a NatsBus, its client and a KvBucket as a watch of an empty bucket uses."""

    name = "things"
    is_connected = False

    @property
    def client(self) -> QuietServer:
        return self

    def on_restored(self, _: Callable[[], None]) -> Callable[[], None]:
        return lambda: None

    def new_inbox(self) -> str:
        return "inbox"

    async def subscribe(self, *_: Any, **__: Any) -> QuietServer:
        return self

    async def unsubscribe(self) -> None: ...

    async def open_consumer(self, *_: str) -> tuple[str, int]:
        return "consumer", 0


@pytest.mark.fault("F20")
async def test_a_watch_survives_a_bug_of_whom_it_tells() -> None:
    """Were it to end, the process would go on for ever with the view it had: nobody waits for the task."""
    loaded = asyncio.Event()
    num_resets = 0

    def on_reset() -> None:
        nonlocal num_resets
        num_resets += 1
        if num_resets == 1:
            raise KeyError("a bug")

    server: Any = QuietServer()
    watch = KvWatch(server, server, lambda _: None, loaded.set, on_reset)
    try:
        async with asyncio.timeout(30):
            await loaded.wait()
    finally:
        await watch.close()
    assert num_resets == 2
