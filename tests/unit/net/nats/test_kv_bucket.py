"""The watch of a bucket continues even if its callbacks raise errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pdmesh.net.nats.kv_bucket import KvEntry, KvWatch


class QuietServer:
    """Stands in for a server with an empty bucket.

    It has the members of NatsBus, its client and KvBucket that a watch uses.
    """

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


class Server(QuietServer):
    """A server whose bucket has one entry. Each new consumer gets the entry."""

    is_connected = True

    def __init__(self) -> None:
        self.num_consumers = 0
        self._deliver: Callable[[Any], Any] = lambda _: None

    async def subscribe(self, _: str, cb: Callable[[Any], Any]) -> QuietServer:
        self._deliver = cb
        return self

    async def open_consumer(self, *_: str) -> tuple[str, int]:
        self.num_consumers += 1
        place = SimpleNamespace(consumer=1, stream=7)
        metadata = SimpleNamespace(sequence=place, num_pending=0)
        entry = SimpleNamespace(
            headers=None, reply="ack", metadata=metadata, subject="a", data=b"1"
        )
        self._delivering = asyncio.ensure_future(self._deliver(entry))
        return "consumer", 1

    async def close_consumer(self, _: str) -> None: ...

    def key_of(self, subject: str) -> str:
        return subject


@pytest.mark.fault("F20")
@pytest.mark.parametrize("num_bad", [1, 2, 1000])
async def test_an_entry_whose_callback_raises_is_handed_out_again_a_few_times(num_bad: int) -> None:
    """Such an entry was once lost, and the view lacked it until the key was written again. If it
    was the last entry, the view never became live.
    """
    server: Any = Server()
    loaded, taken = asyncio.Event(), []

    def on_entry(entry: KvEntry) -> None:
        if server.num_consumers <= num_bad:
            raise KeyError("a bug")
        taken.append(entry.key)

    watch = KvWatch(server, server, on_entry, loaded.set, lambda: None)
    try:
        async with asyncio.timeout(30):
            await loaded.wait()
        assert watch.is_live
    finally:
        await watch.close()
    assert (taken, server.num_consumers) == ((["a"], num_bad + 1) if num_bad < 3 else ([], 3))


@pytest.mark.fault("F20")
async def test_a_watch_survives_a_bug_in_its_callback() -> None:
    """Nothing awaits the watch's task. If the task ended, the process would continue forever with
    an old view.
    """
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
