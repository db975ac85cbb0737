"""The end of a snapshot's stream: a closed channel is a failure, and a cancelled caller stays
cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from pdmesh.errors import Unavailable
from pdmesh.kv.index.snapshot_sources import _gather


class Closed:
    """A stream of a closed channel. grpc.aio raises CancelledError in the reader of such a
    stream.
    """

    async def __aiter__(self) -> AsyncIterator[None]:
        raise asyncio.CancelledError
        yield


class Silent:
    async def __aiter__(self) -> AsyncIterator[None]:
        await asyncio.Event().wait()
        yield


async def test_a_channel_closed_under_a_snapshot_is_a_failed_snapshot() -> None:
    with pytest.raises(Unavailable, match="closed"):
        await _gather(Closed())


async def test_a_cancelled_caller_stays_cancelled() -> None:
    task = asyncio.create_task(_gather(Silent()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
