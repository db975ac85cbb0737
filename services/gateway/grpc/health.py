"""The service grpc.health.v1: tells any client, without a key, whether this gateway serves.

A watch is a stream that reports each change. Because a watch needs no key, the number of watches is
bounded. At the bound, the address with the most watches loses its oldest watch.

A client that does not read delays no other client. For this reason, the servicer of grpcio's health
package is not used. It writes under a lock, so a client that does not read would block the next
change and the server's shutdown.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from typing import Any, Final

from grpc_health.v1.health_pb2 import (
    HealthCheckRequest,
    HealthCheckResponse,
    HealthListRequest,
    HealthListResponse,
)

from pdmesh.errors import InvalidRequest

Context = Any  # grpc.aio.ServicerContext, which is generic in grpc-stubs but not at run time
_MAX_WATCHES: Final = 1024
_MAX_NAME_CHARS: Final = 256


class UnknownService(InvalidRequest):
    grpc_code, http_status, default_reason = "NOT_FOUND", 404, "NOT_FOUND"


class HealthServicer:
    """Gives the same answer for all `services` and for the whole server, whose name is empty.

    `living` has further names. They are SERVING as long as the process answers.
    """

    def __init__(
        self,
        services: Iterable[str],
        max_watches: int = _MAX_WATCHES,
        living: Iterable[str] = (),
    ) -> None:
        self._services = frozenset(("", *services))
        self._living = frozenset(living)
        self._max_watches = max_watches
        self._is_serving = self._is_closing = False
        self._changed = asyncio.Event()  # set and replaced by a new event when the status changes
        self._watches: dict[_Watch, None] = {}  # oldest first

    @property
    def num_watches(self) -> int:
        return len(self._watches)

    def set_serving(self, is_serving: bool) -> None:
        if not self._is_closing and is_serving != self._is_serving:
            self._is_serving = is_serving
            self._tell()

    def close(self) -> None:
        """Report `services` as NOT_SERVING from now on. Each watch reports this change and ends."""
        self._is_serving, self._is_closing = False, True
        self._tell()

    async def Check(  # noqa: N802  # gRPC's name
        self, request: HealthCheckRequest, context: Context
    ) -> HealthCheckResponse:
        if not self._knows(request):
            raise UnknownService("there is no such service", field="service")
        return HealthCheckResponse(status=self._status(request.service))

    async def List(  # noqa: N802
        self, request: HealthListRequest, context: Context
    ) -> HealthListResponse:
        names = self._services | self._living
        return HealthListResponse(
            statuses={name: HealthCheckResponse(status=self._status(name)) for name in names}
        )

    async def Watch(  # noqa: N802
        self, request: HealthCheckRequest, context: Context
    ) -> AsyncIterator[HealthCheckResponse]:
        self._knows(request)
        watch = _Watch(asyncio.current_task(), context.peer().rpartition(":")[0])
        self._make_room()
        self._watches[watch] = None
        try:
            async for status in self._statuses(request.service):
                yield HealthCheckResponse(status=status)
        finally:
            self._watches.pop(watch, None)

    async def _statuses(
        self, name: str
    ) -> AsyncIterator[HealthCheckResponse.ServingStatus.ValueType]:
        told = None
        while True:
            status, changed = self._status(name), self._changed
            if status != told:
                told = status
                yield status
            elif self._is_closing:
                return
            else:
                await changed.wait()

    def _knows(self, request: HealthCheckRequest) -> bool:
        """Whether the service is known. Raises InvalidRequest if the name is too long.

        Names are bounded because a watch keeps its request in memory.
        """
        if len(request.service) > _MAX_NAME_CHARS:
            message = f"service has at most {_MAX_NAME_CHARS} characters"
            raise InvalidRequest(message, field="service")
        return request.service in self._services | self._living

    def _status(self, name: str) -> HealthCheckResponse.ServingStatus.ValueType:
        if name in self._living:
            return HealthCheckResponse.SERVING
        if name not in self._services:
            return HealthCheckResponse.SERVICE_UNKNOWN
        return HealthCheckResponse.SERVING if self._is_serving else HealthCheckResponse.NOT_SERVING

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _make_room(self) -> None:
        """At the bound, end the oldest watch of the address that has the most watches.

        So a client that opens too many watches loses its own watches.
        """
        if len(self._watches) < self._max_watches:
            return
        ((address, _),) = Counter(w.address for w in self._watches).most_common(1)
        oldest = next(w for w in self._watches if w.address == address)
        del self._watches[oldest]
        oldest.end()


class _Watch:
    __slots__ = ("_task", "address")

    def __init__(self, task: asyncio.Task[Any] | None, address: str) -> None:
        self._task = task
        self.address = address

    def end(self) -> None:
        """Cancel the watch's task. Nothing else ends a task that waits for its client to read."""
        if self._task is not None:
            self._task.cancel()
