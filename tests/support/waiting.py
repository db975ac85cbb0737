"""Wait for a condition instead of sleeping."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable


async def until(
    condition: Callable[[], object] | Callable[[], Awaitable[object]], within_s: float = 5.0
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


def wait_until(condition: Callable[[], object], within_s: float = 10.0) -> None:
    """The same for a test without an event loop."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not true within {within_s} s"
        time.sleep(0.02)
