"""Runs the jobs of an engine without KV, for pooling or encoding. Each job is one task.

The outputs of all tasks go into one queue. The host, which is the part of the instance outside the
engine, reads the queue. A leg is a request's stay on this instance.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine

import structlog

from pdmesh.engine.base import Output
from pdmesh.engine.vllm.child.llm_process import LlmProcess
from pdmesh.engine.vllm.host.outputs import OutputQueue
from pdmesh.errors import EngineFailed
from pdmesh.net.tasks import end, watched

log = structlog.get_logger(__name__)


class JobTasks:
    """If a task fails with an error that its job does not handle, the engine counts as dead."""

    def __init__(self, process: LlmProcess) -> None:
        self._process = process
        self._queue = OutputQueue()
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by leg
        self._is_stopping = False

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, leg: int) -> bool:
        return leg in self._tasks

    def begin(self, leg: int, name: str, work: Coroutine[None, None, None]) -> None:
        task = watched(work, name, lambda error: self._task_died(name, error))
        self._tasks[leg] = task
        task.add_done_callback(lambda _: self._tasks.pop(leg, None))

    def put(self, output: Output) -> None:
        self._queue.put([output])

    def abort(self, leg: int) -> None:
        self._queue.drop(leg)
        if (task := self._tasks.get(leg)) is not None:
            task.cancel()  # vLLM aborts the request of a cancelled reader

    async def outputs(self) -> AsyncIterator[list[Output]]:
        """Raises EngineFailed after the last outputs of an engine that died."""
        async for batch in self._queue.batches():
            yield batch

    async def ping(self) -> None:
        """Check that vLLM's engine process is alive. The process answers only between two steps."""
        if not await self._process.is_alive():
            self.engine_died()

    def engine_died(self) -> None:
        self.die("vLLM's engine process died; see its log")

    def die(self, message: str) -> None:
        if self._is_stopping or self._queue.has_failed:
            return
        log.error("vllm.died", cause=message)
        self._queue.fail(EngineFailed(message, reason="ENGINE_DEAD"))

    async def stop(self) -> None:
        """End the tasks. From now on, a failure does not count as the engine's death."""
        self._is_stopping = True
        await end(self._tasks.values())

    def _task_died(self, name: str, error: BaseException) -> None:
        log.error("vllm.task.failed", task=name, exc_info=error)
        self.die(f"{name} failed: {error.__class__.__name__}")
