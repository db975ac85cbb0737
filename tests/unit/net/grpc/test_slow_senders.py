"""Incoming messages are bounded in number, and none may take forever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from pdmesh.errors import DeadlineExceeded, Overloaded
from pdmesh.net.grpc.slow_senders import Incoming
from tests.support.waiting import until


async def never() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def once(message: bytes) -> AsyncIterator[bytes]:
    await asyncio.sleep(0)
    yield message


@pytest.mark.fault("F30")
async def test_a_message_that_never_ends_is_given_up() -> None:
    with pytest.raises(DeadlineExceeded):
        await Incoming(1, timeout_s=0.01).next(never())


@pytest.mark.fault("F30")
async def test_the_longest_waiting_call_is_ended_to_make_room_for_short_ones() -> None:
    incoming = Incoming(2, timeout_s=3600)
    stuck = [asyncio.create_task(incoming.next(never())) for _ in range(2)]
    await asyncio.sleep(0)
    short = [asyncio.create_task(incoming.next(once(b"%d" % i))) for i in range(100)]
    assert await asyncio.gather(*short) == [b"%d" % i for i in range(100)]
    assert any(task.done() for task in stuck)
    for task in (task for task in stuck if task.done()):
        with pytest.raises(Overloaded):
            await task
    for task in stuck:
        task.cancel()
    await asyncio.gather(*stuck, return_exceptions=True)


async def test_no_waiting_call_is_ended_while_there_is_room() -> None:
    incoming = Incoming(3, timeout_s=3600)
    stuck = [asyncio.create_task(incoming.next(never())) for _ in range(2)]
    assert [await incoming.next(once(b"x")) for _ in range(50)] == [b"x"] * 50
    assert not any(task.done() for task in stuck)
    for task in stuck:
        task.cancel()
    await until(lambda: all(task.done() for task in stuck))


async def test_the_end_of_a_stream_does_not_count_as_a_message() -> None:
    messages = once(b"x")
    incoming = Incoming(1, timeout_s=3600)
    assert await incoming.next(messages) == b"x"
    with pytest.raises(StopAsyncIteration):
        await incoming.next(messages)


@pytest.mark.fault("F30")
async def test_the_number_of_calls_without_a_message_is_bounded() -> None:
    incoming = Incoming(3, timeout_s=3600, max_waiting=3)
    stuck = [asyncio.create_task(incoming.next(never())) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await incoming.next(once(b"x"))
    stuck[2].cancel()
    await asyncio.gather(stuck[2], return_exceptions=True)
    assert await incoming.next(once(b"x")) == b"x"
    for task in stuck:
        task.cancel()
    await asyncio.gather(*stuck, return_exceptions=True)
