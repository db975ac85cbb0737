"""Ends asyncio tasks for certain, and reports those that fail.

On Python 3.11 `asyncio.wait_for`, which nats-py uses everywhere, swallows a cancellation that comes
together with its result: the task lives on and its waiter hangs. So a task is cancelled until it is
over; a TaskGroup would cancel its children only once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final, TypeVar

T = TypeVar("T")

_AGAIN_S: Final = 0.05


async def end(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel the tasks until all are over; their exceptions are dropped.

    If this call itself is cancelled, it still waits until all are over.
    """
    pending = {task for task in tasks if not task.done()}
    was_cancelled = False
    while pending:
        for task in pending:
            task.cancel()
        try:
            await asyncio.wait(pending, timeout=_AGAIN_S)
        except asyncio.CancelledError:
            was_cancelled = True
        pending = {task for task in pending if not task.done()}
    if was_cancelled:
        raise asyncio.CancelledError


async def together(*works: Coroutine[Any, Any, None]) -> None:
    """Run all until one fails or this is cancelled; then end all of them. Raises the failure.

    A task that was cancelled from elsewhere has failed, too; asyncio's FIRST_EXCEPTION would not
    notice that.
    """
    tasks = [asyncio.create_task(work) for work in works]
    try:
        pending = set(tasks)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task.cancelled():
                    raise RuntimeError(f"{task.get_name()} was cancelled")
                task.result()
    finally:
        await end(tasks)


def watched(
    work: Coroutine[Any, Any, T], name: str, on_failure: Callable[[BaseException], None]
) -> asyncio.Task[T]:
    """A separate task whose failure is reported once, on the loop.

    Cancellation is not a failure. The caller keeps the task: the loop holds only a weak reference.
    """
    task = asyncio.get_running_loop().create_task(work, name=name)

    def tell(done: asyncio.Task[T]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            on_failure(error)

    task.add_done_callback(tell)
    return task
