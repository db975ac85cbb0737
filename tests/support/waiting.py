"""Waits until a condition is true, so that tests need no sleeps of a fixed length.

A long timeout costs nothing if the condition becomes true.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

# The timeout of tests that do not measure the time. On a busy machine, starting a process takes
# half a minute.
PATIENCE_S: Final = 120.0


async def until(
    condition: Callable[[], object] | Callable[[], Awaitable[object]], within_s: float = PATIENCE_S
) -> float:
    """Wait until `condition()` is true, and return the seconds waited. Fails after `within_s`."""
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
    """Wait as `until` does, in a test without an event loop."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not true within {within_s} s"
        time.sleep(0.02)
