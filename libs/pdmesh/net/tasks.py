"""Ends asyncio tasks reliably, and reports tasks that fail.

On Python 3.11, `asyncio.wait_for` swallows a cancellation that arrives together with the result.
nats-py uses `wait_for` everywhere. Such a task continues, and code that waits for its end hangs.
Therefore `end` cancels a task again and again until it is over. A TaskGroup would cancel the task
only once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final, TypeVar

T = TypeVar("T")

_AGAIN_S: Final = 0.05


async def end(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel the tasks until all are over. Their exceptions are dropped.

    If this call itself is cancelled, it still waits until all tasks are over.
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
    """Run all to their end, or until one fails or this call is cancelled.

    Then end the others, and raise the failure. A task that other code cancels counts as failed.
    asyncio's FIRST_EXCEPTION would not notice it.
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
    """Start a task that calls `on_failure` if it fails. A cancellation is not a failure.

    The caller must keep a reference to the task, because the loop has only a weak one.
    """
    task = asyncio.get_running_loop().create_task(work, name=name)

    def tell(done: asyncio.Task[T]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            on_failure(error)

    task.add_done_callback(tell)
    return task
