"""Ending asyncio tasks for certain.

On Python 3.11 `asyncio.wait_for`, which nats-py uses everywhere, swallows a cancellation that comes together with its
result: the task lives on and who waits for it hangs. So a task is cancelled until it is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

_AGAIN_S: Final = 0.05


async def end(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel the tasks until all are over; what they raise is dropped."""
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_AGAIN_S)
