"""Makes and cancels responses in the background, that is, while no client waits for them.

The gateway that makes a response sets a mark for it in the store (Redis), and renews the mark until
the response ends. Any gateway may set a second mark, which stops the response. If the gateway that
makes a response dies, the first mark expires. The response is then reported as failed, although no
process has recorded the failure. If Redis is unreachable or full when a response ends, the gateway
tries for two minutes to keep the response.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import Final

import structlog

from pdmesh.errors import MeshError, Unavailable
from pdmesh.net.tasks import end
from pdmesh.services.gateway.access.access_control import Permit
from pdmesh.services.gateway.http.responses.format import Json, Keep, ResponseWriter
from pdmesh.services.gateway.http.responses.store import KeepOutcome, ResponseStore
from pdmesh.services.gateway.request.deltas import ClientDisconnected, whole_text
from pdmesh.services.gateway.request.frontend import Call, Frontend

log = structlog.get_logger(__name__)

KEEP_WITHIN_S: Final = 120.0
_FIRST_WAIT_S: Final = 0.25
_LONGEST_WAIT_S: Final = 2.0  # must be less than the time that a cancellation waits
_TELL_EVERY_S: Final = 0.5
_STOP_WITHIN_S: Final = 5.0
_LOOK_EVERY_S: Final = 0.1
_NUM_LOOKS: Final = 50

_Name = tuple[str, str]  # the tenant's name, and the id of the response


@dataclass(frozen=True, slots=True)
class BackgroundCall:
    """A call in the background.

    When the call ends, `permit` is given back, and `keep` stores the response.
    """

    call: Call
    writer: ResponseWriter
    permit: Permit
    keep: Keep


class BackgroundResponses:
    def __init__(self, frontend: Frontend, store: ResponseStore) -> None:
        self._frontend = frontend
        self._store = store
        self._open: dict[_Name, BackgroundCall] = {}
        self._tasks: dict[_Name, asyncio.Task[None]] = {}
        self._telling: asyncio.Task[None] | None = None

    def start(self, response_id: str, job: BackgroundCall) -> None:
        name = (job.permit.tenant.name, response_id)
        self._open[name] = job
        self._tasks[name] = asyncio.create_task(self._run(name, job), name="background-response")
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._tell(), name="background-responses")

    async def cancel(self, tenant: str, response_id: str) -> None:
        """Cancel a response, and wait at most about 5 s for its end. Raises Unavailable."""
        task = self._tasks.get((tenant, response_id))
        if task is not None:
            self._open[tenant, response_id].call.cancel()
            await asyncio.wait([task], timeout=_STOP_WITHIN_S)
            return
        await self._store.ask_to_stop(tenant, response_id)
        for _ in range(_NUM_LOOKS):
            if not await self._store.is_made(tenant, response_id):
                return
            await asyncio.sleep(_LOOK_EVERY_S)

    async def is_made(self, tenant: str, response_id: str) -> bool:
        """Whether a living gateway is making the response. Raises Unavailable."""
        is_made_here = (tenant, response_id) in self._tasks
        return is_made_here or await self._store.is_made(tenant, response_id)

    async def close(self) -> None:
        """Wait at most 5 s until the responses are kept. The caller must have ended all calls."""
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=_STOP_WITHIN_S)
        await end([*self._tasks.values(), *filter(None, [self._telling])])

    async def _run(self, name: _Name, job: BackgroundCall) -> None:
        try:
            await self._keep(name, job, await self._made(name, job))
        finally:
            del self._open[name], self._tasks[name]
            with contextlib.suppress(Unavailable):
                await self._store.made(*name)

    async def _made(self, name: _Name, job: BackgroundCall) -> Json:
        error: MeshError | None = None
        try:
            return await job.writer.whole(await whole_text(job.call))
        except MeshError as exc:
            error = exc.with_traceback(None)  # the frames refer to the call, which refers to exc
            return job.writer.ended_badly("failed", exc)
        except ClientDisconnected:  # the response was cancelled
            return job.writer.ended_badly("cancelled")
        except Exception:
            log.exception("response.bug", response_id=name[1])
            return job.writer.ended_badly("failed", MeshError("internal error"))
        finally:
            self._frontend.close(job.call, error)
            job.permit.leave()

    async def _keep(self, name: _Name, job: BackgroundCall, response: Json) -> None:
        outcome = await job.keep(response)
        if outcome is KeepOutcome.TOO_LARGE:
            response = job.writer.too_large()
            outcome = await job.keep(response)
        until, wait_s = time.monotonic() + KEEP_WITHIN_S, _FIRST_WAIT_S
        while outcome in (KeepOutcome.AWAY, KeepOutcome.FULL) and time.monotonic() < until:
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            outcome = await job.keep(response)
        if outcome is not KeepOutcome.KEPT:
            log.warning("response.not_kept", response_id=name[1], reason=outcome.value)

    async def _tell(self) -> None:
        """As long as responses are open, renew their marks.

        Also cancel the responses that a gateway has marked to be stopped.
        """
        while self._open:
            names = list(self._open)
            with contextlib.suppress(Unavailable):
                for name in await self._store.making(names):
                    if (job := self._open.get(name)) is not None:
                        job.call.cancel()
            await asyncio.sleep(_TELL_EVERY_S)
