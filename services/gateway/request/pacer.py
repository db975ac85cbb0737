"""Decides when a stream's writer sends a new token: at once, or together with the next tokens.

A writer is woken at once for the first token, for the end, and for a token that comes at least one
interval after the writer was last woken. So pacing never delays a stream that is slower than the
interval. Tokens that come faster are written together, once per interval. A single timer wakes all
writers that wait for their interval to pass.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable


class Pacer:
    def __init__(self, interval_s: float) -> None:
        """An interval of 0 means no pacing."""
        self.interval_s = interval_s
        self._waiting: list[Callable[[], None]] = []

    def later(self, wake: Callable[[], None]) -> None:
        """Call `wake` within the interval."""
        if not self._waiting:
            asyncio.get_running_loop().call_later(self.interval_s, self._wake_all)
        self._waiting.append(wake)

    def _wake_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake()


class PacedWaiter:
    """Lets one task wait for new output."""

    def __init__(self, pacer: Pacer) -> None:
        self._pacer = pacer
        self._woken_at = -math.inf
        self._is_paced = False  # the pacer will wake the waiter
        self._is_dirty = False
        self._waiter: asyncio.Future[None] | None = None

    def on_tokens(self) -> None:
        """Note that there is a new token. This is the hot path: it runs once for each token."""
        if self._is_paced:
            return
        if time.monotonic() - self._woken_at < self._pacer.interval_s:
            self._is_paced = True
            self._pacer.later(self._on_pace)
        else:
            self.on_news()

    def _on_pace(self) -> None:
        self._is_paced = False
        self.on_news()

    def on_news(self) -> None:
        """Wake the waiter at once: for an end, an error, or output that must not wait."""
        waiter = self._waiter
        if waiter is None:
            self._is_dirty = True
        elif not waiter.done():
            waiter.set_result(None)

    async def changed(self) -> None:
        """Return when there is new output. Only one task may wait at a time."""
        if not self._is_dirty:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_dirty = False
        self._woken_at = time.monotonic()
