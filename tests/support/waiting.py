"""Wait for a condition instead of sleeping.

Patience costs nothing where the condition comes true.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

# Where how long it takes is not the point: on a busy machine a process takes half a minute to
# start.
PATIENCE_S: Final = 120.0


async def until(
    condition: Callable[[], object] | Callable[[], Awaitable[object]], within_s: float = PATIENCE_S
) -> float:
    """Seconds until `condition()` was true; fails the test after `within_s`."""
    began = time.monotonic()
    while True:
        result = condition()
        if isinstance(result, Awaitable):
            result = await result
        waited = time.monotonic() - began
        if result:
            return waited
        assert waited < within_s, f"not true within {within_s} s"
        await asyncio.sleep(0.002)


def wait_until(condition: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    """The same for a test without an event loop."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not true within {within_s} s"
        time.sleep(0.02)
