"""Starts vLLM's AsyncLLM in a thread beside the event loop, and stops it with its processes.

A cancelled start leaves a thread that cannot be cancelled, and may leave child processes. `stop`
waits for the thread and kills the children, for at most a limited time.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import time
from typing import TYPE_CHECKING, Any

from pdmesh.engine.vllm.child.startup import build, with_progress
from pdmesh.engine.vllm.host.stats import SchedulerView

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

START_TIMEOUT_S = 600.0  # for engines of all roles
STOP_TIMEOUT_S = 15.0
# how long a cancelled start may take to end; the caller of `stop` waits longer
BUILD_STOP_S = 8.0


class LlmProcess:
    """One AsyncLLM. It is started once, and never after `stop`."""

    def __init__(self) -> None:
        self._llm: AsyncLLM | None = None
        self._building: asyncio.Future[AsyncLLM] | None = None
        self._is_stopping = False
        self._other_children = {child.pid for child in multiprocessing.active_children()}

    async def start(
        self, arguments: dict[str, Any], view: SchedulerView, timeout_s: float
    ) -> AsyncLLM:
        """Raises EngineFailed, either with vLLM's own cause or after `timeout_s`."""
        work = asyncio.to_thread(build, arguments, view, lambda: not self._is_stopping)
        self._building = asyncio.ensure_future(work)
        llm: AsyncLLM = await with_progress("vllm.loading", self._building, timeout_s)
        self._llm = llm
        return llm

    async def is_alive(self) -> bool:
        """Whether vLLM's engine process is alive. The process answers only between two steps.

        Returns True before the start and after the stop.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        if self._llm is None:
            return True
        try:
            await self._llm.is_sleeping()
        except EngineDeadError:
            return False
        return True

    async def stop(self) -> None:
        self._is_stopping = True
        if self._llm is None and self._building is not None:
            self._llm = await self._end_build(self._building)
        if self._llm is None:
            return
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()  # it would report the engine's stop as a crash
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(self._llm.shutdown), STOP_TIMEOUT_S)
        self._llm = None

    async def _end_build(self, building: asyncio.Future[AsyncLLM]) -> AsyncLLM | None:
        """End a start under way, with its processes and the thread that waits for them.

        The thread may start another process at any moment, so this waits for the thread to end, for
        at most `BUILD_STOP_S`.
        """
        until = time.monotonic() + BUILD_STOP_S
        while not building.done() and time.monotonic() < until:
            self._kill_children()
            await asyncio.wait([building], timeout=0.1)
        if not building.done() or building.exception() is not None:
            self._kill_children()
            return None
        return building.result()

    def _kill_children(self) -> None:
        for child in multiprocessing.active_children():
            if child.pid not in self._other_children:
                child.kill()
