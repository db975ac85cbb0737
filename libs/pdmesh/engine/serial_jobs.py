"""The base class of the simulated engines without KV: the pooling engine and the encoder.

One loop computes one job after the other, as a device does.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Final, Generic, Protocol, TypeVar

from pdmesh import failpoints
from pdmesh.engine.base import Encoded, Failed, Output, Pooled
from pdmesh.engine.no_kv import NoKv
from pdmesh.errors import EngineFailed
from pdmesh.net.tasks import watched

_SIGN_S: Final = 0.1  # seconds between two signs that a long computation proceeds


class HasLeg(Protocol):
    @property
    def leg(self) -> int: ...


J = TypeVar("J", bound=HasLeg)


class SerialJobs(NoKv, ABC, Generic[J]):
    """An engine's jobs and their outputs.

    The engine answers pings between two jobs, and when `_compute` calls `_is_wanted`. Subclasses
    define `_compute`, which computes one job: it calls `_wait_out` for the time that the job takes,
    checks `_is_wanted` afterwards, and ends the job with `_end`.
    """

    def __init__(self) -> None:
        self._jobs: dict[int, J] = {}
        self._num_signs = self._num_tokens = 0
        self._work, self._has_output = asyncio.Event(), asyncio.Event()
        self._outputs: list[Output] = []
        self._pings: list[asyncio.Future[None]] = []
        self._loop: asyncio.Task[None] | None = None
        self._error: BaseException | None = None

    @abstractmethod
    async def _compute(self, job: J) -> None: ...

    def _start_loop(self, name: str) -> None:
        self._loop = watched(self._run(), name, self._die)

    async def stop(self) -> None:
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.wait([self._loop], timeout=1.0)

    def _begin(self, job: J) -> None:
        self._jobs[job.leg] = job
        self._work.set()

    def abort(self, leg: int) -> None:
        self._jobs.pop(leg, None)
        self._outputs = [o for o in self._outputs if not _is_of(o, leg)]

    async def outputs(self) -> AsyncIterator[list[Output]]:
        while True:
            await self._has_output.wait()
            if self._error is not None:
                raise EngineFailed("the sim engine died") from self._error
            batch, self._outputs = self._outputs, []
            self._has_output.clear()
            yield batch

    async def ping(self) -> None:
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pings.append(answer)
        self._work.set()
        await answer

    # -- the loop ---------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            if failpoints.hit("engine.step") == "hang":
                await asyncio.Event().wait()
            self._answer_pings()
            leg = next(iter(self._jobs), None)
            if leg is None:
                self._work.clear()
                await self._work.wait()
                continue
            await self._compute(self._jobs[leg])

    async def _wait_out(self, duration: float) -> None:
        num_parts = max(1, math.ceil(duration / _SIGN_S))
        for _ in range(num_parts):
            await asyncio.sleep(duration / num_parts)
            self._num_signs += 1

    def _is_wanted(self, job: J) -> bool:
        """Whether the job has not been aborted."""
        self._answer_pings()
        return job.leg in self._jobs

    def _end(self, job: J, output: Output) -> None:
        del self._jobs[job.leg]
        self._outputs.append(output)
        self._has_output.set()

    def _answer_pings(self) -> None:
        for answer in self._pings:
            if not answer.done():
                answer.set_result(None)
        self._pings.clear()

    def _die(self, error: BaseException) -> None:
        self._error = error
        self._has_output.set()


def _is_of(output: Output, leg: int) -> bool:
    return isinstance(output, Pooled | Encoded | Failed) and output.leg == leg
