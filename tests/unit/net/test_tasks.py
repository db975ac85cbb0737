"""Tasks can be ended even if a library swallows cancellations."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from pdmesh.net.tasks import end, together, watched


async def stubborn(num_swallowed: int, ended: asyncio.Event) -> None:
    """A task like those of nats-py on Python 3.11, which lose a cancellation that comes with a
    result.
    """
    try:
        for _ in range(num_swallowed):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        await asyncio.Event().wait()
    finally:
        ended.set()


async def test_a_task_that_swallows_cancellations_is_over_when_end_returns() -> None:
    ended = asyncio.Event()
    task = asyncio.create_task(stubborn(2, ended))
    await asyncio.sleep(0)
    async with asyncio.timeout(30.0):
        await end([task])
    assert ended.is_set()


async def test_stubborn_children_of_a_cancelled_parent_are_over_too() -> None:
    ended = [asyncio.Event(), asyncio.Event()]
    parent = asyncio.create_task(together(*(stubborn(3, each) for each in ended)))
    await asyncio.sleep(0.01)
    async with asyncio.timeout(30.0):
        await end([parent])
    assert all(each.is_set() for each in ended)


async def test_the_failure_of_one_task_ends_the_others_and_is_raised() -> None:
    ended = asyncio.Event()

    async def fail() -> None:
        raise ValueError("broken")

    async with asyncio.timeout(30.0):
        with pytest.raises(ValueError, match="broken"):
            await together(stubborn(1, ended), fail())
    assert ended.is_set()


async def test_a_task_cancelled_from_elsewhere_has_failed() -> None:
    """grpc.aio cancels the reader of a closed channel. The other tasks must not continue as if
    nothing had happened.
    """
    ended = asyncio.Event()

    async def cancelled() -> None:
        raise asyncio.CancelledError

    async with asyncio.timeout(30.0):
        with pytest.raises(RuntimeError, match="was cancelled"):
            await together(stubborn(1, ended), cancelled())
    assert ended.is_set()


async def test_the_failure_of_a_watched_task_is_logged_once_and_its_normal_end_is_not() -> None:
    told: list[str] = []

    async def fail() -> None:
        raise ValueError("broken")

    tasks = [
        watched(fail(), "fails", lambda error: told.append(str(error))),
        watched(asyncio.sleep(0), "ends", lambda error: told.append(str(error))),
        watched(asyncio.Event().wait(), "is cancelled", lambda error: told.append(str(error))),
    ]
    await asyncio.sleep(0)
    tasks[2].cancel()
    await asyncio.wait(tasks)
    await asyncio.sleep(0)
    assert told == ["broken"]
