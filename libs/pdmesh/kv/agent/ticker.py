"""A timer for a KV agent. It runs only while the agent has work, so an idle agent costs nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

log = structlog.get_logger(__name__)


class Ticker:
    """Calls `on_tick` on the running loop every `every_s` seconds while `has_work()` is true."""

    def __init__(
        self, every_s: float, has_work: Callable[[], bool], on_tick: Callable[[], None]
    ) -> None:
        self._every_s, self._has_work, self._on_tick = every_s, has_work, on_tick
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopped = False

    def keep_going(self, soon: bool = False) -> None:
        """Start the timer if there is work, or if work will begin `soon`."""
        if self._timer is None and not self._is_stopped and (soon or self._has_work()):
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._every_s, self._tick)

    def stop(self) -> None:
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        self._timer = None
        try:
            self._on_tick()
        # later ticks clean up after a failed one, so the timer must keep running
        except Exception as error:
            log.error("kv.tick.died", exc_info=error)
        finally:
            self.keep_going()
