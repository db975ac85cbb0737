"""The operators' HTTP endpoint of a process: /metrics, /health/live, /health/ready, /status/<page>.

A process is live if its event loop answers. It is ready if all its readiness checks are true. If
not, the reply to /health/ready names the checks that are false. The endpoint has the same kinds of
bounds as the clients' port. But if there are too many connections, it drops old ones instead of
refusing new ones (`Bounds.makes_room`), because a supervisor kills a process that does not answer
here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pdmesh.httpd.bounds import Bounds
from pdmesh.httpd.server import HttpServer, listen
from pdmesh.telemetry import metrics

NotReady = Callable[[], Sequence[str]]  # returns the readiness checks that are false
Pages = Mapping[str, Callable[[], object]]  # the JSON pages of a service, by name
_GRACE_S: Final = 1
_WRITE_TIMEOUT_S: Final = 10.0
_MAX_HEADER_BYTES: Final = 16_384
_RECEIVE_TIMEOUT_S: Final = 10.0
_MAX_CONNECTIONS: Final = 256
_MAX_CONNECTIONS_PER_IP: Final = 128


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


class OpsServer:
    """Serves from `start` until `close`.

    The constructor binds the port, so a conflict raises OSError at once.
    """

    def __init__(
        self, host: str, port: int, not_ready: NotReady, pages: Pages = MappingProxyType({})
    ) -> None:
        self._app = Starlette(routes=ops_routes(not_ready, pages))
        bounds = Bounds(
            max_header_bytes=_MAX_HEADER_BYTES,
            receive_timeout_s=_RECEIVE_TIMEOUT_S,
            max_connections=_MAX_CONNECTIONS,
            max_connections_per_ip=_MAX_CONNECTIONS_PER_IP,
            makes_room=True,
        )
        listener = listen(host, port, write_timeout_s=_WRITE_TIMEOUT_S)
        self._server = HttpServer(self._app, listener, bounds, shutdown_s=_GRACE_S)
        self.port: int = self._server.port

    def add_routes(self, routes: Sequence[Route]) -> None:
        """Add routes that only this service has."""
        self._app.router.routes.extend(routes)

    def start(self) -> None:
        self._server.start()

    async def close(self) -> None:
        await self._server.stop()
