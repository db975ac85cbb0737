"""The operators' HTTP endpoint of a process: /metrics, /health/live, /health/ready, /status/<page>.

Live: the event loop answers. Ready: everything the process needs holds; the reply names what does not. The routes
may also be mounted in a service's own HTTP server.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pdmesh.telemetry import metrics

NotReady = Callable[[], Sequence[str]]  # names of what does not hold yet
Pages = Mapping[str, Callable[[], object]]  # what a service shows as JSON, by name
_GRACE_S: Final = 1


def ops_routes(not_ready: NotReady, pages: Pages = MappingProxyType({})) -> list[Route]:
    async def show_metrics(_: Request) -> Response:
        return Response(metrics.render(), media_type=metrics.CONTENT_TYPE)

    async def live(_: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def ready(_: Request) -> Response:
        missing = list(not_ready())
        if missing:
            return JSONResponse({"status": "not ready", "waiting_for": missing}, status_code=503)
        return JSONResponse({"status": "ready"})

    async def status(request: Request) -> Response:
        page = pages.get(request.path_params["page"])
        if page is None:
            return JSONResponse({"pages": sorted(pages)}, status_code=404)
        return JSONResponse(page())

    return [
        Route("/status/{page}", status),
        Route("/metrics", show_metrics),
        Route("/health/live", live),
        Route("/health/ready", ready),
    ]


class _Server(uvicorn.Server):
    """Signals belong to the process, not to its HTTP server."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class OpsServer:
    """Serves until `close`. The port is taken in the constructor, so that a conflict is an OSError at once."""

    def __init__(
        self, host: str, port: int, not_ready: NotReady, pages: Pages = MappingProxyType({})
    ) -> None:
        self._socket = socket.create_server((host, port), backlog=128)
        self.port: int = self._socket.getsockname()[1]
        self._app = Starlette(routes=ops_routes(not_ready, pages))
        self._server = _Server(
            uvicorn.Config(
                self._app,
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=_GRACE_S,
            )
        )
        self._task: asyncio.Task[None] | None = None

    def add_routes(self, routes: Sequence[Route]) -> None:
        """What a service serves to its operators besides."""
        self._app.router.routes.extend(routes)

    def start(self) -> None:
        self._task = asyncio.create_task(
            self._server.serve(sockets=[self._socket]), name="ops-server"
        )

    async def close(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._socket.close()
